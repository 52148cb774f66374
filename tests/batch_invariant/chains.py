"""The contract's order of operations, spelled out in numpy one step at a time: the oracle in bits for the products.

A fused multiply-add is taken in extended precision (64-bit mantissa): a product of two FP32 is exact there, so only one
rounding comes before the one to FP32.
"""

import numpy as np
import torch

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def fma(a, b, c):
    a, b, c = (np.asarray(v, np.longdouble) for v in (a, b, c))
    return (a * b + c).astype(np.float32)


def chain(x, w, start=None):
    """x [M, K], w [K, N] FP32 -> [M, N]: fma over ascending k, from +0.0 or continued from `start`."""
    c = np.zeros((x.shape[0], w.shape[1]), np.float32) if start is None else start
    for k in range(x.shape[1]):
        c = fma(x[:, k : k + 1], w[k], c)
    return c


def tree(parts):
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:])


def bounds(n, shards):
    return [(s * n // shards, (s + 1) * n // shards) for s in range(shards)]


def sliced(x, w, shards):
    """Rule 2: one chain per slice of K, and the tree."""
    return tree([chain(x[:, a:b], w[a:b]) for a, b in bounds(x.shape[1], shards)])


def bf16(x):
    """Rounded to BF16, held as FP32."""
    return torch.from_numpy(np.ascontiguousarray(x, np.float32)).bfloat16().float().numpy()


def floats(t):
    return t.float().numpy()


def same_bits(a, b):
    """Equality of bit patterns of two tensors of one type and shape."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


def dequantise(packed, scale):
    """HF MXFP4 [..., N, K/2], [..., N, K/32] -> FP32 numpy [..., N, K]."""
    packed, scale = packed.numpy(), scale.numpy()
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    return E2M1[codes] * np.repeat(np.ldexp(np.float32(1), scale.astype(np.int32) - 127), 32, -1).astype(np.float32)
