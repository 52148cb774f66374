"""All routed experts of all tokens in one call, with adapters of several slots in one batch, and their autograd.

Rounding points (docs/operators.md, Linear and experts). Forward, for the token's expert j: g = bf16(W1 z),
u = bf16(W3 z), h = bf16(situ(g, u)), r_j = chain(W2 h) in FP32; out = bf16(chain over j of fma(weights_j, r_j, .)),
experts ascending. With an adapter: t1 = bf16(A1 z), g = bf16(fma(scale, chain(B1 t1), W1 z)), u alike; t2 = bf16(A2 h),
r_j = fma(scale, chain(B2 t2), W2 h). Backward: dr = weights_j * du; dweights_j = lanes(du . r_j);
dt2 = scale * chain(B2 dr); dh = chain(W2 dr), continued by chain(A2 dt2); dg, du' through situ;
dt1 = scale * chain(B1 dg), dt3 alike; dz_j = one chain over W1 dg, A1 dt1, W3 du', A3 dt3, in this order; all FP32.
dz = bf16(sum over j, ascending, of dz_j, from +0.0). dA continues chain_t(dt x), dB chain_t((scale dy) t), tokens
ascending.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.linear import ANCHOR
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.panels import GROUP, LANES, check_shape

_BF16, _FP32, _INT32, _UINT8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
_WEIGHTS = "pppppp" + "iii" + "ff"
_ADAPTERS = "pppppp" + "piif"
_experts = kernel("zm_experts", "piippi" + _WEIGHTS + _ADAPTERS + "pp")
_experts_backward = kernel("zm_experts_backward", "pi" + "piippi" + _WEIGHTS + _ADAPTERS + "pppppp" + "ppp")
_NO_ADAPTERS: tuple[Any, ...] = (*[None] * 7, 0, 0, 0.0)

BETA, LINEAR_BETA = 4.0, 25.0
"""SiTU's constants in the released configuration of K3."""
KEPT_BYTES = 64 << 20
"""A layer's forward pass keeps its intermediate results for the backward pass where they take no more than this, as
those of a small model do; else they are computed again, which gives the same bits."""
_kept_buffers: list[Tensor] = []
"""Used again by later passes: a new buffer costs its page faults, nearly as much as computing again."""


class Bf16ExpertWeights(NamedTuple):
    """BF16 panels (`pack_panels`) of all E experts; L: width of a token, I: expert width, multiples of 16.

    Widths that are no such multiple are padded with zero rows and columns by whoever packs (`zmrl.model.moe`).
    """

    w1: Tensor
    """`[E, I/16, L, 16]`; w3 alike."""
    w3: Tensor
    w2: Tensor
    """`[E, L/16, I, 16]`."""


class ExpertWeights(NamedTuple):
    """MXFP4 panels (`pack_mxfp4`) of all E experts; L: latent width, I: expert width, multiples of 32."""

    w1_codes: Tensor
    """uint8 `[E, I/16, L, 8]`; w3 alike."""
    w1_scales: Tensor
    """uint8 `[E, I/16, L/32, 16]`."""
    w3_codes: Tensor
    w3_scales: Tensor
    w2_codes: Tensor
    """uint8 `[E, L/16, I, 8]`."""
    w2_scales: Tensor
    """uint8 `[E, L/16, I/32, 16]`."""


_Adapters = tuple[Sequence[Tensor], Tensor, float]
"""(buffers a1, b1, a3, b3, a2, b2, slots, scale)"""
_ADAPTER_NAMES = ("a1", "b1", "a3", "b3", "a2", "b2")


def check_weights(w: Sequence[Tensor]) -> tuple[int, int, int]:
    """Returns (E, L, I)."""
    if len(w) not in (3, 6):
        raise OperatorError(f"w: expected 6 tensors (MXFP4: codes, scales of w1, w3, w2) or 3 (BF16), got {len(w)}")
    quantised = len(w) == 6
    names = ExpertWeights._fields if quantised else Bf16ExpertWeights._fields
    first, multiple = w[0], GROUP if quantised else LANES
    if first.dim() != 4:
        raise OperatorError(f"{names[0]}: expected [E, I/16, L, {8 if quantised else 16}], got {tuple(first.shape)}")
    experts, width, latent = first.shape[0], first.shape[1] * LANES, first.shape[2]
    if latent % multiple or width % multiple or not latent or not width:
        raise OperatorError(
            f"{names[0]}: latent and expert width: expected multiples of {multiple}, got {latent} and {width}"
        )
    for i, (n, k) in enumerate(((width, latent), (width, latent), (latent, width))):
        if quantised:
            codes, scales = 2 * i, 2 * i + 1
            check_shape(names[codes], w[codes], _UINT8, (experts, n // LANES, k, LANES // 2))
            check_shape(names[scales], w[scales], _UINT8, (experts, n // LANES, k // GROUP, LANES))
        else:
            check_shape(names[i], w[i], _BF16, (experts, n // LANES, k, LANES))
    return experts, latent, width


def weight_pointers(w: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """What the kernel takes: codes and scales in turn; BF16 panels have no scales."""
    return w if len(w) == 6 else [part for matrix in w for part in (matrix, None)]


def _check_inputs(z: Tensor, ids: Tensor, weights: Tensor, w: Sequence[Tensor]) -> tuple[int, int, int, int]:
    """Returns (k, E, L, I)."""
    experts, latent, width = check_weights(w)
    check_rows("z", z, _BF16, latent)
    k = ids.shape[1] if ids.dim() == 2 else 0
    check_shape("ids", ids, _INT32, (z.shape[0], k))
    check_shape("weights", weights, _FP32, tuple(ids.shape))
    return k, experts, latent, width


def check_adapters(adapters: _Adapters, rows: int, experts: int, latent: int, width: int) -> tuple[Any, ...]:
    """Returns the kernel's arguments: the six buffers, slots, number of slots, rank, scale."""
    ab, slots, scale = adapters
    if len(ab) != 6:
        raise OperatorError(f"ab: expected 6 tensors ({', '.join(_ADAPTER_NAMES)}), got {len(ab)}")
    b1 = ab[1]
    if b1.dim() != 5 or b1.shape[3] % LANES or not b1.shape[3]:
        raise OperatorError(f"b1: expected [S, E, I/16, r, 16] with r a multiple of 16, got {tuple(b1.shape)}")
    count, rank = b1.shape[0], b1.shape[3]
    for i, (inputs, outputs) in enumerate(((latent, width), (latent, width), (width, latent))):
        check_shape(_ADAPTER_NAMES[2 * i], ab[2 * i], _BF16, (count, experts, rank // LANES, inputs, LANES))
        check_shape(_ADAPTER_NAMES[2 * i + 1], ab[2 * i + 1], _BF16, (count, experts, outputs // LANES, rank, LANES))
    check_vector("slots", slots, _INT32, rows)
    return *ab, slots, count, rank, scale


def _raise(status: int, ids: Tensor, experts: int, slots: Tensor | None, count: int) -> None:
    if status == -1 and slots is not None:
        raise OperatorError(f"slots: expected -1 to {count - 1}, got {slots.min().item()} to {slots.max().item()}")
    raise OperatorError(f"ids: expected strictly ascending expert ids of 0 to {experts - 1} in every row")


def _forward(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    adapters: _Adapters | None,
    beta: float,
    linear_beta: float,
    kept: Tensor | None = None,
) -> Tensor:
    k, experts, latent, width = _check_inputs(z, ids, weights, w)
    rows = z.shape[0]
    lora = _NO_ADAPTERS if adapters is None else check_adapters(adapters, rows, experts, latent, width)
    if kept is not None:
        _check_kept(kept, rows * k, latent, width, lora[8])
    out = torch.empty((rows, latent), dtype=_BF16, device=z.device)
    if z.is_meta:
        return out
    shape = experts, latent, width, beta, linear_beta
    status = _experts(z, z.stride(0), rows, ids, weights, k, *weight_pointers(w), *shape, *lora, kept, out)
    if status < 0:
        _raise(status, ids, experts, lora[6], lora[7])
    return out


def _backward(
    du: Tensor,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    adapters: _Adapters | None,
    beta: float,
    linear_beta: float,
    grads: Sequence[Tensor],
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    k, experts, latent, width = _check_inputs(z, ids, weights, w)
    rows = z.shape[0]
    check_rows("du", du, _BF16, latent)
    check(du.shape[0] == rows, f"du: expected {rows} rows, got {du.shape[0]}")
    lora = _NO_ADAPTERS
    if adapters is not None:
        lora = check_adapters(adapters, rows, experts, latent, width)
        check(len(grads) in (0, 6), f"grads: expected none or 6 ({', '.join(_ADAPTER_NAMES)}), got {len(grads)}")
        for name, grad, buffer in zip(_ADAPTER_NAMES, grads, adapters[0], strict=False):
            check_shape(f"gradient of {name}", grad, _FP32, tuple(buffer.shape[1:]))
    if kept is not None:
        check(adapters is not None, "kept: only a forward pass with adapters keeps anything")
        _check_kept(kept, rows * k, latent, width, lora[8])
    dz = torch.empty((rows, latent), dtype=_BF16, device=z.device)
    dweights = torch.empty((rows, k), dtype=_FP32, device=z.device)
    if z.is_meta:
        return dz, dweights
    inputs = du, du.stride(0), z, z.stride(0), rows, ids, weights, k
    shape = experts, latent, width, beta, linear_beta
    buffers = grads if len(grads) else [None] * 6
    status = _experts_backward(*inputs, *weight_pointers(w), *shape, *lora, *buffers, kept, dz, dweights)
    if status < 0:
        _raise(status, ids, experts, lora[6], lora[7])
    return dz, dweights


def kept_bytes(latent: int, width: int, rank: int) -> int:
    """Bytes that a forward pass keeps for the backward pass of one (token, expert) pair, as csrc/experts.h."""
    return 2 * (2 * width + 3 * rank) + 4 * latent


def _check_kept(kept: Tensor, pairs: int, latent: int, width: int, rank: int) -> None:
    check_shape("kept", kept, _UINT8, (pairs, kept_bytes(latent, width, rank)))
    check(kept.is_meta or kept.data_ptr() % 32 == 0, "kept: expected data at a multiple of 32 bytes")


def _experts_impl(
    z: Tensor, ids: Tensor, weights: Tensor, w: Sequence[Tensor], beta: float = BETA, linear_beta: float = LINEAR_BETA
) -> Tensor:
    return _forward(z, ids, weights, w, None, beta, linear_beta)


def _experts_lora_impl(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    ab: Sequence[Tensor],
    slots: Tensor,
    scale: float,
    beta: float = BETA,
    linear_beta: float = LINEAR_BETA,
    kept: Tensor | None = None,
) -> Tensor:
    return _forward(z, ids, weights, w, (ab, slots, scale), beta, linear_beta, kept)


def _experts_backward_impl(
    du: Tensor,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    beta: float = BETA,
    linear_beta: float = LINEAR_BETA,
) -> tuple[Tensor, Tensor]:
    return _backward(du, z, ids, weights, w, None, beta, linear_beta, ())


def _experts_lora_backward_impl(
    du: Tensor,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w: Sequence[Tensor],
    ab: Sequence[Tensor],
    slots: Tensor,
    scale: float,
    beta: float,
    linear_beta: float,
    grads: Sequence[Tensor],
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return _backward(du, z, ids, weights, w, (ab, slots, scale), beta, linear_beta, grads, kept)


_INPUTS = "Tensor z, Tensor ids, Tensor weights, Tensor[] w"
_BETAS = f"float beta={BETA}, float linear_beta={LINEAR_BETA}"
for _schema, _implementation in (
    (f"experts({_INPUTS}, {_BETAS}) -> Tensor", _experts_impl),
    (
        f"experts_lora({_INPUTS}, Tensor[] ab, Tensor slots, float scale, {_BETAS}, Tensor(a!)? kept=None) -> Tensor",
        _experts_lora_impl,
    ),
    (f"experts_backward(Tensor du, {_INPUTS}, {_BETAS}) -> (Tensor, Tensor)", _experts_backward_impl),
    (
        f"experts_lora_backward(Tensor du, {_INPUTS}, Tensor[] ab, Tensor slots, float scale, float beta, "
        "float linear_beta, Tensor(a!)[] grads, Tensor? kept=None) -> (Tensor, Tensor)",
        _experts_lora_backward_impl,
    ),
):
    register(_schema, _implementation, _implementation)

_op_experts = operator("experts")
_op_experts_lora = operator("experts_lora")
_op_experts_backward = operator("experts_backward")
_op_experts_lora_backward = operator("experts_lora_backward")


def _kept_buffer(pairs: int, size: int) -> Tensor | None:
    """uint8 `[pairs, size]`, which the backward pass gives back; None if it would be too large."""
    if pairs * size > KEPT_BYTES:
        return None
    for i, buffer in enumerate(_kept_buffers):
        if buffer.untyped_storage().nbytes() >= pairs * size:
            return _kept_buffers.pop(i).as_strided((pairs, size), (size, 1))
    _kept_buffers.clear()  # all too small
    return torch.empty((pairs, size), dtype=_UINT8)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weights: Tensor,
        anchor: Tensor,
        ids: Tensor,
        w: ExpertWeights | Bf16ExpertWeights,
        lora: ExpertLoraBuffers | None,
        slots: Tensor | None,
        beta: float,
        linear_beta: float,
    ) -> Tensor:
        ctx.save_for_backward(z, weights)
        ctx.arguments = ids, w, lora, slots, beta, linear_beta
        ctx.kept = None
        if lora is None:
            return _op_experts(z, ids, weights, w, beta, linear_beta)
        ctx.kept = _kept_buffer(ids.numel(), kept_bytes(z.shape[1], lora.b1.shape[2] * LANES, lora.b1.shape[3]))
        return _op_experts_lora(z, ids, weights, w, lora.tensors, slots, lora.scale, beta, linear_beta, ctx.kept)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        z, weights = ctx.saved_tensors
        ids, w, lora, slots, beta, linear_beta = ctx.arguments
        if du.stride(1) != 1:
            du = du.contiguous()
        if lora is None:
            dz, dweights = _op_experts_backward(du, z, ids, weights, w, beta, linear_beta)
        else:
            grads, kept, ctx.kept = list(lora.gradients or ()), ctx.kept, None
            dz, dweights = _op_experts_lora_backward(
                du, z, ids, weights, w, lora.tensors, slots, lora.scale, beta, linear_beta, grads, kept
            )
            if kept is not None:
                _kept_buffers.append(kept)
        wanted = ctx.needs_input_grad
        return (dz if wanted[0] else None), (dweights if wanted[1] else None), *[None] * 7


def experts(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    expert_weights: ExpertWeights | Bf16ExpertWeights,
    beta: float = BETA,
    linear_beta: float = LINEAR_BETA,
    lora: ExpertLoraBuffers | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """z BF16 `[T, L]` (any row stride), ids int32 `[T, k]` strictly ascending, weights FP32 `[T, k]` -> BF16 `[T, L]`.

    The sum over a token's experts of weight times expert, before the latent norm. Infinite betas: SiLU in place of SiTU
    (`ops/activation.py`). lora with slots int32 `[T]` (-1: no adapter): adapters inside w1, w3 and w2. Differentiable
    in z and weights; the gradients of the adapters of slot 0 go to `lora`'s buffers. Rounding points: see the module.
    """
    check(lora is None or slots is not None, "slots: adapters need the slot of every token")
    if torch.is_grad_enabled() and (
        z.requires_grad or weights.requires_grad or (lora is not None and lora.wants_gradients)
    ):
        return _Experts.apply(z, weights, ANCHOR, ids, expert_weights, lora, slots, beta, linear_beta)
    if lora is None:
        return _op_experts(z, ids, weights, expert_weights, beta, linear_beta)
    return _op_experts_lora(z, ids, weights, expert_weights, lora.tensors, slots, lora.scale, beta, linear_beta)
