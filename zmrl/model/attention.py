"""KDA, and MLA with or without the DSA indexer (specification 2), over packed tokens and a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.formats import index_key_fields
from zmrl.batch_invariant.ops.activation import gate_mul
from zmrl.batch_invariant.ops.indexer import index_select, index_store
from zmrl.batch_invariant.ops.kda import kda, short_conv
from zmrl.batch_invariant.ops.latents import LatentFormat, latent_store, latent_values
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.batch_invariant.ops.norm import rms_norm, rms_norm_gated
from zmrl.batch_invariant.ops.panels import LANES
from zmrl.batch_invariant.ops.rows import join_columns
from zmrl.model.cache_format import CacheFormat
from zmrl.model.config import K3Config
from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.linear import ColumnLinear, Linear, RowLinear, frozen
from zmrl.model.names import indexer_projections, kda_projections, mla_projections
from zmrl.model.tensors import PLAIN, Cut, TensorSlice, named, whole
from zmrl.parallel import mla as parallel_mla
from zmrl.parallel import selection as parallel_selection
from zmrl.parallel.group import Group
from zmrl.parallel.layout import TOKENS
from zmrl.parallel.prefill import PrefillShards, gather_context, prefill_attention
from zmrl.parallel.ranks import Ranks


class KdaAttention(nn.Module):
    """Kimi Delta Attention: [T, hidden] -> [T, hidden]."""

    def __init__(self, config: K3Config, ranks: Ranks) -> None:
        super().__init__()
        linear, self.group = config.linear_attn_config, ranks.tensor
        self.heads, self.head_dim = linear.num_heads // self.group.size, linear.head_dim
        self.width = self.heads * self.head_dim
        self.lower_bound, self.eps = linear.gate_lower_bound, config.rms_norm_eps
        rows = {name: out for name, (out, _) in kda_projections(config).items()}
        gate = "g_proj" if linear.use_full_rank_gate else "g_a_proj"
        fused = {name: rows[name] for name in ("q_proj", "k_proj", "v_proj", gate, "f_a_proj", "b_proj")}
        latents = ("g_a_proj", "f_a_proj")
        self.in_proj = ColumnLinear(fused, config.hidden_size, self.group, latents, adapted=True)
        self.g_b_proj: Linear | None = None
        if not linear.use_full_rank_gate:
            self.g_b_proj = ColumnLinear({"g_b_proj": rows["g_b_proj"]}, self.head_dim, self.group, adapted=True)
        self.f_b_proj = ColumnLinear({"f_b_proj": rows["f_b_proj"]}, self.head_dim, self.group, adapted=True)
        self.o_proj = RowLinear("o_proj", rows["o_proj"], linear.projection_size, self.group, adapted=True)
        self.conv_weight = frozen(3 * self.width, linear.short_conv_kernel_size, dtype=torch.float32)
        self.a_log = frozen(linear.a_log_slots, dtype=torch.float32)
        """Of all ranks' heads: its padding does not divide among them."""
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
        first = self.group.rank * self.heads
        a_log = self.a_log[first : first + self.heads]
        o = kda(q, k, v, f, b, a_log, self.dt_bias, self.lower_bound, context.cu_seqlens, cache.state, *at)
        return self.o_proj(rms_norm_gated(o, self.o_norm, g, self.eps), slots)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.in_proj, self.g_b_proj, self.f_b_proj, self.o_proj):
            if projection is not None:
                yield from projection.tensor_slices()
        cut = None if self.group.size == 1 else Cut(0, self.group.rank, self.group.size)
        width = self.width * self.group.size
        for i, name in enumerate(("q_conv1d", "k_conv1d", "v_conv1d")):
            index = slice(i * self.width, (i + 1) * self.width)
            shape = (width, 1, self.conv_weight.shape[1])
            yield TensorSlice(f"{name}.weight", self.conv_weight, index, shape, PLAIN, cut)
        yield whole("A_log", self.a_log)
        yield TensorSlice("dt_bias", self.dt_bias, slice(None), (width,), PLAIN, cut)
        yield whole("o_norm.weight", self.o_norm)


class Indexer(nn.Module):
    """DSA indexer: picks the `index_topk` positions each token attends to. Frozen; no gradient passes."""

    def __init__(self, config: K3Config, key_format: str, group: Group) -> None:
        super().__init__()
        self.key_format, self.group = key_format, group
        assert config.index_head_dim is not None and config.index_topk is not None and config.q_lora_rank is not None
        rows = {name: out for name, (out, _) in indexer_projections(config).items()}
        self.topk, self.eps, self.hadamard = config.index_topk, config.index_norm_eps, config.index_hadamard
        self.key_fields = index_key_fields(key_format, config.index_head_dim)
        self.wq_b = Linear({"wq_b": rows["wq_b"]}, config.q_lora_rank)
        self.wk = Linear({"wk": rows["wk"]}, config.hidden_size)
        self.weights_proj = Linear({"weights_proj": rows["weights_proj"]}, config.hidden_size, fp32_out=True)
        self.k_norm_weight = frozen(config.index_head_dim)
        self.k_norm_bias = frozen(config.index_head_dim)

    @torch.no_grad()
    def store(self, x: Tensor, cache: MlaCache) -> None:
        """Keys of the step's tokens, x [T, hidden], into their pages."""
        norm = (self.k_norm_weight, self.k_norm_bias, self.eps)
        at = cache.index_pages, cache.slot_mapping, cache.block_size
        index_store(self.wk(x), *norm, self.hadamard, *at, self.key_format)

    @torch.no_grad()
    def queries(self, x: Tensor, c_q: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, hidden], c_q [n, q_lora_rank] (normalised) of any rows -> queries BF16, head weights FP32."""
        return self.wq_b(c_q), self.weights_proj(x)

    @torch.no_grad()
    def forward(self, x: Tensor, c_q: Tensor, context: SequenceContext, cache: MlaCache) -> Tensor:
        """x, c_q as in `queries`, of the context's tokens, which are stored -> positions int32 [T, topk], ascending,
        then -1."""
        pages, size = cache.index_pages, cache.block_size
        where = (cache.block_table, context.cu_seqlens, context.positions)
        queries = (*self.queries(x, c_q), self.hadamard)
        selection = *queries, pages, *where, self.topk, size, context.flags, self.key_format
        if self.group.size > 1:
            return parallel_selection.index_select(self.group, *selection)
        return index_select(*selection)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.wq_b, self.wk, self.weights_proj):
            yield from projection.tensor_slices()
        yield whole("k_norm.weight", self.k_norm_weight)
        yield whole("k_norm.bias", self.k_norm_bias)


class AllPositions(nn.Module):
    """In place of an indexer where attention is dense."""

    def store(self, x: Tensor, cache: MlaCache) -> None:
        """Nothing: there are no keys."""

    def forward(self, x: Tensor, c_q: Tensor | None, context: SequenceContext, cache: MlaCache) -> None:
        """None: every position up to the token's own."""

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from ()


class MlaAttention(nn.Module):
    """Multi-head latent attention, NoPE, absorbed, over the indexer's selection or over every earlier position.

    [T, hidden] -> [T, hidden]. Queries go through a latent (q_a_proj, norm, q_b_proj) or come from q_proj at once.
    Heads are spread over the tensor ranks; latents and index keys are on all of them, or spread over context ranks.
    Where a prefill may go by tokens every rank has all of kv_b, of which decoding reads the rank's heads.
    """

    def __init__(self, config: K3Config, cache_format: CacheFormat, ranks: Ranks) -> None:
        super().__init__()
        rows = {name: out for name, (out, _) in mla_projections(config).items()}
        self.group = group = ranks.tensor
        self.context_group = ranks.context
        self.latents = LatentFormat(cache_format.latent, config.latent_scale)
        self.eps, self.kv_lora_rank = config.latent_norm_eps, config.kv_lora_rank
        self.dims = MlaDims(
            heads=config.num_attention_heads // group.size,
            nope=config.qk_nope_head_dim,
            pe=config.qk_rope_head_dim,
            rank=config.kv_lora_rank,
            v=config.v_head_dim,
        )
        query = "q_proj" if config.q_lora_rank is None else "q_a_proj"
        fused = {name: rows[name] for name in (query, "kv_a_proj_with_mqa", "g_proj") if name in rows}
        latents = ("q_a_proj", "kv_a_proj_with_mqa")
        self.in_proj = ColumnLinear(fused, config.hidden_size, group, latents, adapted=True)
        self.gated = config.mla_use_output_gate
        self.q_a_layernorm: Tensor | None = None
        self.q_b_proj: Linear | None = None
        if config.q_lora_rank is not None:
            self.q_a_layernorm = frozen(config.q_lora_rank)
            self.q_b_proj = ColumnLinear({"q_b_proj": rows["q_b_proj"]}, config.q_lora_rank, group, adapted=True)
        self.kv_a_layernorm = frozen(config.kv_lora_rank)
        kv_b, replicated = {"kv_b_proj": rows["kv_b_proj"]}, ("kv_b_proj",) if ranks.prefill == TOKENS else ()
        self.kv_b_proj = ColumnLinear(kv_b, config.kv_lora_rank, group, replicated, adapted=True)
        """Never applied by itself: attention absorbs it."""
        self.sum_heads = parallel_mla.head_sums(group)
        self.kv_b_proj.gradient_slices = self.sum_heads.slices
        width = config.num_attention_heads * config.v_head_dim
        self.o_proj = RowLinear("o_proj", rows["o_proj"], width, group, adapted=True)
        index = cache_format.index
        self.indexer = Indexer(config, index, ranks.context) if config.has_indexer else AllPositions()
        self.latent_bytes = cache_format.latent_bytes(config)

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
        self.indexer.store(x, cache)
        if context.shards is None:
            values = latent_values(kv, rank, self.latents) if torch.is_grad_enabled() else None
            o = self._attend_by_heads(x, c_q, q, values, context, cache)
        else:
            assert c_q is not None
            o = self._attend_by_tokens(x, c_q, q, context, context.shards, cache)
        return self.o_proj(gate_mul(o, *gate) if self.gated else o, slots)

    def _attend_by_heads(
        self, x: Tensor, c_q: Tensor | None, q: Tensor, values: Tensor | None, context: SequenceContext, cache: MlaCache
    ) -> Tensor:
        """q BF16 [T, H*(N+P)] of this rank's heads -> BF16 [T, H*V]. x, c_q: for the indexer; values: for autograd."""
        selected = self.indexer(x, c_q, context, cache)
        where = cache.latent_pages, cache.block_table, context.cu_seqlens, context.positions, selected, cache.block_size
        kv_b, lora = self._own_kv_b(context.slots)
        weights = kv_b, self.dims, lora, context.slots, self.latents
        if self.context_group.size > 1:
            return parallel_mla.mla_attention(self.context_group, q, *where, *weights)
        return mla_attention(q, values, *where, *weights, self.sum_heads)

    def _own_kv_b(self, slots: Tensor | None) -> tuple[Tensor, LoraBuffers | None]:
        """kv_b and its adapters, if the step has any, of this rank's heads."""
        kv_b, lora = self.kv_b_proj.weight, self.kv_b_proj.active_lora(slots)
        panels = self.dims.heads * (self.dims.nope + self.dims.v) // LANES
        if len(kv_b) == panels:
            return kv_b, lora
        own = slice(self.group.rank * panels, (self.group.rank + 1) * panels)
        if lora is not None:  # a copy if there are several slots: the kernels take them without a stride
            lora = replace(lora, b=lora.b[:, own].contiguous())
        return kv_b[own], lora

    def _attend_by_tokens(
        self, x: Tensor, c_q: Tensor, q: Tensor, context: SequenceContext, shards: PrefillShards, cache: MlaCache
    ) -> Tensor:
        """As `_attend_by_heads`, for a step some of whose requests, or all, go by tokens."""
        assert isinstance(self.indexer, Indexer)
        own = shards.rows[self.group.rank]
        queries = (*self.indexer.queries(x[own], c_q[own]), self.indexer.hadamard)
        o = prefill_attention(
            self.group, shards, q, *queries, *self._whole_context(context, shards, cache), context.positions,
            self.indexer.topk, cache.block_size, self.kv_b_proj.weight,
            self.dims._replace(heads=self.dims.heads * self.group.size), self.kv_b_proj.active_lora(context.slots),
            context.slots, context.flags, self.latents, self.indexer.key_format,
        )  # fmt: skip
        others = shards.others
        if len(others):
            rest = context.of_rows(others, shards.others_cu_seqlens)
            o[others] = self._attend_by_heads(x[others], c_q[others], q[others], None, rest, cache)
            if context.flags is not None and rest.flags is not None:
                context.flags[others] = rest.flags
        return o

    def _whole_context(
        self, context: SequenceContext, shards: PrefillShards, cache: MlaCache
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Latent pages, index pages and block table of the requests that go by tokens, with all their positions."""
        assert isinstance(self.indexer, Indexer)
        table = cache.block_table[shards.requests]
        if self.context_group.size == 1:
            return cache.latent_pages, cache.index_pages, table
        lengths = (context.positions[context.cu_seqlens[1:][shards.requests].long() - 1] + 1).tolist()
        where = table, lengths, cache.block_size
        latents, _ = gather_context(self.context_group, cache.latent_pages, *where, [self.latent_bytes])
        keys, of_gathered = gather_context(self.context_group, cache.index_pages, *where, self.indexer.key_fields)
        return latents, keys, of_gathered

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.in_proj, self.q_b_proj, self.kv_b_proj, self.o_proj):
            if projection is not None:
                yield from projection.tensor_slices()
        if self.q_a_layernorm is not None:
            yield whole("q_a_layernorm.weight", self.q_a_layernorm)
        yield whole("kv_a_layernorm.weight", self.kv_a_layernorm)
        yield from named("indexer.", self.indexer.tensor_slices())
