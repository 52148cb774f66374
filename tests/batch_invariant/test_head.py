"""Log-probs, entropy and digest of a logits row: the contract's bits, whatever the batch; gradients against float64."""

import numpy as np
import pytest
import torch

from tests.batch_invariant.exactness import (
    assert_rows_are_independent,
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    dot_lanes,
    elementary,
    outputs,
    random,
    relative_error,
    strided,
    sum_lanes,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import head as module
from zmrl.batch_invariant.ops.digest import rows_digest
from zmrl.batch_invariant.ops.head import log_probs, log_softmax

ops = torch.ops.zmrl
NAN, INF = float("nan"), float("inf")
SIZES = [1, 2, 15, 16, 17, 288, 2047, 2048, 2049, 5000]


def make(rows, n, seed=0, scale=3.0):
    logits = random(rows, n, seed=seed, scale=scale, dtype=torch.float32)
    targets = torch.randint(0, n, (rows,), generator=torch.Generator().manual_seed(seed + 1))
    temperature = torch.tensor([1.0, 0.7, 1.3, 0.01])[torch.arange(rows) % 4]
    return logits, targets, temperature


def oracle(logits, temperature):
    """(log-probs of all ids, entropy) in numpy, one rounding at a time."""
    z = logits.numpy() / temperature.numpy()[:, None]
    d = z - z.max(axis=1, keepdims=True)
    e = elementary("exp", d)
    total = sum_lanes(e)
    log_total = elementary("log", total)
    moment = dot_lanes(e, np.where(e > 0, d, np.float32(0)))
    return torch.from_numpy(d - log_total[:, None]), torch.from_numpy(log_total - moment / total)


@pytest.mark.parametrize("n", SIZES)
def test_bits_are_the_contracts_on_every_isa(n):
    logits, targets, temperature = make(8, n)
    logp, entropy, digest = assert_same_on_every_isa(lambda: log_probs(logits, targets, temperature))
    (whole,) = assert_same_on_every_isa(lambda: log_softmax(logits, temperature))
    wanted, wanted_entropy = oracle(logits, temperature)
    assert_same([whole, logp, entropy], [wanted, wanted.gather(1, targets[:, None])[:, 0], wanted_entropy])
    assert_same([digest], [rows_digest(logits)])


def test_the_full_vocabulary_has_the_contracts_bits():
    logits, targets, temperature = make(2, 163_840, scale=4.0)
    logp, entropy, digest = outputs(lambda: log_probs(logits, targets, temperature))
    wanted, wanted_entropy = oracle(logits, temperature)
    assert_same([logp, entropy], [wanted.gather(1, targets[:, None])[:, 0], wanted_entropy])
    assert_same([log_softmax(logits, temperature), digest], [wanted, rows_digest(logits)])


def test_accuracy_against_float64():
    logits, targets, temperature = make(40, 3000)
    logp, entropy, _ = log_probs(logits, targets, temperature)
    exact = torch.log_softmax(logits.double() / temperature.double()[:, None], dim=1)
    assert (logp - exact.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-4  # z itself is rounded: ulps of z/0.01
    warm = temperature > 0.1
    assert (logp - exact.gather(1, targets[:, None])[:, 0])[warm].abs().max() < 4e-6
    assert (entropy + (exact.exp() * exact).sum(1))[warm].abs().max() < 4e-6
    assert (entropy >= -1e-6).all()


def test_a_row_does_not_depend_on_its_batch():
    logits, targets, temperature = make(130, 288)
    assert_rows_are_independent(lambda rows: log_probs(logits[rows], targets[rows], temperature[rows]))
    assert_rows_are_independent(lambda rows: [log_softmax(logits[rows], temperature[rows])], 20)


def test_threads_and_row_strides_change_nothing():
    logits, targets, temperature = make(8, 20_000)
    assert_same_with_threads(lambda: log_probs(logits, targets, temperature), module, "_log_probs")
    assert_same_with_threads(lambda: log_softmax(logits, temperature), module, "_log_softmax")
    wide = strided(logits)
    assert_same(
        outputs(lambda: log_probs(wide, targets, temperature)), outputs(lambda: log_probs(logits, targets, temperature))
    )


def test_the_digest_sees_every_bit_and_not_the_temperature():
    logits, targets, temperature = make(1, 40)
    seen = {int(log_probs(logits, targets, t)[2]) for t in (temperature, temperature * 0.7)}
    assert len(seen) == 1
    for i in range(40):
        for bit in range(32):
            flipped = logits.clone()
            flipped.view(torch.int32)[0, i] ^= torch.tensor(1 << bit).to(torch.int32)
            seen.add(int(log_probs(flipped, targets, temperature)[2]))
    assert len(seen) == 1 + 40 * 32


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("place", [0, 15, 16, 49])
def test_nan_or_plus_infinity_spoils_its_row_and_no_other(isa, place):
    logits, targets, temperature = make(4, 50)
    logits[1, place], logits[2, place] = NAN, INF
    with native.use_isa(isa):
        logp, entropy, _ = outputs(lambda: log_probs(logits, targets, temperature))
        whole = log_softmax(logits, temperature)
    for t in (logp, entropy, whole):
        bad = t[1:3].contiguous().view(torch.int32)
        assert (bad == 0x7FC00000).all()  # one NaN, so that equal rows are equal in bits
        assert t[[0, 3]].isfinite().all()


def test_minus_infinity_is_a_token_that_cannot_be():
    logits, _, temperature = make(4, 50)
    logits[:, 10:] = -INF
    logp, entropy, _ = log_probs(logits, torch.full((4,), 20), temperature)
    assert (logp == -INF).all()
    assert_same([entropy], [log_probs(logits[:, :10], torch.zeros(4, dtype=torch.int64), temperature)[1]])
    whole = log_softmax(logits, temperature)
    assert (whole[:, 10:] == -INF).all()
    assert_same([whole[:, :10]], [log_softmax(logits[:, :10], temperature)])


def test_one_token_is_certain():
    logp, entropy, _ = log_probs(torch.tensor([[-7.0]]), torch.tensor([0]), torch.tensor([0.7]))
    assert logp.item() == 0.0 and entropy.item() == 0.0


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("n", [1, 17, 288, 3000])
def test_gradients_against_float64_autograd(n, with_entropy):
    logits, targets, _ = make(12, n)
    temperature = torch.tensor([1.0, 0.7, 1.3]).repeat(4)
    dlogp, dentropy = random(12, dtype=torch.float32, seed=5), random(12, dtype=torch.float32, seed=6)
    logits.requires_grad_()
    logp, entropy, digest = log_probs(logits, targets, temperature)
    assert not digest.requires_grad
    ((logp * dlogp).sum() + ((entropy * dentropy).sum() if with_entropy else 0)).backward()
    exact = logits.detach().double().requires_grad_()
    p = torch.log_softmax(exact / temperature.double()[:, None], dim=1)
    wanted = (p.gather(1, targets[:, None])[:, 0] * dlogp).sum()
    if with_entropy:
        wanted = wanted - ((p.exp() * p).sum(1) * dentropy).sum()
    wanted.backward()
    assert (logits.grad - exact.grad).abs().max() < 3e-6 * exact.grad.abs().max().clamp_min(1)


def test_the_gradient_of_the_entropy_alone():
    logits, targets, temperature = make(3, 100)
    logits.requires_grad_()
    log_probs(logits, targets, temperature)[1].sum().backward()
    assert logits.grad.isfinite().all() and (logits.grad != 0).any()
    assert logits.grad.sum(1).abs().max() < 1e-3


def test_a_masked_token_gets_no_gradient():
    logits, _, temperature = make(4, 50)
    logits[:, 10:] = -INF
    logits.requires_grad_()
    logp, entropy, _ = log_probs(logits, torch.zeros(4, dtype=torch.int64), temperature)
    (logp.sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all() and (logits.grad[:, 10:] == 0).all()


def test_gradient_bits_depend_on_nothing():
    logits, targets, temperature = make(60, 2000)
    dlogp, dentropy = random(60, dtype=torch.float32, seed=5), random(60, dtype=torch.float32, seed=6)

    def backward(rows):
        return ops.log_probs_backward(logits[rows], targets[rows], temperature[rows], dlogp[rows], dentropy[rows])

    assert_same_on_every_isa(lambda: backward(slice(0, 5)))
    assert_rows_are_independent(backward, 10)
    assert_same_with_threads(lambda: backward(slice(0, 60)), module, "_log_probs_backward")
    wide = strided(logits)
    got = outputs(lambda: ops.log_probs_backward(wide, targets, temperature, dlogp, dentropy))
    assert_same(got, outputs(lambda: backward(slice(0, 60))))


def test_shapes_types_and_ranges_are_checked():
    logits, targets, temperature = make(3, 20)
    g = torch.ones(3)
    wrong = [
        ("logits", lambda: log_probs(logits.bfloat16(), targets, temperature)),
        ("logits", lambda: log_probs(logits[:, :0], targets, temperature)),
        ("targets", lambda: log_probs(logits, targets.int(), temperature)),
        ("targets", lambda: log_probs(logits, targets[:2], temperature)),
        ("targets", lambda: log_probs(logits, targets * 0 + 20, temperature)),
        ("targets", lambda: log_probs(logits, targets * 0 - 1, temperature)),
        ("temperature", lambda: log_probs(logits, targets, temperature.double())),
        ("temperature", lambda: log_probs(logits, targets, temperature * 0)),
        ("temperature", lambda: log_probs(logits, targets, -temperature)),
        ("temperature", lambda: log_probs(logits, targets, temperature * NAN)),
        ("temperature", lambda: log_probs(logits, targets, temperature * INF)),
        ("temperature", lambda: log_softmax(logits, temperature * 0)),
        ("dlogp", lambda: ops.log_probs_backward(logits, targets, temperature, g[:2], None)),
        ("dentropy", lambda: ops.log_probs_backward(logits, targets, temperature, g, g.double())),
        ("targets", lambda: ops.log_probs_backward(logits, targets + 20, temperature, g, None)),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()


def test_no_rows_and_meta_tensors():
    logits, targets, temperature = make(0, 20)
    assert [t.shape for t in log_probs(logits, targets, temperature)] == [(0,)] * 3
    meta = [t.to("meta") for t in make(5, 20)]
    assert [t.dtype for t in log_probs(*meta)] == [torch.float32, torch.float32, torch.int64]
    assert log_softmax(meta[0], meta[2]).shape == (5, 20)


def test_relative_error_of_long_rows_stays_small():
    logits, _, temperature = make(3, 50_000, scale=1.0)
    temperature[:] = 1.0
    exact = torch.log_softmax(logits.double(), dim=1)
    assert relative_error(log_softmax(logits, temperature), exact) < 2e-7
