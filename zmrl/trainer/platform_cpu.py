"""The CPU as a verl platform (verl ships none), chosen by VERL_PLATFORM=cpu.

Placement uses Ray's *logical* GPU resource, `ray.init(num_gpus=N)`: verl's resource pools, placement groups and worker
look-up only count GPUs and NPUs, and work unchanged that way on a host without either.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _device_module() -> types.ModuleType:
    """What verl calls on `torch.cuda`: there is no device memory, no stream, and nothing to wait for."""
    module = types.ModuleType("zmrl_cpu_device")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "mem_get_info": lambda *_: (1 << 30, 1 << 30),
        "get_device_name": lambda *_: "cpu",
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": torch.set_rng_state,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "stream": lambda *_: nullcontext(),
    }
    for name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        functions[name] = lambda *_: 0
    for name in (
        "set_device", "synchronize", "empty_cache", "ipc_collect", "current_stream", "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
    ):  # fmt: skip
        functions[name] = lambda *_: None
    vars(module).update(functions)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """No accelerator: gloo, host memory, weights handed over in shared memory."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> str:  # type: ignore[override]
        """`.to(get_device_id())` with the number 0 would mean cuda:0."""
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_gpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        """False selects shared memory for the transfer of weights."""
        return False

    def cudart(self) -> None:
        return None
