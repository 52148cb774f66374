"""The router: exact total order, the contract's bits, gradients against float64 autograd."""

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
    fp32,
    outputs,
    relative_error,
    strided,
    sum_lanes,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import router as module
from zmrl.batch_invariant.ops.router import router

ops = torch.ops.zmrl
NAN, INF = float("nan"), float("inf")


def oracle(logits, bias, topk, scale):
    """Sorts by (score descending, NaN last, id ascending)."""
    s = elementary("sigmoid", logits.numpy())
    with np.errstate(invalid="ignore"):
        key = s + bias.numpy()
    ids = np.empty((len(s), topk), np.int32)
    for t, row in enumerate(key):
        order = sorted(range(len(row)), key=lambda i: (bool(np.isnan(row[i])), 0.0 if np.isnan(row[i]) else -row[i], i))
        ids[t] = sorted(order[:topk])
    chosen = np.take_along_axis(s, ids.astype(np.int64), axis=1)
    total = sum_lanes(chosen)[:, None] + np.float32(1e-20)
    return torch.from_numpy(ids), torch.from_numpy(chosen / total * np.float32(scale))


def check_against_oracle(logits, bias, topk, scale=1.0):
    ids, weights = assert_same_on_every_isa(lambda: router(logits, bias, topk, scale))
    assert_same([ids, weights], oracle(logits, bias, topk, scale))


SIZES = [(1, 1), (5, 3), (16, 16), (17, 2), (33, 33), (100, 17), (896, 16), (300, 128)]


@pytest.mark.parametrize("experts, topk", SIZES)
def test_bits_are_the_contracts_on_every_isa(experts, topk):
    check_against_oracle(fp32(6, experts, scale=2), fp32(experts, seed=1, scale=0.1), topk, scale=2.5)


@pytest.mark.parametrize("levels", [1, 2, 3, 7])
def test_ties_go_to_the_lower_id(levels):
    logits = torch.randint(0, levels, (40, 100), generator=torch.Generator().manual_seed(0)).float()
    key = torch.sigmoid(logits)
    cut = key.sort(dim=1, descending=True).values[:, 15:17]
    assert (cut[:, 0] == cut[:, 1]).any()  # a tie at the cut did occur
    check_against_oracle(logits, torch.zeros(100), 16)


def test_a_tie_of_zeros_of_both_signs_is_a_tie():
    logits = torch.full((1, 40), -INF)  # s = 0
    bias = torch.zeros(40)
    bias[::2] = -0.0
    ids, _ = router(logits, bias, 4, 1.0)
    assert ids.tolist() == [[0, 1, 2, 3]]


def test_selection_does_not_depend_on_where_the_best_are():
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        logits = torch.linspace(-4, 4, 200)[torch.randperm(200, generator=g)].unsqueeze(0)
        if seed == 0:
            logits = logits.sort(dim=1).values
        if seed == 1:
            logits = logits.sort(dim=1, descending=True).values
        check_against_oracle(logits, torch.zeros(200), 16)


@pytest.mark.parametrize("isa", native.available_isas())
def test_nan_sorts_last_and_sets_the_flag_of_its_row(isa):
    logits, bias = fp32(4, 50), torch.zeros(50)
    logits[1, 7] = NAN
    logits[2, 3:] = NAN
    logits[3, :] = -INF
    flags = torch.tensor([0, 0, 0, 5], dtype=torch.int32)
    with native.use_isa(isa):
        ids, weights = outputs(lambda: router(logits, bias, 8, 1.0, flags))
    assert flags.tolist() == [0, 1, 1, 5]
    assert 7 not in ids[1].tolist() and weights[:2].isfinite().all()
    assert ids[2].tolist() == list(range(8)) and weights[2].isnan().any()
    assert ids[3].tolist() == list(range(8))
    with native.use_isa(isa):
        assert_same(outputs(lambda: router(logits[:2], bias, 8, 1.0)), [ids[:2], weights[:2]])  # without flags


def test_minus_infinity_sorts_before_nan():
    logits, bias = torch.zeros(1, 20), torch.full((20,), -INF)
    bias[:4] = NAN
    ids, _ = router(logits, bias, 17, 1.0)
    assert ids.tolist() == [[0] + list(range(4, 20))]


def test_a_row_does_not_depend_on_its_batch():
    logits, bias = fp32(130, 120), fp32(120, seed=1, scale=0.1)
    assert_rows_are_independent(lambda rows: router(logits[rows], bias, 16, 1.0))


def test_threads_and_row_strides_change_nothing():
    logits, bias = fp32(200, 896), fp32(896, seed=1, scale=0.1)
    assert_same_with_threads(lambda: router(logits, bias, 16, 1.0), module, "_router")
    assert_same(outputs(lambda: router(strided(logits), bias, 16, 1.0)), outputs(lambda: router(logits, bias, 16, 1.0)))


def test_gradients_against_float64_autograd():
    logits, bias, dw = fp32(30, 100, scale=2), fp32(100, seed=1, scale=0.1), fp32(30, 16, seed=2)
    logits.requires_grad_()
    ids, weights = router(logits, bias, 16, 2.5)
    assert not ids.requires_grad
    weights.backward(dw)
    exact = logits.detach().double().requires_grad_()
    s = torch.sigmoid(exact).gather(1, ids.long())
    (s / (s.sum(1, keepdim=True) + 1e-20) * 2.5).backward(dw.double())
    assert relative_error(logits.grad, exact.grad) < 1e-6
    assert (logits.grad != 0).sum(1).max() <= 16


def test_gradient_bits_are_the_contracts_and_depend_on_nothing():
    logits, dw = fp32(2000, 896, scale=2), fp32(2000, 16, seed=2)
    ids, _ = router(logits, torch.zeros(896), 16, 1.0)

    def backward(rows):
        return ops.router_backward(logits[rows], ids[rows], dw[rows], 1.5)

    (got,) = assert_same_on_every_isa(lambda: backward(slice(0, 9)))
    s = elementary("sigmoid", logits[:9].gather(1, ids[:9].long()).numpy())
    w = dw[:9].numpy()
    total = (sum_lanes(s) + np.float32(1e-20))[:, None]
    c = dot_lanes(w, s)[:, None] / total
    wanted = np.float32(1.5) * (w - c) / total * (s * (np.float32(1) - s))
    assert_same([got.gather(1, ids[:9].long())], [torch.from_numpy(wanted)])
    assert_rows_are_independent(backward, 30)
    assert_same_with_threads(lambda: backward(slice(0, 2000)), module, "_router_backward")


def test_shapes_and_types_are_checked():
    logits, bias = fp32(3, 20), torch.zeros(20)
    ids, weights = router(logits, bias, 4, 1.0)
    wrong = [
        ("logits", lambda: router(logits.bfloat16(), bias, 4, 1.0)),
        ("logits", lambda: router(torch.zeros(1, 5000), torch.zeros(5000), 4, 1.0)),
        ("bias", lambda: router(logits, bias[:19], 4, 1.0)),
        ("topk", lambda: router(logits, bias, 21, 1.0)),
        ("topk", lambda: router(logits, bias, 0, 1.0)),
        ("flags", lambda: router(logits, bias, 4, 1.0, torch.zeros(2, dtype=torch.int32))),
        ("flags", lambda: router(logits, bias, 4, 1.0, torch.zeros(3))),
        ("ids", lambda: ops.router_backward(logits, ids.long(), weights, 1.0)),
        ("ids", lambda: ops.router_backward(logits, ids + 20, weights, 1.0)),
        ("ids", lambda: ops.router_backward(logits, ids - 20, weights, 1.0)),
        ("dweights", lambda: ops.router_backward(logits, ids, weights[:2], 1.0)),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()


def test_meta_tensors_get_their_shapes():
    ids, weights = router(torch.empty(5, 64, device="meta"), torch.empty(64, device="meta"), 8, 1.0)
    assert ids.shape == weights.shape == (5, 8) and ids.dtype == torch.int32
