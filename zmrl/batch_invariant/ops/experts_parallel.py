"""The experts of one rank for the tokens of all ranks, and the sums of their owners (`zmrl/parallel/experts.py`).

Orders and rounding points are those of `ops/experts.py`, of which these are the pieces: r_j and dz_j leave a rank in
FP32, unweighted and unsummed, and the owner of a token sums over its experts in ascending id and rounds once.

A pair is one expert of one token: `rows` int32 `[n]` is the row of z, `ids` int32 `[n]` the expert among the rank's.
Pairs of one expert come in token order, which is the order of the adapters' gradient chains.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.experts import (
    Bf16ExpertWeights,
    ExpertWeights,
    check_adapters,
    check_weights,
    weight_pointers,
)
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.panels import check_shape

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_WEIGHTS, _ADAPTERS = "pppppp" + "iii" + "ff", "pppppp" + "piif"
_expert_results = kernel("zm_expert_results", "pipip" + _WEIGHTS + _ADAPTERS + "p")
_combine_experts = kernel("zm_combine_experts", "pippiip")
_backward = kernel("zm_expert_results_backward", "pi" + "pipipp" + _WEIGHTS + _ADAPTERS + "pppppp" + "pp")
_NO_ADAPTERS = (*[None] * 7, 0, 0, 0.0)


def _check_pairs(z: Tensor, rows: Tensor, ids: Tensor, latent: int) -> int:
    """Returns the number of pairs."""
    check_rows("z", z, _BF16, latent)
    count = rows.shape[0]
    check_vector("rows", rows, _INT32, count)
    check_vector("ids", ids, _INT32, count)
    if count and not rows.is_meta and not 0 <= int(rows.min()) <= int(rows.max()) < z.shape[0]:
        raise OperatorError(f"rows: expected 0 to {z.shape[0] - 1}, got {int(rows.min())} to {int(rows.max())}")
    return count


def _raise(status: int, experts: int) -> None:
    if status == -1:
        raise OperatorError("slots: a pair has a slot that the adapters do not have")
    raise OperatorError(f"ids: expected experts 0 to {experts - 1}")


def _adapters(
    ab: Sequence[Tensor], slots: Tensor | None, scale: float, count: int, experts: int, latent: int, width: int
) -> tuple:
    if not len(ab):
        return _NO_ADAPTERS
    if slots is None:
        raise OperatorError("slots: adapters need the slot of every pair")
    return check_adapters((ab, slots, scale), count, experts, latent, width)


def _expert_results_impl(
    z: Tensor,
    rows: Tensor,
    ids: Tensor,
    w: Sequence[Tensor],
    ab: Sequence[Tensor],
    slots: Tensor | None,
    scale: float,
    beta: float,
    linear_beta: float,
) -> Tensor:
    experts, latent, width = check_weights(w)
    count = _check_pairs(z, rows, ids, latent)
    lora = _adapters(ab, slots, scale, count, experts, latent, width)
    results = torch.empty((count, latent), dtype=_FP32, device=z.device)
    if not z.is_meta:
        shape = experts, latent, width, beta, linear_beta
        status = _expert_results(z, z.stride(0), rows, count, ids, *weight_pointers(w), *shape, *lora, results)
        if status < 0:
            _raise(status, experts)
    return results


def _expert_results_backward_impl(
    du: Tensor,
    z: Tensor,
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    ab: Sequence[Tensor],
    slots: Tensor | None,
    scale: float,
    beta: float,
    linear_beta: float,
    grads: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    experts, latent, width = check_weights(w)
    count = _check_pairs(z, rows, ids, latent)
    check_rows("du", du, _BF16, latent)
    check(du.shape[0] == z.shape[0], f"du: expected {z.shape[0]} rows, got {du.shape[0]}")
    check_vector("weights", weights, _FP32, count)
    lora = _adapters(ab, slots, scale, count, experts, latent, width)
    check(len(grads) in (0, 6), f"grads: expected none or 6, got {len(grads)}")
    for grad, buffer in zip(grads, ab, strict=False):
        check_shape("gradient", grad, _FP32, tuple(buffer.shape[1:]))
    dz = torch.empty((count, latent), dtype=_FP32, device=z.device)
    dweights = torch.empty(count, dtype=_FP32, device=z.device)
    if not z.is_meta:
        inputs = du, du.stride(0), z, z.stride(0), rows, count, ids, weights
        shape = experts, latent, width, beta, linear_beta
        buffers = grads if len(grads) else [None] * 6
        status = _backward(*inputs, *weight_pointers(w), *shape, *lora, *buffers, dz, dweights)
        if status < 0:
            _raise(status, experts)
    return dz, dweights


def _combine_experts_impl(results: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    check(results.dim() == 2, f"results: expected [n, L], got {tuple(results.shape)}")
    check_shape("results", results, _FP32, tuple(results.shape))
    check(index.dim() == 2, f"index: expected [T, k], got {tuple(index.shape)}")
    tokens, k = index.shape
    check_shape("index", index, _INT32, (tokens, k))
    if weights is not None:
        check_shape("weights", weights, _FP32, (tokens, k))
    out = torch.empty((tokens, results.shape[1]), dtype=_BF16, device=results.device)
    if not results.is_meta:
        _combine_experts(results, results.shape[1], index, weights, tokens, k, out)
    return out


_PAIRS = "Tensor rows, Tensor ids"
_REST = "Tensor[] w, Tensor[] ab, Tensor? slots, float scale, float beta, float linear_beta"
for _schema, _implementation in (
    (f"expert_results(Tensor z, {_PAIRS}, {_REST}) -> Tensor", _expert_results_impl),
    (
        f"expert_results_backward(Tensor du, Tensor z, {_PAIRS}, Tensor weights, {_REST}, Tensor(a!)[] grads) "
        "-> (Tensor, Tensor)",
        _expert_results_backward_impl,
    ),
    ("combine_experts(Tensor results, Tensor index, Tensor? weights=None) -> Tensor", _combine_experts_impl),
):
    register(_schema, _implementation, _implementation)

_op_results = operator("expert_results")
_op_backward = operator("expert_results_backward")
_op_combine = operator("combine_experts")


def expert_results(
    z: Tensor,
    rows: Tensor,
    ids: Tensor,
    w: ExpertWeights | Bf16ExpertWeights,
    lora: ExpertLoraBuffers | None,
    slots: Tensor | None,
    beta: float,
    linear_beta: float,
) -> Tensor:
    """z BF16 `[T, L]`, pairs rows, ids (see the module) and slots int32 `[n]` -> r FP32 `[n, L]`, in the given order.

    w, lora: of the rank's experts, as in `experts`.
    """
    ab, scale = ([], 0.0) if lora is None else (lora.tensors, lora.scale)
    return _op_results(z, rows, ids, w, ab, slots, scale, beta, linear_beta)


def expert_results_backward(
    du: Tensor,
    z: Tensor,
    rows: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: ExpertWeights | Bf16ExpertWeights,
    lora: ExpertLoraBuffers | None,
    slots: Tensor | None,
    beta: float,
    linear_beta: float,
) -> tuple[Tensor, Tensor]:
    """du BF16 `[T, L]`, weights FP32 `[n]`: of the pairs -> (dz FP32 `[n, L]`, dweights FP32 `[n]`).

    The gradients of the adapters of slot 0 continue the chains in `lora`'s buffers.
    """
    ab, scale, grads = ([], 0.0, []) if lora is None else (lora.tensors, lora.scale, list(lora.gradients or ()))
    return _op_backward(du, z, rows, ids, weights, w, ab, slots, scale, beta, linear_beta, grads)


def combine_experts(results: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """results FP32 `[n, L]`, index int32 `[T, k]`: a token's results, experts ascending -> BF16 `[T, L]`.

    weights FP32 `[T, k]`: bf16(chain over j of fma(weight, result, .)); None: bf16(+0.0 + result_0 + result_1 + ...).
    """
    return _op_combine(results, index, weights)
