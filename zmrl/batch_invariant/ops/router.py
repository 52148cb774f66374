"""The expert router (specification 3.2): sigmoid scores, exact top-k of the biased scores, renormalised weights.

Rounding points: FP32 throughout, none to BF16. s = sigmoid(logits); order: s + bias descending, then id ascending, NaN
last; weights_j = (s_j/(lanes over the chosen s, ids ascending, + 1e-20))*scale. Backward: sum as there,
c = lanes(dw*s)/sum, dlogits = ((scale*(dw - c))/sum)*(s*(1-s)) where chosen, else 0; the bias gets no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel

MAX_EXPERTS = 4096
MAX_TOPK = 128

_router = kernel("zm_router", "pippppiiif")
_router_backward = kernel("zm_router_backward", "pipppiiif")

_FP32, _INT32 = torch.float32, torch.int32


def _router_check(
    logits: Tensor, bias: Tensor, topk: int, scale: float, flags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_rows("logits", logits, _FP32)
    rows, experts = logits.shape
    if not 1 <= experts <= MAX_EXPERTS:
        raise OperatorError(f"logits: expected 1 to {MAX_EXPERTS} experts, got {experts}")
    check_vector("bias", bias, _FP32, experts)
    if not 1 <= topk <= min(experts, MAX_TOPK):
        raise OperatorError(f"topk: expected 1 to {min(experts, MAX_TOPK)}, got {topk}")
    if flags is not None:
        check_vector("flags", flags, _INT32, rows)
    ids = torch.empty((rows, topk), dtype=_INT32, device=logits.device)
    return ids, torch.empty((rows, topk), dtype=_FP32, device=logits.device)


def _router_cpu(
    logits: Tensor, bias: Tensor, topk: int, scale: float, flags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    ids, weights = _router_check(logits, bias, topk, scale, flags)
    _router(logits, logits.stride(0), bias, ids, weights, flags, *logits.shape, topk, scale)
    return ids, weights


def _router_backward_meta(logits: Tensor, ids: Tensor, dweights: Tensor, scale: float) -> Tensor:
    check_rows("logits", logits, _FP32)
    check_rows("ids", ids, _INT32)
    rows, topk = logits.shape[0], ids.shape[1]
    if not 1 <= topk <= MAX_TOPK:
        raise OperatorError(f"ids: expected 1 to {MAX_TOPK} columns, got {topk}")
    for name, tensor, dtype in (("ids", ids, _INT32), ("dweights", dweights, _FP32)):
        if tensor.dtype != dtype or tuple(tensor.shape) != (rows, topk) or not tensor.is_contiguous():
            raise OperatorError(
                f"{name}: expected {dtype} [{rows}, {topk}] contiguous, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    return torch.empty(logits.shape, dtype=_FP32, device=logits.device)


def _router_backward_cpu(logits: Tensor, ids: Tensor, dweights: Tensor, scale: float) -> Tensor:
    dlogits = _router_backward_meta(logits, ids, dweights, scale)
    if _router_backward(logits, logits.stride(0), ids, dweights, dlogits, *logits.shape, ids.shape[1], scale) < 0:
        raise OperatorError(f"ids: an expert must lie in 0 to {logits.shape[1] - 1}")
    return dlogits


register(
    "router(Tensor logits, Tensor bias, int topk, float scale, Tensor(a!)? flags=None) -> (Tensor, Tensor)",
    _router_cpu,
    _router_check,
)
register(
    "router_backward(Tensor logits, Tensor ids, Tensor dweights, float scale) -> Tensor",
    _router_backward_cpu,
    _router_backward_meta,
)

_op_router = operator("router")
_op_router_backward = operator("router_backward")


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, topk, scale, flags):
        ids, weights = _op_router(logits, bias, topk, scale, flags)
        ctx.mark_non_differentiable(ids)
        ctx.save_for_backward(logits, ids)
        ctx.scale = scale
        return ids, weights

    @staticmethod
    def backward(ctx, _, dweights):
        return _op_router_backward(*ctx.saved_tensors, dweights.contiguous(), ctx.scale), None, None, None, None


def router(logits: Tensor, bias: Tensor, topk: int, scale: float, flags: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits FP32 [T, E] (any row stride), bias FP32 [E] -> (ids int32 [T, topk] ascending, weights FP32 [T, topk]).

    flags int32 [T]: set to 1 where a biased score is NaN, else left alone. Differentiable: logits through the weights.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return _Router.apply(logits, bias, topk, scale, flags)
    return _op_router(logits, bias, topk, scale, flags)
