"""Configuration of the Kimi K3.1 text model: fields, validation, presets and exact parameter counts.

Field names are those of the released `text_config` (model_type `kimi_linear`), plus the indexer's fields in
DeepSeek/GLM naming (`index_n_heads`, `index_head_dim`, `index_topk`). Knows nothing about torch, so that hosts can
read a configuration without importing it.

Source: `kimi-k31-architecture.md`, sections 1 (fields), 1.4 (counts) and 8 (scaled-down presets).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURE = "KimiK31ForCausalLM"
MODEL_TYPE = "zmrl_kimi_k31"
"""Deliberately not a model type that vLLM knows as MLA: that would force block size 16 and no prefix cache on a CPU."""

MXFP4_GROUP_SIZE = 32


class ConfigError(ValueError):
    """A configuration that does not describe a model that this code implements."""


@dataclass(frozen=True)
class LinearAttnConfig:
    """KDA (Kimi Delta Attention) part of the configuration. Layer numbers are 1-based, as in the release."""

    full_attn_layers: tuple[int, ...]
    """1-based numbers of the MLA layers."""
    kda_layers: tuple[int, ...]
    """1-based numbers of the KDA layers."""
    head_dim: int = 128
    num_heads: int = 96
    short_conv_kernel_size: int = 4
    gate_lower_bound: float = -5.0
    """Log-decay bound l: g = l * sigmoid(exp(A_log) * (f + dt_bias)), so a decay is never below exp(l)."""
    use_full_rank_gate: bool = True

    @property
    def projection_size(self) -> int:
        """Width of q, k, v and the gate: heads x head_dim."""
        return self.num_heads * self.head_dim

    @property
    def a_log_slots(self) -> int:
        """Stored length of `A_log`: the head count padded with zeros to a power of two (96 heads -> 128)."""
        return 1 << (self.num_heads - 1).bit_length()


@dataclass(frozen=True)
class K3Config:
    """The text model's configuration. `index_topk = None` (with the other index fields) is K3 without the indexer."""

    linear_attn_config: LinearAttnConfig
    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int = 96
    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    """Width of the shared "pe" key part. It is never rotated (NoPE)."""
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    intermediate_size: int = 33792
    """Width of the dense MLP of the first `first_k_dense_replace` layers."""
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int = 3584
    """Width of the latent in which the routed experts work."""
    latent_moe_use_norm: bool = True
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 0.0
    """eps of q_a_layernorm and kv_a_layernorm. 0 becomes `rms_norm_eps` (vLLM's choice; the HF code uses 1e-6)."""
    latent_scale: float = 1.0
    """Static scale of latents that a cache holds as FP8 codes: value = code * scale. Calibrated with the checkpoint."""
    attn_res_block_size: int = 12
    index_n_heads: int | None = 32
    index_head_dim: int | None = 128
    index_topk: int | None = 2048
    index_hadamard: bool = False
    """Rotate index queries and keys by H/sqrt(dim) before quantisation."""
    index_norm_eps: float = 1e-6
    """eps of the LayerNorm of the index keys."""
    max_position_embeddings: int = 1048576
    bos_token_id: int = 163584
    eos_token_id: int = 163586
    pad_token_id: int = 163839
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not self.latent_norm_eps:
            object.__setattr__(self, "latent_norm_eps", self.rms_norm_eps)
        _validate(self)

    # Derived quantities

    @property
    def has_indexer(self) -> bool:
        """True for K3.1 (every MLA layer has an indexer), False for K3."""
        return self.index_topk is not None

    @property
    def layer_types(self) -> list[str]:
        """`"linear_attention"` (KDA) or `"full_attention"` (MLA) per 0-based layer, in vLLM's and HF's words."""
        full = set(self.linear_attn_config.full_attn_layers)
        return ["full_attention" if i + 1 in full else "linear_attention" for i in range(self.num_hidden_layers)]

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: nope ‖ pe."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one fused MLP that the shared experts form."""
        return self.num_shared_experts * self.moe_intermediate_size

    def is_full_attention(self, layer: int) -> bool:
        """Whether 0-based `layer` is an MLA layer."""
        return layer + 1 in self.linear_attn_config.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has the latent MoE rather than the dense MLP."""
        return layer >= self.first_k_dense_replace

    # Serialisation

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, with `architectures` and `model_type`, as written to config.json.

        There is no `quantization_config`: vLLM would build its own quantised layers from it, and the reader decides
        per tensor (is there a `.weight_packed`?), as the release requires anyway (specification 1.2).
        """
        out: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": MODEL_TYPE}
        for item in dataclasses.fields(self):
            out[item.name] = getattr(self, item.name)
        linear = dataclasses.asdict(self.linear_attn_config)
        out["linear_attn_config"] = {k: list(v) if isinstance(v, tuple) else v for k, v in linear.items()}
        out["layer_types"] = self.layer_types
        return out

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> K3Config:
        """Read a config.json dictionary; a multimodal K3 config is read from its `text_config`.

        Keys that are no field of the text model (HF's bookkeeping) are ignored. Raises ConfigError when a field is
        missing that has no safe default (every size), since a size that silently became K3's would be wrong.
        """
        values = values.get("text_config", values)
        linear = values.get("linear_attn_config")
        if not isinstance(linear, dict):
            raise ConfigError("config: linear_attn_config is missing; is this a Kimi K3 / K3.1 checkpoint?")
        absent = [n for n in _REQUIRED if n not in values]
        absent += [f"linear_attn_config.{n}" for n in _REQUIRED_LINEAR if n not in linear]
        if absent:
            raise ConfigError(f"config: missing {', '.join(absent)}; add them to config.json")
        known_linear = {f.name for f in dataclasses.fields(LinearAttnConfig)}
        kwargs_linear: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in linear.items() if k in known_linear
        }
        known = {f.name for f in dataclasses.fields(cls)} - {"linear_attn_config"}
        kwargs = {k: v for k, v in values.items() if k in known}
        kwargs.setdefault("num_key_value_heads", kwargs["num_attention_heads"])
        for name in _INDEX_FIELDS:
            kwargs.setdefault(name, None)
        config = cls(linear_attn_config=LinearAttnConfig(**kwargs_linear), **kwargs)
        if values.get("layer_types") not in (None, config.layer_types):
            raise ConfigError("config: layer_types disagrees with linear_attn_config; drop layer_types")
        return config

    @classmethod
    def from_json(cls, path: str | Path) -> K3Config:
        """Read `path`, a config.json file or the directory that holds one."""
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        try:
            return cls.from_dict(json.loads(file.read_text()))
        except FileNotFoundError:
            raise ConfigError(f"config: {file} does not exist; give a checkpoint directory") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"config: {file} is not JSON ({error})") from None

    # Parameter counts (specification 1.4)

    def kda_attention_parameters(self) -> int:
        """Parameters of one KDA layer's attention; A_log counts its stored slots."""
        linear = self.linear_attn_config
        width, hidden = linear.projection_size, self.hidden_size
        projections = 5 * width * hidden + linear.head_dim * (hidden + width) + linear.num_heads * hidden
        return projections + 3 * width * linear.short_conv_kernel_size + linear.a_log_slots + width + linear.head_dim

    def mla_attention_parameters(self) -> int:
        """Parameters of one MLA layer's attention without its indexer."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        q = self.q_lora_rank * (hidden + 1 + heads * self.qk_head_dim)
        kv = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        kv += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return q + kv + 2 * heads * self.v_head_dim * hidden

    def indexer_parameters(self) -> int:
        """Parameters of one indexer (0 for K3)."""
        heads, dim = self.index_n_heads or 0, self.index_head_dim or 0
        return heads * dim * self.q_lora_rank + dim * self.hidden_size + 2 * dim + heads * self.hidden_size

    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.moe_intermediate_size * self.routed_expert_hidden_size

    def moe_parameters(self) -> int:
        """Parameters of one MoE block: router, latent projections and norm, shared and routed experts."""
        latent, hidden = self.routed_expert_hidden_size, self.hidden_size
        router = self.num_experts * (hidden + 1)
        return (
            router
            + 2 * latent * hidden
            + latent
            + 3 * self.shared_intermediate_size * hidden
            + self.num_experts * self.expert_parameters()
        )

    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense MLP."""
        return 3 * self.intermediate_size * self.hidden_size

    def total_parameters(self) -> int:
        """Parameters of the text model; an MXFP4 weight counts as one parameter per element."""
        total = 2 * self.vocab_size * self.hidden_size + 3 * self.hidden_size
        for layer in range(self.num_hidden_layers):
            total += 6 * self.hidden_size
            if self.is_full_attention(layer):
                total += self.mla_attention_parameters() + self.indexer_parameters()
            else:
                total += self.kda_attention_parameters()
            total += self.moe_parameters() if self.is_moe(layer) else self.dense_mlp_parameters()
        return total

    def active_parameters(self) -> int:
        """Parameters that one token uses: the total without idle experts and the input embedding."""
        moe_layers = sum(self.is_moe(layer) for layer in range(self.num_hidden_layers))
        idle = moe_layers * (self.num_experts - self.num_experts_per_token) * self.expert_parameters()
        return self.total_parameters() - idle - self.vocab_size * self.hidden_size


_INDEX_FIELDS = ("index_n_heads", "index_head_dim", "index_topk")
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "num_experts_per_token",
    "num_shared_experts", "moe_intermediate_size", "routed_expert_hidden_size", "attn_res_block_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings",
)  # fmt: skip
_REQUIRED_LINEAR = ("full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size")
_POSITIVE = tuple(n for n in _REQUIRED if not n.endswith("_token_id")) + ("first_k_dense_replace",)
_FIXED = {
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "moe_layer_freq": 1,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "hidden_act": "situ",
    "tie_word_embeddings": False,
}
"""Fields whose other values are models that this code does not implement."""


def _validate(config: K3Config) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(f"config: {message}")

    linear = config.linear_attn_config
    for name in _POSITIVE:
        value = getattr(config, name)
        require(type(value) is int and value > 0, f"{name} must be a positive integer, not {value!r}")
    for name in ("head_dim", "num_heads", "short_conv_kernel_size"):
        value = getattr(linear, name)
        message = f"linear_attn_config.{name} must be a positive integer, not {value!r}"
        require(type(value) is int and value > 0, message)
    for name, only in _FIXED.items():
        value = getattr(config, name)
        require(value == only, f"{name}={value!r} is not implemented; only {only!r} is")
    require(linear.use_full_rank_gate, "linear_attn_config.use_full_rank_gate=False is not implemented")
    require(linear.gate_lower_bound < 0, "linear_attn_config.gate_lower_bound must be negative")

    both = sorted(linear.full_attn_layers + linear.kda_layers)
    message = "full_attn_layers and kda_layers must together name every layer 1..num_hidden_layers exactly once"
    require(both == list(range(1, config.num_hidden_layers + 1)), message)
    require(config.first_k_dense_replace <= config.num_hidden_layers, "first_k_dense_replace exceeds the layer count")
    require(
        config.num_key_value_heads == config.num_attention_heads,
        "num_key_value_heads must equal num_attention_heads (MLA expands one latent to every head)",
    )
    require(
        config.num_experts_per_token <= config.num_experts,
        f"num_experts_per_token={config.num_experts_per_token} exceeds num_experts={config.num_experts}",
    )
    for name in ("routed_expert_hidden_size", "moe_intermediate_size"):
        value = getattr(config, name)
        require(value % MXFP4_GROUP_SIZE == 0, f"{name}={value} must be a multiple of 32, the MXFP4 group size")
    for name in ("rms_norm_eps", "latent_norm_eps", "index_norm_eps", "activation_situ_beta", "latent_scale"):
        require(getattr(config, name) > 0, f"{name} must be positive")
    require(config.activation_situ_linear_beta > 0, "activation_situ_linear_beta must be positive")

    index = [getattr(config, n) for n in _INDEX_FIELDS]
    require(
        all(v is None for v in index) or all(type(v) is int and v > 0 for v in index),
        f"{', '.join(_INDEX_FIELDS)} must all be positive integers (K3.1) or all be absent (K3), not {index}",
    )
    if config.index_hadamard:
        dim = config.index_head_dim
        require(dim is not None and dim & (dim - 1) == 0, "index_hadamard needs an index_head_dim that is a power of 2")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(config, name)
        require(0 <= value < config.vocab_size, f"{name}={value} is outside the vocabulary of {config.vocab_size}")


def _preset(full_layers: tuple[int, ...], layers: int, kda_heads: int, kda_dim: int, **fields: Any) -> K3Config:
    linear = LinearAttnConfig(
        full_attn_layers=full_layers,
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in full_layers),
        head_dim=kda_dim,
        num_heads=kda_heads,
    )
    heads = fields.get("num_attention_heads", 96)
    return K3Config(linear_attn_config=linear, num_hidden_layers=layers, num_key_value_heads=heads, **fields)


_BYTE_VOCAB = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 264}
"""Ids of the byte-level tokenizer (`zmrl.model.tokenizer`): eos is <|end_of_msg|>, where generation stops."""

_NANO = dict(
    hidden_size=128, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=32, intermediate_size=256, moe_intermediate_size=32, vocab_size=288, index_n_heads=4, index_head_dim=32,
    index_topk=32, max_position_embeddings=8192, **_BYTE_VOCAB,
)  # fmt: skip
_TINY = dict(
    qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, q_lora_rank=192, kv_lora_rank=128, vocab_size=512,
    index_n_heads=8, index_head_dim=64, index_topk=256, max_position_embeddings=32768, **_BYTE_VOCAB,
)  # fmt: skip
_FULL_LAYERS = tuple(range(4, 93, 4)) + (93,)

PRESETS: dict[str, K3Config] = {
    "nano": _preset((4, 5), 5, 4, 32, routed_expert_hidden_size=64, attn_res_block_size=2, **_NANO),
    "nano-b": _preset((4, 8, 9), 9, 4, 32, routed_expert_hidden_size=32, attn_res_block_size=4, **_NANO),
    "tiny-s": _preset(
        (4, 8, 12, 13), 13, 6, 64, hidden_size=384, num_attention_heads=6, intermediate_size=1024,
        routed_expert_hidden_size=128, moe_intermediate_size=96, attn_res_block_size=2, **_TINY,
    ),
    "tiny": _preset(
        (4, 8, 12, 16, 17), 17, 8, 64, hidden_size=512, num_attention_heads=8, intermediate_size=1536,
        routed_expert_hidden_size=256, moe_intermediate_size=128, attn_res_block_size=3, **_TINY,
    ),
    "k31-pro": _preset(_FULL_LAYERS, 93, 96, 128),
    "k3": _preset(_FULL_LAYERS, 93, 96, 128, index_n_heads=None, index_head_dim=None, index_topk=None),
}  # fmt: skip
"""Named configurations: nano-A, nano-B, tiny-s and tiny of specification 8, the full K3.1 Pro, and K3 (no indexer)."""


def get_config(name_or_path: str | Path) -> K3Config:
    """A preset by name, or the configuration of a checkpoint directory."""
    if str(name_or_path) in PRESETS:
        return PRESETS[str(name_or_path)]
    if Path(name_or_path).exists():
        return K3Config.from_json(name_or_path)
    presets = ", ".join(PRESETS)
    raise ConfigError(f"{str(name_or_path)!r} is no preset ({presets}) and no directory; give the path of a checkpoint")
