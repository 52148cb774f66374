"""Norms and elementwise activations: the contract's bits, dependent on nothing else; gradients against float64."""

import math

import numpy as np
import pytest
import torch

from tests.batch_invariant.chains import bf16, floats, fma
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
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import activation, norm
from zmrl.batch_invariant.ops.activation import gate_mul, situ
from zmrl.batch_invariant.ops.norm import layer_norm, rms_norm, rms_norm_gated

EPS, BETA, LINEAR_BETA = 1e-5, 4.0, 25.0
ops = torch.ops.zmrl


def inverse_rms(x):
    n = np.float32(x.shape[-1])
    return (np.float32(1) / np.sqrt(dot_lanes(x, x) / n + np.float32(EPS)))[..., None]


def heads(x, d):
    return x.reshape(x.shape[0], -1, d)


class Case:
    """An operator over rows: its inputs, its bits by the contract, its float64 form, its backward operator."""

    def __init__(self, name, kernel, op, backward, oracle, reference, columns, weights=lambda n: ()):
        self.name, self.kernel, self.op, self.backward = name, kernel, op, backward
        self.oracle, self.reference, self.columns, self.weights = oracle, reference, columns, weights
        self.module = norm if "norm" in name else activation

    def inputs(self, n, rows, seed=0):
        """The row inputs and the result's gradient, for width n."""
        widths = self.columns(n)
        x = [random(rows, w, seed=seed + i, scale=2.0) for i, w in enumerate(widths)]
        return x, random(rows, n, seed=seed + 9)


def w32(n, seed=50):
    return 1 + 0.3 * random(n, seed=seed, dtype=torch.float32)


def rms64(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) * w.double()


def gated_oracle(o, z, w):
    d = w.shape[0]
    x = heads(o, d)
    y = (x * inverse_rms(x)) * w
    return bf16(y.reshape(o.shape) * elementary("sigmoid", z))


def layer_norm_oracle(x, w, b):
    n = np.float32(x.shape[-1])
    mean = (sum_lanes(x) / n)[..., None]
    centred = x - mean
    root = np.sqrt(dot_lanes(centred, centred) / n + np.float32(EPS))[..., None]
    return fma(centred / root, w, b)


def situ_oracle(x):
    g, u = np.split(x, 2, axis=1)
    beta, linear = np.float32(BETA), np.float32(LINEAR_BETA)
    y = beta * elementary("tanh", g / beta) * elementary("sigmoid", g)
    return bf16(y * linear * elementary("tanh", u / linear))


def situ64(x):
    g, u = x.chunk(2, dim=1)
    return BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)


def silu_oracle(x):
    g, u = np.split(x, 2, axis=1)
    return bf16((g * elementary("sigmoid", g)) * u)


def silu64(x):
    g, u = x.chunk(2, dim=1)
    return torch.nn.functional.silu(g) * u


GATED_HEAD = {8: 8, 24: 24, 64: 32, 96: 24, 160: 80, 256: 128}  # width -> head width

CASES = [
    Case(
        "rms_norm", "_rms_norm", lambda x, w: rms_norm(x, w, EPS),
        lambda dy, x, w: ops.rms_norm_backward(dy, x, w, EPS),
        lambda x, w: bf16((x * inverse_rms(x)) * w), rms64, lambda n: [n], lambda n: (w32(n),),
    ),
    Case(
        "rms_norm of BF16 weights", "_rms_norm", lambda x, w: rms_norm(x, w, EPS),
        lambda dy, x, w: ops.rms_norm_backward(dy, x, w, EPS),
        lambda x, w: bf16((x * inverse_rms(x)) * w), rms64, lambda n: [n], lambda n: (w32(n).bfloat16(),),
    ),
    Case(
        "rms_norm_gated", "_rms_norm_gated", lambda o, z, w: rms_norm_gated(o, w, z, EPS),
        lambda dy, o, z, w: ops.rms_norm_gated_backward(dy, o, w, z, EPS), gated_oracle,
        lambda o, z, w: rms64(heads(o, w.shape[0]), w).reshape(o.shape) * torch.sigmoid(z), lambda n: [n, n],
        lambda n: (w32(GATED_HEAD[n]),),
    ),
    Case(
        "layer_norm", "_layer_norm", lambda x, w, b: layer_norm(x, w, b, EPS), None, layer_norm_oracle,
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[1:], w.double(), b.double(), EPS), lambda n: [n],
        lambda n: (w32(n), w32(n, 60)),
    ),
    Case(
        "layer_norm of BF16 weights", "_layer_norm", lambda x, w, b: layer_norm(x, w, b, EPS), None, layer_norm_oracle,
        lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[1:], w.double(), b.double(), EPS), lambda n: [n],
        lambda n: (w32(n).bfloat16(), w32(n, 60).bfloat16()),
    ),
    Case(
        "situ", "_situ", lambda x: situ(x, BETA, LINEAR_BETA),
        lambda dy, x: ops.situ_backward(dy, x, BETA, LINEAR_BETA),
        situ_oracle, situ64, lambda n: [2 * n],
    ),
    Case(
        "silu", "_situ", lambda x: situ(x, math.inf, math.inf),
        lambda dy, x: ops.situ_backward(dy, x, math.inf, math.inf),
        silu_oracle, silu64, lambda n: [2 * n],
    ),
    Case(
        "gate_mul", "_gate_mul", gate_mul, ops.gate_mul_backward, lambda o, z: bf16(o * elementary("sigmoid", z)),
        lambda o, z: o * torch.sigmoid(z), lambda n: [n, n],
    ),
]  # fmt: skip
ODD_SIZES = [1, 5, 16, 17, 33, 100, 256]
SIZES = {case.name: list(GATED_HEAD) if case.name == "rms_norm_gated" else ODD_SIZES for case in CASES}
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_differentiable = pytest.mark.parametrize("case", [c for c in CASES if c.backward], ids=lambda case: case.name)


@each_case
def test_bits_are_the_contracts_on_every_isa(case):
    for n in SIZES[case.name]:
        x, _ = case.inputs(n, 6)
        w = case.weights(n)
        (got,) = assert_same_on_every_isa(lambda x=x, w=w: case.op(*x, *w))
        wanted = case.oracle(*map(floats, x), *map(floats, w))
        assert np.array_equal(floats(got).view(np.int32), wanted.astype(np.float32).view(np.int32))


@each_case
def test_accuracy_against_float64(case):
    n = SIZES[case.name][-1]
    x, _ = case.inputs(n, 40)
    w = case.weights(n)
    got = case.op(*x, *w)
    limit = 1e-6 if got.dtype == torch.float32 else 2.5e-3
    assert relative_error(got, case.reference(*[t.double() for t in x], *w)) < limit


@each_case
def test_a_row_does_not_depend_on_its_batch(case):
    n = SIZES[case.name][-1]
    x, _ = case.inputs(n, 130)
    w = case.weights(n)
    assert_rows_are_independent(lambda rows: case.op(*[t[rows] for t in x], *w))


@each_case
def test_threads_and_row_strides_change_nothing(case):
    n = SIZES[case.name][-1]
    x, _ = case.inputs(n, 4000)
    w = case.weights(n)
    assert_same_with_threads(lambda: case.op(*x, *w), case.module, case.kernel)
    assert_same(outputs(lambda: case.op(*[strided(t) for t in x], *w)), outputs(lambda: case.op(*x, *w)))


@each_case
def test_no_rows_give_no_rows(case):
    n = SIZES[case.name][-1]
    x, _ = case.inputs(n, 0)
    assert case.op(*x, *case.weights(n)).shape == (0, n)


@each_differentiable
def test_gradients_against_float64_autograd(case):
    for n in SIZES[case.name]:
        if n == 1 and "rms" in case.name:
            continue  # the norm of one element is its sign: gradients of size eps
        x, dy = case.inputs(n, 40)
        w = case.weights(n)
        mine = [t.requires_grad_() for t in x]
        case.op(*mine, *w).backward(dy)
        exact = [t.detach().double().requires_grad_() for t in x]
        case.reference(*exact, *w).backward(dy.double())
        for a, b in zip(mine, exact, strict=True):
            assert a.grad.dtype == torch.bfloat16
            assert relative_error(a.grad, b.grad) < 4e-3


@each_differentiable
def test_gradient_bits_depend_on_nothing(case):
    n = SIZES[case.name][-1]
    x, dy = case.inputs(n, 700)
    w = case.weights(n)
    few = slice(0, 9)
    assert_same_on_every_isa(lambda: case.backward(dy[few], *[t[few] for t in x], *w))
    assert_same_with_threads(lambda: case.backward(dy, *x, *w), case.module, f"{case.kernel}_backward")
    assert_rows_are_independent(lambda rows: case.backward(dy[rows], *[t[rows] for t in x], *w), 40)
    wide = outputs(lambda: case.backward(strided(dy), *[strided(t) for t in x], *w))
    assert_same(wide, outputs(lambda: case.backward(dy, *x, *w)))


@each_differentiable
def test_expanded_gradients_and_no_grad(case):
    n = SIZES[case.name][-1]
    x, _ = case.inputs(n, 3)
    w = case.weights(n)
    mine = [t.requires_grad_() for t in x]
    case.op(*mine, *w).float().sum().backward()  # a gradient with strides 0
    assert all(t.grad.isfinite().all() for t in mine)
    with torch.no_grad():
        assert not case.op(*mine, *w).requires_grad


def test_gate_and_situ_keep_the_sign_of_zero():
    o = torch.tensor([[-0.0, 0.0]]).bfloat16()
    assert torch.signbit(gate_mul(o, o)).tolist() == [[True, False]]
    g_u = torch.tensor([[-0.0, 0.0, 1.0, 1.0]]).bfloat16()
    assert torch.signbit(situ(g_u, BETA, LINEAR_BETA)).tolist() == [[True, False]]


def test_nan_stays_in_its_row():
    x, w = random(3, 40), w32(40)
    x[1, 39] = float("nan")
    y = rms_norm(x, w, EPS)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_shapes_and_types_are_checked():
    x, w = random(3, 16), w32(16)
    wrong = [
        ("x", lambda: rms_norm(x.float(), w, EPS)),
        ("x", lambda: rms_norm(x.t(), w, EPS)),
        ("x", lambda: rms_norm(x[0], w, EPS)),
        ("w", lambda: rms_norm(x, w[:15], EPS)),
        ("w", lambda: rms_norm(x, w.double(), EPS)),
        ("w", lambda: rms_norm(x, w32(32)[::2], EPS)),
        ("dy", lambda: ops.rms_norm_backward(x[:2], x, w, EPS)),
        ("z", lambda: rms_norm_gated(x, w, x[:2], EPS)),
        ("o", lambda: rms_norm_gated(x, w32(5), x, EPS)),
        ("w", lambda: rms_norm_gated(x, w.bfloat16(), x, EPS)),
        ("b", lambda: layer_norm(x, w, w.bfloat16(), EPS)),
        ("gate_up", lambda: situ(random(3, 15), BETA, LINEAR_BETA)),
        ("beta", lambda: situ(x, 0.0, LINEAR_BETA)),
        ("dy", lambda: ops.situ_backward(x, x, BETA, LINEAR_BETA)),
        ("z", lambda: gate_mul(x, x[:, :8])),
        ("dy", lambda: ops.gate_mul_backward(x[:, :8], x, x)),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()


def test_meta_tensors_get_their_shapes():
    x, w = torch.empty(5, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, device="meta")
    assert rms_norm(x, w, EPS).shape == (5, 64)
    assert rms_norm_gated(x, w[:32], x, EPS).shape == (5, 64)
    assert layer_norm(x, w, w, EPS).dtype == torch.float32
    assert situ(x, BETA, LINEAR_BETA).shape == (5, 32)
    assert gate_mul(x, x).device.type == "meta"
