"""The ranks of an engine: vLLM's groups as ours, and what the environment must say before workers start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zmrl.parallel.group import ONE_RANK, Group, TorchGroup
from zmrl.parallel.layout import HEADS, Layout
from zmrl.parallel.ranks import Ranks
from zmrl.rollout.engine import PREFILL

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig

_BIND = "VLLM_CPU_OMP_THREADS_BIND"

_own_binding: str | None = None
"""The last value of it that was set here."""


def layout_of(vllm_config: VllmConfig) -> Layout:
    """The layout of an engine; routed experts are always spread over its tensor ranks.

    vLLM's block size is that of one rank, so that every block size fits.
    """
    parallel = vllm_config.parallel_config
    tensor, context = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
    prefill = vllm_config.additional_config.get(PREFILL, HEADS)
    return Layout(tensor, tensor, context, parallel.cp_kv_cache_interleave_size, prefill=prefill)


def prepare_environment(parallel: ParallelConfig) -> None:
    """For the workers of several ranks: cores for each, and gloo on loopback. What the user has set is left alone.

    vLLM gives each rank the cores of a NUMA node of its own, and fails where there are fewer nodes
    (utils/ompmultiprocessing.py:219). Here the ranks share the cores that this process may use.
    """
    global _own_binding
    if os.environ.get(_BIND) == _own_binding:  # of an engine before this one, which may have had other ranks
        os.environ.pop(_BIND, None)
    if parallel.world_size == 1:
        return
    if _BIND not in os.environ:
        _own_binding = bind_cores(sorted(os.sched_getaffinity(0)), parallel.local_world_size)
        os.environ[_BIND] = _own_binding
    if parallel.nnodes == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def bind_cores(cores: list[int], ranks: int) -> str:
    """vLLM's notation: the cores of each rank, equally many; "nobind" if there are fewer cores than ranks."""
    each = len(cores) // ranks
    if not each:
        return "nobind"
    return "|".join(",".join(map(str, cores[r * each : (r + 1) * each])) for r in range(ranks))


def ranks_of(vllm_config: VllmConfig) -> Ranks:
    """This worker's groups, after vLLM has made them."""
    from vllm.distributed.parallel_state import get_dcp_group, get_tp_group

    if vllm_config.parallel_config.tensor_parallel_size == 1:
        return Ranks()
    tensor = TorchGroup(get_tp_group().cpu_group)
    context: Group = ONE_RANK
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        context = TorchGroup(get_dcp_group().cpu_group)
    return Ranks(tensor, tensor, context, layout_of(vllm_config).prefill)
