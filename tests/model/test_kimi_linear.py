"""Kimi-Linear checkpoints that transformers made, loaded by their own names: its logits are ours within a tolerance."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model import kimi_linear
from tests.model.paged import PagedHost, Request
from zmrl.model.checkpoint import CheckpointError, iter_tensors, load_reference, read_config
from zmrl.model.config import K3Config
from zmrl.model.context import scratch_context
from zmrl.model.names import PREFIX
from zmrl.model.reference import ForwardContext
from zmrl.model.transformer import KimiK31

LENGTH = 70
TOLERANCE = 0.04
"""Relative, in the norm: BF16 activations over five layers. transformers in BF16 is 0.025 to 0.045 off its own FP32."""
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""FP32 on both sides, other orders of summation."""

each_size = pytest.mark.parametrize("size", kimi_linear.SIZES)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """size, decided -> (transformers' model, its checkpoint, ids, its logits)."""
    found = {}

    def get(size, decided=False):
        if (size, decided) not in found:
            model = kimi_linear.make(size, decided)
            path = kimi_linear.save(model, tmp_path_factory.mktemp(size) / "model")
            vocabulary = kimi_linear.SIZES[size]["vocab_size"]
            ids = torch.randint(0, vocabulary, (LENGTH,), generator=torch.Generator().manual_seed(9))
            found[size, decided] = model, path, ids, kimi_linear.logits(model, ids)
        return found[size, decided]

    return get


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


@torch.no_grad()
def whole(model, ids):
    return model.logits(model(ids, scratch_context(model.config, [len(ids)])))


@each_size
def test_the_names_are_those_of_the_release(made, size):
    _, path, _, _ = made(size)
    stored = load_file(path / "model.safetensors")
    assert not any(name.startswith(PREFIX) for name in stored)
    linear = read_config(path).linear_attn_config
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, linear.num_heads, 1)
    assert stored["model.layers.0.self_attn.q_conv1d.weight"].shape == (linear.projection_size, 1, 4)
    assert "model.layers.4.block_sparse_moe.experts.3.w2.weight" in stored
    assert "model.layers.4.block_sparse_moe.gate.e_score_correction_bias" in stored


@each_size
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_reference_logits_are_those_of_transformers(made, size, form):
    _, path, ids, theirs = made(size)
    with torch.no_grad():
        ours = load_reference(path)(ids[None], ForwardContext(kda_form=form))[0]
    torch.testing.assert_close(ours, theirs, **CLOSE)


@each_size
def test_reference_logits_token_by_token_are_those_of_transformers(made, size):
    model, path, ids, theirs = made(size)
    reference = load_reference(path)
    context = ForwardContext(state=reference.new_state())
    with torch.no_grad():
        ours = torch.cat([reference(token[None, None], context)[0] for token in ids])
    torch.testing.assert_close(ours, theirs, **CLOSE)
    torch.testing.assert_close(ours, kimi_linear.logits_by_token(model, ids), **CLOSE)


@each_size
def test_logits_of_a_whole_prompt_are_those_of_transformers(made, size):
    _, path, ids, theirs = made(size, decided=True)
    assert error(whole(KimiK31.from_checkpoint(path), ids), theirs) < TOLERANCE


@each_size
def test_logits_token_by_token_are_those_of_transformers_and_bits_of_the_whole(made, size):
    model, path, ids, _ = made(size, decided=True)
    ours = KimiK31.from_checkpoint(path)
    request = Request(ids, 0)
    host = PagedHost(ours, [request])
    steps = torch.cat([host.step([(request, 1)])[0] for _ in ids])
    with torch.no_grad():
        by_token = ours.logits(steps)
    assert error(by_token, kimi_linear.logits_by_token(model, ids)) < TOLERANCE
    assert torch.equal(by_token.view(torch.int32), whole(ours, ids).view(torch.int32))


@pytest.mark.parametrize("switch", ["gate_lower_bound", "hidden_act", "routed_scaling_factor", "A_log", "w2", "conv"])
def test_what_is_compared_depends_on_every_part(made, tmp_path, switch):
    """The tolerance is narrower than the least of these changes."""
    _, path, ids, theirs = made("odd", decided=True)
    config = read_config(path)
    tensors = {name: tensor.clone() for name, tensor in iter_tensors(path)}
    if switch == "gate_lower_bound":
        linear = dataclasses.replace(config.linear_attn_config, gate_lower_bound=-5.0)
        config = dataclasses.replace(config, linear_attn_config=linear)
    elif switch == "hidden_act":
        config = dataclasses.replace(config, hidden_act="situ")
    elif switch == "routed_scaling_factor":
        config = dataclasses.replace(config, routed_scaling_factor=1.0)
    elif switch == "A_log":
        tensors[f"{PREFIX}model.layers.0.self_attn.A_log"] += 1
    elif switch == "w2":
        stem = f"{PREFIX}model.layers.2.block_sparse_moe.experts"
        for expert in range(config.num_experts):
            tensors[f"{stem}.{expert}.w2.weight"].neg_()
    else:
        stem = f"{PREFIX}model.layers.2.self_attn"
        q, k = f"{stem}.q_conv1d.weight", f"{stem}.k_conv1d.weight"
        tensors[q], tensors[k] = tensors[k], tensors[q]
    model = KimiK31(config)
    loader = model.loader("changed")
    for name, tensor in tensors.items():
        loader.load(name, tensor)
    loader.finish()
    assert error(whole(model, ids), theirs) > 2 * TOLERANCE


def test_a_float32_checkpoint_is_rounded_to_bf16_as_it_is_loaded(made, tmp_path):
    model, path, ids, theirs = made("odd")
    wide = kimi_linear.save(model, tmp_path / "wide", torch.float32)
    assert read_config(wide).dtype == "float32"
    assert torch.equal(whole(KimiK31.from_checkpoint(wide), ids), whole(KimiK31.from_checkpoint(path), ids))
    with torch.no_grad():
        torch.testing.assert_close(load_reference(wide)(ids[None])[0], theirs, **CLOSE)


def change(path, target, config=None, **tensors):
    """A copy of a checkpoint with other fields in its config, and tensors replaced or, if None, removed."""
    target.mkdir()
    values = json.loads((path / "config.json").read_text()) | (config or {})
    (target / "config.json").write_text(json.dumps(values))
    stored = load_file(path / "model.safetensors") | {name: t for name, t in tensors.items() if t is not None}
    for name in [name for name, t in tensors.items() if t is None]:
        del stored[name]
    save_file(stored, target / "model.safetensors")
    return target


def test_a_tensor_that_is_missing_extra_or_there_twice_is_named(made, tmp_path):
    _, path, _, _ = made("odd")
    gone = "model.layers.2.block_sparse_moe.experts.6.w3.weight"
    with pytest.raises(CheckpointError, match=r"experts\.6\.w3\.weight .*missing"):
        next(iter_tensors(change(path, tmp_path / "a", **{gone: None})))
    extra = "model.layers.0.self_attn.g_proj.weight"
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.g_proj.*not part"):
        next(iter_tensors(change(path, tmp_path / "b", **{extra: torch.zeros(1)})))
    twice = f"{PREFIX}lm_head.weight"
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is there under two names"):
        next(iter_tensors(change(path, tmp_path / "c", **{twice: torch.zeros(1)})))


@pytest.mark.parametrize(
    "field, value",
    [
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("num_expert_group", 2),
        ("moe_renormalize", False),
        ("linear_conv_kernel_dim", 3),
        ("linear_head_dim", 12),
        ("kv_lora_rank", 40),
        ("layer_types", ["sliding_attention"] * 5),
        ("mlp_layer_types", ["sparse", "dense", "sparse", "sparse", "sparse"]),
        ("quantization_config", {"quant_method": "fp8", "format": "float"}),
        ("eos_token_id", [1, 2]),
        ("index_topk", 32),
        ("latent_moe_use_norm", True),
        ("mla_use_nope", False),
    ],
)
def test_a_model_that_is_not_implemented_is_refused_by_name(made, tmp_path, field, value):
    _, path, _, _ = made("odd")
    ours = {"linear_conv_kernel_dim": "short_conv_kernel_size", "linear_head_dim": "head_dim"}.get(field, field)
    with pytest.raises(CheckpointError, match=ours):
        read_config(change(path, tmp_path / "changed", {field: value}))


def test_the_configs_of_transformers_and_of_the_release_mean_the_same(made):
    _, path, _, _ = made("odd")
    theirs = json.loads((path / "config.json").read_text())
    released = {k: v for k, v in theirs.items() if not k.startswith("linear_") and not k.endswith("layer_types")}
    released |= {
        "linear_attn_config": {
            "full_attn_layers": [2, 4, 5], "kda_layers": [1, 3], "head_dim": 24, "num_heads": 5,
            "short_conv_kernel_size": 4,
        },
        "first_k_dense_replace": 2, "mla_use_nope": True, "moe_router_activation_func": "sigmoid",
    }  # fmt: skip
    assert K3Config.from_dict(released) == K3Config.from_dict(theirs) == read_config(path)
