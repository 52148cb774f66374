"""Linear layers that are spread over ranks, in the pieces between which the ranks exchange (`zmrl/parallel/linear.py`).

Orders and rounding points are those of `ops/linear.py`: a rank that owns 8 / W slices of the reduction computes them as
`linear(..., shards=8 // W, fp32_out=True)` or `linear_gradient`, finishing their subtree, and `tree_sum` is the rest of
the tree. All sums are FP32; `add_adapter` and `linear_gradient` without fp32_out round to BF16 once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.panels import LANES, check_shape, panel_count

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_tree_sum = kernel("zm_tree_sum", "piifp")
_add_adapter = kernel("zm_add_adapter", "pippiifp")
_linear_gradient = kernel("zm_linear_gradient", "piiii" + "ppipi" + "pi" + "pi")
_outer = kernel("zm_outer", "piii" + "piii" + "ipfp")


def _tree_sum_impl(parts: Tensor, scale: float = 1.0) -> Tensor:
    check(
        parts.dim() >= 1 and parts.shape[0] in (1, 2, 4, 8), f"parts: expected 1, 2, 4 or 8, got {tuple(parts.shape)}"
    )
    check_shape("parts", parts, _FP32, tuple(parts.shape))
    out = torch.empty(parts.shape[1:], dtype=_FP32, device=parts.device)
    if not parts.is_meta:
        _tree_sum(parts, parts.shape[0], out.numel(), scale, out)
    return out


def _add_adapter_impl(base: Tensor, delta: Tensor | None, slots: Tensor | None, scale: float) -> Tensor:
    check_rows("base", base, _FP32)
    rows, n = base.shape
    if delta is not None:
        check_shape("delta", delta, _FP32, (rows, n))
        if slots is None:
            raise OperatorError("slots: an adapter needs the slot of every token")
        check_vector("slots", slots, _INT32, rows)
    y = torch.empty((rows, n), dtype=_BF16, device=base.device)
    if not base.is_meta:
        _add_adapter(base, base.stride(0), delta, slots, rows, n, scale, y)
    return y


def _linear_gradient_impl(
    dy: Tensor,
    w: Tensor,
    splits: Sequence[int],
    own: Sequence[int],
    slices: int,
    start: Tensor | None = None,
    fp32_out: bool = True,
) -> Tensor:
    check(dy.dtype in (_BF16, _FP32), f"dy: expected {_BF16} or {_FP32}, got {dy.dtype}")
    check_rows("dy", dy, dy.dtype, sum(splits))
    k = w.shape[1] if w.dim() == 3 else 0
    check_shape("w", w, _BF16, (sum(map(panel_count, splits)), k, LANES))
    check(len(own) == 2 * len(splits), f"own: expected begin and size of {len(splits)} parts, got {list(own)}")
    for i, size in enumerate(splits):
        begin, count = own[2 * i], own[2 * i + 1]
        check(0 <= begin <= begin + count <= size, f"own: part {i} has {size} outputs, got {begin} and {count} more")
    check(slices in (1, 2, 4, 8), f"slices: expected 1, 2, 4 or 8, got {slices}")
    rows = dy.shape[0]
    if start is not None:
        check_rows("start", start, _FP32, k)
        check(slices == 1 and start.shape[0] == rows, "start: continues one chain, with one row for every row of dy")
    out = torch.empty((rows, k), dtype=_FP32 if fp32_out else _BF16, device=dy.device)
    if not dy.is_meta:
        sizes, ranges = torch.tensor(splits), torch.tensor(own)
        stride = 0 if start is None else start.stride(0)
        _linear_gradient(
            dy, dy.stride(0), dy.dtype == _FP32, rows, k, w, sizes, len(splits), ranges, slices, start, stride, out,
            fp32_out,
        )  # fmt: skip
    return out


def _outer_impl(x: Tensor, v: Tensor, slots: Tensor | None, scale: float, grad: Tensor) -> None:
    for name, t in (("x", x), ("v", v)):
        check(t.dtype in (_BF16, _FP32), f"{name}: expected {_BF16} or {_FP32}, got {t.dtype}")
        check_rows(name, t, t.dtype)
    rows, inputs, n = x.shape[0], x.shape[1], v.shape[1]
    check(v.shape[0] == rows, f"v: expected {rows} rows, got {v.shape[0]}")
    if slots is not None:
        check_vector("slots", slots, _INT32, rows)
    check_shape("grad", grad, _FP32, (panel_count(n), inputs, LANES))
    if not x.is_meta:
        fp32 = x.dtype == _FP32, v.dtype == _FP32
        _outer(x, x.stride(0), fp32[0], inputs, v, v.stride(0), fp32[1], n, rows, slots, scale, grad)


for _schema, _implementation in (
    ("tree_sum(Tensor parts, float scale=1.0) -> Tensor", _tree_sum_impl),
    ("add_adapter(Tensor base, Tensor? delta, Tensor? slots, float scale) -> Tensor", _add_adapter_impl),
    (
        "linear_gradient(Tensor dy, Tensor w, int[] splits, int[] own, int slices, Tensor? start=None, "
        "bool fp32_out=True) -> Tensor",
        _linear_gradient_impl,
    ),
    ("outer(Tensor x, Tensor v, Tensor? slots, float scale, Tensor(a!) grad) -> ()", _outer_impl),
):
    register(_schema, _implementation, _implementation)

_op_tree_sum = operator("tree_sum")
_op_add_adapter = operator("add_adapter")
_op_linear_gradient = operator("linear_gradient")
_op_outer = operator("outer")


def tree_sum(parts: Tensor, scale: float = 1.0) -> Tensor:
    """parts FP32 `[W, ...]`, W 1, 2, 4 or 8 -> scale * (((0+1)+(2+3))+((4+5)+(6+7))), FP32 `[...]`."""
    return _op_tree_sum(parts, scale)


def add_adapter(base: Tensor, delta: Tensor | None, slots: Tensor | None, scale: float) -> Tensor:
    """base FP32 `[T, N]` (any row stride), delta FP32 `[T, N]` -> BF16: fma(scale, delta, base) where slots[t] >= 0."""
    return _op_add_adapter(base, delta, slots, scale)


def linear_gradient(
    dy: Tensor,
    w: Tensor,
    splits: Sequence[int],
    own: Sequence[tuple[int, int]],
    slices: int,
    start: Tensor | None = None,
    fp32_out: bool = True,
) -> Tensor:
    """W^T dy over some of the outputs: dy BF16 or FP32 `[T, sum(splits)]`, w panels `[panels, K, 16]` -> `[T, K]`.

    own: the first output and the number of outputs of every part that count. slices: their chains (the slices of one
    rank); slice s is slice s of each part's own outputs, parts in order. start FP32 `[T, K]` (any row stride; slices
    1): the chain continues it.
    """
    return _op_linear_gradient(dy, w, splits, [i for pair in own for i in pair], slices, start, fp32_out)


def outer(x: Tensor, v: Tensor, slots: Tensor | None, scale: float, grad: Tensor) -> None:
    """grad FP32 panels `[ceil(N/16), K, 16]` (mutated) continues the chain over tokens of fma(x, scale * v, .).

    x BF16 or FP32 `[T, K]`, v BF16 or FP32 `[T, N]` (any row strides). slots int32 `[T]`: only tokens of slot 0.
    """
    _op_outer(x, v, slots, scale, grad)
