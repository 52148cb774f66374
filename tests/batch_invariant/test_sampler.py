"""The sampler: a pure function of (row, temperature, seed, position), and a sample of the row's own distribution."""

import numpy as np
import pytest
import torch

from tests.batch_invariant.chains import fma
from tests.batch_invariant.exactness import (
    assert_rows_are_independent,
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    elementary,
    outputs,
    random,
    strided,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import head as module
from zmrl.batch_invariant.ops.head import log_softmax, sample

NAN, INF = float("nan"), float("inf")
RARE = (0, 543646)
"""A (seed, position) at which token 1's noise has 24 leading zero bits: a chance of 2^-24."""


def make(rows, n, seed=0, scale=2.0):
    logits = random(rows, n, seed=seed, scale=scale, dtype=torch.float32)
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.0])[torch.arange(rows) % 4]
    g = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g)
    return logits, temperature, seeds, torch.arange(rows) * 3


def splitmix64(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(seeds, positions, n):
    """The noise in numpy, one rounding at a time."""
    f = np.float32
    with np.errstate(over="ignore"):
        stream = splitmix64(seeds.numpy().view(np.uint64) + np.uint64(0xA0761D6478BD642F))
        position = positions.numpy().view(np.uint64) + np.uint64(1)
        key = splitmix64(stream + position * np.uint64(0xE7037ED1A0B428DB))
        ids = np.arange(1, n + 1, dtype=np.uint64)
        h = splitmix64(key[:, None] + ids * np.uint64(0x8EBC6AF09C88C6E3))
    high = (h >> np.uint64(40)).astype(f)
    low = ((h >> np.uint64(16)) & np.uint64(0xFFFFFF)).astype(f)
    v = np.minimum(fma(low + f(0.5), f(2.0**-48), high * f(2.0**-24)), f(1) - f(2.0**-24))
    y = f(1) - v
    e = (v - (f(1) - y)) / y - elementary("log", y)
    return f(0) - elementary("log", e), v


def oracle(logits, temperature, seeds, positions):
    noise, _ = gumbel(seeds, positions, logits.shape[1])
    x, t = logits.numpy(), temperature.numpy()[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return torch.from_numpy(np.where(t == 0, x, x / t + noise).argmax(1))


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 100, 288, 5000])
def test_tokens_are_the_definitions_on_every_isa(n):
    arguments = make(24, n)
    assert_same(assert_same_on_every_isa(lambda: sample(*arguments)), [oracle(*arguments)])


def test_the_full_vocabulary_is_sampled_by_the_definition():
    arguments = make(4, 163_840)
    assert_same(outputs(lambda: sample(*arguments)), [oracle(*arguments)])


def test_the_noise_is_exponential_in_double_precision_too():
    """-log(1 - v) in FP32 keeps its relative precision for the least v, where rare tokens are decided."""
    noise, v = gumbel(torch.arange(2000), torch.arange(2000), 500)
    exact = -np.log(-np.log1p(-v.astype(np.float64)))
    assert np.abs(noise - exact).max() < 3e-6
    assert v.min() < 2.0**-18 and v.max() < 1


def test_a_row_does_not_depend_on_its_batch():
    arguments = make(130, 288)
    assert_rows_are_independent(lambda rows: sample(*[t[rows] for t in arguments]))


def test_threads_and_row_strides_change_nothing():
    logits, *rest = make(16, 10_000)
    assert_same_with_threads(lambda: sample(logits, *rest), module, "_sample")
    assert_same(outputs(lambda: sample(strided(logits), *rest)), outputs(lambda: sample(logits, *rest)))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_are_the_probabilities(temperature):
    draws, n = 40_000, 12
    row = random(1, n, seed=3, scale=1.5, dtype=torch.float32)
    t = torch.full((draws,), temperature)
    for seeds, positions in (
        (torch.arange(draws), torch.zeros(draws, dtype=torch.int64)),
        (torch.zeros(draws, dtype=torch.int64), torch.arange(draws)),
    ):
        tokens = sample(row.expand(draws, n), t, seeds, positions)
        p = log_softmax(row, t[:1])[0].double().exp()
        counts = torch.bincount(tokens, minlength=n).double()
        chi2 = ((counts - draws * p) ** 2 / (draws * p)).sum().item()
        assert chi2 < 31.3  # 11 degrees of freedom: exceeded once in a thousand


def test_neighbouring_seeds_positions_and_tokens_are_unrelated():
    draws, n = 20_000, 8
    flat, one, zero = torch.zeros(draws, n), torch.ones(draws), torch.zeros(draws, dtype=torch.int64)
    a = sample(flat, one, torch.arange(draws), zero)
    for b in (
        sample(flat, one, torch.arange(draws) + 1, zero),
        sample(flat, one, torch.arange(draws), zero + 1),
        sample(flat, one, zero, torch.arange(draws)),
    ):
        pairs = torch.bincount(a * n + b, minlength=n * n).double()
        chi2 = ((pairs - draws / n**2) ** 2 / (draws / n**2)).sum().item()
        assert chi2 < 104.0  # 63 degrees of freedom, once in a thousand


@pytest.mark.parametrize("isa", native.available_isas())
def test_a_token_of_probability_1e_7_can_be_drawn(isa):
    """A uniform of 24 bits could not give noise above 17.3; here the hash's next bits decide."""
    seed, position = (torch.tensor([x]) for x in RARE)
    noise, v = gumbel(seed, position, 2)
    assert v[0, 1] < 2.0**-24 and noise[0, 1] > 16.6
    with native.use_isa(isa):
        for gap, token in ((15.0, 1), (30.0, 0)):
            arguments = torch.tensor([[gap, 0.0]]), torch.ones(1), seed, position
            assert sample(*arguments).item() == oracle(*arguments).item() == token


def test_padding_with_impossible_tokens_changes_nothing():
    logits, *rest = make(20, 100)
    padded = torch.cat([logits, torch.full((20, 29), -INF)], dim=1)
    assert_same([sample(padded, *rest)], [sample(logits, *rest)])


@pytest.mark.parametrize("isa", native.available_isas())
def test_greedy_takes_the_largest_and_of_equals_the_lowest(isa):
    zero = torch.zeros(5, dtype=torch.int64)
    logits = torch.full((5, 70), -3.0)
    logits[0, [17, 33, 64]] = 2.0
    logits[1, :] = -INF
    logits[2, 3], logits[2, 69] = NAN, 1.0
    logits[3, :] = NAN
    logits[4, 5], logits[4, 4] = 0.0, -0.0
    with native.use_isa(isa):
        assert sample(logits, torch.zeros(5), zero, zero).tolist() == [17, 0, 69, 0, 4]
        warm = sample(logits, torch.ones(5), zero, zero).tolist()
    assert warm[1] == warm[3] == 0 and warm[2] != 3


def test_sampling_has_no_state():
    arguments = make(50, 64)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    first = sample(*arguments)
    assert_same([sample(*[t[order] for t in arguments])], [first[order]])
    assert_same([sample(*arguments)], [first])


def test_shapes_types_and_ranges_are_checked():
    logits, temperature, seeds, positions = make(3, 20)
    wrong = [
        ("logits", lambda: sample(logits.double(), temperature, seeds, positions)),
        ("logits", lambda: sample(logits[:, :0], temperature, seeds, positions)),
        ("temperature", lambda: sample(logits, -torch.ones(3), seeds, positions)),
        ("temperature", lambda: sample(logits, temperature * NAN, seeds, positions)),
        ("temperature", lambda: sample(logits, torch.full((3,), INF), seeds, positions)),
        ("temperature", lambda: sample(logits, temperature[:2], seeds, positions)),
        ("seeds", lambda: sample(logits, temperature, seeds.int(), positions)),
        ("positions", lambda: sample(logits, temperature, seeds, positions[:2])),
    ]  # fmt: skip
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()


def test_no_rows_and_meta_tensors():
    assert sample(*make(0, 20)).shape == (0,)
    assert sample(*[t.to("meta") for t in make(5, 20)]).dtype == torch.int64
