"""exp, log, tanh, sigmoid and softplus of csrc/math.h against float64, over the whole range of FP32."""

import numpy as np
import pytest
import torch

from tests.batch_invariant.exactness import FUNCTIONS, _elementary, elementary, flushing_denormals, threads
from zmrl.batch_invariant import native

LARGEST = float(np.finfo(np.float32).max)
ULPS = {"exp": 2.0, "log": 2.0, "tanh": 2.0, "sigmoid": 2.5, "softplus": 2.5}
EDGES = (
    [88.7228, -87.33655, -103.97208, -103.2789, -88.72284, -104.0, 88.8]  # limits of exp, and of sigmoid's denormals
    + [1.0, 0.70710678, 1.41421356, 1.17549435e-38, 0.5, 2.0, 4.0]  # log's breaks
    + [0.625, -0.625, 9.0, -9.0, 1e-4, 0.34657359, -0.34657359, 0.0]
)


def reference(name, x):
    x = x.astype(np.float64)
    with np.errstate(all="ignore"):
        if name == "sigmoid":
            return np.where(x >= 0, 1 / (1 + np.exp(-x)), np.exp(x) / (1 + np.exp(x)))
        if name == "softplus":
            return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
        return getattr(np, name)(x)


def sweep(step):
    """Every step-th bit pattern: both signs, denormals, infinities, NaNs."""
    return np.arange(0, 1 << 32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)


def around_edges(radius=3000):
    """All floats near the places where an implementation changes its mind."""
    centres = np.array(EDGES, np.float32).view(np.int32).astype(np.int64)
    bits = (centres[:, None] + np.arange(-radius, radius + 1)).ravel() & 0xFFFFFFFF
    return bits.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_error_is_within_the_claimed_ulps(name):
    x = np.concatenate([sweep(2053), around_edges()])
    with np.errstate(invalid="ignore"):
        y, wanted = elementary(name, x), reference(name, x)
    # Above the largest float plus half an ulp the right result is inf; between, either neighbour is within one ulp.
    ordinary = np.isfinite(wanted) & (np.abs(wanted) <= LARGEST)
    ulp = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(np.abs(wanted[ordinary]), 1e-300))), -126) - 23)
    assert np.isfinite(y[ordinary]).all()
    assert (np.abs(y[ordinary] - wanted[ordinary]) / ulp).max() <= ULPS[name]
    with np.errstate(over="ignore"):
        rest, expected = y[~ordinary], wanted[~ordinary].astype(np.float32)
    np.testing.assert_array_equal(rest, expected)  # inf, -inf and NaN


@pytest.mark.parametrize("name", FUNCTIONS)
def test_bits_are_the_same_on_every_isa(name):
    x = np.concatenate([sweep(30011), around_edges(200)])
    x = x[~np.isnan(x)]
    results = []
    for isa in native.available_isas():
        with native.use_isa(isa):
            results.append(elementary(name, x))
    number = ~np.isnan(results[0])
    for result in results:
        np.testing.assert_array_equal(~np.isnan(result), number)
        np.testing.assert_array_equal(result.view(np.int32)[number], results[0].view(np.int32)[number])


@pytest.mark.parametrize("isa", native.available_isas())
def test_special_values(isa):
    inf, nan = float("inf"), float("nan")
    cases = {
        "exp": [(0.0, 1.0), (-0.0, 1.0), (inf, inf), (-inf, 0.0), (88.73, inf), (-104.1, 0.0), (nan, nan)],
        "log": [(1.0, 0.0), (0.0, -inf), (-0.0, -inf), (inf, inf), (-1e-40, nan), (-1.0, nan), (-inf, nan), (nan, nan)],
        "tanh": [(0.0, 0.0), (-0.0, -0.0), (inf, 1.0), (-inf, -1.0), (20.0, 1.0), (-1e-40, -1e-40), (nan, nan)],
        "sigmoid": [(0.0, 0.5), (-0.0, 0.5), (inf, 1.0), (-inf, 0.0), (-200.0, 0.0), (200.0, 1.0), (nan, nan)],
        "softplus": [(inf, inf), (-inf, 0.0), (-200.0, 0.0), (200.0, 200.0), (20.0, 20.0), (nan, nan)],
    }  # fmt: skip
    with native.use_isa(isa):
        for name, pairs in cases.items():
            x, wanted = (np.array(column, np.float32) for column in zip(*pairs, strict=True))
            y = elementary(name, x)
            number = ~np.isnan(wanted)
            np.testing.assert_array_equal(y.view(np.int32)[number], wanted.view(np.int32)[number])
            assert np.isnan(y[~number]).all()
        assert elementary("exp", np.float32([-103.0])).view(np.int32)[0] == 1  # the least denormal


@pytest.mark.parametrize("name", FUNCTIONS)
def test_tail_and_body_are_one_path(name):
    x = np.linspace(0.01, 3, 67, dtype=np.float32)
    whole = elementary(name, x)
    for n in range(1, 67):
        np.testing.assert_array_equal(elementary(name, x[:n]), whole[:n])
        np.testing.assert_array_equal(elementary(name, x[n:]), whole[n:])


def test_bits_are_the_same_with_two_threads():
    x = torch.linspace(-100, 80, 200_003)
    results = []
    for count in (1, 2):
        with threads(count):
            results.append(torch.empty_like(x))
            assert _elementary(x, results[-1], x.numel(), 0) == count
    assert torch.equal(results[0].view(torch.int32), results[1].view(torch.int32))


@pytest.mark.parametrize("count", [1, 2])
def test_denormals_survive_a_flushed_caller(count):
    x = torch.linspace(-103.9, -87.4, 200_003)
    with threads(count):
        wanted = torch.empty_like(x)
        _elementary(x, wanted, x.numel(), 0)
        bits = wanted.view(torch.int32)
        assert 0 < bits.max() < 1 << 23 and bits.min() > 0  # denormals all
        with flushing_denormals():
            got = torch.empty_like(x)
            _elementary(x, got, x.numel(), 0)
            assert (torch.tensor([1e-40]) * 1).item() == 0.0  # the caller's own mode is as it was
    assert torch.equal(got.view(torch.int32), bits)
