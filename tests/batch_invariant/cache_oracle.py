"""Independent codecs of the cache's formats: numpy with ml_dtypes' e4m3, e2m1 and e8m0, and compressed-tensors' packs.

Written from docs/cache.md; knows nothing about the kernels. Saturation of e4m3 is applied before ml_dtypes, which gives
NaN beyond 464.
"""

import ml_dtypes
import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8

E4M3, E2M1, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu
LARGEST = np.float32(3.402823466e38)


def e4m3(x: np.ndarray) -> np.ndarray:
    """FP32 -> codes, saturating."""
    return np.clip(np.asarray(x, np.float32), -448, 448).astype(E4M3).view(np.uint8)


def e4m3_values(codes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(codes).view(E4M3).astype(np.float32)


def pack_e2m1(x: np.ndarray) -> np.ndarray:
    """FP32 [rows, n] -> bytes [rows, n/2]: rounded by ml_dtypes (NaN: to +0), packed by compressed-tensors."""
    rounded = np.clip(np.where(np.isnan(x), np.float32(0), x), -6, 6).astype(E2M1).astype(np.float32)
    return pack_fp4_to_uint8(torch.from_numpy(rounded)).numpy()


def unpack_e2m1(packed: np.ndarray) -> np.ndarray:
    """Bytes [rows, n/2] -> FP32 [rows, n], by compressed-tensors."""
    rows, half = packed.shape
    return unpack_fp4_from_uint8(torch.from_numpy(packed.copy()), rows, 2 * half, torch.float32).numpy()


def groups(x: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [rows, n] -> (groups [rows, n/size, size], amax without NaN and infinity, whether there is NaN)."""
    parts = x.reshape(len(x), -1, size)
    amax = np.minimum(np.where(np.isnan(parts), 0, np.abs(parts)).max(-1), LARGEST).astype(np.float32)
    return parts, amax, np.isnan(parts).any(-1)


# ---- latents ---------------------------------------------------------------------------------------------------------


def nvfp4_order(count: int) -> list[int]:
    """The group whose scale stands at each place: a (count/4) x 4 matrix of groups, read by columns."""
    return np.arange(count).reshape(-1, 4).T.flatten().tolist()


def encode_latents(x: np.ndarray, rank: int, name: str, scale: float = 1.0) -> np.ndarray:
    """FP32 values of BF16 rows [T, rank + pe] -> bytes [T, ...]."""
    if name == "fp8":
        with np.errstate(over="ignore", invalid="ignore"):
            return e4m3(x / np.float32(scale))
    parts, amax, nan = groups(x[:, :rank], 16)
    codes = np.where(nan, 0x7F, e4m3(np.maximum(amax / np.float32(6), np.float32(2**-9)))).astype(np.uint8)
    with np.errstate(invalid="ignore"):
        scaled = parts / e4m3_values(codes)[..., None]  # NaN in a group with a NaN scale
    return np.concatenate(
        [pack_e2m1(scaled.reshape(len(x), rank)), e4m3(x[:, rank:]), codes[:, nvfp4_order(rank // 16)]], 1
    )


def decode_latents(rows: np.ndarray, rank: int, pe: int, name: str, scale: float = 1.0) -> np.ndarray:
    """Bytes -> values [T, rank + pe], FP32 that are to be rounded to BF16."""
    if name == "fp8":
        return e4m3_values(rows) * np.float32(scale)
    half, places = rank // 2, nvfp4_order(rank // 16)
    scales = np.empty((len(rows), rank // 16), np.float32)
    scales[:, places] = e4m3_values(rows[:, half + pe :])
    with np.errstate(invalid="ignore"):
        latent = unpack_e2m1(rows[:, :half]) * np.repeat(scales, 16, 1)
    return np.concatenate([latent, e4m3_values(rows[:, half : half + pe])], 1)


# ---- index keys ------------------------------------------------------------------------------------------------------


def encode_keys(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """FP32 [T, D] -> (codes, scales) as bytes [T, ...]."""
    if name == "fp8":
        _, amax, _ = groups(x, x.shape[1])
        wanted = np.maximum(amax, np.float32(1e-4)) / np.float32(448)
        scale = np.exp2(np.ceil(np.log2(wanted.astype(np.float64)))).astype(np.float32)
        return e4m3(x / scale), np.ascontiguousarray(scale).view(np.uint8)
    parts, amax, nan = groups(x, 32)
    least = np.float32(6) * np.float32(2.0**-126)
    wanted = (np.maximum(amax, least) / np.float32(6)).astype(np.float64)
    scale = np.exp2(np.ceil(np.log2(wanted)))
    codes = np.where(nan, 255, scale.astype(E8M0).view(np.uint8)).astype(np.uint8)
    scaled = np.where(nan[..., None], np.float32(0), parts / scale[..., None]).astype(np.float32)
    return pack_e2m1(scaled.reshape(x.shape)), codes


def decode_keys(codes: np.ndarray, scales: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(values that dot products see [T, D], what multiplies the product [T])."""
    if name == "fp8":
        return e4m3_values(codes), np.ascontiguousarray(scales).view(np.float32)[:, 0]
    unit = np.repeat(np.ascontiguousarray(scales).view(E8M0).astype(np.float32), 32, 1)
    return unpack_e2m1(codes) * unit, np.ones(len(codes), np.float32)
