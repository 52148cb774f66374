"""`peft` loads an exported adapter into the reference model and computes what our kernels compute."""

import dataclasses
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor, nn

from zmrl.lora import peft_io
from zmrl.model.checkpoint import export_tensors, load_reference, write_checkpoint
from zmrl.model.config import PRESETS, K3Config
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import LoraSpec, lora_targets
from zmrl.model.transformer import KimiK31

RANK, ALPHA = 16, 24
LENGTH = 24

CONFIG: K3Config = dataclasses.replace(
    PRESETS["nano"], num_experts=8, num_experts_per_token=8, index_topk=LENGTH, vocab_size=288
)
"""Every expert and every position is selected: rounding cannot change a selection, only values."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_checkpoint(path, export_tensors(CONFIG, initial_tensors(CONFIG, seed=5)), CONFIG)
    return path


@pytest.fixture(scope="module")
def model(base: Path) -> KimiK31:
    model = KimiK31.from_checkpoint(base)
    model.create_lora(1, RANK, ALPHA)
    return model


def _export(model: KimiK31, tensors: dict[str, Tensor], path: Path) -> nn.Module:
    """Tensors into our live buffers, out to a file, and by peft into the reference."""
    peft_io.fill(model.lora_slices(0), tensors)
    live = {item.name: item.read() for item in model.lora_slices(0)}
    peft_io.write_adapter(path / "adapter", live, CONFIG, RANK, ALPHA, "nano")
    return peft.PeftModel.from_pretrained(load_reference(path / "base"), path / "adapter")


def _random(scale: float = 0.05) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(11)
    specs = LoraSpec(RANK, ALPHA).tensor_specs(CONFIG)
    return {name: (torch.randn(shape, generator=generator) * scale).bfloat16() for name, shape, _ in specs}


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Path:
    (tmp_path / "base").symlink_to(base)
    return tmp_path


def test_every_module_gets_its_own_adapter_scaled_by_alpha_over_rank(model, place):
    """Cases 5 and 6: nothing is swapped when projections are fused, and alpha survives."""
    tensors = _random()
    wrapped = _export(model, tensors, place)
    modules = dict(wrapped.get_base_model().named_modules())
    targets = list(lora_targets(CONFIG))
    adapted = [name for name, module in modules.items() if hasattr(module, "lora_A")]
    assert sorted(adapted) == sorted(target.module for target in targets)
    for target in targets:
        stem = f"base_model.model.{target.module}.lora_"
        expected = (ALPHA / RANK) * tensors[f"{stem}B.weight"].float() @ tensors[f"{stem}A.weight"].float()
        delta = modules[target.module].get_delta_weight("default")
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-6, msg=target.module)


def test_constants_in_q_k_v_stay_with_q_k_v(model, place):
    tensors = {name: torch.zeros_like(tensor) for name, tensor in _random().items()}
    stem = "base_model.model.model.layers.0.self_attn."
    for value, name in enumerate(("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"), start=1):
        tensors[f"{stem}{name}.lora_A.weight"].fill_(1.0)
        tensors[f"{stem}{name}.lora_B.weight"].fill_(float(value))
    wrapped = _export(model, tensors, place)
    attention = wrapped.get_base_model().model.layers[0].self_attn
    for value, name in enumerate(("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"), start=1):
        delta = getattr(attention, name).get_delta_weight("default")
        assert bool((delta == value * ALPHA).all()), name  # alpha / r * sum over r ones


def test_the_adapter_changes_our_logits_as_it_changes_the_reference(model, place):
    wrapped = _export(model, _random(), place)
    ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(1))
    slots = torch.zeros(LENGTH, dtype=torch.int32)
    with torch.no_grad():
        ours = model.logits(model(ids, scratch_context(CONFIG, [LENGTH], slots)))
        ours_base = model.logits(model(ids, scratch_context(CONFIG, [LENGTH])))
        theirs = wrapped(ids.unsqueeze(0))[0]
        with wrapped.disable_adapter():
            theirs_base = wrapped(ids.unsqueeze(0))[0]
    delta, expected = ours - ours_base, theirs - theirs_base
    error = (delta - expected).norm() / expected.norm()
    assert expected.norm() > 0.1 * theirs_base.norm(), "the adapter is too small to test anything"
    assert error < 0.05, f"relative error {error:.3f}"
