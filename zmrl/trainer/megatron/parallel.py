"""The trainer's ranks: Megatron's process groups, as the model and the sums over samples use them.

Rank d * T + t is tensor rank t of copy d of the model; the copies take the samples in rank order. Megatron makes the
groups; what passes through them is ours (`zmrl.parallel`), since the sum of a collective has no fixed order.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zmrl.parallel.group import ONE_RANK, Group, TorchGroup
from zmrl.parallel.layout import Layout
from zmrl.parallel.ranks import Ranks


@dataclass(frozen=True)
class TrainerRanks:
    """What a rank of the trainer belongs to."""

    model: Ranks
    """Who shares out the model."""
    data: Group
    """Who holds the same part of the model and takes other samples."""
    data_group: Any
    """`data` as a process group of torch."""

    @property
    def lockstep(self) -> Group:
        """The copies that run their micro-batches together, since their tokens meet at the experts; or this alone."""
        return self.data if self.model.copies > 1 else ONE_RANK


def initialise(layout: Layout) -> TrainerRanks:
    """Make sure that the default process group (gloo) and Megatron's groups exist, laid out so.

    layout: checked; a group that the caller made is used. RuntimeError if it has another number of ranks.
    """
    from megatron.core import parallel_state

    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != layout.data * layout.tensor:
        raise RuntimeError(
            f"the trainer has {dist.get_world_size()} ranks, trainer.data_parallel={layout.data} and "
            f"trainer.tensor_parallel={layout.tensor} need {layout.data * layout.tensor}"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=layout.tensor)
    data_group = parallel_state.get_data_parallel_group()
    tensor = _group(parallel_state.get_tensor_model_parallel_group())
    expert: Group = ONE_RANK
    if layout.expert > 1:
        expert = tensor if layout.expert == layout.tensor else TorchGroup()
    return TrainerRanks(Ranks(tensor, expert), _group(data_group), data_group)


def _group(process_group: Any) -> Group:
    return ONE_RANK if dist.get_world_size(process_group) == 1 else TorchGroup(process_group)
