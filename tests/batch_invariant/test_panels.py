"""Packing is a permutation: what goes in comes out, and a code lies where the kernels look for it."""

import pytest
import torch

from tests.batch_invariant.chains import dequantise
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import panels


@pytest.mark.parametrize("shape", [(1, 1), (15, 3), (16, 32), (17, 5), (3, 40, 7), (2, 3, 33, 4)])
def test_panels_hold_the_weight_and_zero_rows(shape):
    w = torch.randn(shape)
    packed = panels.pack_panels(w)
    n, k = shape[-2:]
    assert packed.shape == (*shape[:-2], -(-n // 16), k, 16) and packed.is_contiguous()
    assert torch.equal(panels.unpack_panels(packed, n), w)
    flat = packed.flatten(0, -4) if len(shape) > 2 else packed[None]
    for row in range(flat.shape[1] * 16):
        lane = flat[0, row // 16, :, row % 16]
        wanted = w.reshape(-1, n, k)[0, row] if row < n else torch.zeros(k)
        assert torch.equal(lane, wanted)


def test_parts_are_padded_by_themselves():
    weights = [torch.randn(n, 5) for n in (3, 16, 20)]
    packed = panels.pack_parts(weights)
    assert packed.shape == (1 + 1 + 2, 5, 16)
    for got, wanted in zip(panels.unpack_parts(packed, [3, 16, 20]), weights, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("shape", [(16, 32), (20, 64), (3, 48, 96)])
def test_mxfp4_round_trip(shape):
    *lead, n, k = shape
    packed = torch.randint(0, 256, (*lead, n, k // 2), dtype=torch.uint8)
    scale = torch.randint(0, 256, (*lead, n, k // 32), dtype=torch.uint8)
    codes, scales = panels.pack_mxfp4(packed, scale)
    assert codes.shape == (*lead, -(-n // 16), k, 8) and scales.shape == (*lead, -(-n // 16), k // 32, 16)
    back = panels.unpack_mxfp4(codes, scales, n)
    assert torch.equal(back[0], packed) and torch.equal(back[1], scale)


def test_mxfp4_codes_lie_where_the_layout_says():
    n, k = 32, 64
    packed = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    codes = panels.pack_mxfp4_codes(packed)
    for row, column in ((0, 0), (7, 1), (8, 2), (15, 63), (16, 5), (31, 62)):
        code = packed[row, column // 2] >> 4 if column % 2 else packed[row, column // 2] & 15
        byte = codes[row // 16, column, row % 8]
        assert code == (byte >> 4 if row % 16 >= 8 else byte & 15)


def test_dequantised_values_are_exact_in_bf16():
    packed = torch.randint(0, 256, (32, 32), dtype=torch.uint8)
    scale = torch.randint(60, 190, (32, 2), dtype=torch.uint8)
    values = torch.from_numpy(dequantise(packed, scale))
    assert torch.equal(values.bfloat16().float(), values)


def test_wrong_shapes_are_refused():
    with pytest.raises(OperatorError, match="scale"):
        panels.pack_mxfp4(torch.zeros(16, 16, dtype=torch.uint8), torch.zeros(16, 2, dtype=torch.uint8))
    with pytest.raises(OperatorError, match="packed"):
        panels.pack_mxfp4_codes(torch.zeros(16, 8, dtype=torch.uint8))
    with pytest.raises(OperatorError, match="panels"):
        panels.unpack_panels(torch.zeros(1, 4, 16), 17)
    with pytest.raises(OperatorError, match="weight"):
        panels.pack_panels(torch.zeros(4))
