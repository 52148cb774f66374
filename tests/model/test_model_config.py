"""Configuration and names against the figures of the specification (sections 1.4, 5, 7, 8)."""

import dataclasses
import itertools
import json
import math

import pytest

from zmrl.model.config import PRESETS, ConfigError, K3Config, get_config
from zmrl.model.names import PREFIX, LoraSpec, lora_targets, tensor_specs

PRO, K3 = PRESETS["k31-pro"], PRESETS["k3"]


def test_full_size_parameter_counts_are_those_of_the_release():
    assert K3.kda_attention_parameters() == 443_740_416
    assert K3.mla_attention_parameters() == 232_196_096
    assert PRO.indexer_parameters() == 7_438_592
    assert K3.expert_parameters() == 33_030_144
    assert K3.moe_parameters() == 29_784_936_832
    assert K3.dense_mlp_parameters() == 726_663_168
    assert K3.total_parameters() == 2_779_484_478_208
    assert K3.active_parameters() == 104_189_614_848
    assert PRO.total_parameters() - K3.total_parameters() == 178_526_208


@pytest.mark.parametrize(
    ("preset", "total", "active"),
    [("nano", 23.29, 1.62), ("nano-b", 24.22, 2.56), ("tiny-s", 416, 26.7), ("tiny", 1452, 67.9)],
)
def test_small_presets_have_the_specified_size(preset, total, active):
    config = PRESETS[preset]
    assert config.total_parameters() / 1e6 == pytest.approx(total, rel=2e-3)
    assert config.active_parameters() / 1e6 == pytest.approx(active, rel=2e-3)


@pytest.mark.parametrize("preset", PRESETS)
def test_tensor_specs_add_up_to_the_parameter_count(preset):
    config = PRESETS[preset]
    total = 0
    for name, shape, _ in tensor_specs(config):
        if not name.endswith("weight_scale"):
            total += math.prod(shape) * (2 if name.endswith("weight_packed") else 1)
    assert total == config.total_parameters()


def test_k3_has_as_many_tensors_as_the_release():
    assert sum(1 for _ in tensor_specs(K3)) == 497_052


def test_tensor_names_shapes_and_dtypes_are_those_of_the_specification():
    specs = {s.name.removeprefix(PREFIX): (s.shape, s.dtype) for s in tensor_specs(PRO)}
    expected = {
        "model.embed_tokens.weight": ((163840, 7168), "BF16"),
        "lm_head.weight": ((163840, 7168), "BF16"),
        "model.output_attn_res_proj.weight": ((1, 7168), "BF16"),
        "model.layers.0.mlp.down_proj.weight": ((7168, 33792), "BF16"),
        "model.layers.0.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
        "model.layers.0.self_attn.q_conv1d.weight": ((12288, 1, 4), "F32"),
        "model.layers.0.self_attn.A_log": ((128,), "F32"),
        "model.layers.0.self_attn.dt_bias": ((12288,), "F32"),
        "model.layers.0.self_attn.o_norm.weight": ((128,), "F32"),
        "model.layers.0.self_attn.f_b_proj.weight": ((12288, 128), "BF16"),
        "model.layers.3.self_attn.q_b_proj.weight": ((18432, 1536), "BF16"),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": ((576, 7168), "BF16"),
        "model.layers.3.self_attn.kv_b_proj.weight": ((24576, 512), "BF16"),
        "model.layers.92.self_attn.g_proj.weight": ((12288, 7168), "BF16"),
        "model.layers.92.self_attn.indexer.wq_b.weight": ((4096, 1536), "BF16"),
        "model.layers.92.self_attn.indexer.wk.weight": ((128, 7168), "BF16"),
        "model.layers.92.self_attn.indexer.weights_proj.weight": ((32, 7168), "BF16"),
        "model.layers.92.self_attn.indexer.k_norm.bias": ((128,), "BF16"),
        "model.layers.1.block_sparse_moe.gate.e_score_correction_bias": ((896,), "F32"),
        "model.layers.1.block_sparse_moe.routed_expert_down_proj.weight": ((3584, 7168), "BF16"),
        "model.layers.1.block_sparse_moe.shared_experts.up_proj.weight": ((6144, 7168), "BF16"),
        "model.layers.1.block_sparse_moe.experts.895.w1.weight_packed": ((3072, 1792), "U8"),
        "model.layers.1.block_sparse_moe.experts.895.w3.weight_scale": ((3072, 112), "U8"),
        "model.layers.1.block_sparse_moe.experts.0.w2.weight_packed": ((3584, 1536), "U8"),
        "model.layers.1.block_sparse_moe.experts.0.w2.weight_scale": ((3584, 96), "U8"),
    }
    for name, spec in expected.items():
        assert specs[name] == spec, name


def test_full_size_layers_alternate_as_released():
    types = PRO.layer_types
    assert types.count("full_attention") == 24
    assert types.count("linear_attention") == 69
    assert [i + 1 for i, t in enumerate(types) if t == "full_attention"] == [*range(4, 93, 4), 93]


def test_lora_parameters_at_rank_32_are_those_of_the_specification():
    kda = [t for t in lora_targets(PRO) if t.module.startswith("model.layers.0.self_attn.")]
    mla = [t for t in lora_targets(PRO) if t.module.startswith("model.layers.3.self_attn.")]
    assert sum(t.parameters(32) for t in kda) == 3_976_192
    assert sum(t.parameters(32) for t in mla) == 3_213_312
    assert LoraSpec(32, 32).parameters(PRO) == 53_023_546_368


def test_lora_never_touches_the_indexer_or_the_shared_experts():
    for target in itertools.islice(lora_targets(PRESETS["nano"]), 100_000):
        assert "indexer" not in target.module and "shared" not in target.module and ".mlp." not in target.module


@pytest.mark.parametrize("preset", ["nano", "nano-k3", "nano-linear"])
def test_lora_targets_are_exactly_what_the_peft_suffixes_select(preset):
    config = PRESETS[preset]
    suffixes = tuple(f".{t}" for t in LoraSpec().target_modules(config))
    linears = {s.name.removeprefix(PREFIX).rsplit(".", 1)[0] for s in tensor_specs(config) if len(s.shape) == 2}
    assert {m for m in linears if m.endswith(suffixes)} == {t.module for t in lora_targets(config)}


@pytest.mark.parametrize("preset", PRESETS)
def test_config_survives_json(preset):
    config = PRESETS[preset]
    assert K3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_multimodal_config_is_read_from_its_text_config():
    nested = {"model_type": "kimi_k3", "text_config": K3.to_dict()}
    assert K3Config.from_dict(nested) == K3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "128"}, "hidden_size"),
        ({"num_experts_per_token": 1000}, "num_experts_per_token"),
        ({"routed_expert_hidden_size": 48}, "routed_expert_hidden_size"),
        ({"num_hidden_layers": 6}, "full_attn_layers"),
        ({"index_topk": None}, "index_topk"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"eos_token_id": 288}, "eos_token_id"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"index_hadamard": True, "index_head_dim": 24}, "index_hadamard"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(change, names):
    with pytest.raises(ConfigError, match=names):
        dataclasses.replace(PRESETS["nano"], **change)


def test_a_missing_size_is_refused_rather_than_defaulted():
    values = PRESETS["nano"].to_dict()
    del values["kv_lora_rank"]
    with pytest.raises(ConfigError, match="kv_lora_rank"):
        K3Config.from_dict(values)


def test_unknown_model_is_refused_with_the_choices(tmp_path):
    with pytest.raises(ConfigError, match="k31-pro"):
        get_config(str(tmp_path / "absent"))
