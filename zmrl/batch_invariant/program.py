"""Kernel calls, recorded once and repeated in one native call, without Python between them.

A repeated call reads and writes the same addresses: new inputs are copied into the tensors that the recorded calls
read, results are found in the tensors that they returned. The kernels are the same, so the bits are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zmrl.batch_invariant import native

_INTEGERS, _FLOATS = 48, 8
"""Most arguments of a kernel, as csrc/program.cpp."""
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
        count, threads, library = len(calls), torch.get_num_threads(), native.library()
        self.names = [name for name, _, _ in calls]
        self._arguments = [arguments for _, _, arguments in calls]
        self._kernels = (ctypes.c_void_p * count)()
        self._integers = (ctypes.c_int64 * (_INTEGERS * count))()
        self._floats = (ctypes.c_float * (_FLOATS * count))()
        self._status, self._nanoseconds = ctypes.c_int64(), ctypes.c_int64()
        for i, (name, signature, arguments) in enumerate(calls):
            self._kernels[i] = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            kinds = list(zip(signature, arguments, strict=True))
            for j, value in enumerate([*(_integer(v) for kind, v in kinds if kind != "f"), threads]):
                self._integers[i * _INTEGERS + j] = value
            for j, number in enumerate(v for kind, v in kinds if kind == "f"):
                assert j < _FLOATS and isinstance(number, float | int)
                self._floats[i * _FLOATS + j] = number

    def __call__(self, repeats: int = 1, timed: bool = False) -> float:
        """Runs all calls, `repeats` times. Returns seconds if `timed`: of one repeat, on the thread's own clock if
        there is one thread, else on the wall's. ProgramError if a kernel refuses."""
        time = ctypes.byref(self._nanoseconds) if timed else None
        buffers = self._kernels, self._integers, self._floats
        failed = _run(*buffers, len(self.names), repeats, ctypes.byref(self._status), time)
        if failed >= 0:
            raise ProgramError(f"{self.names[failed]} failed with status {self._status.value}")
        return self._nanoseconds.value / repeats / 1e9


def _integer(value: object) -> int:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, ctypes.Array):
        return ctypes.addressof(value)
    assert value is None or isinstance(value, int)
    return int(value or 0)
