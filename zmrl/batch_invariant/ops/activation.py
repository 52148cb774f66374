"""Elementwise activations, FP32 inside.

Rounding points: one, of the result. situ: bf16((((beta*tanh(g/beta))*sigmoid(g))*linear_beta)*tanh(u/linear_beta)), g
and u the halves of a row; an infinite beta (or linear_beta) leaves g (or u) itself in place of its scaled tanh, so that
both infinite is SiLU: bf16((g*sigmoid(g))*u). gate_mul: bf16(o*sigmoid(z)). Backward: one rounding per gradient
(csrc/situ.h, csrc/activation.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.rows import as_rows, check_matrix

_situ = kernel("zm_situ", "pipiiff")
_situ_backward = kernel("zm_situ_backward", "pipipiiff")
_gate_mul = kernel("zm_gate_mul", "pipipii")
_gate_mul_backward = kernel("zm_gate_mul_backward", "pipipippii")

_BF16 = torch.bfloat16


def _situ_meta(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    check_rows("gate_up", gate_up, _BF16)
    rows, columns = gate_up.shape
    if columns % 2:
        raise OperatorError(f"gate_up: expected an even number of columns (gate, up), got {columns}")
    if not (beta > 0 and linear_beta > 0):
        raise OperatorError(f"beta: expected positive numbers, got beta {beta}, linear_beta {linear_beta}")
    return torch.empty((rows, columns // 2), dtype=_BF16, device=gate_up.device)


def _situ_cpu(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    y = _situ_meta(gate_up, beta, linear_beta)
    _situ(gate_up, gate_up.stride(0), y, *y.shape, beta, linear_beta)
    return y


def _situ_backward_meta(dy: Tensor, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    check_matrix("dy", dy, _BF16, *_situ_meta(gate_up, beta, linear_beta).shape)
    return torch.empty(gate_up.shape, dtype=_BF16, device=gate_up.device)


def _situ_backward_cpu(dy: Tensor, gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    dx = _situ_backward_meta(dy, gate_up, beta, linear_beta)
    _situ_backward(dy, dy.stride(0), gate_up, gate_up.stride(0), dx, *dy.shape, beta, linear_beta)
    return dx


def _gate_mul_meta(o: Tensor, z: Tensor) -> Tensor:
    check_rows("o", o, _BF16)
    check_matrix("z", z, _BF16, *o.shape)
    return torch.empty(o.shape, dtype=_BF16, device=o.device)


def _gate_mul_cpu(o: Tensor, z: Tensor) -> Tensor:
    y = _gate_mul_meta(o, z)
    _gate_mul(o, o.stride(0), z, z.stride(0), y, *o.shape)
    return y


def _gate_mul_backward_meta(dy: Tensor, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    grad_o = _gate_mul_meta(o, z)
    check_matrix("dy", dy, _BF16, *o.shape)
    return grad_o, torch.empty(o.shape, dtype=_BF16, device=o.device)


def _gate_mul_backward_cpu(dy: Tensor, o: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    grad_o, grad_z = _gate_mul_backward_meta(dy, o, z)
    _gate_mul_backward(dy, dy.stride(0), o, o.stride(0), z, z.stride(0), grad_o, grad_z, *o.shape)
    return grad_o, grad_z


register("situ(Tensor gate_up, float beta, float linear_beta) -> Tensor", _situ_cpu, _situ_meta)
register(
    "situ_backward(Tensor dy, Tensor gate_up, float beta, float linear_beta) -> Tensor",
    _situ_backward_cpu,
    _situ_backward_meta,
)
register("gate_mul(Tensor o, Tensor z) -> Tensor", _gate_mul_cpu, _gate_mul_meta)
register(
    "gate_mul_backward(Tensor dy, Tensor o, Tensor z) -> (Tensor, Tensor)",
    _gate_mul_backward_cpu,
    _gate_mul_backward_meta,
)

_op_situ = operator("situ")
_op_situ_backward = operator("situ_backward")
_op_gate_mul = operator("gate_mul")
_op_gate_mul_backward = operator("gate_mul_backward")


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, beta, linear_beta):
        ctx.save_for_backward(gate_up)
        ctx.betas = beta, linear_beta
        return _op_situ(gate_up, beta, linear_beta)

    @staticmethod
    def backward(ctx, dy):
        return _op_situ_backward(as_rows(dy), *ctx.saved_tensors, *ctx.betas), None, None


class _GateMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, z):
        ctx.save_for_backward(o, z)
        return _op_gate_mul(o, z)

    @staticmethod
    def backward(ctx, dy):
        return _op_gate_mul_backward(as_rows(dy), *ctx.saved_tensors)


def situ(gate_up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """gate_up BF16 [T, 2I] (gate, then up; any row stride) -> BF16 [T, I]. Differentiable in gate_up.

    Both betas infinite: SiLU(gate) * up.
    """
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _Situ.apply(gate_up, beta, linear_beta)
    return _op_situ(gate_up, beta, linear_beta)


def gate_mul(o: Tensor, z: Tensor) -> Tensor:
    """o, z BF16 [T, N] (any row strides) -> BF16 [T, N]: o * sigmoid(z). Differentiable in both."""
    if torch.is_grad_enabled() and (o.requires_grad or z.requires_grad):
        return _GateMul.apply(o, z)
    return _op_gate_mul(o, z)
