"""Everything that zmrl changes in verl at run time: verl 0.9.1, and nothing else.

Each patch names the line it works around and the failure it prevents, and first looks for that line: another verl is
an error here, not a surprise later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

VERL_VERSION = "0.9.1"


class PatchError(RuntimeError):
    """verl is not the version that the patches were written for."""


def check_version() -> None:
    """Refuse another verl: hooks and patches are written against this very version."""
    import verl

    if verl.__version__ != VERL_VERSION:
        raise PatchError(f"verl {verl.__version__} is installed, zmrl needs {VERL_VERSION}; run `make setup`")


def expect_line(target: Callable[..., Any], line: str) -> None:
    """Raise PatchError unless the source of `target` holds `line`."""
    if line not in inspect.getsource(target):
        name = f"{target.__module__}.{target.__qualname__}"
        raise PatchError(f"{name} no longer holds {line!r}: re-read it and adapt zmrl/trainer/patches_verl.py")


def single_cpu_backend() -> None:
    """verl/utils/distributed.py:85 builds "cpu:gloo,cpu:gloo" where the device is the CPU.

    Without: `ValueError: Duplicate device type cpu` when a worker starts. Must run before
    verl/workers/engine_workers.py binds the function's name, so at plug-in time.
    """
    from verl.utils import distributed

    original = distributed.initialize_global_process_group_ray
    expect_line(original, 'backend = backend or f"cpu:gloo,{get_device_name()}:{get_nccl_backend()}"')

    def initialize(timeout_second: int | None = None, backend: str | None = None) -> None:
        original(timeout_second=timeout_second, backend=backend or "cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize
