"""Configuration of the text models of the family (Kimi-Linear, K3, K3.1): fields, presets, exact parameter counts.

Field names are those of the released configs (model_type `kimi_linear`), plus the indexer's fields in DeepSeek/GLM
naming (`index_n_heads`, `index_head_dim`, `index_topk`) and `expert_format`. Members differ by switches alone
(docs/models.md). What is allowed: `config_rules`; how files spell it: `config_dialects`. Knows nothing about torch, so
that hosts can read a configuration without importing it.

Source: `kimi-k31-architecture.md`, sections 1 (fields), 1.4 (counts) and 8 (scaled-down presets).
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmrl.model.config_dialects import normalise
from zmrl.model.config_rules import INDEX_FIELDS, MXFP4_GROUP_SIZE, ConfigError, validate

__all__ = [
    "ARCHITECTURE",
    "MODEL_TYPE",
    "MXFP4_GROUP_SIZE",
    "PRESETS",
    "ConfigError",
    "K3Config",
    "LinearAttnConfig",
    "get_config",
    "without_indexer",
]

ARCHITECTURE = "KimiK31ForCausalLM"
MODEL_TYPE = "zmrl_kimi_k31"
"""Deliberately not a model type that vLLM knows as MLA: that would force block size 16 and no prefix cache on a CPU."""


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
    gate_lower_bound: float | None = -5.0
    """Log-decay bound l: g = l * sigmoid(exp(A_log) * (f + dt_bias)), so a decay is never below exp(l). None: without a
    bound, g = -exp(A_log) * softplus(f + dt_bias)."""
    use_full_rank_gate: bool = True
    """Output gate by `g_proj`; False: by `g_b_proj` after `g_a_proj`, through head_dim."""

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
    """The text model's configuration; its defaults are K3.1 Pro."""

    linear_attn_config: LinearAttnConfig
    vocab_size: int = 163840
    hidden_size: int = 7168
    num_hidden_layers: int = 93
    num_attention_heads: int = 96
    num_key_value_heads: int = 96
    q_lora_rank: int | None = 1536
    """None: queries by one projection, `q_proj`."""
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    """Width of the shared "pe" key part. It is never rotated (NoPE)."""
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    """Whether MLA's output is multiplied by sigmoid(`g_proj` x)."""
    intermediate_size: int = 33792
    """Width of the dense MLP of the first `first_k_dense_replace` layers."""
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584
    """Width of the latent in which the routed experts work; None: they work at full width, without latent and norm."""
    latent_moe_use_norm: bool = True
    expert_format: str = "mxfp4"
    """How the routed experts are stored, and what their kernels read: "mxfp4" or "bf16"."""
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    hidden_act: str = "situ"
    """"situ", or "silu": SiLU(gate) * up."""
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    latent_norm_eps: float = 0.0
    """eps of q_a_layernorm and kv_a_layernorm. 0 becomes `rms_norm_eps` (vLLM's choice; the HF code uses 1e-6)."""
    latent_scale: float = 1.0
    """Static scale of latents that a cache holds as FP8 codes: value = code * scale. Calibrated with the checkpoint."""
    attn_res_block_size: int | None = 12
    """Layers of a block of attention residuals; None: plain residual additions."""
    index_n_heads: int | None = 32
    """None, with the other two: no indexer, MLA attends to every earlier position."""
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
    """How the weights that are not quantised are stored; the kernels round float32 to BF16 when it is loaded."""

    def __post_init__(self) -> None:
        if not self.latent_norm_eps:
            object.__setattr__(self, "latent_norm_eps", self.rms_norm_eps)
        validate(self)

    # Derived quantities

    @property
    def has_indexer(self) -> bool:
        """True for K3.1 (every MLA layer has an indexer), False for K3 and Kimi-Linear."""
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
    def expert_hidden_size(self) -> int:
        """Width that the routed experts read and write: the latent's, or the model's."""
        return self.routed_expert_hidden_size or self.hidden_size

    @property
    def activation_betas(self) -> tuple[float, float]:
        """SiTU's beta and linear beta; both infinite is SiLU (`zmrl.batch_invariant.ops.activation`)."""
        if self.hidden_act == "silu":
            return math.inf, math.inf
        return self.activation_situ_beta, self.activation_situ_linear_beta

    @property
    def shared_intermediate_size(self) -> int:
        """Width of the one fused MLP that the shared experts form."""
        return self.num_shared_experts * self.moe_intermediate_size

    def is_full_attention(self, layer: int) -> bool:
        """Whether 0-based `layer` is an MLA layer."""
        return layer + 1 in self.linear_attn_config.full_attn_layers

    def is_moe(self, layer: int) -> bool:
        """Whether 0-based `layer` has the mixture of experts rather than the dense MLP."""
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
        """Read a config.json dictionary in any dialect of the family (`config_dialects`).

        Keys that are no field of the text model (HF's bookkeeping) are ignored. Raises ConfigError when a field is
        missing that has no safe default, or when the fields mean a model that is not implemented.
        """
        values = normalise(values)
        linear = values["linear_attn_config"]
        known_linear = {f.name for f in dataclasses.fields(LinearAttnConfig)}
        kwargs_linear: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in linear.items() if k in known_linear
        }
        known = {f.name for f in dataclasses.fields(cls)} - {"linear_attn_config"}
        kwargs = {k: v for k, v in values.items() if k in known}
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
        low_rank = linear.head_dim * (hidden + width)
        gate = width * hidden if linear.use_full_rank_gate else low_rank
        projections = 4 * width * hidden + gate + low_rank + linear.num_heads * hidden
        return projections + 3 * width * linear.short_conv_kernel_size + linear.a_log_slots + width + linear.head_dim

    def mla_attention_parameters(self) -> int:
        """Parameters of one MLA layer's attention without its indexer."""
        heads, hidden = self.num_attention_heads, self.hidden_size
        rank, queries = self.q_lora_rank, heads * self.qk_head_dim
        q = queries * hidden if rank is None else rank * (hidden + 1 + queries)
        kv = hidden * (self.kv_lora_rank + self.qk_rope_head_dim) + self.kv_lora_rank
        kv += self.kv_lora_rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return q + kv + (2 if self.mla_use_output_gate else 1) * heads * self.v_head_dim * hidden

    def indexer_parameters(self) -> int:
        """Parameters of one indexer; 0 without one."""
        heads, dim = self.index_n_heads or 0, self.index_head_dim or 0
        return heads * dim * (self.q_lora_rank or 0) + dim * self.hidden_size + 2 * dim + heads * self.hidden_size

    def expert_parameters(self) -> int:
        """Parameters of one routed expert."""
        return 3 * self.moe_intermediate_size * self.expert_hidden_size

    def moe_parameters(self) -> int:
        """Parameters of one MoE block: router, latent projections and norm, shared and routed experts."""
        latent, hidden = self.routed_expert_hidden_size or 0, self.hidden_size
        router = self.num_experts * (hidden + 1)
        shared = 3 * self.shared_intermediate_size * hidden
        return router + 2 * latent * hidden + latent + shared + self.num_experts * self.expert_parameters()

    def dense_mlp_parameters(self) -> int:
        """Parameters of one dense MLP."""
        return 3 * self.intermediate_size * self.hidden_size

    def total_parameters(self) -> int:
        """Parameters of the text model; an MXFP4 weight counts as one parameter per element."""
        mixes = self.attn_res_block_size is not None  # a norm and a query each
        total = (2 * self.vocab_size + 1 + 2 * mixes) * self.hidden_size
        for layer in range(self.num_hidden_layers):
            total += (2 + 4 * mixes) * self.hidden_size
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


def _preset(full_layers: tuple[int, ...], layers: int, kda_heads: int, kda_dim: int, **fields: Any) -> K3Config:
    linear = LinearAttnConfig(
        full_attn_layers=full_layers,
        kda_layers=tuple(i for i in range(1, layers + 1) if i not in full_layers),
        head_dim=kda_dim,
        num_heads=kda_heads,
    )
    heads = fields.get("num_attention_heads", 96)
    return K3Config(linear_attn_config=linear, num_hidden_layers=layers, num_key_value_heads=heads, **fields)


def _kimi_linear(config: K3Config, **fields: Any) -> K3Config:
    """`config` with every switch as in Kimi-Linear."""
    linear = dataclasses.replace(config.linear_attn_config, gate_lower_bound=None, use_full_rank_gate=False)
    return dataclasses.replace(
        without_indexer(config), linear_attn_config=linear, q_lora_rank=None, mla_use_output_gate=False,
        routed_expert_hidden_size=None, latent_moe_use_norm=False, expert_format="bf16", hidden_act="silu",
        attn_res_block_size=None, num_shared_experts=1, routed_scaling_factor=2.446, latent_norm_eps=1e-6, **fields,
    )  # fmt: skip


def without_indexer(config: K3Config) -> K3Config:
    """`config` with dense attention."""
    absent: dict[str, Any] = dict.fromkeys(INDEX_FIELDS)
    return dataclasses.replace(config, **absent)


_BYTE_VOCAB = {"bos_token_id": 256, "eos_token_id": 258, "pad_token_id": 264}
"""Ids of the byte-level tokenizer (`zmrl.model.tokenizer`): eos is <|end_of_msg|>, where generation stops."""

_NANO = dict(
    hidden_size=128, num_attention_heads=4, q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=32, intermediate_size=256, moe_intermediate_size=32, vocab_size=288, index_n_heads=4, index_head_dim=32,
    index_topk=32, max_position_embeddings=32768, **_BYTE_VOCAB,
)  # fmt: skip
_TINY = dict(
    qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, q_lora_rank=192, kv_lora_rank=128, vocab_size=512,
    index_n_heads=8, index_head_dim=64, index_topk=256, max_position_embeddings=32768, **_BYTE_VOCAB,
)  # fmt: skip
_FULL_LAYERS = tuple(range(4, 93, 4)) + (93,)

_NANO_A = _preset((4, 5), 5, 4, 32, routed_expert_hidden_size=64, attn_res_block_size=2, **_NANO)
_K31_PRO = _preset(_FULL_LAYERS, 93, 96, 128)

PRESETS: dict[str, K3Config] = {
    "nano": _NANO_A,
    "nano-b": _preset((4, 8, 9), 9, 4, 32, routed_expert_hidden_size=32, attn_res_block_size=4, **_NANO),
    "tiny-s": _preset(
        (4, 8, 12, 13), 13, 6, 64, hidden_size=384, num_attention_heads=6, intermediate_size=1024,
        routed_expert_hidden_size=128, moe_intermediate_size=96, attn_res_block_size=2, **_TINY,
    ),
    "tiny": _preset(
        (4, 8, 12, 16, 17), 17, 8, 64, hidden_size=512, num_attention_heads=8, intermediate_size=1536,
        routed_expert_hidden_size=256, moe_intermediate_size=128, attn_res_block_size=3, **_TINY,
    ),
    "nano-k3": without_indexer(_NANO_A),
    "nano-linear": _kimi_linear(_NANO_A, num_experts=64, num_experts_per_token=8),
    "k31-pro": _K31_PRO,
    "k3": without_indexer(_K31_PRO),
    "kimi-linear-48b": _kimi_linear(
        _preset(
            (4, 8, 12, 16, 20, 24, 27), 27, 32, 128, hidden_size=2304, num_attention_heads=32, intermediate_size=9216,
            num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024,
        ),
    ),
}  # fmt: skip
"""Named configurations. K3.1: nano-A, nano-B, tiny-s and tiny of specification 8, and k31-pro at full size; K3 (no
indexer): nano-k3 and k3; Kimi-Linear: nano-linear and the released kimi-linear-48b."""


def get_config(name_or_path: str | Path) -> K3Config:
    """A preset by name, or the configuration of a checkpoint directory."""
    if str(name_or_path) in PRESETS:
        return PRESETS[str(name_or_path)]
    if Path(name_or_path).exists():
        return K3Config.from_json(name_or_path)
    presets = ", ".join(PRESETS)
    raise ConfigError(f"{str(name_or_path)!r} is no preset ({presets}) and no directory; give the path of a checkpoint")
