"""KDA, and MLA with or without the DSA indexer (specification 2), over packed tokens and a cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.ops.activation import gate_mul
from zmrl.batch_invariant.ops.indexer import index_select, index_store
from zmrl.batch_invariant.ops.kda import kda, short_conv
from zmrl.batch_invariant.ops.latents import LatentFormat, latent_store, latent_values
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.batch_invariant.ops.norm import rms_norm, rms_norm_gated
from zmrl.batch_invariant.ops.rows import join_columns
from zmrl.model.cache_format import CacheFormat
from zmrl.model.config import K3Config
from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.linear import REDUCTION_SHARDS, Linear, frozen
from zmrl.model.names import indexer_projections, kda_projections, mla_projections
from zmrl.model.tensors import PLAIN, TensorSlice, named, whole


class KdaAttention(nn.Module):
    """Kimi Delta Attention: [T, hidden] -> [T, hidden]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        linear = config.linear_attn_config
        self.heads, self.width, self.head_dim = linear.num_heads, linear.projection_size, linear.head_dim
        self.lower_bound, self.eps = linear.gate_lower_bound, config.rms_norm_eps
        self.a_log_slots = linear.a_log_slots
        rows = {name: out for name, (out, _) in kda_projections(config).items()}
        gate = "g_proj" if linear.use_full_rank_gate else "g_a_proj"
        fused = {name: rows[name] for name in ("q_proj", "k_proj", "v_proj", gate, "f_a_proj", "b_proj")}
        self.in_proj = Linear(fused, config.hidden_size, adapted=True)
        self.g_b_proj: Linear | None = None
        if not linear.use_full_rank_gate:
            self.g_b_proj = Linear({"g_b_proj": rows["g_b_proj"]}, self.head_dim, adapted=True)
        self.f_b_proj = Linear({"f_b_proj": rows["f_b_proj"]}, self.head_dim, adapted=True)
        self.o_proj = Linear({"o_proj": rows["o_proj"]}, self.width, shards=REDUCTION_SHARDS, adapted=True)
        self.conv_weight = frozen(3 * self.width, linear.short_conv_kernel_size, dtype=torch.float32)
        self.a_log = frozen(self.a_log_slots, dtype=torch.float32)
        self.dt_bias = frozen(self.width, dtype=torch.float32)
        self.o_norm = frozen(self.head_dim, dtype=torch.float32)

    def forward(self, x: Tensor, context: SequenceContext, cache: KdaCache) -> Tensor:
        slots, at = context.slots, (cache.state_in, cache.state_out)
        qkv, g, f_a, b = self.in_proj(x, slots).split([3 * self.width, *self.in_proj.splits[3:]], dim=1)
        if self.g_b_proj is not None:
            g = self.g_b_proj(g, slots)
        qkv = short_conv(qkv, self.conv_weight, context.cu_seqlens, cache.conv_state, *at)
        q, k, v = qkv.split(self.width, dim=1)
        f = self.f_b_proj(f_a, slots)
        a_log = self.a_log[: self.heads]
        o = kda(q, k, v, f, b, a_log, self.dt_bias, self.lower_bound, context.cu_seqlens, cache.state, *at)
        return self.o_proj(rms_norm_gated(o, self.o_norm, g, self.eps), slots)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.in_proj, self.g_b_proj, self.f_b_proj, self.o_proj):
            if projection is not None:
                yield from projection.tensor_slices()
        for i, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            index = slice(i * self.width, (i + 1) * self.width)
            shape = (self.width, 1, self.conv_weight.shape[1])
            yield TensorSlice(f"{name}.weight", self.conv_weight, index, shape, PLAIN)
        yield whole("A_log", self.a_log)
        yield whole("dt_bias", self.dt_bias)
        yield whole("o_norm.weight", self.o_norm)


class Indexer(nn.Module):
    """DSA indexer: picks the `index_topk` positions each token attends to. Frozen; no gradient passes."""

    def __init__(self, config: K3Config, key_format: str) -> None:
        super().__init__()
        self.key_format = key_format
        assert config.index_head_dim is not None and config.index_topk is not None and config.q_lora_rank is not None
        rows = {name: out for name, (out, _) in indexer_projections(config).items()}
        self.topk, self.eps, self.hadamard = config.index_topk, config.index_norm_eps, config.index_hadamard
        self.wq_b = Linear({"wq_b": rows["wq_b"]}, config.q_lora_rank)
        self.wk = Linear({"wk": rows["wk"]}, config.hidden_size)
        self.weights_proj = Linear({"weights_proj": rows["weights_proj"]}, config.hidden_size, fp32_out=True)
        self.k_norm_weight = frozen(config.index_head_dim)
        self.k_norm_bias = frozen(config.index_head_dim)

    @torch.no_grad()
    def forward(self, x: Tensor, c_q: Tensor | None, context: SequenceContext, cache: MlaCache) -> Tensor:
        """x [T, hidden], c_q [T, q_lora_rank] (normalised) -> positions int32 [T, topk], ascending, then -1."""
        pages, size = cache.index_pages, cache.block_size
        norm = (self.k_norm_weight, self.k_norm_bias, self.eps)
        index_store(self.wk(x), *norm, self.hadamard, pages, cache.slot_mapping, size, self.key_format)
        where = (cache.block_table, context.cu_seqlens, context.positions)
        weights = self.weights_proj(x)
        queries = (self.wq_b(c_q), weights, self.hadamard)
        return index_select(*queries, pages, *where, self.topk, size, context.flags, self.key_format)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.wq_b, self.wk, self.weights_proj):
            yield from projection.tensor_slices()
        yield whole("k_norm.weight", self.k_norm_weight)
        yield whole("k_norm.bias", self.k_norm_bias)


class AllPositions(nn.Module):
    """In place of an indexer where attention is dense."""

    def forward(self, x: Tensor, c_q: Tensor | None, context: SequenceContext, cache: MlaCache) -> None:
        """None: every position up to the token's own."""

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from ()


class MlaAttention(nn.Module):
    """Multi-head latent attention, NoPE, absorbed, over the indexer's selection or over every earlier position.

    [T, hidden] -> [T, hidden]. Queries go through a latent (q_a_proj, norm, q_b_proj) or come from q_proj at once.
    """

    def __init__(self, config: K3Config, cache_format: CacheFormat) -> None:
        super().__init__()
        rows = {name: out for name, (out, _) in mla_projections(config).items()}
        self.latents = LatentFormat(cache_format.latent, config.latent_scale)
        self.eps, self.kv_lora_rank = config.latent_norm_eps, config.kv_lora_rank
        self.dims = MlaDims(
            heads=config.num_attention_heads,
            nope=config.qk_nope_head_dim,
            pe=config.qk_rope_head_dim,
            rank=config.kv_lora_rank,
            v=config.v_head_dim,
        )
        query = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        fused = {name: rows[name] for name in (query, "kv_a_proj_with_mqa", "g_proj") if name in rows}
        self.in_proj = Linear(fused, config.hidden_size, adapted=True)
        self.gated = config.mla_use_output_gate
        self.q_a_layernorm: Tensor | None = None
        self.q_b_proj: Linear | None = None
        if config.q_lora_rank is not None:
            self.q_a_layernorm = frozen(config.q_lora_rank)
            self.q_b_proj = Linear({"q_b_proj": rows["q_b_proj"]}, config.q_lora_rank, adapted=True)
        self.kv_a_layernorm = frozen(config.kv_lora_rank)
        self.kv_b_proj = Linear({"kv_b_proj": rows["kv_b_proj"]}, config.kv_lora_rank, adapted=True)
        """Never applied by itself: attention absorbs it."""
        width = config.num_attention_heads * config.v_head_dim
        self.o_proj = Linear({"o_proj": rows["o_proj"]}, width, shards=REDUCTION_SHARDS, adapted=True)
        self.indexer = Indexer(config, cache_format.index) if config.has_indexer else AllPositions()

    def forward(self, x: Tensor, context: SequenceContext, cache: MlaCache) -> Tensor:
        slots = context.slots
        q, kv_a, *gate = self.in_proj(x, slots).split(self.in_proj.splits, dim=1)
        c_q: Tensor | None = None
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            c_q = rms_norm(q, self.q_a_layernorm, self.eps)
            q = self.q_b_proj(c_q, slots)
        latent = rms_norm(kv_a[:, : self.kv_lora_rank], self.kv_a_layernorm, self.eps)
        kv = join_columns(latent, kv_a[:, self.kv_lora_rank :])
        rank = self.kv_lora_rank
        latent_store(kv, cache.latent_pages, cache.slot_mapping, cache.block_size, rank, self.latents)
        o = mla_attention(
            q,
            latent_values(kv, rank, self.latents) if torch.is_grad_enabled() else None,
            cache.latent_pages,
            cache.block_table,
            context.cu_seqlens,
            context.positions,
            self.indexer(x, c_q, context, cache),
            cache.block_size,
            self.kv_b_proj.weight,
            self.dims,
            None if slots is None else self.kv_b_proj.lora,
            slots,
            self.latents,
        )
        return self.o_proj(gate_mul(o, *gate) if self.gated else o, slots)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.in_proj, self.q_b_proj, self.kv_b_proj, self.o_proj):
            if projection is not None:
                yield from projection.tensor_slices()
        if self.q_a_layernorm is not None:
            yield whole("q_a_layernorm.weight", self.q_a_layernorm)
        yield whole("kv_a_layernorm.weight", self.kv_a_layernorm)
        yield from named("indexer.", self.indexer.tensor_slices())
