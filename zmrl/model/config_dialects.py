"""The ways in which a config.json of the family is written, brought to the field names of `K3Config`.

* Kimi K3 and K3.1: a multimodal config whose `text_config` holds the text model, or that text model itself.
* Kimi-Linear as released: sizes of the KDA layers and the layer numbers in `linear_attn_config`, no field for what K3
  added later. A switch that is absent is off.
* Kimi-Linear as transformers writes it: `linear_num_heads` and the like at the top, `layer_types`, `mlp_layer_types`.

Sources: the released config.json files; transformers 5.19, models/kimi_linear/configuration_kimi_linear.py.
"""

from __future__ import annotations

from typing import Any

from zmrl.model.config_rules import INDEX_FIELDS, ConfigError, require

_ABSENT: dict[str, Any] = {
    "q_lora_rank": None,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "latent_moe_use_norm": False,
    "attn_res_block_size": None,
    **dict.fromkeys(INDEX_FIELDS),
}
"""Switches, and what their absence means."""
_ABSENT_LINEAR: dict[str, Any] = {"use_full_rank_gate": False, "gate_lower_bound": None}
_OTHER_NAMES = {"model_max_length": "max_position_embeddings", "torch_dtype": "dtype"}
_REQUIRED = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "intermediate_size", "num_experts", "num_experts_per_token",
    "num_shared_experts", "moe_intermediate_size", "hidden_act", "bos_token_id", "eos_token_id", "pad_token_id",
    "max_position_embeddings",
)  # fmt: skip
"""Fields without a safe default: a size that silently became K3's would be wrong."""
_REQUIRED_LINEAR = ("full_attn_layers", "kda_layers", "head_dim", "num_heads", "short_conv_kernel_size")
_UNNAMED_LATENT_EPS = 1e-6
"""eps of kv_a_layernorm in Kimi-Linear: its code and transformers leave the norm class's default."""


def normalise(values: dict[str, Any]) -> dict[str, Any]:
    """A config.json dictionary of any dialect -> one with the field names of `K3Config`, switches filled in.

    Keys that are no field are kept. ConfigError names what is missing or means a model that is not implemented.
    """
    values = dict(values.get("text_config", values))
    for theirs, ours in _OTHER_NAMES.items():
        if theirs in values:
            values.setdefault(ours, values[theirs])
    values["linear_attn_config"] = linear = _linear(values)
    if "mlp_layer_types" in values:
        values.setdefault("first_k_dense_replace", _dense_layers(values["mlp_layer_types"]))
    absent = [n for n in _REQUIRED if n not in values]
    absent += [f"linear_attn_config.{n}" for n in _REQUIRED_LINEAR if n not in linear]
    require(not absent, f"missing {', '.join(absent)}; add them to config.json")
    require(not values.get("attention_bias"), "attention_bias=True is not implemented; only False is")
    if isinstance(values["eos_token_id"], list) and len(values["eos_token_id"]) == 1:
        values["eos_token_id"] = values["eos_token_id"][0]
    require(
        not linear.get("use_full_rank_gate") or "gate_lower_bound" in linear,
        "linear_attn_config.gate_lower_bound is missing; add it (null: softplus decay without a bound)",
    )
    for name, value in _ABSENT_LINEAR.items():
        linear.setdefault(name, value)
    for name, value in _ABSENT.items():
        values.setdefault(name, value)
    if values["attn_res_block_size"] is None:
        values.setdefault("latent_norm_eps", _UNNAMED_LATENT_EPS)
    values.setdefault("num_key_value_heads", values["num_attention_heads"])
    values.setdefault("expert_format", _expert_format(values))
    return values


def _linear(values: dict[str, Any]) -> dict[str, Any]:
    linear = values.get("linear_attn_config")
    if isinstance(linear, dict):
        return dict(linear)
    types = values.get("layer_types")
    if "linear_num_heads" not in values or not isinstance(types, list):
        raise ConfigError("config: linear_attn_config is missing; is this a Kimi-Linear, K3 or K3.1 checkpoint?")
    unknown = set(types) - {"full_attention", "linear_attention"}
    require(not unknown, f"layer_types: {', '.join(sorted(unknown))} is not implemented")
    return {
        "full_attn_layers": [i for i, kind in enumerate(types, start=1) if kind == "full_attention"],
        "kda_layers": [i for i, kind in enumerate(types, start=1) if kind == "linear_attention"],
        "head_dim": values.get("linear_head_dim"),
        "num_heads": values["linear_num_heads"],
        "short_conv_kernel_size": values.get("linear_conv_kernel_dim"),
    }


def _dense_layers(types: list[str]) -> int:
    dense = types.count("dense")
    message = "mlp_layer_types must be 'dense' for the first layers and 'sparse' for the others"
    require(types == ["dense"] * dense + ["sparse"] * (len(types) - dense), message)
    return dense


def _expert_format(values: dict[str, Any]) -> str:
    """By the quantisation that the release declares; K3's small checkpoints are MXFP4 without declaring it."""
    quantised = values.get("quantization_config")
    if quantised:
        kind = quantised.get("format")
        require(kind == "mxfp4-pack-quantized", f"quantization_config: format {kind!r} is not implemented")
        return "mxfp4"
    return "bf16" if values["routed_expert_hidden_size"] is None else "mxfp4"
