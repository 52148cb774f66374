"""Linear layers over panels, with adapters of several slots in one batch, and their autograd.

Rounding points (docs/operators.md, Linear and experts). Forward: y = one chain of FP32 fused multiply-adds over
ascending k from +0.0 (shards 1) or 8 slices of K and their tree (shards 8); bf16(y), or y in FP32. With an adapter, for
part p of a fused projection: t_p = bf16(A_p x) (same shards), y = bf16(fma(scale, chain_r(B t_p), base)); slot -1:
bf16(base). Backward: dt_p = scale * chain_n(B dy_p) in FP32; dx = bf16(chain_n(W dy), parts in order, continued by the
chain over r of A dt). shards_n 8: these chains over n are slices; slice s is slice s of every part, parts in order, so
a rank that owns whole slices of each part owns whole slices of the sum. dA continues chain_t(dt x), dB continues
chain_t((scale dy) t).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import LANES, check_shape, panel_count

_linear = kernel("zm_linear", "piii" + "ppii" + "pppiif" + "pi")
_linear_backward = kernel("zm_linear_backward", "pii" + "piii" + "ppiii" + "pppiif" + "ppp")
_NO_ADAPTER: tuple[Any, ...] = (None, None, None, 0, 0, 0.0)

_BF16, _FP32 = torch.bfloat16, torch.float32
_Adapter = tuple[Tensor, Tensor, Tensor, float]
"""(a, b, slots, scale)"""


@cache
def _layout(splits: tuple[int, ...]) -> tuple[Tensor, int, int]:
    """The sizes as int64, their sum, and the panels of all parts."""
    check(len(splits) > 0 and min(splits) > 0, f"splits: expected sizes of one or more parts, got {splits}")
    return torch.tensor(splits, dtype=torch.int64), sum(splits), sum(map(panel_count, splits))


def _check_weight(w: Tensor, panels: int) -> int:
    """Returns K."""
    shape = w.shape
    k = shape[1] if len(shape) == 3 else 0
    check_shape("w", w, _BF16, (panels, k, LANES))
    return k


def _check_shards(name: str, shards: int) -> None:
    if shards not in (1, 8):
        raise OperatorError(f"{name}: expected 1 or 8, got {shards}")


def _check_adapter(adapter: _Adapter, rows: int, k: int, parts: int, panels: int) -> tuple[Any, ...]:
    """Returns the kernel's arguments a, b, slots, number of slots, rank, scale."""
    a, b, slots, scale = adapter
    if b.dim() != 4 or b.shape[2] % LANES or not b.shape[2]:
        raise OperatorError(f"b: expected [S, {panels}, r, 16] with r a multiple of 16, got {tuple(b.shape)}")
    count, rank = b.shape[0], b.shape[2]
    check_shape("b", b, _BF16, (count, panels, rank, LANES))
    check_shape("a", a, _BF16, (count, parts * rank // LANES, k, LANES))
    check_vector("slots", slots, torch.int32, rows)
    return a, b, slots, count, rank, scale


def _raise_slots(slots: Tensor, count: int) -> None:
    raise OperatorError(f"slots: expected -1 to {count - 1}, got {slots.min().item()} to {slots.max().item()}")


def _linear_impl(
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    shards: int = 1,
    fp32_out: bool = False,
    adapter: _Adapter | None = None,
) -> Tensor:
    sizes, columns, panels = _layout(tuple(splits))
    k = _check_weight(w, panels)
    rows, parts = check_rows("x", x, _BF16, k), len(splits)
    if not (fp32_out and shards in (2, 4)):  # a rank's share of 8 is a partial sum, in FP32
        _check_shards("shards", shards)
    lora = _NO_ADAPTER if adapter is None else _check_adapter(adapter, rows, k, parts, panels)
    y = x.new_empty((rows, columns), dtype=_FP32) if fp32_out else x.new_empty((rows, columns))
    if not x.is_meta and _linear(x, x.stride(0), rows, k, w, sizes, parts, shards, *lora, y, fp32_out) < 0:
        _raise_slots(lora[2], lora[3])
    return y


def _backward(
    dy: Tensor,
    x: Tensor | None,
    w: Tensor,
    adapter: _Adapter | None,
    splits: tuple[int, ...],
    shards: int,
    shards_n: int,
    grad_a: Tensor | None,
    grad_b: Tensor | None,
) -> Tensor:
    sizes, columns, panels = _layout(splits)
    k = _check_weight(w, panels)
    if dy.dtype not in (_BF16, _FP32):
        raise OperatorError(f"dy: expected torch.bfloat16 or torch.float32, got {dy.dtype}")
    rows, parts = check_rows("dy", dy, dy.dtype, columns), len(splits)
    _check_shards("shards", shards)
    _check_shards("shards_n", shards_n)
    lora, x_stride = _NO_ADAPTER, 0
    if adapter is not None and x is not None:
        check(check_rows("x", x, _BF16, k) == rows, f"x: expected {rows} rows, got {x.shape[0]}")
        lora, x_stride = _check_adapter(adapter, rows, k, parts, panels), x.stride(0)
        for name, grad, buffer in (("grad_a", grad_a, adapter[0]), ("grad_b", grad_b, adapter[1])):
            if grad is not None:
                check_shape(name, grad, _FP32, tuple(buffer.shape[1:]))
    dx = dy.new_empty((rows, k), dtype=_BF16)
    if dy.is_meta:
        return dx
    gradients = dy, dy.stride(0), dy.dtype == _FP32
    weights = w, sizes, parts, shards, shards_n
    if _linear_backward(*gradients, x, x_stride, rows, k, *weights, *lora, grad_a, grad_b, dx) < 0:
        _raise_slots(lora[2], lora[3])
    return dx


def _linear_lora_impl(
    x: Tensor, w: Tensor, a: Tensor, b: Tensor, slots: Tensor, scale: float, splits: Sequence[int], shards: int = 1
) -> Tensor:
    return _linear_impl(x, w, splits, shards, False, (a, b, slots, scale))


def _linear_backward_impl(dy: Tensor, w: Tensor, splits: Sequence[int], shards_n: int = 1) -> Tensor:
    return _backward(dy, None, w, None, tuple(splits), 1, shards_n, None, None)


def _linear_lora_backward_impl(
    dy: Tensor,
    x: Tensor,
    w: Tensor,
    a: Tensor,
    b: Tensor,
    slots: Tensor,
    scale: float,
    splits: Sequence[int],
    shards: int,
    shards_n: int,
    grad_a: Tensor | None,
    grad_b: Tensor | None,
) -> Tensor:
    adapter = a, b, slots, scale
    return _backward(dy, x, w, adapter, tuple(splits), shards, shards_n, grad_a, grad_b)


_LORA = "Tensor a, Tensor b, Tensor slots, float scale, int[] splits"
for _schema, _implementation in (
    ("linear(Tensor x, Tensor w, int[] splits, int shards=1, bool fp32_out=False) -> Tensor", _linear_impl),
    (f"linear_lora(Tensor x, Tensor w, {_LORA}, int shards=1) -> Tensor", _linear_lora_impl),
    ("linear_backward(Tensor dy, Tensor w, int[] splits, int shards_n=1) -> Tensor", _linear_backward_impl),
    (
        f"linear_lora_backward(Tensor dy, Tensor x, Tensor w, {_LORA}, int shards, int shards_n, "
        "Tensor(a!)? grad_a, Tensor(b!)? grad_b) -> Tensor",
        _linear_lora_backward_impl,
    ),
):
    register(_schema, _implementation, _implementation)

_op_linear = operator("linear")
_op_linear_lora = operator("linear_lora")
_op_linear_backward = operator("linear_backward")
_op_linear_lora_backward = operator("linear_lora_backward")

ANCHOR = torch.zeros((), requires_grad=True)
"""The base is frozen and adapters are not autograd's parameters, so the input of the first layer needs no gradient.
This makes its output need one, so that its backward runs and fills the adapter's buffers."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        w: Tensor,
        splits: Sequence[int],
        shards: int,
        fp32_out: bool,
        lora: LoraBuffers | None,
        slots: Tensor | None,
        shards_n: int,
    ) -> Tensor:
        ctx.arguments = w, splits, shards, lora, slots, shards_n
        if lora is None:
            return _op_linear(x, w, splits, shards, fp32_out)
        ctx.save_for_backward(x)
        return _op_linear_lora(x, w, lora.a, lora.b, slots, lora.scale, splits, shards)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w, splits, shards, lora, slots, shards_n = ctx.arguments
        if dy.stride(1) != 1:
            dy = dy.contiguous()
        if lora is None:
            dx = _op_linear_backward(dy, w, splits, shards_n)
        else:
            adapter = lora.a, lora.b, slots, lora.scale
            (x,) = ctx.saved_tensors
            dx = _op_linear_lora_backward(dy, x, w, *adapter, splits, shards, shards_n, lora.grad_a, lora.grad_b)
        return (dx if ctx.needs_input_grad[0] else None), *[None] * 8


def linear(
    x: Tensor,
    w: Tensor,
    splits: Sequence[int],
    shards: int = 1,
    fp32_out: bool = False,
    lora: LoraBuffers | None = None,
    slots: Tensor | None = None,
    shards_n: int = 1,
) -> Tensor:
    """x BF16 `[T, K]` (any row stride), w BF16 panels `[panels, K, 16]` -> BF16 (or FP32) `[T, sum(splits)]`.

    splits: true sizes of the parts of a fused projection. shards 8: K can be sharded over ranks (row-parallel); 4 or 2,
    with fp32_out: the share of one of 2 or 4 ranks. shards_n 8: N can be (column-parallel), which orders the input
    gradient. lora with slots int32 `[T]` (-1: no adapter): adapters; the output is BF16. Differentiable in x only; the
    gradients of the adapter of slot 0 go to `lora`'s buffers. Rounding points: see the module.
    """
    if lora is not None and (slots is None or fp32_out):
        check(slots is not None, "slots: an adapter needs the slot of every token")
        check(not fp32_out, "fp32_out: an adapted layer has BF16 outputs")
    if torch.is_grad_enabled() and (x.requires_grad or (lora is not None and lora.wants_gradients)):
        return _Linear.apply(x, ANCHOR, w, splits, shards, fp32_out, lora, slots, shards_n)
    if lora is None:
        return _op_linear(x, w, splits, shards, fp32_out)
    return _op_linear_lora(x, w, lora.a, lora.b, slots, lora.scale, splits, shards)
