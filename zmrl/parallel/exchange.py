"""Sums and rows that pass between ranks: a collective moves, the receiver adds (numerics.md rule 2)."""

from __future__ import annotations

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
