"""MXFP4 against ml_dtypes' float4_e2m1fn and float8_e8m0fnu."""

import ml_dtypes
import numpy as np
import pytest
import torch

from zmrl.model import mxfp4

E2M1 = ml_dtypes.float4_e2m1fn


def test_every_code_and_scale_dequantises_as_ml_dtypes_does():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(255, 32)
    scale = torch.arange(255, dtype=torch.uint8).unsqueeze(1)
    ours = mxfp4.dequantise(mxfp4.pack(codes), scale, torch.float64).numpy()
    values = np.arange(16, dtype=np.uint8).view(E2M1).astype(np.float64)
    scales = np.arange(255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    expected = scales[:, None] * np.tile(values, 2)
    assert np.array_equal(ours, expected)
    assert np.array_equal(np.signbit(ours), np.signbit(expected))


def test_dequantised_values_are_exact_in_bf16():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(251, 32)
    scale = torch.arange(2, 253, dtype=torch.uint8).unsqueeze(1)
    packed = mxfp4.pack(codes)
    exact = mxfp4.dequantise(packed, scale, torch.float64)
    assert torch.equal(mxfp4.dequantise(packed, scale, torch.bfloat16).double(), exact)


def test_elements_round_to_nearest_even_as_ml_dtypes_does():
    # Groups whose largest value is 4..6 have scale 1, so elements are rounded as they are.
    values = torch.linspace(-6, 6, 24 * 31).reshape(24, 31)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).repeat(5)[:31]
    values = torch.cat((values, ties.unsqueeze(0), -ties.unsqueeze(0)))
    weight = torch.cat((torch.full((len(values), 1), 6.0), values), dim=1)
    assert torch.equal(mxfp4.group_scales(weight), torch.ones(len(values), 1, 1))
    expected = weight.numpy().astype(E2M1).astype(np.float32)
    assert np.array_equal(mxfp4.round_to_mxfp4(weight).numpy().view(np.int32), expected.view(np.int32))


def test_packed_form_holds_exactly_the_rounded_weights():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 96, generator=generator) * torch.logspace(-30, 30, 64).unsqueeze(1)
    packed, scale = mxfp4.quantise(weight)
    assert packed.shape == (64, 48) and scale.shape == (64, 3) and packed.dtype == scale.dtype == torch.uint8
    rounded = mxfp4.round_to_mxfp4(weight)
    assert torch.equal(mxfp4.dequantise(packed, scale).view(torch.int16), rounded.bfloat16().view(torch.int16))


def test_even_elements_are_in_the_low_nibble():
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([4.0, -1.5, 0.5])
    packed, scale = mxfp4.quantise(weight)
    assert scale.item() == 127
    assert packed[0, :2].tolist() == [6 | (11 << 4), 1]
    assert torch.equal(mxfp4.unpack(packed)[0, :3], torch.tensor([6, 11, 1], dtype=torch.uint8))


def test_scale_follows_the_largest_element_of_the_group():
    for amax, byte in ((1.0, 125), (1.9999, 125), (2.0, 126), (6.0, 127), (7.9, 127), (8.0, 128), (0.0, 127)):
        assert mxfp4.quantise(torch.full((1, 32), amax))[1].item() == byte, amax


def test_values_beyond_the_largest_code_saturate():
    weight = torch.full((1, 32), 7.9)
    assert mxfp4.round_to_mxfp4(-weight).eq(-6).all()


def test_quantising_twice_changes_nothing():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    once = mxfp4.round_to_mxfp4(weight)
    assert torch.equal(mxfp4.round_to_mxfp4(once), once)


def test_extremely_small_and_large_weights_stay_finite():
    weight = torch.tensor([1e-45, 1e-38, 3e38, 0.0]).unsqueeze(1).repeat(1, 32)
    packed, scale = mxfp4.quantise(weight)
    out = mxfp4.dequantise(packed, scale, torch.float64)
    assert torch.isfinite(out).all()
    assert out[2, 0] == 1.5 * 2.0**127 and out[3, 0] == 0
    assert torch.equal(out.float(), mxfp4.round_to_mxfp4(weight))


def test_fake_quantisation_passes_the_gradient_through():
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    out = mxfp4.fake_quantise(weight)
    assert torch.equal(out, mxfp4.round_to_mxfp4(weight))
    out.square().sum().backward()
    assert torch.equal(weight.grad, 2 * out.detach())


@pytest.mark.parametrize("weight", [torch.zeros(2, 48), torch.full((1, 32), float("nan"))])
def test_weights_that_cannot_be_quantised_are_refused(weight):
    with pytest.raises(ValueError, match="MXFP4"):
        mxfp4.quantise(weight)


def test_a_nan_scale_is_refused():
    with pytest.raises(ValueError, match="255"):
        mxfp4.dequantise(torch.zeros(1, 16, dtype=torch.uint8), torch.full((1, 1), 255, dtype=torch.uint8))
