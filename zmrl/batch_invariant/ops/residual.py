"""The residual stream (specification 3.1): its additions, and a softmax over the sources of a row that mixes them.

Rounding points: one, of the result. q = norm*proj, exact in FP32; inv_j = 1/sqrt(lanes(v_j*v_j)/N + eps),
a_j = lanes(v_j*q)*inv_j, p = softmax(a): maximum, exp, `lanes` over j, division; y = bf16(chain over j of
fma(p_j, v_j, .)) from +0.0.
Backward (norm and proj are frozen): r_j = lanes(dy*v_j), c = chain over j of fma(p_j, r_j, .), da_j = p_j*(r_j - c),
dv_j = bf16(fma(p_j, dy, fma(da_j*inv_j, q, -((((da_j*a_j)*inv_j)*inv_j)/N)*v_j))).
residual_add: bf16(a + b), in a kernel since torch's addition obeys flush-to-zero flags that a host may have set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import Int64Array, kernel
from zmrl.batch_invariant.ops.rows import as_rows, check_matrix

MAX_SOURCES = 64

_attn_res_mix = kernel("zm_attn_res_mix", "ppipppiif")
_attn_res_mix_backward = kernel("zm_attn_res_mix_backward", "pippipppiif")
_residual_add = kernel("zm_residual_add", "pipipii")

_BF16 = torch.bfloat16


def _pointers(tensors: Sequence[Tensor]) -> Int64Array:
    return Int64Array(t.data_ptr() for t in tensors)


def _strides(tensors: Sequence[Tensor]) -> Int64Array:
    return Int64Array(t.stride(0) for t in tensors)


def _attn_res_mix_meta(norm: Tensor, proj: Tensor, sources: Sequence[Tensor], eps: float) -> Tensor:
    if not 1 <= len(sources) <= MAX_SOURCES:
        raise OperatorError(f"sources: expected 1 to {MAX_SOURCES}, got {len(sources)}")
    check_rows("sources[0]", sources[0], _BF16)
    rows, columns = sources[0].shape
    for j, source in enumerate(sources):
        if source.shape != (rows, columns) or source.dtype != _BF16 or (columns > 1 and source.stride(1) != 1):
            check_matrix(f"sources[{j}]", source, _BF16, rows, columns)
    check_vector("norm", norm, _BF16, columns)
    check_vector("proj", proj, _BF16, columns)
    return torch.empty((rows, columns), dtype=_BF16, device=norm.device)


def _attn_res_mix_cpu(norm: Tensor, proj: Tensor, sources: Sequence[Tensor], eps: float) -> Tensor:
    y = _attn_res_mix_meta(norm, proj, sources, eps)
    if len(sources) == 1:
        return y.copy_(sources[0])
    _attn_res_mix(_pointers(sources), _strides(sources), len(sources), norm, proj, y, *y.shape, eps)
    return y


def _attn_res_mix_backward_meta(
    dy: Tensor, sources: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float
) -> list[Tensor]:
    y = _attn_res_mix_meta(norm, proj, sources, eps)
    check_matrix("dy", dy, _BF16, *y.shape)
    return [torch.empty(y.shape, dtype=_BF16, device=y.device) for _ in sources]


def _attn_res_mix_backward_cpu(
    dy: Tensor, sources: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float
) -> list[Tensor]:
    grads = _attn_res_mix_backward_meta(dy, sources, norm, proj, eps)
    if len(sources) == 1:
        return [grads[0].copy_(dy)]
    _attn_res_mix_backward(
        dy, dy.stride(0), _pointers(sources), _strides(sources), len(sources), norm, proj, _pointers(grads), *dy.shape,
        eps,
    )  # fmt: skip
    return grads


register(
    "attn_res_mix(Tensor norm, Tensor proj, Tensor[] sources, float eps) -> Tensor",
    _attn_res_mix_cpu,
    _attn_res_mix_meta,
)
register(
    "attn_res_mix_backward(Tensor dy, Tensor[] sources, Tensor norm, Tensor proj, float eps) -> Tensor[]",
    _attn_res_mix_backward_cpu,
    _attn_res_mix_backward_meta,
)


def _residual_add_meta(a: Tensor, b: Tensor) -> Tensor:
    check_rows("a", a, _BF16)
    check_matrix("b", b, _BF16, *a.shape)
    return torch.empty(a.shape, dtype=_BF16, device=a.device)


def _residual_add_cpu(a: Tensor, b: Tensor) -> Tensor:
    y = _residual_add_meta(a, b)
    _residual_add(a, a.stride(0), b, b.stride(0), y, *a.shape)
    return y


register("residual_add(Tensor a, Tensor b) -> Tensor", _residual_add_cpu, _residual_add_meta)

_op_residual_add = operator("residual_add")
_op_attn_res_mix = operator("attn_res_mix")
_op_attn_res_mix_backward = operator("attn_res_mix_backward")


class _AttnResMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, norm, proj, eps, *sources):
        ctx.save_for_backward(norm, proj, *sources)
        ctx.eps = eps
        return _op_attn_res_mix(norm, proj, sources, eps)

    @staticmethod
    def backward(ctx, dy):
        norm, proj, *sources = ctx.saved_tensors
        return None, None, None, *_op_attn_res_mix_backward(as_rows(dy), sources, norm, proj, ctx.eps)


def attn_res_mix(sources: Sequence[Tensor], norm: Tensor, proj: Tensor, eps: float) -> Tensor:
    """sources: up to 64 of BF16 [T, N] (any row strides), norm and proj BF16 [N] -> BF16 [T, N].

    Differentiable in the sources. One source is returned itself, not a copy: its bits are untouched.
    """
    if len(sources) == 1:
        return sources[0]
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        return _AttnResMix.apply(norm, proj, eps, *sources)
    return _op_attn_res_mix(norm, proj, sources, eps)


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        return _op_residual_add(a, b)

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


def residual_add(a: Tensor, b: Tensor) -> Tensor:
    """BF16 [T, N] + BF16 [T, N] (any row strides) -> BF16 [T, N], rounded once. Differentiable."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _ResidualAdd.apply(a, b)
    return _op_residual_add(a, b)
