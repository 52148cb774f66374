"""Log-probabilities and sampling from a row of FP32 logits over the real vocabulary.

Rounding points (FP32 throughout): z = logits/temperature (IEEE), m = max z, sum = lanes(exp(z-m)),
logp = (z[target]-m) - log(sum); moment = lanes(exp(z-m)*(z-m)), terms with exp = 0 being 0; entropy = log(sum) -
moment/sum. A NaN in the row makes them the NaN 0x7fc00000. digest: sum over i of mix64(i, bits of logits[i]) mod 2^64,
before the temperature. Backward: p = exp(z-m)*(1/sum), g = dlogp/temperature, h = dentropy/temperature;
dlogits = p*fma(-h, (z-m) - moment/sum, -g), plus g at the target.
sample: the largest z + gumbel, lowest id of equals; the noise is a hash of (seed, position, id) (csrc/sampler.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel

MAX_SAMPLED_VOCABULARY = 1 << 24

_log_probs = kernel("zm_log_probs", "pipppppii")
_log_softmax = kernel("zm_log_softmax", "pippii")
_log_probs_backward = kernel("zm_log_probs_backward", "pipppppii")
_sample = kernel("zm_sample", "pippppii")

_FP32, _INT64 = torch.float32, torch.int64


def _check_logits(logits: Tensor, temperature: Tensor) -> int:
    """Returns the number of rows."""
    check_rows("logits", logits, _FP32)
    if logits.shape[1] == 0:
        raise OperatorError("logits: expected at least one column")
    check_vector("temperature", temperature, _FP32, logits.shape[0])
    return logits.shape[0]


def _check_status(status: int, columns: int) -> None:
    if status == -1:
        raise OperatorError("temperature: expected finite numbers above 0")
    if status == -2:
        raise OperatorError(f"targets: expected ids from 0 to {columns - 1}")


def _log_probs_meta(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = _check_logits(logits, temperature)
    check_vector("targets", targets, _INT64, rows)
    logp = torch.empty(rows, dtype=_FP32, device=logits.device)
    entropy = torch.empty(rows, dtype=_FP32, device=logits.device)
    return logp, entropy, torch.empty(rows, dtype=_INT64, device=logits.device)


def _log_probs_cpu(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out = _log_probs_meta(logits, targets, temperature)
    _check_status(_log_probs(logits, logits.stride(0), targets, temperature, *out, *logits.shape), logits.shape[1])
    return out


def _log_softmax_meta(logits: Tensor, temperature: Tensor) -> Tensor:
    _check_logits(logits, temperature)
    return torch.empty(logits.shape, dtype=_FP32, device=logits.device)


def _log_softmax_cpu(logits: Tensor, temperature: Tensor) -> Tensor:
    out = _log_softmax_meta(logits, temperature)
    _check_status(_log_softmax(logits, logits.stride(0), temperature, out, *logits.shape), logits.shape[1])
    return out


def _log_probs_backward_meta(
    logits: Tensor, targets: Tensor, temperature: Tensor, dlogp: Tensor, dentropy: Tensor | None = None
) -> Tensor:
    rows = _check_logits(logits, temperature)
    check_vector("targets", targets, _INT64, rows)
    check_vector("dlogp", dlogp, _FP32, rows)
    if dentropy is not None:
        check_vector("dentropy", dentropy, _FP32, rows)
    return torch.empty(logits.shape, dtype=_FP32, device=logits.device)


def _log_probs_backward_cpu(
    logits: Tensor, targets: Tensor, temperature: Tensor, dlogp: Tensor, dentropy: Tensor | None = None
) -> Tensor:
    dlogits = _log_probs_backward_meta(logits, targets, temperature, dlogp, dentropy)
    status = _log_probs_backward(
        logits, logits.stride(0), targets, temperature, dlogp, dentropy, dlogits, *logits.shape
    )  # fmt: skip
    _check_status(status, logits.shape[1])
    return dlogits


def _sample_meta(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    rows = _check_logits(logits, temperature)
    if logits.shape[1] > MAX_SAMPLED_VOCABULARY:
        raise OperatorError(f"logits: expected at most {MAX_SAMPLED_VOCABULARY} columns, got {logits.shape[1]}")
    check_vector("seeds", seeds, _INT64, rows)
    check_vector("positions", positions, _INT64, rows)
    return torch.empty(rows, dtype=_INT64, device=logits.device)


def _sample_cpu(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    tokens = _sample_meta(logits, temperature, seeds, positions)
    if _sample(logits, logits.stride(0), temperature, seeds, positions, tokens, *logits.shape) < 0:
        raise OperatorError("temperature: expected finite numbers from 0")
    return tokens


register(
    "log_probs(Tensor logits, Tensor targets, Tensor temperature) -> (Tensor, Tensor, Tensor)",
    _log_probs_cpu,
    _log_probs_meta,
)
register("log_softmax(Tensor logits, Tensor temperature) -> Tensor", _log_softmax_cpu, _log_softmax_meta)
register(
    "log_probs_backward(Tensor logits, Tensor targets, Tensor temperature, Tensor dlogp, Tensor? dentropy=None)"
    " -> Tensor",
    _log_probs_backward_cpu,
    _log_probs_backward_meta,
)
register(
    "sample(Tensor logits, Tensor temperature, Tensor seeds, Tensor positions) -> Tensor", _sample_cpu, _sample_meta
)

_op_log_probs = operator("log_probs")
_op_log_softmax = operator("log_softmax")
_op_log_probs_backward = operator("log_probs_backward")
_op_sample = operator("sample")


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, temperature):
        logp, entropy, digest = _op_log_probs(logits, targets, temperature)
        ctx.mark_non_differentiable(digest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, targets, temperature)
        return logp, entropy, digest

    @staticmethod
    def backward(ctx, dlogp, dentropy, _):
        logits, targets, temperature = ctx.saved_tensors
        dlogp = torch.zeros_like(temperature) if dlogp is None else dlogp.contiguous()
        dentropy = None if dentropy is None else dentropy.contiguous()
        return _op_log_probs_backward(logits, targets, temperature, dlogp, dentropy), None, None


def log_probs(logits: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits FP32 [T, V] (any row stride), targets int64 [T], temperature FP32 [T] above 0 -> (logp, entropy, digest).

    logp and entropy FP32 [T]: of the target, and of the row, at the temperature; digest int64 [T]: of the raw row, the
    bits of a uint64. Differentiable: logits through logp and entropy.
    """
    if torch.is_grad_enabled() and logits.requires_grad:
        return _LogProbs.apply(logits, targets, temperature)
    return _op_log_probs(logits, targets, temperature)


def log_softmax(logits: Tensor, temperature: Tensor) -> Tensor:
    """logits FP32 [T, V] (any row stride), temperature FP32 [T] -> FP32 [T, V]: `log_probs` of every id, the same bits.

    Not differentiable.
    """
    return _op_log_softmax(logits.detach(), temperature)


def sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """logits FP32 [T, V] (any row stride), temperature FP32 [T], seeds and output positions int64 [T] -> int64 [T].

    Temperature 0: the largest logit, lowest id. NaN never wins; a row without a logit above -inf gives 0.
    """
    return _op_sample(logits.detach(), temperature, seeds, positions)
