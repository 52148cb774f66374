"""Process group and Megatron's parallel state. One rank so far; the reductions are laid out for more (`gradients`)."""

from __future__ import annotations

import os

import torch.distributed as dist


def initialise() -> None:
    """Make sure that the default process group (gloo) and Megatron's groups exist, with one rank.

    A group that the caller made is used. RuntimeError if it has more ranks: gradients would be summed by a
    collective, whose order the numerics contract forbids.
    """
    from megatron.core import parallel_state

    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise RuntimeError(
            f"the Megatron host runs on 1 rank so far, not {dist.get_world_size()}: set the trainer's world size to 1"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
