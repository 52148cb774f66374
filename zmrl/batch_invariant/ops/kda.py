"""Kimi Delta Attention (specification 2.1) and its short convolution, over packed sequences with state in slots.

The token-by-token recurrence in an FP32 state is the definition (numerics.md): a sequence fed in any chunks, its state
carried, has the bits of the whole. Everything is FP32 inside; rounding points: one, of the result.

short_conv: c = chain over j of fma(w[c,j], x[t-3+j], .) from +0.0, y = bf16(c*sigmoid(c)).
kda, per head of D: qn = q*((1/sqrt(D))/sqrt(lanes(q*q) + 1e-6)), kn = k*(1/sqrt(lanes(k*k) + 1e-6)),
alpha = exp(lower_bound*sigmoid(exp(a_log)*(f + dt_bias))), without a bound exp(-exp(a_log)*softplus(f + dt_bias)),
beta = sigmoid(b); S~ = alpha*S (rounded); u = beta*(v - chain over k of fma(S~, kn, .)); S = fma(kn, u, S~);
o = bf16(chain over k of fma(S, qn, .)). A decay is only ever multiplied by, never divided by, and lies in [0, 1]: the
recurrence is finite whatever its strength.

Backward: whole sequences from a zero state; one rounding per gradient (csrc/conv.cpp, csrc/kda_backward.cpp). States
are recomputed from a forward sweep that keeps every 32nd; nothing is divided by a decay. Weights, a_log and dt_bias are
frozen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.rows import as_rows, check_matrix
from zmrl.batch_invariant.ops.sequences import (
    check_cu_seqlens,
    check_starts_from_zero,
    check_state,
    check_status,
)

CONV_WIDTH = 4
MAX_HEAD_DIM = 128

_short_conv = kernel("zm_short_conv", "pipppppiipiii")
_short_conv_backward = kernel("zm_short_conv_backward", "pipipppiii")
_kda = kernel("zm_kda", "pipipipipippfppppiipiiii")
_kda_backward = kernel("zm_kda_backward", "pipipipipipippfppppppiiii")

_BF16, _FP32 = torch.bfloat16, torch.float32


def _check_conv(x: Tensor, w: Tensor, cu_seqlens: Tensor) -> int:
    """Returns the number of requests."""
    check_rows("x", x, _BF16)
    if w.dtype != _FP32 or w.shape != (x.shape[1], CONV_WIDTH) or not w.is_contiguous():
        raise OperatorError(
            f"w: expected torch.float32 [{x.shape[1]}, {CONV_WIDTH}] contiguous, got {w.dtype} {tuple(w.shape)}"
        )
    return check_cu_seqlens(cu_seqlens)


def _short_conv_cpu(
    x: Tensor,
    w: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor | None = None,
    state_in: Tensor | None = None,
    state_out: Tensor | None = None,
) -> Tensor:
    y, requests, stride, slots = _short_conv_check(x, w, cu_seqlens, conv_state, state_in, state_out)
    status = _short_conv(
        x, x.stride(0), w, cu_seqlens, state_in, state_out, conv_state, stride, slots, y, *x.shape, requests
    )
    check_status(status)
    return y


def _short_conv_check(
    x: Tensor,
    w: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor | None,
    state_in: Tensor | None,
    state_out: Tensor | None,
) -> tuple[Tensor, int, int, int]:
    """Returns (output, requests, slot stride, slots)."""
    requests = _check_conv(x, w, cu_seqlens)
    inner = (CONV_WIDTH - 1, x.shape[1])
    stride, slots = check_state("conv_state", conv_state, inner, _BF16, (state_in, state_out), requests)
    return torch.empty(x.shape, dtype=_BF16, device=x.device), requests, stride, slots


def _short_conv_backward_meta(dy: Tensor, x: Tensor, w: Tensor, cu_seqlens: Tensor) -> Tensor:
    _check_conv(x, w, cu_seqlens)
    check_matrix("dy", dy, _BF16, *x.shape)
    return torch.empty(x.shape, dtype=_BF16, device=x.device)


def _short_conv_backward_cpu(dy: Tensor, x: Tensor, w: Tensor, cu_seqlens: Tensor) -> Tensor:
    dx = _short_conv_backward_meta(dy, x, w, cu_seqlens)
    requests = cu_seqlens.shape[0] - 1
    check_status(_short_conv_backward(dy, dy.stride(0), x, x.stride(0), w, cu_seqlens, dx, *x.shape, requests))
    return dx


_NO_BOUND = 0.0
"""What the kernels take for a lower bound that is None."""


def _check_kda(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    cu_seqlens: Tensor,
) -> tuple[int, int, int]:  # fmt: skip
    """Returns (heads, head dimension, requests)."""
    if lower_bound is not None and not lower_bound < 0:
        raise OperatorError(f"lower_bound: expected a negative number or None, got {lower_bound}")
    check_rows("q", q, _BF16)
    check_rows("b", b, _BF16)
    (rows, columns), heads = q.shape, b.shape[1]
    if heads == 0 or columns % heads:
        raise OperatorError(f"q: {columns} columns are no multiple of the {heads} heads of b")
    dim = columns // heads
    if dim % 8 or not 8 <= dim <= MAX_HEAD_DIM:
        raise OperatorError(f"q: expected a head width that is a multiple of 8 up to {MAX_HEAD_DIM}, got {dim}")
    check_matrix("b", b, _BF16, rows, heads)
    check_matrix("k", k, _BF16, rows, columns)
    check_matrix("v", v, _BF16, rows, columns)
    check_matrix("f", f, _BF16, rows, columns)
    check_vector("a_log", a_log, _FP32, heads)
    check_vector("dt_bias", dt_bias, _FP32, columns)
    return heads, dim, check_cu_seqlens(cu_seqlens)


def _kda_check(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    cu_seqlens: Tensor, state: Tensor | None, state_in: Tensor | None,
    state_out: Tensor | None,
) -> tuple[Tensor, tuple[int, int, int], tuple[int, int]]:  # fmt: skip
    """Returns (output, (heads, head dimension, requests), (slot stride, slots))."""
    sizes = _check_kda(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens)
    heads, dim, requests = sizes
    slots = check_state("state", state, (heads, dim, dim), _FP32, (state_in, state_out), requests)
    return torch.empty(q.shape, dtype=_BF16, device=q.device), sizes, slots


def _kda_cpu(
    q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None,
    cu_seqlens: Tensor, state: Tensor | None = None, state_in: Tensor | None = None, state_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    o, sizes, slots = _kda_check(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens, state, state_in, state_out)
    status = _kda(
        q, q.stride(0), k, k.stride(0), v, v.stride(0), f, f.stride(0), b, b.stride(0), a_log, dt_bias,
        lower_bound or _NO_BOUND, cu_seqlens, state_in, state_out, state, *slots, o, q.shape[0], *sizes,
    )  # fmt: skip
    check_status(status)
    return o


def _kda_backward_meta(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, cu_seqlens: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    _check_kda(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens)
    check_matrix("do", do, _BF16, *q.shape)
    return tuple(torch.empty(t.shape, dtype=_BF16, device=t.device) for t in (q, k, v, f, b))


def _kda_backward_cpu(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, f: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None, cu_seqlens: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = _kda_backward_meta(do, q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens)
    heads = b.shape[1]
    status = _kda_backward(
        do, do.stride(0), q, q.stride(0), k, k.stride(0), v, v.stride(0), f, f.stride(0), b, b.stride(0), a_log,
        dt_bias, lower_bound or _NO_BOUND, cu_seqlens, *grads, q.shape[0], heads, q.shape[1] // heads,
        cu_seqlens.shape[0] - 1,
    )  # fmt: skip
    check_status(status)
    return grads


register(
    "short_conv(Tensor x, Tensor w, Tensor cu_seqlens, Tensor(a!)? conv_state=None, Tensor? state_in=None, "
    "Tensor? state_out=None) -> Tensor",
    _short_conv_cpu,
    lambda *arguments: _short_conv_check(*arguments, *[None] * (6 - len(arguments)))[0],
)
register(
    "short_conv_backward(Tensor dy, Tensor x, Tensor w, Tensor cu_seqlens) -> Tensor",
    _short_conv_backward_cpu,
    _short_conv_backward_meta,
)
register(
    "kda(Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor a_log, Tensor dt_bias, float? lower_bound, "
    "Tensor cu_seqlens, Tensor(a!)? state=None, Tensor? state_in=None, Tensor? state_out=None) -> Tensor",
    _kda_cpu,
    lambda *arguments: _kda_check(*arguments, *[None] * (12 - len(arguments)))[0],
)
register(
    "kda_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor f, Tensor b, Tensor a_log, Tensor dt_bias, "
    "float? lower_bound, Tensor cu_seqlens) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _kda_backward_cpu,
    _kda_backward_meta,
)

_op_short_conv = operator("short_conv")
_op_short_conv_backward = operator("short_conv_backward")
_op_kda = operator("kda")
_op_kda_backward = operator("kda_backward")


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, cu_seqlens, *state):
        ctx.save_for_backward(x, w, cu_seqlens)
        return _op_short_conv(x, w, cu_seqlens, *state)

    @staticmethod
    def backward(ctx, dy):
        return _op_short_conv_backward(as_rows(dy), *ctx.saved_tensors), *[None] * 5


class _Kda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens, *state):
        ctx.save_for_backward(q, k, v, f, b, a_log, dt_bias, cu_seqlens)
        ctx.lower_bound = lower_bound
        return _op_kda(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens, *state)

    @staticmethod
    def backward(ctx, do):
        *inputs, cu_seqlens = ctx.saved_tensors
        return *_op_kda_backward(as_rows(do), *inputs, ctx.lower_bound, cu_seqlens), *[None] * 7


def short_conv(
    x: Tensor,
    w: Tensor,
    cu_seqlens: Tensor,
    conv_state: Tensor | None = None,
    state_in: Tensor | None = None,
    state_out: Tensor | None = None,
) -> Tensor:
    """Causal depthwise convolution of width 4, then SiLU: x BF16 [T, C] (any row stride), w FP32 [C, 4] -> BF16 [T, C].

    cu_seqlens int32 [R + 1]. conv_state BF16 [slots, 3, C] (any slot stride) holds the last 3 inputs of a sequence;
    state_in, state_out int32 [R]: the slot a request continues from (-1: it starts here) and the slot its state goes to
    (-1: dropped), the same or different; no slot may be written by one request and used by another. Differentiable in
    x, for whole sequences. Rounding points: see the module.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        check_starts_from_zero(state_in)
        return _ShortConv.apply(x, w, cu_seqlens, conv_state, state_in, state_out)
    return _op_short_conv(x, w, cu_seqlens, conv_state, state_in, state_out)


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    cu_seqlens: Tensor,
    state: Tensor | None = None,
    state_in: Tensor | None = None,
    state_out: Tensor | None = None,
) -> Tensor:
    """q, k, v, f BF16 [T, H*D], b BF16 [T, H] (any row strides), a_log FP32 [H], dt_bias FP32 [H*D] -> BF16 [T, H*D].

    D a multiple of 8 up to 128. lower_bound: of the log-decay, negative; None: softplus decay, unbounded. state FP32
    [slots, H, K, V], K = V = D, any slot stride; cu_seqlens, state_in and state_out as for `short_conv`. Differentiable
    in q, k, v, f and b, for whole sequences. Rounding points: see the module.
    """
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v, f, b)):
        check_starts_from_zero(state_in)
        return _Kda.apply(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens, state, state_in, state_out)
    return _op_kda(q, k, v, f, b, a_log, dt_bias, lower_bound, cu_seqlens, state, state_in, state_out)
