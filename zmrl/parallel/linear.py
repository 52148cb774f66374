"""Tensor-parallel linear layers with adapters, forward and input gradients, in the bits of one rank.

Rank r of W = 1, 2, 4, 8 owns the slices 8r/W to 8(r+1)/W of whatever is spread over ranks, and finishes their subtree;
the owner of a row adds the subtrees (`exchange`). `ops/linear.py` has the rounding points; with one rank the functions
here are `linear(..., shards=8)` and `linear(..., shards_n=8)`.

    column-parallel   outputs are spread. B lies with its outputs, A is on all ranks. The input gradient and
                      dt = scale * B^T dy are sums over outputs.
    row-parallel      inputs are spread. A lies with its inputs, B is on all ranks. The output and t = A x are sums over
                      inputs, and travel together.

A fused projection may have parts that every rank computes whole (`replicated`): a rank sums its share of their outputs.
Gradients of what is on all ranks (A, B, such parts) come out equal on all ranks.

A rank sends 6 * (W - 1) / W * N bytes per row of N sums; a ring all-reduce of BF16 would be 4 * (W - 1) / W * N.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant.library import check
from zmrl.batch_invariant.ops.linear import ANCHOR, linear
from zmrl.batch_invariant.ops.linear_parallel import add_adapter, linear_gradient, outer, tree_sum
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import panel_count
from zmrl.batch_invariant.ops.rows import as_rows
from zmrl.parallel.exchange import gather_rows, own_rows, reduce_rows
from zmrl.parallel.group import Group
from zmrl.parallel.layout import REDUCTION_SLICES


def _by_slot(slots: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(slot, its rows) for the slots that have an adapter."""
    for slot in slots.unique().tolist():
        if slot >= 0:
            yield slot, (slots == slot).nonzero().flatten()


def _adapter_rows(x: Tensor, panels: Tensor, slots: Tensor, outputs: int, slices: int) -> Tensor:
    """FP32 [T, outputs]: rows of x times the adapter matrix of their slot, in `slices` chains; 0 without adapter."""
    out = torch.zeros(len(x), outputs)
    for slot, rows in _by_slot(slots):
        out[rows] = linear(x[rows], panels[slot], [outputs], slices, True)
    return out


def _finish_gradient(base: Tensor, dt: Tensor, lora: LoraBuffers, slots: Tensor) -> Tensor:
    """bf16(base, continued by the chain of A^T dt): base FP32 [T, K], dt FP32 [T, P*r]."""
    dx = add_adapter(base, None, None, 0.0)
    width = dt.shape[1]
    for slot, rows in _by_slot(slots):
        dx[rows] = linear_gradient(dt[rows], lora.a[slot], [width], [(0, width)], 1, base[rows], False)
    return dx


# ---- inputs spread over ranks ----------------------------------------------------------------------------------------


def _row_forward(
    group: Group, x: Tensor, w: Tensor, outputs: int, lora: LoraBuffers | None, slots: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Returns y and, of this rank's rows, t."""
    slices = REDUCTION_SLICES // group.size
    partial = linear(x, w, [outputs], slices, True)
    if lora is None or slots is None:
        rows = reduce_rows(group, partial, "row-parallel sums")
        return gather_rows(group, add_adapter(rows, None, None, 0.0), len(x), "row-parallel rows"), None
    rank = lora.b.shape[2]
    partial = torch.cat([partial, _adapter_rows(x, lora.a, slots, rank, slices)], 1)
    base, t = reduce_rows(group, partial, "row-parallel sums").split([outputs, rank], 1)
    t, own_slots = t.bfloat16(), own_rows(slots, group.rank, group.size)
    rows = add_adapter(base, _adapter_rows(t, lora.b, own_slots, outputs, 1), own_slots, lora.scale)
    return gather_rows(group, rows, len(x), "row-parallel rows"), t


class _RowParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        group: Group,
        w: Tensor,
        outputs: int,
        lora: LoraBuffers | None,
        slots: Tensor | None,
    ) -> Tensor:
        y, t = _row_forward(group, x, w, outputs, lora, slots)
        t = None if t is None else gather_rows(group, t, len(x), "row-parallel t")
        ctx.save_for_backward(x, t)
        ctx.arguments = w, outputs, lora, slots
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, t), (w, outputs, lora, slots) = ctx.saved_tensors, ctx.arguments
        dy, every = as_rows(dy), [(0, outputs)]
        if lora is None or slots is None:
            return linear_gradient(dy, w, [outputs], every, 1, None, False), *[None] * 6
        dt = torch.zeros(len(dy), lora.b.shape[2])
        for slot, rows in _by_slot(slots):
            dt[rows] = tree_sum(linear_gradient(dy[rows], lora.b[slot], [outputs], every, 1)[None], lora.scale)
        dx = _finish_gradient(linear_gradient(dy, w, [outputs], every, 1), dt, lora, slots)
        if lora.grad_a is not None:
            outer(x, dt, slots, 1.0, lora.grad_a)
        if lora.grad_b is not None:
            outer(t, dy, slots, lora.scale, lora.grad_b)
        return dx, *[None] * 6


def row_parallel(
    group: Group,
    x: Tensor,
    w: Tensor,
    outputs: int,
    lora: LoraBuffers | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """x BF16 `[T, K/W]`: this rank's inputs, w panels `[ceil(N/16), K/W, 16]` -> y BF16 `[T, N]` on all ranks.

    lora: a `[S, r/16, K/W, 16]` of this rank's inputs, b `[S, ceil(N/16), r, 16]`; slots int32 `[T]`, equal on all
    ranks. Differentiable in x; the gradient of b comes out on every rank.
    """
    lora = None if slots is None else lora
    if torch.is_grad_enabled() and (x.requires_grad or (lora is not None and lora.wants_gradients)):
        return _RowParallel.apply(x, ANCHOR, group, w, outputs, lora, slots)
    return _row_forward(group, x, w, outputs, lora, slots)[0]


# ---- outputs spread over ranks ---------------------------------------------------------------------------------------


class _ColumnParallel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        group: Group,
        w: Tensor,
        splits: Sequence[int],
        replicated: Sequence[bool],
        fp32_out: bool,
        lora: LoraBuffers | None,
        slots: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.arguments = group, w, splits, replicated, lora, slots
        return linear(x, w, splits, 1, fp32_out, lora, slots)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        group, w, splits, replicated, lora, slots = ctx.arguments
        (x,) = ctx.saved_tensors
        dy = as_rows(dy)
        own = [
            (group.rank * n // group.size, n // group.size) if whole else (0, n)
            for n, whole in zip(splits, replicated, strict=True)
        ]
        slices = REDUCTION_SLICES // group.size
        partial = linear_gradient(dy, w, splits, own, slices)
        if lora is None or slots is None:
            mine = add_adapter(reduce_rows(group, partial, "column-parallel sums"), None, None, 0.0)
            return gather_rows(group, mine, len(x), "column-parallel rows"), *[None] * 8
        parts = list(zip(dy.split(list(splits), 1), _part_panels(splits), own, strict=True))
        dt = torch.cat([_rank_gradient(*part, lora, slots, slices) for part in parts], 1)
        partial = torch.cat([partial, dt], 1)
        base, dt = reduce_rows(group, partial, "column-parallel sums").split([w.shape[1], dt.shape[1]], 1)
        dt = tree_sum(dt.contiguous()[None], lora.scale)
        mine = _finish_gradient(base, dt, lora, own_rows(slots, group.rank, group.size))
        dx = gather_rows(group, mine, len(x), "column-parallel rows")
        if lora.grad_a is not None:
            outer(x, gather_rows(group, dt, len(x), "column-parallel dt"), slots, 1.0, lora.grad_a)
        if lora.grad_b is not None:
            rank = lora.b.shape[2]
            t = linear(x, lora.a[0], [rank * len(splits)])
            for i, (dy_part, panels, _) in enumerate(parts):
                outer(t[:, i * rank : (i + 1) * rank], dy_part, slots, lora.scale, lora.grad_b[panels])
        return dx, *[None] * 8


def _part_panels(splits: Sequence[int]) -> list[slice]:
    """Where the panels of each part of a fused projection lie."""
    stops = torch.tensor([0, *map(panel_count, splits)]).cumsum(0).tolist()
    return [slice(a, b) for a, b in pairwise(stops)]


def _rank_gradient(
    dy: Tensor, panels: slice, own: tuple[int, int], lora: LoraBuffers, slots: Tensor, slices: int
) -> Tensor:
    """B^T dy of one part over this rank's own outputs: FP32 [T, r]."""
    out = torch.zeros(len(dy), lora.b.shape[2])
    for slot, rows in _by_slot(slots):
        out[rows] = linear_gradient(dy[rows], lora.b[slot, panels], [dy.shape[1]], [own], slices)
    return out


def column_parallel(
    group: Group,
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    replicated: Sequence[bool] | None = None,
    fp32_out: bool = False,
    lora: LoraBuffers | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """x BF16 `[T, K]`, equal on all ranks -> y BF16 or FP32 `[T, sum(splits)]`: this rank's outputs of every part.

    w panels of those outputs; replicated: which parts every rank has whole. lora: a `[S, P*r/16, K, 16]`, b with its
    outputs. Differentiable in x: the gradient is whole, on all ranks, as is that of a.
    """
    replicated = [False] * len(splits) if replicated is None else replicated
    for n, whole in zip(splits, replicated, strict=True):
        check(not whole or n % group.size == 0, f"splits: {n} replicated outputs on {group.size} ranks: not divisible")
    lora = None if slots is None else lora
    if torch.is_grad_enabled() and (x.requires_grad or (lora is not None and lora.wants_gradients)):
        return _ColumnParallel.apply(x, ANCHOR, group, w, splits, replicated, fp32_out, lora, slots)
    return linear(x, w, splits, 1, fp32_out, lora, slots)


# ---- the head --------------------------------------------------------------------------------------------------------


class _GatherLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.columns = group, logits.shape[1]
        return group.all_gather(logits, "logits").transpose(0, 1).flatten(1).contiguous()

    @staticmethod
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, None]:
        return dlogits.split(ctx.columns, 1)[ctx.group.rank].contiguous(), None


def vocabulary_parallel_logits(group: Group, hidden: Tensor, w: Tensor, vocabulary: int) -> Tensor:
    """hidden BF16 `[T, hidden]`, w panels of this rank's `vocabulary / W` ids -> the whole row, FP32 `[T, vocabulary]`.

    Every rank gets the row and treats it as one: `log_probs`, digests and samples are those of one rank.
    Differentiable in hidden.
    """
    check(vocabulary % group.size == 0, f"vocabulary: {vocabulary} ids on {group.size} ranks: not divisible")
    own = column_parallel(group, hidden, w, [vocabulary // group.size], None, True)
    return _GatherLogits.apply(own, group)
