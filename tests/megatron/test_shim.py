"""The CPU shim refuses a megatron-core that it was not written for, and touches nothing but Megatron's own modules."""

import subprocess
import sys

import pytest

from zmrl.trainer.megatron import shim

install = shim.install.__wrapped__  # without the cache


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(shim, "VERSION", "0.99")
    with pytest.raises(shim.ShimError, match=r"was written for 0\.99"):
        install()


def test_a_changed_line_is_refused_and_named(monkeypatch):
    changed = shim.PATCHES[0]._replace(line="device=torch.accelerator.current_device()")
    monkeypatch.setattr(shim, "PATCHES", (*shim.PATCHES[1:], changed))
    with pytest.raises(shim.ShimError, match=r"_ParamAndGradBuffer.*accelerator.*DDP cannot allocate"):
        install()


def test_a_vanished_function_is_refused(monkeypatch):
    gone = shim.PATCHES[2]._replace(target="forward_backward_without_anything")
    monkeypatch.setattr(shim, "PATCHES", (gone,))
    with pytest.raises(shim.ShimError, match="forward_backward_without_anything"):
        install()


def test_torch_itself_stays_as_it_is():
    """In a process of its own: the patches stay in Megatron's modules for good."""
    script = """
import torch
before = {name: getattr(torch, name) for name in ("tensor", "zeros", "Tensor")}, torch.cuda.current_device
from zmrl.trainer.megatron import shim
shim.install()
shim.install()
assert before == ({name: getattr(torch, name) for name in before[0]}, torch.cuda.current_device)
from megatron.core.optimizer import optimizer
assert optimizer.torch is not torch and optimizer.torch.nn is torch.nn
assert optimizer.torch.tensor([1.0], device="cuda").device.type == "cpu"
"""
    result = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
