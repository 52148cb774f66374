"""Latent rows in their format: storing them in pages, and what pages give back, with its gradient. The codecs alone.

A row is R latent and P further values. Rounding points (docs/cache.md has the layouts):
    bf16   none
    fp8    code = e4m3(x / scale); value = bf16(code * scale)
    nvfp4  per 16 latents: s = e4m3(max(amax / 6, 2^-9)), code = e2m1(x / s), value = code * s, exact in BF16;
           the P further values: code = e4m3(x), value = code
Codes round to nearest, ties to even; e4m3 saturates at 448, e2m1 at 6. NaN stays NaN: as an e4m3 code, or, since e2m1
has none, as the scale of its group, whose codes are zero. amax passes over NaN.

Gradient: straight through; +0 where the value was clipped, that is, where rounding with an unbounded exponent would
have left the range: |x / scale| > 464 (e4m3), |x / s| >= 7 (e2m1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS, FormatError, index_key_bytes, latent_row_bytes
from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.pages import check_pages, check_stored

_BF16, _FP32, _UINT8 = torch.bfloat16, torch.float32, torch.uint8
_latent_store = kernel("zm_latent_store", "pi" + "iiiif" + "piipi")
_latent_values = kernel("zm_latent_values", "pi" + "iiiif" + "pip")
_e4m3 = kernel("zm_e4m3", "ppii")
_e2m1 = kernel("zm_e2m1", "ppii")
_index_key = kernel("zm_index_key", "ppiiii")


class LatentFormat(NamedTuple):
    """How latents are stored."""

    name: str = "bf16"
    scale: float = 1.0
    """What e4m3 codes are multiplied by, for "fp8": positive, of the whole tensor."""


BF16_LATENTS = LatentFormat()


def latent_format_code(name: str, scale: float, rank: int, pe: int) -> tuple[int, int]:
    """(number of the format in the kernels, bytes of a row). OperatorError for a format that the sizes do not allow."""
    check(rank > 0 and pe >= 0, f"rank: expected a positive number and values beside it, got {rank} and {pe}")
    check(0.0 < scale < float("inf"), f"scale: expected a positive number, got {scale}")
    try:
        size = latent_row_bytes(name, rank, pe)
    except FormatError as error:
        raise OperatorError(f"format: {error}") from None
    return LATENT_FORMATS.index(name), size


def index_format_code(name: str, d: int) -> tuple[int, int]:
    """(number of the format in the kernels, bytes of a key)."""
    try:
        size = index_key_bytes(name, d)
    except FormatError as error:
        raise OperatorError(f"format: {error}") from None
    return INDEX_FORMATS.index(name), size


# ---- rows in pages ---------------------------------------------------------------------------------------------------


def _latent_store_meta(
    kv: Tensor, pages: Tensor, slot_mapping: Tensor, block_size: int, rank: int, format: str, scale: float
) -> None:
    check_rows("kv", kv, _BF16)
    _, row = latent_format_code(format, scale, rank, kv.shape[1] - rank)
    check_pages(pages, block_size, row, 2 if format == "bf16" else 1)
    check_vector("slot_mapping", slot_mapping, torch.int64, kv.shape[0])


def _latent_store_cpu(
    kv: Tensor, pages: Tensor, slot_mapping: Tensor, block_size: int, rank: int, format: str, scale: float
) -> None:
    _latent_store_meta(kv, pages, slot_mapping, block_size, rank, format, scale)
    tokens, width = kv.shape
    check_stored(
        _latent_store(
            kv, kv.stride(0), tokens, rank, width - rank, LATENT_FORMATS.index(format), scale, pages, pages.stride(0),
            pages.shape[0], slot_mapping, block_size,
        )
    )  # fmt: skip


def _values(kv: Tensor, rank: int, format: str, scale: float, grad: Tensor | None) -> Tensor:
    check_rows("kv", kv, _BF16)
    tokens, width = kv.shape
    code, _ = latent_format_code(format, scale, rank, width - rank)
    stride = 0
    if grad is not None:
        check_rows("grad", grad, _BF16, width)
        check(grad.shape[0] == tokens, f"grad: expected {tokens} rows, got {grad.shape[0]}")
        stride = grad.stride(0)
    out = torch.empty((tokens, width), dtype=_BF16, device=kv.device)
    if not kv.is_meta:
        _latent_values(kv, kv.stride(0), tokens, rank, width - rank, code, scale, grad, stride, out)
    return out


def _latent_values_impl(kv: Tensor, rank: int, format: str, scale: float) -> Tensor:
    return _values(kv, rank, format, scale, None)


def _latent_values_backward_impl(grad: Tensor, kv: Tensor, rank: int, format: str, scale: float) -> Tensor:
    return _values(kv, rank, format, scale, grad)


register(
    "latent_store(Tensor kv, Tensor(a!) pages, Tensor slot_mapping, int block_size, int rank, str format, float scale) "
    "-> ()",
    _latent_store_cpu,
    _latent_store_meta,
)
register(
    "latent_values(Tensor kv, int rank, str format, float scale) -> Tensor", _latent_values_impl, _latent_values_impl
)
register(
    "latent_values_backward(Tensor grad, Tensor kv, int rank, str format, float scale) -> Tensor",
    _latent_values_backward_impl,
    _latent_values_backward_impl,
)
_op_store = operator("latent_store")
_op_values = operator("latent_values")
_op_values_backward = operator("latent_values_backward")


class _LatentValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, *arguments: Any) -> Tensor:
        ctx.save_for_backward(kv)
        ctx.arguments = arguments
        return _op_values(kv, *arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if grad.shape[1] > 1 and grad.stride(1) != 1:
            grad = grad.contiguous()
        return _op_values_backward(grad, *ctx.saved_tensors, *ctx.arguments), None, None, None


def latent_store(
    kv: Tensor,
    pages: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    rank: int,
    latents: LatentFormat = BF16_LATENTS,
) -> None:
    """Stores kv BF16 `[T, R+P]` (any row stride; rank: R) in latent pages (mutated) at slot_mapping int64 `[T]`.

    slot = block * block_size + place; -1: not stored. Raises OperatorError for a slot outside the pages, before
    storing anything.
    """
    _op_store(kv.detach(), pages, slot_mapping, block_size, rank, *latents)


def latent_values(kv: Tensor, rank: int, latents: LatentFormat = BF16_LATENTS) -> Tensor:
    """What pages give back for kv BF16 `[T, R+P]` (any row stride): BF16 `[T, R+P]`, kv itself for "bf16".

    Differentiable, see the module.
    """
    if latents.name == "bf16":
        return kv
    if torch.is_grad_enabled() and kv.requires_grad:
        return _LatentValues.apply(kv, rank, *latents)
    return _op_values(kv, rank, *latents)


# ---- codecs ----------------------------------------------------------------------------------------------------------


def encode_e4m3(x: Tensor) -> Tensor:
    """FP32, contiguous, any shape -> e4m3 codes (uint8): to nearest even, saturating at 448, NaN to NaN."""
    return _encode(_e4m3, x)


def decode_e4m3(codes: Tensor) -> Tensor:
    """e4m3 codes (uint8), contiguous -> FP32, exact."""
    return _decode(_e4m3, codes)


def encode_e2m1(x: Tensor) -> Tensor:
    """FP32, contiguous, any shape -> e2m1 codes (uint8, one a byte): to nearest even, saturating at 6, NaN to +0."""
    return _encode(_e2m1, x)


def decode_e2m1(codes: Tensor) -> Tensor:
    """e2m1 codes (uint8, one a byte), contiguous -> FP32, exact."""
    return _decode(_e2m1, codes)


def encode_index_keys(x: Tensor, format: str) -> Tensor:
    """FP32 `[T, D]`, contiguous -> uint8 `[T, bytes]`: a key's codes, then its scales, as in a page of one token."""
    check(
        x.dtype == _FP32 and x.dim() == 2 and x.is_contiguous(), f"x: expected contiguous {_FP32} [T, D], got {x.dtype}"
    )
    tokens, d = x.shape
    code, size = index_format_code(format, d)
    keys = torch.empty((tokens, size), dtype=_UINT8)
    _index_key(x, keys, tokens, d, code, 0)
    return keys


def decode_index_keys(keys: Tensor, d: int, format: str) -> Tensor:
    """uint8 `[T, bytes]`, contiguous -> FP32 `[T, D]`: codes times scales, rounded to FP32 where that is not exact."""
    code, size = index_format_code(format, d)
    check(keys.dtype == _UINT8 and keys.shape[1:] == (size,) and keys.is_contiguous(), f"keys: expected [T, {size}]")
    x = torch.empty((keys.shape[0], d), dtype=_FP32)
    _index_key(x, keys, keys.shape[0], d, code, 1)
    return x


def _encode(codec: Any, x: Tensor) -> Tensor:
    check(x.dtype == _FP32 and x.is_contiguous(), f"x: expected contiguous {_FP32}, got {x.dtype}")
    codes = torch.empty_like(x, dtype=_UINT8)
    codec(x, codes, x.numel(), 0)
    return codes


def _decode(codec: Any, codes: Tensor) -> Tensor:
    check(codes.dtype == _UINT8 and codes.is_contiguous(), f"codes: expected contiguous {_UINT8}, got {codes.dtype}")
    x = torch.empty_like(codes, dtype=_FP32)
    codec(x, codes, x.numel(), 1)
    return x
