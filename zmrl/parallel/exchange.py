"""Sums and rows that pass between ranks: a collective moves, the receiver adds (numerics.md rule 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.linear_parallel import tree_sum
from zmrl.parallel.group import Group


def row_shares(rows: int, size: int) -> list[int]:
    """How many of `rows` consecutive rows each rank finishes."""
    return [(r + 1) * rows // size - r * rows // size for r in range(size)]


def own_rows(x: Tensor, rank: int, size: int) -> Tensor:
    """The rows of x that a rank finishes."""
    return x[rank * len(x) // size : (rank + 1) * len(x) // size]


def reduce_rows(group: Group, partial: Tensor, what: str) -> Tensor:
    """partial FP32 `[T, N]`: a rank's subtree -> this rank's rows of the whole sum, by the rest of the tree."""
    shares = row_shares(len(partial), group.size)
    received = group.all_to_all(partial.split(shares), what, [shares[group.rank]] * group.size)
    return tree_sum(torch.stack(received))


def gather_rows(group: Group, mine: Tensor, rows: int, what: str) -> Tensor:
    """Every rank's share of `rows` rows -> all of them, on every rank."""
    return torch.cat(group.all_to_all([mine] * group.size, what, row_shares(rows, group.size)))


class _SplitRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, what: str) -> Tensor:
        ctx.arguments = group, len(x), f"{what} gradients"
        return own_rows(x, group.rank, group.size).contiguous()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        group, rows, what = ctx.arguments
        return gather_rows(group, dy, rows, what), None, None


class _JoinRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, rows: int, what: str) -> Tensor:
        ctx.group = group
        return gather_rows(group, x, rows, what)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return own_rows(dy, ctx.group.rank, ctx.group.size).contiguous(), None, None, None


def split_rows(group: Group, x: Tensor, what: str) -> Tensor:
    """x `[T, ...]`, equal on all ranks -> this rank's rows. The gradient is whole again, on all ranks."""
    return _SplitRows.apply(x, group, what)


def join_rows(group: Group, x: Tensor, rows: int, what: str) -> Tensor:
    """This rank's share of `rows` rows -> all of them, on all ranks. Of the gradient each takes its own rows."""
    return _JoinRows.apply(x, group, rows, what)
