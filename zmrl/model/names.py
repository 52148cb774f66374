"""Names, shapes and dtypes of every checkpoint tensor, and the modules that LoRA adapts.

The one place that knows how the released checkpoint is laid out (specification 5) and which projections carry an
adapter (specification 7). Generators, not tables: the full model has half a million tensors. Needs no torch.

Two name spaces: *checkpoint names* carry the prefix `language_model.`; *module names*, those of
`zmrl.model.reference` and of PEFT adapters, do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from zmrl.model.config import MXFP4_GROUP_SIZE, K3Config

PREFIX = "language_model."
"""Prefix of checkpoint names: the release is a multimodal wrapper around the text model."""

EXPERT_PROJECTIONS = ("w1", "w2", "w3")
"""w1 = gate, w2 = down, w3 = up."""


class TensorSpec(NamedTuple):
    """One checkpoint tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """safetensors' code: "BF16", "F32" or "U8"."""


class LoraTarget(NamedTuple):
    """One linear module that carries an adapter: A is [rank, in_features], B is [out_features, rank]."""

    module: str
    """Module name without prefix, e.g. `model.layers.0.self_attn.q_proj`."""
    out_features: int
    in_features: int

    def parameters(self, rank: int) -> int:
        """Adapter parameters at `rank`."""
        return rank * (self.out_features + self.in_features)


class LoraSpec(NamedTuple):
    """Which modules carry adapters, as PEFT spells it."""

    rank: int = 32
    alpha: int = 32

    def target_modules(self, config: K3Config) -> list[str]:
        """Suffixes for `peft.LoraConfig(target_modules=...)`. `gate_proj` and the indexer are not among them."""
        return list(dict.fromkeys([*kda_projections(config), *mla_projections(config), *EXPERT_PROJECTIONS]))

    def parameters(self, config: K3Config) -> int:
        """All adapter parameters."""
        return sum(t.parameters(self.rank) for t in lora_targets(config))

    def tensor_specs(self, config: K3Config, dtype: str = "F32") -> Iterator[TensorSpec]:
        """Tensors of a PEFT adapter file, `base_model.model.` + module + `.lora_{A,B}.weight`."""
        for target in lora_targets(config):
            stem = f"base_model.model.{target.module}"
            yield TensorSpec(f"{stem}.lora_A.weight", (self.rank, target.in_features), dtype)
            yield TensorSpec(f"{stem}.lora_B.weight", (target.out_features, self.rank), dtype)


def kda_projections(config: K3Config) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear projections of one KDA layer, by name below `self_attn`."""
    linear, hidden = config.linear_attn_config, config.hidden_size
    width = linear.projection_size
    gate = {"g_proj": (width, hidden)}
    if not linear.use_full_rank_gate:
        gate = {"g_a_proj": (linear.head_dim, hidden), "g_b_proj": (width, linear.head_dim)}
    return {
        "q_proj": (width, hidden),
        "k_proj": (width, hidden),
        "v_proj": (width, hidden),
        **gate,
        "o_proj": (hidden, width),
        "b_proj": (linear.num_heads, hidden),
        "f_a_proj": (linear.head_dim, hidden),
        "f_b_proj": (width, linear.head_dim),
    }


def mla_projections(config: K3Config) -> dict[str, tuple[int, int]]:
    """[out, in] of the linear projections of one MLA layer (without its indexer), by name below `self_attn`."""
    heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.q_lora_rank
    queries = heads * config.qk_head_dim
    q = {"q_proj": (queries, hidden)}
    if rank is not None:
        q = {"q_a_proj": (rank, hidden), "q_b_proj": (queries, rank)}
    gate = {"g_proj": (heads * config.v_head_dim, hidden)} if config.mla_use_output_gate else {}
    return {
        **q,
        "kv_a_proj_with_mqa": (config.kv_lora_rank + config.qk_rope_head_dim, hidden),
        "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
        **gate,
        "o_proj": (hidden, heads * config.v_head_dim),
    }


def indexer_projections(config: K3Config) -> dict[str, tuple[int, int]]:
    """[out, in] of one indexer's projections, by name below `self_attn.indexer`; empty without an indexer."""
    heads, dim, rank = config.index_n_heads, config.index_head_dim, config.q_lora_rank
    if heads is None or dim is None or rank is None:
        return {}
    return {
        "wq_b": (heads * dim, rank),
        "wk": (dim, config.hidden_size),
        "weights_proj": (heads, config.hidden_size),
    }


def expert_projections(config: K3Config) -> dict[str, tuple[int, int]]:
    """[out, in] of one routed expert's projections, by name below `block_sparse_moe.experts.N`."""
    outer, width = config.expert_hidden_size, config.moe_intermediate_size
    return {"w1": (width, outer), "w2": (outer, width), "w3": (width, outer)}


def tensor_specs(config: K3Config) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint, in layer order, with the prefix `language_model.`.

    Of `config.dtype` except: convolutions, A_log, dt_bias, o_norm and the router bias are F32; routed experts in MXFP4
    are U8 `weight_packed` [out, in/2] and U8 `weight_scale` [out, in/32].
    """
    stored = {"bfloat16": "BF16", "float32": "F32"}[config.dtype]
    for spec in _specs(config):
        yield spec if spec.dtype != "BF16" else spec._replace(dtype=stored)


def _specs(config: K3Config) -> Iterator[TensorSpec]:
    hidden, mixes = config.hidden_size, config.attn_res_block_size is not None
    yield _bf16("model.embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.num_hidden_layers):
        stem = f"model.layers.{layer}."
        yield _bf16(f"{stem}input_layernorm.weight", hidden)
        yield _bf16(f"{stem}post_attention_layernorm.weight", hidden)
        for mix in ("self_attention_res", "mlp_res") if mixes else ():
            yield from _mix_specs(f"{stem}{mix}", hidden)
        attention = _mla_specs if config.is_full_attention(layer) else _kda_specs
        yield from attention(config, f"{stem}self_attn.")
        if config.is_moe(layer):
            yield from _moe_specs(config, f"{stem}block_sparse_moe.")
        else:
            yield from _mlp_specs(f"{stem}mlp.", hidden, config.intermediate_size)
    yield _bf16("model.norm.weight", hidden)
    if mixes:
        yield from _mix_specs("model.output_attn_res", hidden)
    yield _bf16("lm_head.weight", config.vocab_size, hidden)


def is_indexer_tensor(name: str) -> bool:
    """Whether a checkpoint or module name belongs to an indexer; a K3 checkpoint lacks those."""
    return ".self_attn.indexer." in name


def checkpoint_name(config: K3Config, stored: str) -> str:
    """The name under which `tensor_specs` has the tensor that a checkpoint file calls `stored`.

    Kimi-Linear is no part of a multimodal model: its tensors lack the prefix. transformers, when it saves, takes the
    dense MLP's name for that of a mixture of experts as well (`block_sparse_moe.gate_proj`).
    """
    name = stored if stored.startswith(PREFIX) else PREFIX + stored
    match = _DENSE_AS_MOE.fullmatch(name)
    return f"{match[1]}mlp.{match[3]}" if match and not config.is_moe(int(match[2])) else name


_DENSE_AS_MOE = re.compile(
    rf"({re.escape(PREFIX)}model\.layers\.(\d+)\.)block_sparse_moe\.((?:gate|up|down)_proj\.weight)"
)


def lora_targets(config: K3Config) -> Iterator[LoraTarget]:
    """Every adapted module: all attention projections and w1, w2, w3 of every routed expert, not the indexer."""
    experts = expert_projections(config)
    for layer in range(config.num_hidden_layers):
        stem = f"model.layers.{layer}."
        full = config.is_full_attention(layer)
        for name, shape in (mla_projections if full else kda_projections)(config).items():
            yield LoraTarget(f"{stem}self_attn.{name}", *shape)
        if config.is_moe(layer):
            for expert in range(config.num_experts):
                for name, shape in experts.items():
                    yield LoraTarget(f"{stem}block_sparse_moe.experts.{expert}.{name}", *shape)


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(PREFIX + name, shape, "BF16")


def _f32(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(PREFIX + name, shape, "F32")


def _kda_specs(config: K3Config, stem: str) -> Iterator[TensorSpec]:
    linear = config.linear_attn_config
    for name, shape in kda_projections(config).items():
        yield _bf16(f"{stem}{name}.weight", *shape)
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield _f32(f"{stem}{name}.weight", linear.projection_size, 1, linear.short_conv_kernel_size)
    yield _f32(f"{stem}A_log", linear.a_log_slots)
    yield _f32(f"{stem}dt_bias", linear.projection_size)
    yield _f32(f"{stem}o_norm.weight", linear.head_dim)


def _mla_specs(config: K3Config, stem: str) -> Iterator[TensorSpec]:
    for name, shape in mla_projections(config).items():
        yield _bf16(f"{stem}{name}.weight", *shape)
    if config.q_lora_rank is not None:
        yield _bf16(f"{stem}q_a_layernorm.weight", config.q_lora_rank)
    yield _bf16(f"{stem}kv_a_layernorm.weight", config.kv_lora_rank)
    for name, shape in indexer_projections(config).items():
        yield _bf16(f"{stem}indexer.{name}.weight", *shape)
    if config.index_head_dim is not None:
        yield _bf16(f"{stem}indexer.k_norm.weight", config.index_head_dim)
        yield _bf16(f"{stem}indexer.k_norm.bias", config.index_head_dim)


def _mix_specs(stem: str, hidden: int) -> Iterator[TensorSpec]:
    yield _bf16(f"{stem}_norm.weight", hidden)
    yield _bf16(f"{stem}_proj.weight", 1, hidden)


def _mlp_specs(stem: str, hidden: int, width: int) -> Iterator[TensorSpec]:
    yield _bf16(f"{stem}gate_proj.weight", width, hidden)
    yield _bf16(f"{stem}up_proj.weight", width, hidden)
    yield _bf16(f"{stem}down_proj.weight", hidden, width)


def _moe_specs(config: K3Config, stem: str) -> Iterator[TensorSpec]:
    hidden, latent = config.hidden_size, config.routed_expert_hidden_size
    yield _bf16(f"{stem}gate.weight", config.num_experts, hidden)
    yield _f32(f"{stem}gate.e_score_correction_bias", config.num_experts)
    if latent is not None:
        yield _bf16(f"{stem}routed_expert_down_proj.weight", latent, hidden)
        yield _bf16(f"{stem}routed_expert_norm.weight", latent)
        yield _bf16(f"{stem}routed_expert_up_proj.weight", hidden, latent)
    yield from _mlp_specs(f"{stem}shared_experts.", hidden, config.shared_intermediate_size)
    for expert in range(config.num_experts):
        for name, (out, width) in expert_projections(config).items():
            name = f"{stem}experts.{expert}.{name}"
            if config.expert_format == "bf16":
                yield _bf16(f"{name}.weight", out, width)
                continue
            yield TensorSpec(f"{PREFIX}{name}.weight_packed", (out, width // 2), "U8")
            yield TensorSpec(f"{PREFIX}{name}.weight_scale", (out, width // MXFP4_GROUP_SIZE), "U8")
