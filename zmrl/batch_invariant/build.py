"""Builds the kernels: `python -m zmrl.batch_invariant.build`.

One source, one shared object per instruction set (so that no inline function compiled for one set can be linked into
another). The names carry `kernel_id()`, a hash of sources and flags, so a stale build is never loaded.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
OUTPUT = Path(__file__).parent / "_build"
COMMON_FLAGS = (
    "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=off -fno-math-errno "
    "-fno-trapping-math -Wall -Wextra -Werror"
).split()
ISA_FLAGS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "scalar": ["-fno-tree-vectorize"],
}


class KernelBuildError(RuntimeError):
    """The compiler is missing or refused the sources."""


@cache
def kernel_id() -> str:
    """16 hex digits over all sources and the common flags: part of the identity both engines exchange.

    It does not depend on the instruction set, the compiler's output or the machine.
    """
    digest = hashlib.sha256(" ".join(COMMON_FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def library_path(isa: str) -> Path:
    return OUTPUT / f"libzmrl-{isa}-{kernel_id()}.so"


def build(isas: tuple[str, ...] = tuple(ISA_FLAGS), verbose: bool = False) -> None:
    """Builds what is missing; processes that build at the same time wait for each other."""
    if all(library_path(isa).exists() for isa in isas):
        return
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelBuildError("no C++ compiler found: install g++ or set CXX")
    OUTPUT.mkdir(exist_ok=True)
    with open(OUTPUT / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [isa for isa in isas if not library_path(isa).exists()]
        print(f"building the kernels for {', '.join(missing)}: about a minute", file=sys.stderr, flush=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = {
                isa: [pool.submit(_compile, compiler, source, isa, verbose) for source in sorted(SOURCES.glob("*.cpp"))]
                for isa in missing
            }
            objects = {isa: [job.result() for job in listed] for isa, listed in jobs.items()}
        for isa in missing:
            target = library_path(isa).with_suffix(".tmp")
            _run([compiler, "-shared", "-fopenmp", *map(str, objects[isa]), "-o", str(target)], verbose)
            os.replace(target, library_path(isa))
        current = {library_path(isa) for isa in ISA_FLAGS}
        current |= {_object_path(source, isa) for source in SOURCES.glob("*.cpp") for isa in ISA_FLAGS}
        for old in {*OUTPUT.glob("*.so"), *OUTPUT.glob("*.o")} - current:
            old.unlink()


def _object_path(source: Path, isa: str) -> Path:
    """Named after everything that the object depends on, so that an edited source rebuilds its own object only."""
    digest = hashlib.sha256(" ".join([*COMMON_FLAGS, *ISA_FLAGS[isa]]).encode())
    for path in (*sorted(SOURCES.glob("*.h")), source):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return OUTPUT / f"{source.stem}-{isa}-{digest.hexdigest()[:16]}.o"


def _compile(compiler: str, source: Path, isa: str, verbose: bool) -> Path:
    target = _object_path(source, isa)
    if not target.exists():
        scratch = target.with_suffix(".tmp")
        _run([compiler, *COMMON_FLAGS, *ISA_FLAGS[isa], "-c", str(source), "-o", str(scratch)], verbose)
        os.replace(scratch, target)
    return target


def _run(command: list[str], verbose: bool) -> None:
    if verbose:
        print(" ".join(command), flush=True)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise KernelBuildError(f"{' '.join(command)}\n{result.stderr}")


if __name__ == "__main__":
    build(verbose="-v" in sys.argv)
    print(f"kernels {kernel_id()}: {', '.join(ISA_FLAGS)} in {OUTPUT.name}/")
