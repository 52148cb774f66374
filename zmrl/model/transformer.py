"""The text model of the family (Kimi-Linear, K3, K3.1): the one forward pass of both hosts.

Modules over packed tokens and a `SequenceContext`; no state, no scheduling. The rollout and the trainer wrap `KimiK31`
and differ only in where the context's buffers live, and in the ranks that share the model out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.build import kernel_id
from zmrl.batch_invariant.ops.norm import rms_norm
from zmrl.batch_invariant.ops.residual import attn_res_mix, residual_add
from zmrl.model.attention import KdaAttention, MlaAttention
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.checkpoint import iter_tensors, read_config
from zmrl.model.config import K3Config
from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.linear import ColumnLinear, Linear, frozen
from zmrl.model.moe import Experts, MixtureOfExperts, Mlp
from zmrl.model.names import PREFIX
from zmrl.model.tensors import TensorLoader, TensorSlice, named, whole
from zmrl.parallel.layout import REDUCTION_SLICES, TOKENS
from zmrl.parallel.linear import vocabulary_parallel_logits
from zmrl.parallel.prefill import PrefillShards, requests_by_tokens
from zmrl.parallel.ranks import SINGLE, Ranks


class ResidualMix(nn.Module):
    """Attention residual: a softmax-weighted mix of the earlier block outputs and the running prefix."""

    def __init__(self, config: K3Config, name: str) -> None:
        super().__init__()
        self.eps, self.name = config.rms_norm_eps, name
        self.norm = frozen(config.hidden_size)
        self.proj = frozen(config.hidden_size)

    def forward(self, blocks: list[Tensor], prefix: Tensor | None) -> Tensor:
        """Sources BF16 [T, hidden] each -> BF16 [T, hidden]."""
        sources = blocks if prefix is None else [*blocks, prefix]
        return attn_res_mix(sources, self.norm, self.proj, self.eps)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield whole(f"{self.name}_norm.weight", self.norm)
        yield whole(f"{self.name}_proj.weight", self.proj, (1, self.proj.shape[0]))


class PlainResidual(nn.Module):
    """In place of a mix where there are no attention residuals: the running prefix is the residual stream."""

    def forward(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        return prefix

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from ()


def residual_mix(config: K3Config, name: str) -> ResidualMix | PlainResidual:
    """What reads the residual stream."""
    return PlainResidual() if config.attn_res_block_size is None else ResidualMix(config, name)


class DecoderLayer(nn.Module):
    """Attention and MLP, each reading the residual stream or a mix of it (specification 3.1)."""

    def __init__(self, config: K3Config, layer: int, cache_format: CacheFormat, ranks: Ranks) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        size = config.attn_res_block_size
        self.starts_block = size is not None and layer % size == 0
        self.self_attention_res = residual_mix(config, "self_attention_res")
        self.input_layernorm = frozen(config.hidden_size)
        full = config.is_full_attention(layer)
        self.self_attn = MlaAttention(config, cache_format, ranks) if full else KdaAttention(config, ranks)
        self.mlp_res = residual_mix(config, "mlp_res")
        self.post_attention_layernorm = frozen(config.hidden_size)
        self.mlp_name = "block_sparse_moe" if config.is_moe(layer) else "mlp"
        moe, width = config.is_moe(layer), config.intermediate_size
        self.mlp = MixtureOfExperts(config, ranks) if moe else Mlp(config, width, ranks)

    def forward(
        self, blocks: list[Tensor], prefix: Tensor, context: SequenceContext, cache: KdaCache | MlaCache
    ) -> Tensor:
        """Appends to `blocks` where a block starts; returns the new prefix, BF16, rounded after every addition."""
        h = self.self_attention_res(blocks, prefix)
        if self.starts_block:
            blocks.append(prefix)
        a = self.self_attn(rms_norm(h, self.input_layernorm, self.eps), context, cache)
        prefix = a if self.starts_block else residual_add(prefix, a)
        h = self.mlp_res(blocks, prefix)
        return residual_add(prefix, self.mlp(rms_norm(h, self.post_attention_layernorm, self.eps), context))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield whole("input_layernorm.weight", self.input_layernorm)
        yield whole("post_attention_layernorm.weight", self.post_attention_layernorm)
        yield from self.self_attention_res.tensor_slices()
        yield from self.mlp_res.tensor_slices()
        yield from named("self_attn.", self.self_attn.tensor_slices())
        yield from named(f"{self.mlp_name}.", self.mlp.tensor_slices())


class KimiK31(nn.Module):
    """The text model. Weights are loaded with `loader()`; adapters are made with `create_lora`.

    cache_format: of the pages that every context has. FormatError if the model's sizes do not allow it. ranks: whose
    part of the model this is; LayoutError if they do not fit it.
    """

    def __init__(
        self, config: K3Config, cache_format: CacheFormat = DEFAULT_CACHE_FORMAT, ranks: Ranks = SINGLE
    ) -> None:
        super().__init__()
        cache_format.token_bytes(config)
        ranks.layout.check(config)
        self.config, self.cache_format, self.ranks = config, cache_format, ranks
        self.lora_rank, self.lora_alpha = 0, 0.0
        self.embed_tokens = frozen(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, cache_format, ranks) for i in range(config.num_hidden_layers)
        )
        self.output_attn_res = residual_mix(config, "output_attn_res")
        self.norm = frozen(config.hidden_size)
        self.lm_head = ColumnLinear({"lm_head": config.vocab_size}, config.hidden_size, ranks.tensor, fp32_out=True)

    def forward(self, token_ids: Tensor, context: SequenceContext) -> Tensor:
        """token_ids int [T] -> normalised hidden states BF16 [T, hidden]."""
        if self.ranks.prefill == TOKENS:
            step = context.cu_seqlens, context.positions
            requests = requests_by_tokens(self.config, self.cache_format, self.ranks, *step)
            size = self.ranks.tensor.size
            context.shards = PrefillShards.of(context.cu_seqlens, size, requests) if requests else None
        return self.decoder(nn.functional.embedding(token_ids, self.embed_tokens), context)

    def decoder(self, prefix: Tensor, context: SequenceContext) -> Tensor:
        """The decoder layers and the last norm: embeddings BF16 [T, hidden] -> hidden states BF16 [T, hidden]."""
        blocks: list[Tensor] = []
        for layer, cache in zip(self.layers, context.caches, strict=True):
            prefix = layer(blocks, prefix, context, cache)
        return rms_norm(self.output_attn_res(blocks, prefix), self.norm, self.config.rms_norm_eps)

    def idle(self, adapter: bool) -> Tensor:
        """Takes part in a forward of other copies of the model while this one has no tokens (`Ranks.copies`).

        Without it they would wait at the experts. Returns FP32 [0], whose backward takes part in theirs.
        """
        self.ranks.expert.events["forwards without tokens"] += 1
        z = torch.empty(0, self.config.expert_hidden_size, dtype=torch.bfloat16)
        for layer in self._decoder_layers():
            if isinstance(layer.mlp, MixtureOfExperts):
                z = layer.mlp.experts.idle(z, adapter)
        return z.float().flatten()

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden BF16 [T, hidden] -> FP32 [T, vocab_size], the real vocabulary without padding."""
        if self.ranks.tensor.size == 1:
            return self.lm_head(hidden)
        return vocabulary_parallel_logits(self.ranks.tensor, hidden, self.lm_head.weight, self.config.vocab_size)

    def _decoder_layers(self) -> list[DecoderLayer]:
        return cast(list[DecoderLayer], list(self.layers))

    # Tensors by name

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, cache_format: CacheFormat = DEFAULT_CACHE_FORMAT, ranks: Ranks = SINGLE
    ) -> KimiK31:
        """Reads a checkpoint directory, of which a rank keeps its part; CheckpointError names what is wrong with it."""
        model = cls(read_config(path), cache_format, ranks)
        loader = model.loader(str(path))
        for name, tensor in iter_tensors(path):
            loader.load(name, tensor)
        loader.finish()
        return model

    def tensor_slices(self) -> Iterator[TensorSlice]:
        """Every live base tensor under its checkpoint name."""
        yield whole(f"{PREFIX}model.embed_tokens.weight", self.embed_tokens)
        for i, layer in enumerate(self._decoder_layers()):
            yield from named(f"{PREFIX}model.layers.{i}.", layer.tensor_slices())
        yield whole(f"{PREFIX}model.norm.weight", self.norm)
        yield from named(f"{PREFIX}model.", self.output_attn_res.tensor_slices())
        yield from named(PREFIX, self.lm_head.tensor_slices())

    def base_buffers(self) -> dict[str, Tensor]:
        """Every live base buffer by module path: what `tensor_slices` are slices of."""
        return dict(self.named_parameters())

    def lora_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one slot of the `lora_buffers` that a single rank would have."""
        return {
            f"{item.key}.{field}": shape
            for item in self.adapted_modules()
            for field, shape in item.module.lora_shapes().items()
        }

    def own_lora(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of one slot of the `lora_buffers` that a single rank would have."""
        own: dict[str, Tensor] = {}
        for item in self.adapted_modules():
            fields = {field: whole[f"{item.key}.{field}"] for field in item.module.lora_buffers()}
            own |= {f"{item.key}.{field}": part for field, part in item.module.own_lora(fields).items()}
        return own

    def loader(self, what: str) -> TensorLoader:
        """Accepts every checkpoint tensor once; `what` names the source in errors."""
        return TensorLoader(self.tensor_slices(), what)

    # Adapters

    def adapted_modules(self) -> Iterator[AdaptedModule]:
        """Modules that take adapters, in layer order."""
        for i, layer in enumerate(self._decoder_layers()):
            stem = f"model.layers.{i}."
            for name, module in layer.self_attn.named_children():
                if isinstance(module, Linear) and module.adapted:
                    yield AdaptedModule(f"layers.{i}.self_attn.{name}", f"{stem}self_attn.", module)
            if isinstance(layer.mlp, MixtureOfExperts):
                yield AdaptedModule(f"layers.{i}.experts", f"{stem}block_sparse_moe.experts.", layer.mlp.experts)

    def create_lora(self, slots: int, rank: int, alpha: float) -> None:
        """Zero adapters in every adapted module; scale = alpha / rank."""
        if rank <= 0 or rank % 16:
            raise ValueError(f"lora rank {rank}: a positive multiple of 16 is needed (adapter panels have 16 lanes)")
        self.lora_rank, self.lora_alpha = rank, float(alpha)
        for item in self.adapted_modules():
            item.module.create_lora(slots, rank, alpha / rank)

    def lora_buffers(self) -> dict[str, Tensor]:
        """Live adapter buffers [slots, ...] BF16 by key, e.g. `layers.0.self_attn.in_proj.a`."""
        return {
            f"{item.key}.{field}": buffer
            for item in self.adapted_modules()
            for field, buffer in item.module.lora_buffers().items()
        }

    def adapter_buffers(self, slot: int) -> dict[str, Tensor]:
        """Those of one slot."""
        return {key: buffer[slot] for key, buffer in self.lora_buffers().items()}

    def lora_slices(self, buffers: dict[str, Tensor] | int) -> Iterator[TensorSlice]:
        """Adapter tensors under PEFT names: of a slot of the live buffers, or of buffers keyed and shaped like one."""
        for item in self.adapted_modules():
            fields = item.module.lora_buffers()
            if isinstance(buffers, int):
                own = {field: buffer[buffers] for field, buffer in fields.items()}
            else:
                own = {field: buffers[f"{item.key}.{field}"] for field in fields}
            yield from named(f"base_model.model.{item.stem}", item.module.lora_slices(own))


@dataclass(frozen=True)
class AdaptedModule:
    """A module with adapters, the key of its buffers, and the stem of its PEFT names."""

    key: str
    stem: str
    module: Linear | Experts


def function_config(model: KimiK31) -> dict[str, object]:
    """What is part of the function and not of how it is run; both sides exchange it (numerics.md).

    `model` is a hash of every field of the configuration; the fields beside it are there to be read.
    """
    config = model.config
    fields = json.dumps(config.to_dict(), sort_keys=True)
    return {
        "model": hashlib.sha256(fields.encode()).hexdigest()[:16],
        "lora_rank": model.lora_rank,
        "lora_alpha": model.lora_alpha,
        "latent_format": model.cache_format.latent,
        "index_format": model.cache_format.index,
        "latent_scale": config.latent_scale,
        "reduction_shards": REDUCTION_SLICES,
        "rms_norm_eps": config.rms_norm_eps,
        "latent_norm_eps": config.latent_norm_eps,
        "index_norm_eps": config.index_norm_eps,
        "index_topk": config.index_topk,
        "index_hadamard": config.index_hadamard,
        "kernel_id": kernel_id(),
    }
