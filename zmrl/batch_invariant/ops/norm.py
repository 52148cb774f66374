"""Row norms. Statistics are in FP32, sums over a row are `lanes` (numerics.md rule 4); weights get no gradient.

Rounding points: one, of the result. rms_norm: inv = 1/sqrt(lanes(x*x)/N + eps), y = bf16((x*inv)*w).
rms_norm_gated: per head of D, y = bf16(((o*inv)*w)*sigmoid(z)).
layer_norm: m = lanes(x)/N, y = fma((x-m)/sqrt(lanes((x-m)^2)/N + eps), w, b) in FP32.
Backward in FP32 to one rounding per result: with g = dy*w (gated: (dy*sigmoid(z))*w),
dx = bf16((g - x*(((lanes(g*x)*inv)*inv)/N))*inv), dz = bf16((dy*((o*inv)*w))*(s*(1-s))), s = sigmoid(z).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.rows import as_rows, check_matrix

_rms_norm = kernel("zm_rms_norm", "pipipiif")
_rms_norm_backward = kernel("zm_rms_norm_backward", "pipipipiif")
_rms_norm_gated = kernel("zm_rms_norm_gated", "pippipiiif")
_rms_norm_gated_backward = kernel("zm_rms_norm_gated_backward", "pipippippiiif")
_layer_norm = kernel("zm_layer_norm", "pippipiif")

_BF16, _FP32 = torch.bfloat16, torch.float32


def _check_weight(name: str, w: Tensor, length: int) -> None:
    if w.dtype not in (_BF16, _FP32):
        raise OperatorError(f"{name}: expected torch.bfloat16 or torch.float32, got {w.dtype}")
    check_vector(name, w, w.dtype, length)


def _rms_norm_meta(x: Tensor, w: Tensor, eps: float) -> Tensor:
    check_rows("x", x, _BF16)
    _check_weight("w", w, x.shape[1])
    return torch.empty(x.shape, dtype=_BF16, device=x.device)


def _rms_norm_cpu(x: Tensor, w: Tensor, eps: float) -> Tensor:
    y = _rms_norm_meta(x, w, eps)
    _rms_norm(x, x.stride(0), w, w.dtype == _FP32, y, *x.shape, eps)
    return y


def _rms_norm_backward_meta(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    dx = _rms_norm_meta(x, w, eps)
    check_matrix("dy", dy, _BF16, *x.shape)
    return dx


def _rms_norm_backward_cpu(dy: Tensor, x: Tensor, w: Tensor, eps: float) -> Tensor:
    dx = _rms_norm_backward_meta(dy, x, w, eps)
    _rms_norm_backward(dy, dy.stride(0), x, x.stride(0), w, w.dtype == _FP32, dx, *x.shape, eps)
    return dx


def _rms_norm_gated_meta(o: Tensor, w: Tensor, z: Tensor, eps: float) -> Tensor:
    check_rows("o", o, _BF16)
    check_matrix("z", z, _BF16, *o.shape)
    if w.dim() != 1 or w.shape[0] == 0:
        raise OperatorError(f"w: expected torch.float32 [D], got {tuple(w.shape)}")
    check_vector("w", w, _FP32, w.shape[0])
    if o.shape[1] % w.shape[0]:
        raise OperatorError(f"o: {o.shape[1]} columns are no multiple of the head width {w.shape[0]} of w")
    return torch.empty(o.shape, dtype=_BF16, device=o.device)


def _rms_norm_gated_cpu(o: Tensor, w: Tensor, z: Tensor, eps: float) -> Tensor:
    y = _rms_norm_gated_meta(o, w, z, eps)
    rows, (columns, d) = o.shape[0], (o.shape[1], w.shape[0])
    _rms_norm_gated(o, o.stride(0), w, z, z.stride(0), y, rows, columns // d, d, eps)
    return y


def _rms_norm_gated_backward_meta(dy: Tensor, o: Tensor, w: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_o = _rms_norm_gated_meta(o, w, z, eps)
    check_matrix("dy", dy, _BF16, *o.shape)
    return grad_o, torch.empty(o.shape, dtype=_BF16, device=o.device)


def _rms_norm_gated_backward_cpu(dy: Tensor, o: Tensor, w: Tensor, z: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    grad_o, grad_z = _rms_norm_gated_backward_meta(dy, o, w, z, eps)
    rows, (columns, d) = o.shape[0], (o.shape[1], w.shape[0])
    _rms_norm_gated_backward(
        dy, dy.stride(0), o, o.stride(0), w, z, z.stride(0), grad_o, grad_z, rows, columns // d, d, eps
    )  # fmt: skip
    return grad_o, grad_z


def _layer_norm_meta(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    check_rows("x", x, _BF16)
    _check_weight("w", w, x.shape[1])
    check_vector("b", b, w.dtype, x.shape[1])
    return torch.empty(x.shape, dtype=_FP32, device=x.device)


def _layer_norm_cpu(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    y = _layer_norm_meta(x, w, b, eps)
    _layer_norm(x, x.stride(0), w, b, w.dtype == _FP32, y, *x.shape, eps)
    return y


register("rms_norm(Tensor x, Tensor w, float eps) -> Tensor", _rms_norm_cpu, _rms_norm_meta)
register(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor w, float eps) -> Tensor",
    _rms_norm_backward_cpu,
    _rms_norm_backward_meta,
)
register("rms_norm_gated(Tensor o, Tensor w, Tensor z, float eps) -> Tensor", _rms_norm_gated_cpu, _rms_norm_gated_meta)
register(
    "rms_norm_gated_backward(Tensor dy, Tensor o, Tensor w, Tensor z, float eps) -> (Tensor, Tensor)",
    _rms_norm_gated_backward_cpu,
    _rms_norm_gated_backward_meta,
)
register("layer_norm(Tensor x, Tensor w, Tensor b, float eps) -> Tensor", _layer_norm_cpu, _layer_norm_meta)

_op_rms_norm = operator("rms_norm")
_op_rms_norm_backward = operator("rms_norm_backward")
_op_rms_norm_gated = operator("rms_norm_gated")
_op_rms_norm_gated_backward = operator("rms_norm_gated_backward")
_op_layer_norm = operator("layer_norm")


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return _op_rms_norm(x, w, eps)

    @staticmethod
    def backward(ctx, dy):
        return _op_rms_norm_backward(as_rows(dy), *ctx.saved_tensors, ctx.eps), None, None


class _RmsNormGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, w, z, eps):
        ctx.save_for_backward(o, w, z)
        ctx.eps = eps
        return _op_rms_norm_gated(o, w, z, eps)

    @staticmethod
    def backward(ctx, dy):
        grad_o, grad_z = _op_rms_norm_gated_backward(as_rows(dy), *ctx.saved_tensors, ctx.eps)
        return grad_o, None, grad_z, None


def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x BF16 [T, N] (any row stride), w BF16 or FP32 [N] -> BF16 [T, N]. Differentiable in x."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _RmsNorm.apply(x, w, eps)
    return _op_rms_norm(x, w, eps)


def rms_norm_gated(o: Tensor, w: Tensor, z: Tensor, eps: float) -> Tensor:
    """o, z BF16 [T, H*D] (any row strides), w FP32 [D] -> BF16 [T, H*D]: norm per head, times sigmoid(z).

    Differentiable in o and z.
    """
    if torch.is_grad_enabled() and (o.requires_grad or z.requires_grad):
        return _RmsNormGated.apply(o, w, z, eps)
    return _op_rms_norm_gated(o, w, z, eps)


def layer_norm(x: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """x BF16 [T, N] (any row stride), w and b both BF16 or both FP32 [N] -> FP32 [T, N]. Not differentiable."""
    return _op_layer_norm(x.detach(), w, b, eps)
