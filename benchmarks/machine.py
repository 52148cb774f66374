"""Times kernels in a native loop and measures what the machine can do: `python -m benchmarks.machine`.

A kernel's time excludes Python: its arguments are recorded from one call of the operator and the C function is called
in a native loop (`zmrl.batch_invariant.program`). With one thread the thread's own CPU clock is read, so that other
work on the machine does not count; with more, the wall clock. A floor is the larger of FLOP / peak and bytes /
bandwidth, where the bandwidth is that of reading as many bytes as the case touches (they may fit a cache).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from zmrl.batch_invariant import build, native
from zmrl.batch_invariant.program import Program

TORCH_AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@cache
def _library(isa: str) -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cpp")
    target = build.library_path(isa).with_name(f"bench-{isa}-{build.kernel_id()}-{source.stat().st_mtime_ns}.so")
    if not target.exists():
        flags = [*build.COMMON_FLAGS, *build.ISA_FLAGS[isa], "-shared", f"-I{build.SOURCES}"]
        subprocess.run(["g++", *flags, str(source), "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    for name in ("zm_bench_fma", "zm_bench_read"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def clock(threads: int) -> Callable[[], float]:
    """Seconds: of this thread alone, or of the wall."""
    return time.thread_time if threads <= 1 else time.perf_counter


class KernelCall:
    """The kernels that `operator` runs, recorded once, to be repeated without Python."""

    def __init__(self, operator: Callable[[], object]) -> None:
        calls: list[native.Call] = []
        with native.recording(calls):
            self.result = operator()
        self.program = Program(calls)

    def seconds(self, repeats: int = 1) -> float:
        """Of one call, the mean of `repeats`."""
        return self.program(repeats, timed=True)


def python_seconds(call: Callable[[], object], repeats: int = 1) -> float:
    """Of one call through Python."""
    now = clock(torch.get_num_threads())
    start = now()
    for _ in range(repeats):
        call()
    return (now() - start) / repeats


Timer = Callable[[int], float]
"""repeats -> seconds of one call"""


def python_timer(call: Callable[[], object]) -> Timer:
    return lambda repeats: python_seconds(call, repeats)


def paired(timers: list[Timer], pairs: int = 15, seconds: float = 0.004) -> list[list[float]]:
    """Seconds of each timer in `pairs` alternating rounds of about `seconds` each."""
    repeats = []
    for timer in timers:
        timer(1)
        repeats.append(max(1, round(seconds / max(timer(1), 1e-7))))
    rounds = [[timer(n) for timer, n in zip(timers, repeats, strict=True)] for _ in range(pairs)]
    return [list(column) for column in zip(*rounds, strict=True)]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the paired ratios; above 1 we are faster."""
    return statistics.median(b / a for a, b in zip(ours, theirs, strict=True))


@cache
def fma_peak(isa: str, threads: int) -> float:
    """FLOP per second of independent chains of fused multiply-adds, the best of some runs."""
    library, steps = _library(isa), 200_000
    runs = [library.zm_bench_fma(ctypes.c_int64(steps), ctypes.c_int64(threads)) for _ in range(60)]
    return steps * 12 * 16 * 2 * threads / min(runs) * 1e9


@cache
def bandwidth(isa: str, threads: int, size: int) -> float:
    """Bytes per second of reading `size` bytes (rounded to a power of two, at most 256 MiB) again and again."""
    size = min(max(1 << (size - 1).bit_length(), 1 << 14), 256 << 20)
    data, library = torch.ones(size // 4), _library(isa)
    repeats = max(1, (32 << 20) // size)
    times = [
        library.zm_bench_read(ctypes.c_void_p(data.data_ptr()), *map(ctypes.c_int64, (size, repeats, threads)))
        for _ in range(12 if threads == 1 else 60)
    ]
    return size * repeats / min(times) * 1e9


def floor(flop: float, size: float) -> tuple[float, str]:
    """Seconds below which the case cannot be, with the instruction set and threads as set now, and what sets it."""
    isa, threads = native.isa(), torch.get_num_threads()
    compute, memory = flop / fma_peak(isa, threads), size / bandwidth(isa, threads, int(size))
    return (compute, "FMA") if compute >= memory else (memory, "bytes")


def describe() -> None:
    """Prints peak and bandwidths for the instruction set and threads as set now."""
    isa, threads = native.isa(), torch.get_num_threads()
    sizes = {"32 KiB": 1 << 15, "512 KiB": 1 << 19, "8 MiB": 8 << 20, "256 MiB": 256 << 20}
    rates = ", ".join(f"{name} {bandwidth(isa, threads, size) / 1e9:.0f}" for name, size in sizes.items())
    print(f"{isa}, {threads} threads: {fma_peak(isa, threads) / 1e9:.0f} GFLOP/s FMA; read GB/s of {rates}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa(), help="of ours and of torch")


@contextmanager
def run_with(options: argparse.Namespace) -> Iterator[None]:
    """Sets threads and instruction set, of torch's libraries as well, and prints the machine."""
    if options.isa == "avx2" and torch.backends.cpu.get_cpu_capability() != "AVX2":  # they look when they are loaded
        os.execve(sys.executable, sys.orig_argv, os.environ | TORCH_AVX2)
    torch.set_num_threads(options.threads)
    with native.use_isa(options.isa):
        describe()
        yield


if __name__ == "__main__":
    for isa in native.available_isas():
        with native.use_isa(isa):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                describe()
