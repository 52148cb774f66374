"""Which configurations describe a model that this code implements. Knows nothing about files or torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmrl.model.config import K3Config

MXFP4_GROUP_SIZE = 32

INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")
"""All set: DSA indexer (K3.1). All None: dense attention (K3, Kimi-Linear)."""

_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "num_experts_per_token",
    "num_shared_experts", "moe_intermediate_size", "max_position_embeddings",
)  # fmt: skip
_POSITIVE_OR_NONE = ("q_lora_rank", "routed_expert_hidden_size", "attn_res_block_size")
_CHOICES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("situ", "silu"),
    "expert_format": ("mxfp4", "bf16"),
    "dtype": ("bfloat16", "float32"),
    "mla_use_output_gate": (True, False),
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "num_expert_group": (1,),
    "topk_group": (1,),
    "moe_renormalize": (True,),
    "tie_word_embeddings": (False,),
}
"""Values that are implemented; others are models that this code does not know."""
_MULTIPLES = {"qk_nope_head_dim": 16, "kv_lora_rank": 16, "v_head_dim": 16}
"""Heads and latents start at panels of 16 rows (docs/operators.md)."""


class ConfigError(ValueError):
    """A configuration that does not describe a model that this code implements."""


def require(condition: bool, message: str) -> None:
    """ConfigError unless `condition`."""
    if not condition:
        raise ConfigError(f"config: {message}")


def validate(config: K3Config) -> None:
    """ConfigError names the field and what it may be."""
    for name in _POSITIVE:
        value = getattr(config, name)
        require(type(value) is int and value > 0, f"{name} must be a positive integer, not {value!r}")
    for name in _POSITIVE_OR_NONE:
        value = getattr(config, name)
        message = f"{name} must be a positive integer or absent, not {value!r}"
        require(value is None or (type(value) is int and value > 0), message)
    for name, choices in _CHOICES.items():
        value = getattr(config, name)
        allowed = " or ".join(repr(choice) for choice in choices)
        require(value in choices, f"{name}={value!r} is not implemented; only {allowed} is")
    for name, multiple in _MULTIPLES.items():
        value = getattr(config, name)
        require(value % multiple == 0, f"{name}={value} must be a multiple of {multiple}: the kernels' panels")
    _validate_layers(config)
    _validate_experts(config)
    _validate_indexer(config)
    for name in ("rms_norm_eps", "latent_norm_eps", "index_norm_eps", "latent_scale"):
        require(getattr(config, name) > 0, f"{name} must be positive")
    require(
        config.num_key_value_heads == config.num_attention_heads,
        "num_key_value_heads must equal num_attention_heads (MLA expands one latent to every head)",
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        require(type(value) is int, f"{name} must be one integer, not {value!r}")
        require(0 <= value < config.vocab_size, f"{name}={value} is outside the vocabulary of {config.vocab_size}")


def _validate_layers(config: K3Config) -> None:
    linear = config.linear_attn_config
    for name in ("head_dim", "num_heads", "short_conv_kernel_size"):
        value = getattr(linear, name)
        message = f"linear_attn_config.{name} must be a positive integer, not {value!r}"
        require(type(value) is int and value > 0, message)
    bound = linear.gate_lower_bound
    message = f"linear_attn_config.gate_lower_bound must be negative, or absent (softplus decay), not {bound!r}"
    require(bound is None or bound < 0, message)
    width, dim = linear.short_conv_kernel_size, linear.head_dim
    require(width == 4, f"linear_attn_config.short_conv_kernel_size={width} is not implemented; only 4 is")
    message = f"linear_attn_config.head_dim={dim} must be a multiple of 8 up to 128: the KDA kernel's limit"
    require(dim % 8 == 0 and dim <= 128, message)
    both = sorted(linear.full_attn_layers + linear.kda_layers)
    message = "full_attn_layers and kda_layers must together name every layer 1..num_hidden_layers exactly once"
    require(both == list(range(1, config.num_hidden_layers + 1)), message)
    dense = config.first_k_dense_replace
    require(type(dense) is int and dense >= 0, f"first_k_dense_replace must be an integer from 0, not {dense!r}")
    require(dense <= config.num_hidden_layers, "first_k_dense_replace exceeds the layer count")


def _validate_experts(config: K3Config) -> None:
    require(
        config.num_experts_per_token <= config.num_experts,
        f"num_experts_per_token={config.num_experts_per_token} exceeds num_experts={config.num_experts}",
    )
    latent = config.routed_expert_hidden_size
    require(
        config.latent_moe_use_norm == (latent is not None),
        f"latent_moe_use_norm={config.latent_moe_use_norm} with routed_expert_hidden_size={latent} is not implemented: "
        "experts in a latent have the norm, full-width experts (no routed_expert_hidden_size) have none",
    )
    if config.expert_format == "mxfp4":
        for name, value in (
            ("routed_expert_hidden_size" if latent else "hidden_size", config.expert_hidden_size),
            ("moe_intermediate_size", config.moe_intermediate_size),
        ):
            message = f"{name}={value} must be a multiple of {MXFP4_GROUP_SIZE}, the MXFP4 group size"
            require(value % MXFP4_GROUP_SIZE == 0, message)
    for name in ("activation_situ_beta", "activation_situ_linear_beta"):
        require(getattr(config, name) > 0, f"{name} must be positive")


def _validate_indexer(config: K3Config) -> None:
    index = [getattr(config, n) for n in INDEX_FIELDS]
    require(
        all(v is None for v in index) or all(type(v) is int and v > 0 for v in index),
        f"{', '.join(INDEX_FIELDS)} must all be positive integers (K3.1) or all be absent (K3), not {index}",
    )
    require(
        index[0] is None or config.q_lora_rank is not None,
        "an indexer (index_n_heads) needs q_lora_rank: its queries are made from the query latent",
    )
    if config.index_hadamard:
        dim = config.index_head_dim
        require(dim is not None and dim & (dim - 1) == 0, "index_hadamard needs an index_head_dim that is a power of 2")
