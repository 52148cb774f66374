"""Where the gradients of a mini-batch are added up on a rank: those of one copy of the model, or of all.

All but the experts see this copy's samples only: one `ShardTree`, and a sum over the copies at the end. So do the
experts that lie on the ranks of one copy. Where they lie on the ranks of all copies (`Ranks.copies`), tokens of all
copies meet here, each copy in a shard of its own: a tree for each copy, whose sums are added up where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zmrl.model.gradients import AdapterGradients
from zmrl.parallel.group import Group
from zmrl.trainer.megatron.gradients import SHARDS, ShardTree, sum_of_copies, sum_over_ranks

Places = Mapping[str, tuple[int, torch.Size]]
"""Of each gradient, by key: its first element in a flat buffer, and its shape."""


class MiniBatchGradients:
    """Gradients of one mini-batch after the other: `enter` before every micro-batch, `finish` after the last."""

    def __init__(
        self, adapter: AdapterGradients, total: Tensor, places: Places, experts: int, data: Group, copies: int
    ) -> None:
        """total: FP32 [n], where the sums of all shards end, each gradient at its place.

        experts: the first elements of `total`, those of experts. data: the copies of the model, with the same part of
        it each; copies: among how many of them the experts are.
        """
        self.adapter, self.places, self.data = adapter, places, data
        self.shards = SHARDS // data.size
        """Sample shards of a copy."""
        self._copy, self._first = (0, 0) if copies == 1 else (data.rank, experts)
        self.tree = ShardTree(total[self._first :], self.shards)
        """Of this copy's samples."""
        totals = [] if copies == 1 else [total[:experts], *(torch.empty(experts) for _ in range(copies - 1))]
        self.expert_trees = [ShardTree(own, self.shards) for own in totals]
        """Of every copy's samples, at this rank's experts."""

    def enter(self, shards: Sequence[int]) -> None:
        """The next micro-batch of each of the `copies` is of this shard. Shards ascend."""
        if self.tree.open_shard != shards[self._copy]:
            self._end_own()
            self.adapter.bind(self._views(self.tree.begin(shards[self._copy]), self._first))
        if self.expert_trees:
            for tree, shard in zip(self.expert_trees, shards, strict=True):
                if tree.open_shard != shard:
                    if tree.open_shard is not None:
                        tree.end()
                    tree.begin(shard)
            self.adapter.bind_experts([self._views(tree.open(), 0) for tree in self.expert_trees])

    def finish(self) -> None:
        """All micro-batches are done: the sums over all shards, on all ranks.

        In place of Megatron's all-reduce, whose order is gloo's.
        """
        self._end_own()
        sum_over_ranks(self.data, self.tree.total)
        for tree in self.expert_trees:
            tree.end()
        sum_of_copies([tree.total for tree in self.expert_trees])
        self.adapter.release()

    def reset(self) -> None:
        """Forget the mini-batch at hand."""
        for tree in (self.tree, *self.expert_trees):
            tree.reset()
        self.adapter.release()

    @property
    def complete(self) -> bool:
        """Whether every shard is in the sums."""
        return all(tree.complete for tree in (self.tree, *self.expert_trees))

    def _end_own(self) -> None:
        if self.tree.open_shard is not None:
            self.adapter.finish()
            self.tree.end()

    def _views(self, flat: Tensor, first: int) -> dict[str, Tensor]:
        """The gradients in a part of the buffer that starts at element `first`."""
        stop = first + len(flat)
        return {
            key: flat[start - first :][: shape.numel()].view(shape)
            for key, (start, shape) in self.places.items()
            if first <= start < stop
        }
