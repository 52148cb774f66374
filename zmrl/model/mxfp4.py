"""MXFP4: 4-bit E2M1 weights with one power-of-two scale (E8M0) per 32 consecutive inputs.

Format of the release (specification 4; OCP Microscaling v1.0): per matrix [out, in]
  `weight_packed` uint8 [out, in/2]: element 2j in the low nibble of byte j, element 2j+1 in the high nibble;
  `weight_scale`  uint8 [out, in/32]: E8M0, value 2^(byte - 127), byte 255 is NaN.
A nibble's bit 3 is the sign; its low three bits code 0, 0.5, 1, 1.5, 2, 3, 4, 6.

Scale rule: 2^(floor(log2(amax)) - 2), amax over the group (OCP's rule: 2 is E2M1's largest exponent), clamped to what
E8M0 holds; values beyond 6 scales saturate. It is one cheap rule for export and for quantisation-aware training, so
what was trained is what is stored. Elements round to nearest, ties to even, and keep the sign of zero.

Every code x scale product is exact in BF16, so a BF16 trainer and an MXFP4 rollout hold the same
weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.model.config import MXFP4_GROUP_SIZE as GROUP

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
_MAGNITUDE_CODE = torch.tensor([0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7], dtype=torch.uint8)
"""Code of a representable magnitude m, indexed by 2m."""


def group_scales(weight: Tensor) -> Tensor:
    """Scales of `weight` [..., in] (float32): float32 [..., in/32, 1], powers of two in 2^-126 .. 2^127.

    A group of zeros gets scale 1. The lower end is FP32's smallest normal number, one above E8M0's 2^-127.
    """
    groups = weight.unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    scales = _floor_power_of_two(amax).mul_(0.25).clamp_(min=2.0**-126)
    return torch.where(amax == 0, torch.ones_like(scales), scales)


def round_to_mxfp4(weight: Tensor) -> Tensor:
    """`weight` [..., in] rounded to the nearest MXFP4 value, in float32. Rounding points: this one."""
    weight = weight.detach().float()
    scales = group_scales(weight)
    groups = weight.unflatten(-1, (-1, GROUP))
    # The spacing of E2M1 values around x is half of 2^floor(log2|x|), but never finer than half a scale.
    step = torch.maximum(_floor_power_of_two(groups), scales).mul_(0.5)
    rounded = (groups / step).round_().mul_(step)
    limit = scales * E2M1_MAX
    return torch.minimum(torch.maximum(rounded, -limit, out=rounded), limit, out=rounded).flatten(-2)


class _FakeQuantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor) -> Tensor:
        return round_to_mxfp4(weight).to(weight.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def fake_quantise(weight: Tensor) -> Tensor:
    """`round_to_mxfp4` with a straight-through gradient (identity everywhere), for quantisation-aware training."""
    return _FakeQuantise.apply(weight)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise `weight` [..., out, in] (any float dtype) to (`weight_packed`, `weight_scale`).

    Raises ValueError when the input width is no multiple of 32 or a value is not finite.
    """
    if weight.shape[-1] % GROUP:
        raise ValueError(f"MXFP4 needs a width that is a multiple of {GROUP}, not {weight.shape[-1]}")
    weight = weight.detach().float()
    if not torch.isfinite(weight).all():
        raise ValueError("MXFP4 cannot hold NaN or infinity; the weights to quantise are not finite")
    scales = group_scales(weight)
    units = (round_to_mxfp4(weight).unflatten(-1, (-1, GROUP)) / scales).flatten(-2)
    magnitude = _MAGNITUDE_CODE.to(weight.device)[(units.abs() * 2).long()]
    codes = magnitude | (torch.signbit(units).to(torch.uint8) << 3)
    exponent = torch.frexp(scales.squeeze(-1)).exponent - 1
    return pack(codes), (exponent + 127).to(torch.uint8)


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [..., in], one nibble each -> uint8 [..., in/2], even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """uint8 [..., in/2] -> codes uint8 [..., in]; the inverse of `pack`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def dequantise(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """(`weight_packed` [..., in/2], `weight_scale` [..., in/32]) -> [..., in] in `dtype`; exact in BF16 and wider.

    Raises ValueError on a NaN scale (byte 255).
    """
    if (scale == 255).any():
        raise ValueError("MXFP4 scale byte 255 means NaN; the checkpoint is damaged")
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float64, device=packed.device)
    values = table[unpack(packed).long()].unflatten(-1, (-1, GROUP))
    ones = torch.ones(scale.shape, dtype=torch.float64, device=scale.device)
    scales = torch.ldexp(ones, scale.to(torch.int32) - 127).unsqueeze(-1)
    return (values * scales).flatten(-2).to(dtype)


def _floor_power_of_two(values: Tensor) -> Tensor:
    """2^floor(log2|x|) of float32 values, by clearing sign and mantissa bits (0 for zeros and subnormals)."""
    return (values.view(torch.int32) & 0x7F800000).view(torch.float32)
