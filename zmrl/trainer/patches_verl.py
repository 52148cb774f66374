"""Everything that zmrl changes in verl at run time: verl 0.9.1, and nothing else.

Each patch names the line it works around and the failure it prevents, and first looks for that line: another verl is
an error here, not a surprise later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from zmrl.model.config import MODEL_TYPE

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


class LocalActor:
    """Stands for an actor, in the process that calls it: `actor.method.remote(...)` runs at once and can be awaited."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> LocalMethod:
        if name.startswith("_"):  # copying and pickling ask for such names
            raise AttributeError(name)
        return LocalMethod(getattr(self._actor, name))


@dataclass
class LocalMethod:
    """A method of such an actor."""

    method: Callable[..., Any]

    def remote(self, *args: Any, **kwargs: Any) -> Done:
        return Done(self.method(*args, **kwargs))


@dataclass(eq=False)
class Done:
    """An awaitable result that is there."""

    value: Any

    def __await__(self) -> Generator[None, None, Any]:
        return self.value
        yield  # makes this a generator


def local_load_balancer() -> None:
    """verl/workers/rollout/router.py:322 gives the load balancer a process of its own; only the agent loop's asks it.

    Without: that process imports vLLM when all else is up, since it gets the servers' handles, and every sample waits
    for a call of it and makes another. For one agent loop: several would each count their own requests only.
    """
    from verl.workers.rollout import router
    from verl.workers.rollout.llm_server import LLMServerClient

    original = router._create_global_sticky_inflight
    expect_line(original, "return ray.remote(load_balancer_cls).remote(**kwargs)")
    expect_line(LLMServerClient._acquire_server, "await self._load_balancer.acquire_server.remote(")
    plain = router.GlobalRequestLoadBalancer

    def create(servers: dict[str, Any], full_determinism: bool, load_balancer_cls: type) -> Any:
        if load_balancer_cls is not plain:
            return original(servers, full_determinism, load_balancer_cls)
        return LocalActor(plain(servers=servers, full_determinism=full_determinism))

    router._create_global_sticky_inflight = create


def token_builder() -> None:
    """verl/utils/tokenizer/continuous_token_wiring.py:210 warns, for every sample, that it takes the default builder.

    Without: an eighth of the agent loop's time is spent on writing the same line.
    """
    from verl.utils.tokenizer import continuous_token_wiring as wiring

    expect_line(wiring.infer_continuous_token_model_family, "_MODEL_TYPE_TO_FAMILY.get(model_type)")
    wiring._MODEL_TYPE_TO_FAMILY.setdefault(MODEL_TYPE, wiring.ContinuousTokenModelFamily.DEFAULT)
