"""The order in which gradients are summed, and their norm (numerics.md, Backward).

A mini-batch is 8 contiguous shards of samples in data-set order. Within a shard the kernels continue one chain over the
tokens, across micro-batches; a micro-batch never crosses the border of a shard. The shards are summed by the tree
((0+1)+(2+3))+((4+5)+(6+7)). So neither the size of a micro-batch nor the thread count changes a bit; and of 2, 4 or 8
data-parallel ranks, each with its part of the samples, each finishes a subtree, and `sum_over_ranks` the tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.panels import LANES
from zmrl.model.shards import whole_panels
from zmrl.model.tensors import TensorSlice
from zmrl.parallel.exchange import gather_rows, reduce_rows
from zmrl.parallel.group import Group
from zmrl.parallel.ranks import SINGLE, Ranks

SHARDS = 8


class MicroBatch(NamedTuple):
    """Samples `samples` of the mini-batch, all of sample shard `shard`."""

    shard: int
    samples: range


def micro_batches(count: int, size: int, shards: int = SHARDS) -> list[MicroBatch]:
    """`count` samples cut into micro-batches of at most `size`, within shards.

    Shard s is the samples s*count//8 to (s+1)*count//8. shards: those of this rank, if the mini-batch is divided evenly
    among several ranks; count and numbers are this rank's then.
    """
    out = []
    for shard in range(shards):
        start, stop = shard * count // shards, (shard + 1) * count // shards
        out += [MicroBatch(shard, range(i, min(i + size, stop))) for i in range(start, stop, size)]
    return out


def in_lockstep(copies: Group, plan: list[MicroBatch]) -> list[tuple[MicroBatch, list[int]]]:
    """This copy's plan, and with each micro-batch the shards that all copies are in then.

    All copies get as many: the last of those that have fewer are empty.
    """
    counts = copies.all_gather(torch.tensor([len(plan)]), "micro-batch counts")
    last = plan[-1].shard if plan else 0
    padded = [*plan, *[MicroBatch(last, range(0))] * (int(counts.max()) - len(plan))]
    shards = copies.all_gather(torch.tensor([micro.shard for micro in padded]), "micro-batch shards")
    return list(zip(padded, shards.T.tolist(), strict=True))


class ShardTree:
    """Sums the gradients of the shards of a mini-batch on this rank, with log2(8) = 3 buffers besides the total.

    Between `begin(shard)` and `end()` the kernels accumulate into the buffer that `begin` returned. Call them for
    ascending shards and leave out shards without samples: a sum with nothing is the other operand. The sum ends in
    `total`, since the last shard is never empty.
    """

    def __init__(self, total: Tensor, shards: int = SHARDS) -> None:
        """total: FP32 [n], Megatron's gradient buffer. shards: 8, or those of one of several data-parallel ranks."""
        self.total, self.shards = total, shards
        self._spare: list[Tensor] = []
        self._nodes: list[tuple[int, Tensor | None]] = []
        """(level, sum) of the finished subtrees, left to right: a binary counter of shards."""
        self._shards = 0
        self._open: Tensor | None = None
        self.open_shard: int | None = None
        """The shard between `begin` and `end`."""

    def reset(self) -> None:
        """Forget the mini-batch at hand."""
        used = [*(buffer for _, buffer in self._nodes), self._open]
        self._spare += [buffer for buffer in used if buffer is not None and buffer is not self.total]
        self._nodes, self._shards, self._open, self.open_shard = [], 0, None, None

    def begin(self, shard: int) -> Tensor:
        """The zeroed buffer [n] into which `shard` accumulates."""
        while self._shards < shard:
            self._finish(None)
        if shard == self.shards - 1:
            buffer = self.total
        else:
            buffer = self._spare.pop() if self._spare else torch.empty_like(self.total)
        self._open, self.open_shard = buffer.zero_(), shard
        return buffer

    def open(self) -> Tensor:
        """The buffer of the open shard."""
        assert self._open is not None
        return self._open

    def end(self) -> None:
        """The open shard is complete."""
        buffer, self._open, self.open_shard = self._open, None, None
        self._finish(buffer)

    @property
    def complete(self) -> bool:
        """Whether `total` holds the sum over all shards."""
        return self._shards == self.shards

    def _finish(self, buffer: Tensor | None) -> None:
        self._shards += 1
        level = 0
        while self._nodes and self._nodes[-1][0] == level:
            left = self._nodes.pop()[1]
            if buffer is None:
                buffer = left
            elif left is not None:
                buffer.add_(left)
                self._spare.append(left)
            level += 1
        self._nodes.append((level, buffer))


def sum_over_ranks(group: Group, total: Tensor) -> None:
    """total FP32 [n]: in place, the subtree of this rank's shards -> the sum over all shards, on all ranks."""
    if group.size > 1:
        rows = total.view(-1, LANES)
        rows.copy_(gather_rows(group, reduce_rows(group, rows, "gradients"), len(rows), "gradients"))


def sum_of_copies(totals: Sequence[Tensor]) -> None:
    """totals FP32 [n], the subtree of each copy's shards: the first becomes the sum over all shards; spends the rest.

    What `sum_over_ranks` does, where the subtrees of all copies are on one rank.
    """
    while len(totals) > 1:
        for left, right in zip(totals[::2], totals[1::2], strict=True):
            left.add_(right)
        totals = totals[::2]


def gradient_norm(slices: Iterable[TensorSlice], ranks: Ranks = SINGLE) -> float:
    """The Euclidean norm over all named gradients; ValueError names the first tensor whose gradient is not finite.

    slices: FP32 gradients in panels, named as in PEFT, or the parts of one of `ranks`. Defined per named tensor, so
    that it depends on no layout: in float64, element (row, k) in lane row mod 16; a lane's squares, by panel and k, are
    halved again and again (the upper half added to the lower; an odd middle stays); lanes are combined at distance 8,
    4, 2, 1; the tensors' sums are added in name order. Padded rows are zero and add nothing.
    """
    sums: dict[str, float] = {}
    bulk: dict[int, list[float]] = {}
    for item in slices:
        if isinstance(item.index, int):  # one of many experts: all of them at once, all ranks' in order
            key = item.buffer.data_ptr()
            if key not in bulk:
                own = _sums_of_squares(item.buffer.flatten(1, -2))
                bulk[key] = ranks.expert.all_gather(own, "gradient norm").flatten().tolist()
            sums[item.name] = bulk[key][item.index + ranks.expert.rank * len(item.buffer)]
        else:
            sums[item.name] = float(_sums_of_squares(whole_panels(item, ranks).reshape(1, -1, 16)))
    total = 0.0
    for name in sorted(sums):
        if not math.isfinite(sums[name]):
            raise ValueError(
                f"the gradient of {name} is not finite; look for NaN or infinite rewards, advantages or log-probs, or "
                "lower the learning rate"
            )
        total += sums[name]
    return math.sqrt(total)


def _sums_of_squares(values: Tensor) -> Tensor:
    """FP32 [R, n, 16] -> float64 [R]: the sums that `gradient_norm` describes."""
    rows = values.double().square_()
    while (n := rows.shape[1]) > 1:
        half = n // 2
        rows[:, :half] += rows[:, n - half :]
        rows = rows[:, : n - half]
    lanes = rows[:, 0]
    for distance in (8, 4, 2, 1):
        lanes = lanes[:, :distance] + lanes[:, distance:]
    return lanes[:, 0]
