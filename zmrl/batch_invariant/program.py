"""Kernel calls, recorded once and repeated in one native call, without Python between them.

A repeated call reads and writes the same addresses: new inputs are copied into the tensors that the recorded calls
read, results are found in the tensors that they returned. The kernels are the same, so the bits are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zmrl.batch_invariant import native

_run = native.kernel("zm_run_program", "pppiipp")


class ProgramError(RuntimeError):
    """A kernel of a program refused its arguments; the message names the kernel and its status."""


@dataclass
class Recording:
    """What happened inside `recorded`."""

    calls: list[native.Call] = field(default_factory=list)
    other: set[str] = field(default_factory=set)
    """Operators that are neither kernels nor views: a program would leave them out."""


class _Watch(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = [r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns]
        if func.namespace != "zmrl" and not (views and all(views)):
            self.recording.other.add(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def recorded() -> Iterator[Recording]:
    """Records the kernels that run, as they run, and the names of torch's own operators beside them."""
    recording = Recording()
    with _Watch(recording), native.recording(recording.calls):
        yield recording


class Program:
    """Recorded calls, of the instruction set and the number of threads of now. Keeps their tensors alive."""

    def __init__(self, calls: list[native.Call]) -> None:
        self.names = [name for name, _, _ in calls]
        self._arguments = [arguments for _, _, arguments in calls]
        self._kernels = torch.tensor([native.address(name) for name in self.names], dtype=torch.int64)
        self._integers = torch.zeros(len(calls), native.MOST_INTEGERS, dtype=torch.int64)
        self._floats = torch.zeros(len(calls), native.MOST_FLOATS, dtype=torch.float32)
        self._status, self._nanoseconds = torch.zeros(2, 1, dtype=torch.int64)
        for call, integers, floats in zip(calls, self._integers, self._floats, strict=True):
            native.unpack(call, integers, floats)

    def __call__(self, repeats: int = 1, timed: bool = False) -> float:
        """Runs all calls, `repeats` times. Returns seconds if `timed`: of one repeat, on the thread's own clock if
        there is one thread, else on the wall's. ProgramError if a kernel refuses."""
        time = self._nanoseconds if timed else None
        buffers = self._kernels, self._integers, self._floats
        failed = _run(*buffers, len(self.names), repeats, self._status, time)
        if failed >= 0:
            raise ProgramError(f"{self.names[failed]} failed with status {self._status.item()}")
        return self._nanoseconds.item() / repeats / 1e9
