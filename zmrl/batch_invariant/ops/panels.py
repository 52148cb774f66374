"""Packs weights into panels and back (docs/operators.md, Layouts). Layout only: no value changes, any device.

Panels of W `[N, K]`: `[ceil(N/16), K, 16]`, panel p, input k, lane j = `W[16p+j, k]`; missing rows are zero bits. Every
function takes leading dimensions too (experts `[E, N, K]`, adapters `[S, E, N, K]`).
"""

from collections.abc import Sequence

import torch

from zmrl.batch_invariant.library import OperatorError, check

LANES = 16
GROUP = 32
"""MXFP4: inputs that share one E8M0 scale."""


def panel_count(n: int) -> int:
    """Panels of a weight with n rows."""
    return -(-n // LANES)


def check_shape(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """A contiguous tensor of exactly this type and shape."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        got = f"{tensor.dtype} {tuple(tensor.shape)}{'' if tensor.is_contiguous() else ' not contiguous'}"
        raise OperatorError(f"{name}: expected {dtype} {shape} contiguous, got {got}")


def pack_panels(weight: torch.Tensor) -> torch.Tensor:
    """`[..., N, K]`, any dtype -> panels `[..., ceil(N/16), K, 16]`, contiguous."""
    check(weight.dim() >= 2, f"weight: expected [..., N, K], got {tuple(weight.shape)}")
    *lead, n, k = weight.shape
    missing = -n % LANES
    if missing:
        weight = torch.cat([weight, weight.new_zeros(*lead, missing, k)], -2)
    return weight.reshape(*lead, panel_count(n), LANES, k).transpose(-1, -2).contiguous()


def unpack_panels(panels: torch.Tensor, n: int) -> torch.Tensor:
    """Panels `[..., P, K, 16]` -> `[..., n, K]`, contiguous."""
    check(
        panels.dim() >= 3 and panels.shape[-1] == LANES and panels.shape[-3] == panel_count(n),
        f"panels: expected [..., {panel_count(n)}, K, {LANES}] for {n} rows, got {tuple(panels.shape)}",
    )
    *lead, count, k, _ = panels.shape
    return panels.transpose(-1, -2).reshape(*lead, count * LANES, k)[..., :n, :].contiguous()


def pack_parts(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fused projection: weights `[..., N_i, K]` -> panels of the first, the second, ... (each padded by itself)."""
    return torch.cat([pack_panels(w) for w in weights], -3)


def unpack_parts(panels: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
    """The weights `[..., splits[i], K]` of a fused projection."""
    parts = panels.split([panel_count(n) for n in splits], -3)
    return [unpack_panels(part, n) for part, n in zip(parts, splits, strict=True)]


def pack_mxfp4_codes(packed: torch.Tensor) -> torch.Tensor:
    """HF `weight_packed` U8 `[..., N, K/2]` (byte j: element 2j in the low nibble, 2j+1 in the high one) -> codes U8
    `[..., ceil(N/16), K, 8]` (byte j: lane j in the low nibble, lane j+8 in the high one).
    """
    wanted = f"torch.uint8 [..., N, K/2] with K a multiple of {GROUP}"
    check(
        packed.dtype == torch.uint8 and packed.dim() >= 2 and packed.shape[-1] % (GROUP // 2) == 0,
        f"packed: expected {wanted}, got {packed.dtype} {tuple(packed.shape)}",
    )
    codes = pack_panels(torch.stack([packed & 15, packed >> 4], -1).flatten(-2))
    return codes[..., :8] | codes[..., 8:] << 4


def unpack_mxfp4_codes(codes: torch.Tensor, n: int) -> torch.Tensor:
    """Panels of codes `[..., ceil(n/16), K, 8]` -> `weight_packed` `[..., n, K/2]`."""
    nibbles = unpack_panels(torch.cat([codes & 15, codes >> 4], -1), n)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


def pack_mxfp4_scales(scale: torch.Tensor) -> torch.Tensor:
    """HF `weight_scale` U8 (E8M0) `[..., N, K/32]` -> panels `[..., ceil(N/16), K/32, 16]`."""
    check(scale.dtype == torch.uint8, f"scale: expected torch.uint8, got {scale.dtype}")
    return pack_panels(scale)


def unpack_mxfp4_scales(scales: torch.Tensor, n: int) -> torch.Tensor:
    """Panels of scales `[..., ceil(n/16), K/32, 16]` -> `weight_scale` `[..., n, K/32]`."""
    return unpack_panels(scales, n)


def pack_mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both tensors of an HF MXFP4 weight -> (codes, scales); OperatorError if they do not belong together."""
    wanted = (*packed.shape[:-1], packed.shape[-1] * 2 // GROUP)
    check(tuple(scale.shape) == wanted, f"scale: expected {wanted}, got {tuple(scale.shape)}")
    return pack_mxfp4_codes(packed), pack_mxfp4_scales(scale)


def unpack_mxfp4(codes: torch.Tensor, scales: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_mxfp4` for n rows: (`weight_packed`, `weight_scale`)."""
    return unpack_mxfp4_codes(codes, n), unpack_mxfp4_scales(scales, n)
