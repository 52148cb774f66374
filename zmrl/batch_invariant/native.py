"""Loads the kernels and calls them: instruction set, threads, pointers. Knows nothing about what a kernel computes."""

import ctypes
import os
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from zmrl.batch_invariant.build import ISA_FLAGS, build, library_path

_CPU_FLAGS: dict[str, set[str]] = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"},
    "avx2": {"avx2", "fma"},
    "scalar": set(),
}
MOST_INTEGERS, MOST_FLOATS = 48, 8
"""Arguments of a kernel, pointers and threads among the integers (csrc/call.h)."""


def available_isas() -> list[str]:
    """Instruction sets this CPU can run, best first."""
    with open("/proc/cpuinfo") as cpuinfo:
        line = next((text for text in cpuinfo if text.startswith("flags")), "")
    flags = set(line.split())
    return [isa for isa in ISA_FLAGS if _CPU_FLAGS[isa] <= flags]


Call = tuple[str, str, tuple[object, ...]]
"""Name, signature and arguments of a kernel that ran."""
_recorder = threading.local()
"""Its `calls`: where the kernels of this thread are recorded, if they are."""
_libraries: dict[str, ctypes.PyDLL] = {}
_isa = os.environ.get("ZMRL_ISA") or available_isas()[0]
if _isa not in available_isas():
    raise ValueError(f"ZMRL_ISA={_isa}: this CPU runs {', '.join(available_isas())}")


def isa() -> str:
    """The instruction set in use (the best one, or the environment variable ZMRL_ISA). Never changes a bit."""
    return _isa


@contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Runs the kernels of another instruction set: for tests of their equality."""
    global _isa
    if name not in available_isas():
        raise ValueError(f"instruction set {name!r} is unknown or not this CPU's: it has {', '.join(available_isas())}")
    before, _isa = _isa, name
    try:
        yield
    finally:
        _isa = before


def library() -> ctypes.PyDLL:
    """The shared object of the instruction set in use."""
    found = _libraries.get(_isa)
    if found is None:
        build()
        found = ctypes.PyDLL(str(library_path(_isa)))
        arguments = ctypes.c_char_p, ctypes.py_object, ctypes.c_int64
        found.zm_call.argtypes = ctypes.c_void_p, *arguments
        found.zm_unpack.argtypes = *arguments, ctypes.c_void_p, ctypes.c_void_p
        found.zm_call.restype = found.zm_unpack.restype = ctypes.c_int64
        _libraries[_isa] = found  # last: other threads call what they find here
    return found


def address(name: str) -> int:
    """Of the C function `name`, of the instruction set in use."""
    return ctypes.cast(getattr(library(), name), ctypes.c_void_p).value or 0


def kernel(name: str, signature: str) -> Callable[..., int]:
    """A callable for the C function `name`.

    signature: one letter per argument: p pointer (what has a `data_ptr()`, an address, or None), i int64, f float.
    Every kernel takes the number of threads as one more, last, int64, which is filled in from
    `torch.get_num_threads()`. The C function returns an int64: 0, or a count or status that its wrapper interprets.
    """
    kinds, floats = signature.encode(), signature.count("f")
    if len(signature) - floats >= MOST_INTEGERS or floats > MOST_FLOATS:
        raise ValueError(f"{name}: {signature!r} has more arguments than a call can pass")
    bound: dict[str, tuple[Callable[..., int], int]] = {}

    def call(*arguments: object) -> int:
        target = bound.get(_isa)
        if target is None:
            target = bound[_isa] = library().zm_call, address(name)
        calls = getattr(_recorder, "calls", None)
        if calls is not None:
            calls.append((name, signature, arguments))
        return target[0](target[1], kinds, arguments, torch.get_num_threads())

    return call


def unpack(call: Call, integers: torch.Tensor, floats: torch.Tensor) -> None:
    """Writes a recorded call's arguments, with the threads of now, as csrc/program.cpp takes them."""
    _, signature, arguments = call
    pointers = integers.data_ptr(), floats.data_ptr()
    library().zm_unpack(signature.encode(), arguments, torch.get_num_threads(), *pointers)


class Int64Array:
    """Integers or addresses in memory, for a pointer argument of a kernel."""

    def __init__(self, values: Iterable[int]) -> None:
        self._values = array("q", values)

    def data_ptr(self) -> int:
        return self._values.buffer_info()[0]


_bytes_read = kernel("zm_bytes_read", "i")


def bytes_read() -> dict[str, int]:
    """Bytes of "index" keys and "latent" rows that the indexer and attention have read from pages since the last call.

    Of the instruction set in use. A key counts once for the up to eight tokens of a request that share it, a latent
    once for each token.
    """
    return {"index": _bytes_read(0), "latent": _bytes_read(1)}


@contextmanager
def recording(calls: list[Call]) -> Iterator[None]:
    """Appends to `calls` the kernels that this thread runs, with their arguments, which keep the tensors alive."""
    before, _recorder.calls = getattr(_recorder, "calls", None), calls
    try:
        yield
    finally:
        _recorder.calls = before


most_threads = kernel("zm_most_threads", "")
"""Threads of the largest team since the last call, of the instruction set in use; 1 if every kernel worked alone."""
