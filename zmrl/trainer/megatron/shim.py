"""What megatron-core 0.16.1 needs to run on a CPU: three small patches, applied by `install()`, never on import.

Only the name `torch` inside three of Megatron's own modules is replaced, by a stand-in that allocates on the CPU; torch
itself stays as it is for everything else in the process. (Megatron's parallel state and the default process group are
process-global all the same, which is why the trainer has a process of its own.) Every patch first checks that the
line it works around is still there and raises `ShimError` if it is not: a silent miss would surface far away.

Pieces of Megatron that zmrl does not use (TE layers, RNG tracker, MoE layers, clipping by norm, the asynchronous
checkpoint writer) are not patched.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

VERSION = "0.16.1"


class ShimError(RuntimeError):
    """megatron-core is not the version, or not the source, that the shim was written for."""


class Patch(NamedTuple):
    """One line of Megatron that does not work here; its module gets the stand-in for `torch`."""

    module: str
    target: str
    """Attribute path of the function or class that holds the line."""
    line: str
    """Source text that must be found in it."""
    failure: str
    """What happens without the patch."""


PATCHES = (
    Patch(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBuffer.__init__",
        "device=torch.cuda.current_device()",  # line 806
        "DDP cannot allocate its gradient buffer: torch.cuda.current_device() asserts that torch was built with CUDA",
    ),
    Patch(
        "megatron.core.optimizer.optimizer",
        "FP32Optimizer.__init__",
        "self._scale = torch.tensor([1.0], dtype=torch.float, device='cuda')",  # line 907
        "the optimizer cannot be built: its loss scale is a CUDA tensor",
    ),
    Patch(
        "megatron.core.pipeline_parallel.schedules",
        "forward_backward_no_pipelining",
        'total_num_tokens = torch.zeros([], dtype=torch.int, device="cuda")',  # line 596
        "the schedule cannot run: its token count is a CUDA tensor",
    ),
)


class _CpuTorch(ModuleType):
    """Stands in for `torch` inside one Megatron module: new tensors asked for on "cuda" come on the CPU."""

    cuda = SimpleNamespace(current_device=lambda: torch.device("cpu"))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.tensor(*args, **kwargs)

    @staticmethod
    def zeros(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*args, **kwargs)


@cache
def install() -> None:
    """Patch megatron-core in this process; a second call does nothing. ShimError if it is not what we know."""
    import megatron.core

    if megatron.core.__version__ != VERSION:
        raise ShimError(
            f"megatron-core {megatron.core.__version__} is installed, but the CPU shim was written for {VERSION}; "
            "install requirements/cpu.lock"
        )
    modules = [importlib.import_module(patch.module) for patch in PATCHES]
    for module, patch in zip(modules, PATCHES, strict=True):
        target: Any = module
        for name in patch.target.split("."):
            target = getattr(target, name, None)
        if target is None or patch.line not in inspect.getsource(target):
            raise ShimError(
                f"{patch.module}: {patch.target} does not hold {patch.line!r} any more; see whether the patch is still "
                f"needed (without it, {patch.failure})"
            )
    for module in modules:
        module.torch = _CpuTorch("torch")  # type: ignore[attr-defined]
