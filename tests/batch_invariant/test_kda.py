"""KDA: the bits are those of the token-by-token definition, however a sequence is fed; gradients against float64."""

import numpy as np
import pytest
import torch
from torch.nn.functional import softplus

from tests.batch_invariant.chains import bf16, floats, fma, same_bits
from tests.batch_invariant.exactness import (
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    block_rows,
    cu_of,
    dot_lanes,
    elementary,
    fp32,
    int32,
    outputs,
    random,
    relative_error,
    strided,
)
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import kda as module
from zmrl.batch_invariant.ops.kda import kda

LOWER_BOUND = -5.0
BOUNDS = pytest.mark.parametrize("bound", [LOWER_BOUND, None], ids=["bounded", "softplus"])
NAN = float("nan")
ops = torch.ops.zmrl


class Layer:
    """Weights and random inputs of H heads of width D; bound: of the log-decay, None: softplus decay."""

    def __init__(self, tokens, heads=2, dim=8, seed=0, bound=LOWER_BOUND):
        self.bound = bound
        self.heads, self.dim, self.width = heads, dim, heads * dim
        self.q, self.k, self.v, self.f = (random(tokens, self.width, seed=seed + i) for i in range(4))
        self.b = random(tokens, heads, seed=seed + 4)
        self.a_log, self.dt_bias = fp32(heads, seed=seed + 5, scale=0.5), fp32(self.width, seed=seed + 6)
        self.do = random(tokens, self.width, seed=seed + 7)

    def inputs(self, rows=slice(None)):
        return [t[rows] for t in (self.q, self.k, self.v, self.f, self.b)]

    def run(self, lengths, rows=slice(None), state=None, state_in=None, state_out=None, inputs=None):
        inputs = inputs or self.inputs(rows)
        return kda(*inputs, self.a_log, self.dt_bias, self.bound, cu_of(lengths), state, state_in, state_out)

    def backward(self, lengths, rows=slice(None), inputs=None, do=None):
        do = self.do[rows] if do is None else do
        inputs = inputs or self.inputs(rows)
        return ops.kda_backward(do, *inputs, self.a_log, self.dt_bias, self.bound, cu_of(lengths))


def kda_oracle(layer, start=None):
    """One sequence in numpy, one rounding at a time; returns (o, final state [H, K, V])."""
    one, eps = np.float32(1), np.float32(1e-6)
    heads, dim = layer.heads, layer.dim
    q, k, v, f = (floats(t).reshape(-1, heads, dim) for t in layer.inputs()[:4])
    qn = q * ((one / np.sqrt(np.float32(dim))) / np.sqrt(dot_lanes(q, q) + eps))[..., None]
    kn = k * (one / np.sqrt(dot_lanes(k, k) + eps))[..., None]
    rate = elementary("exp", layer.a_log.numpy())[:, None]
    x = f + layer.dt_bias.numpy().reshape(heads, dim)
    if layer.bound is None:
        alpha = elementary("exp", -rate * elementary("softplus", x))
    else:
        alpha = elementary("exp", np.float32(layer.bound) * elementary("sigmoid", rate * x))
    beta = elementary("sigmoid", floats(layer.b))[..., None]
    state = np.zeros((heads, dim, dim), np.float32) if start is None else start
    o = np.zeros_like(q)
    for t in range(len(q)):
        state = alpha[t][:, :, None] * state
        predicted = np.zeros((heads, dim), np.float32)
        for i in range(dim):
            predicted = fma(state[:, i], kn[t][:, i : i + 1], predicted)
        u = beta[t] * (v[t] - predicted)
        state = fma(kn[t][:, :, None], u[:, None, :], state)
        for i in range(dim):
            o[t] = fma(state[:, i], qn[t][:, i : i + 1], o[t])
    return bf16(o.reshape(len(q), -1)), state


def kda64(q, k, v, f, b, layer, lengths):
    """The definition in float64, differentiable."""
    heads, dim = layer.heads, layer.dim
    q, k, v, f = (t.view(-1, heads, dim) for t in (q, k, v, f))
    qn = q * dim**-0.5 / torch.sqrt((q * q).sum(-1, keepdim=True) + 1e-6)
    kn = k / torch.sqrt((k * k).sum(-1, keepdim=True) + 1e-6)
    rate = layer.a_log.double().exp()[:, None]
    x = f + layer.dt_bias.double().view(heads, dim)
    alpha = torch.exp(-rate * softplus(x) if layer.bound is None else layer.bound * torch.sigmoid(rate * x))
    beta = torch.sigmoid(b)
    out, t = [], 0
    for length in lengths:
        state = torch.zeros(heads, dim, dim, dtype=torch.float64)
        for _ in range(length):
            state = alpha[t][:, :, None] * state
            u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, kn[t]))
            state = state + kn[t][:, :, None] * u[:, None, :]
            out.append(torch.einsum("hkv,hk->hv", state, qn[t]).reshape(-1))
            t += 1
    return torch.stack(out)


def empty_slots(slots, layer):
    return block_rows(torch.full((slots, layer.heads, layer.dim, layer.dim), NAN))


@BOUNDS
@pytest.mark.parametrize("dim", [8, 16, 24, 40, 80, 128])
def test_kda_bits_are_the_definitions_on_every_isa(dim, bound):
    layer = Layer(11 if dim < 80 else 3, heads=2, dim=dim, bound=bound)
    start = fp32(1, 2, dim, dim, seed=20, scale=0.3)

    def run():
        state = empty_slots(3, layer)
        state[1] = start[0]
        o = layer.run([len(layer.q)], state=state, state_in=int32(1), state_out=int32(2))
        assert same_bits(state[1].contiguous(), start[0]) and state[0].isnan().all()
        return o, state[2]

    o, state = assert_same_on_every_isa(run)
    wanted_o, wanted_state = kda_oracle(layer, start[0].numpy())
    assert np.array_equal(floats(o).view(np.int32), wanted_o.view(np.int32))
    assert np.array_equal(state.numpy().view(np.int32), wanted_state.view(np.int32))


def feed(layer, total, chunks, in_place):
    """One sequence in chunks with its state carried in slots: the outputs and the final state."""
    state, out, t = empty_slots(4, layer), [], 0
    slot = -1
    for i, chunk in enumerate(chunks):
        to = 0 if in_place else 1 + i % 3
        out.append(layer.run([chunk], slice(t, t + chunk), state, int32(slot), int32(to)))
        slot, t = to, t + chunk
    assert t == total
    return torch.cat(out), state[slot]


@BOUNDS
@pytest.mark.parametrize("dim", [24, 32, 128])
@pytest.mark.parametrize("in_place", [True, False])
def test_kda_of_chunks_is_kda_of_the_whole(dim, in_place, bound):
    total = 70
    layer = Layer(total, dim=dim, bound=bound)
    whole = feed(layer, total, [total], in_place)
    for chunks in ([1] * total, [7] * 10, [16, 16, 16, 16, 6], [64, 6], [1, 0, 68, 1]):
        assert_same(feed(layer, total, chunks, in_place), whole)


def test_kda_of_a_sequence_does_not_depend_on_its_batch():
    lengths = [1, 5, 0, 33, 2, 64, 1, 8, 9]
    layer, before = Layer(sum(lengths), heads=3, dim=32), fp32(9, 3, 32, 32, seed=30, scale=0.3)
    state = block_rows(before)
    slots_in, slots_out = int32(4, -1, 2, 0, 8, -1, 6, 7, 1), int32(4, 3, -1, 0, 5, 8, 6, -1, 1)
    slots_in[4] = -1  # slot 8 is written by request 5
    batch = layer.run(lengths, state=state, state_in=slots_in, state_out=slots_out)
    t = 0
    for r, length in enumerate(lengths):
        alone = block_rows(before)
        rows = slice(t, t + length)
        o = layer.run([length], rows, alone, slots_in[r : r + 1], slots_out[r : r + 1])
        assert same_bits(o, batch[rows])
        if slots_out[r] >= 0:
            assert same_bits(alone[slots_out[r]].contiguous(), state[slots_out[r]].contiguous())
        t += length
    assert same_bits(state[2].contiguous(), before[2])  # read only


def test_kda_of_equal_sequences_is_equal_at_every_place():
    layer = Layer(3, heads=2, dim=16)
    (alone,) = outputs(lambda: layer.run([3]))
    for count in range(1, 131):
        inputs = [t.repeat(count, 1) for t in layer.inputs()]
        o = kda(*inputs, layer.a_log, layer.dt_bias, LOWER_BOUND, cu_of([3] * count))
        assert same_bits(o, alone.repeat(count, 1))


def test_threads_and_row_strides_change_nothing():
    lengths = [40, 1, 25]
    layer = Layer(sum(lengths), heads=3, dim=64)
    assert_same_with_threads(lambda: layer.run(lengths), module, "_kda")
    assert_same_with_threads(lambda: layer.backward(lengths), module, "_kda_backward")
    wide = [strided(t) for t in layer.inputs()]
    assert_same(outputs(lambda: layer.run(lengths, inputs=wide)), outputs(lambda: layer.run(lengths)))
    got = outputs(lambda: layer.backward(lengths, inputs=wide, do=strided(layer.do)))
    assert_same(got, outputs(lambda: layer.backward(lengths)))


@BOUNDS
@pytest.mark.parametrize("dim", [8, 24, 32, 80, 128])
def test_kda_accuracy_and_gradients_against_float64(dim, bound):
    lengths = [37, 1, 70] if dim < 128 else [66, 2]
    layer = Layer(sum(lengths), dim=dim, bound=bound)
    mine = [t.requires_grad_() for t in layer.inputs()]
    o = layer.run(lengths, inputs=mine)
    o.backward(layer.do)
    exact = [t.detach().double().requires_grad_() for t in mine]
    wanted = kda64(*exact, layer, lengths)
    wanted.backward(layer.do.double())
    assert relative_error(o, wanted) < 2.5e-3
    for a, b in zip(mine, exact, strict=True):
        assert a.grad.dtype == torch.bfloat16 and a.grad.shape == a.shape
        assert relative_error(a.grad, b.grad) < 3e-3


@BOUNDS
def test_kda_gradients_survive_the_strongest_decay(bound):
    layer = Layer(100, dim=16, bound=bound)
    layer.f += 60  # alpha = e^-5 everywhere: 100 tokens decay by e^-500; without a bound alpha is 0 or next to it
    mine = [t.requires_grad_() for t in layer.inputs()]
    layer.run([100], inputs=mine).backward(layer.do)
    exact = [t.detach().double().requires_grad_() for t in mine]
    kda64(*exact, layer, [100]).backward(layer.do.double())
    for a, b in list(zip(mine, exact, strict=True))[:3]:
        assert relative_error(a.grad, b.grad) < 3e-3


def test_without_a_bound_no_decay_is_too_strong_or_too_weak():
    """Per channel from alpha = 1 to alpha = 0 within a tile of any size: finite, and the float64 definition."""
    layer = Layer(40, dim=32, bound=None)
    layer.f = layer.f + torch.linspace(-300, 300, layer.width).bfloat16()
    layer.a_log += 3
    mine = [t.requires_grad_() for t in layer.inputs()]
    o = layer.run([40], inputs=mine)
    o.backward(layer.do)
    alpha = elementary("exp", -elementary("exp", layer.a_log.numpy()).max() * elementary("softplus", floats(layer.f)))
    assert (alpha == 0).any() and (alpha == 1).any(), "the decays are not extreme: the test shows nothing"
    exact = [t.detach().double().requires_grad_() for t in mine]
    wanted = kda64(*exact, layer, [40])
    wanted.backward(layer.do.double())
    assert relative_error(o, wanted) < 2.5e-3
    for a, b in zip(mine, exact, strict=True):
        assert a.grad.isfinite().all() and relative_error(a.grad, b.grad) < 3e-3


def test_the_bound_takes_part():
    bounded, unbounded = Layer(20), Layer(20, bound=None)
    assert not same_bits(bounded.run([20]), unbounded.run([20]))
    assert not same_bits(bounded.backward([20])[3], unbounded.backward([20])[3])


@BOUNDS
@pytest.mark.parametrize("dim", [24, 128])
def test_kda_gradient_bits_are_the_same_on_every_isa(dim, bound):
    layer = Layer(35, heads=1, dim=dim, bound=bound)
    assert_same_on_every_isa(lambda: layer.backward([35]))


def test_kda_gradients_of_a_sequence_do_not_depend_on_its_batch():
    lengths = [1, 33, 0, 64, 5, 32]
    layer = Layer(sum(lengths), heads=2, dim=32)
    batch = outputs(lambda: layer.backward(lengths))
    t = 0
    for length in lengths:
        rows = slice(t, t + length)
        assert_same(outputs(lambda rows=rows, n=length: layer.backward([n], rows)), [g[rows] for g in batch])
        t += length


def test_the_gradient_ignores_the_future():
    """A token's output gradient reaches only itself and earlier tokens; what has none changes nothing."""
    layer = Layer(50, dim=16)
    do = layer.do.clone()
    do[30:] = 0
    for g, shorter in zip(layer.backward([50], do=do), layer.backward([30], slice(0, 30), do=do[:30]), strict=True):
        assert same_bits(g[:30].abs(), shorter.abs())  # signs of zero may differ
        assert (g[30:] == 0).all()


def test_training_takes_whole_sequences_only():
    layer = Layer(4)
    state, at = torch.zeros(1, 2, 8, 8), int32(0)
    q = layer.q.clone().requires_grad_()
    inputs = [q, *layer.inputs()[1:]]
    nowhere = int32(-1)
    none = torch.zeros(0, 2, 8, 8)
    layer.run([4], inputs=inputs, state=none, state_in=nowhere, state_out=nowhere)  # as the trainer does
    with pytest.raises(OperatorError, match=r"^state_in: training needs"):
        layer.run([4], inputs=inputs, state=state, state_in=at, state_out=at)
    with torch.no_grad():
        assert not layer.run([4], inputs=inputs, state=state, state_in=at, state_out=at).requires_grad


def test_shapes_types_and_slots_are_checked_before_anything_is_written():
    layer = Layer(4)
    q, k, v, f, b = layer.inputs()
    a, dt, state = layer.a_log, layer.dt_bias, torch.full((2, 2, 8, 8), NAN)
    wrong = [
        ("q", lambda: kda(q.float(), k, v, f, b, a, dt, -5.0, cu_of([4]))),
        ("q", lambda: kda(q[:, :15], k, v, f, b, a, dt, -5.0, cu_of([4]))),
        ("q", lambda: kda(q[:, :8], k, v, f, b, a, dt, -5.0, cu_of([4]))),
        ("k", lambda: kda(q, k[:3], v, f, b, a, dt, -5.0, cu_of([4]))),
        ("f", lambda: kda(q, k, v, f[:, :8], b, a, dt, -5.0, cu_of([4]))),
        ("b", lambda: kda(q, k, v, f, b[:2], a, dt, -5.0, cu_of([4]))),
        ("a_log", lambda: kda(q, k, v, f, b, dt, dt, -5.0, cu_of([4]))),
        ("dt_bias", lambda: kda(q, k, v, f, b, a, a, -5.0, cu_of([4]))),
        ("lower_bound", lambda: kda(q, k, v, f, b, a, dt, 0.0, cu_of([4]))),
        ("lower_bound", lambda: kda(q, k, v, f, b, a, dt, float("nan"), cu_of([4]))),
        ("cu_seqlens", lambda: layer.run([3])),
        ("cu_seqlens", lambda: kda(q, k, v, f, b, a, dt, -5.0, int32(0, 5, 4))),
        ("cu_seqlens", lambda: kda(q, k, v, f, b, a, dt, -5.0, int32(1, 4))),
        ("cu_seqlens", lambda: kda(q, k, v, f, b, a, dt, -5.0, torch.tensor([0, 4]))),
        ("state", lambda: layer.run([4], state=state.transpose(2, 3), state_in=int32(0), state_out=int32(0))),
        ("state", lambda: layer.run([4], state=state.double(), state_in=int32(0), state_out=int32(0))),
        ("state_in", lambda: layer.run([4], state=state, state_in=int32(2), state_out=int32(0))),
        ("state_in", lambda: layer.run([4], state=state, state_in=int32(-2), state_out=int32(0))),
        ("state_in", lambda: layer.run([4], state=state, state_in=int32(0, 0), state_out=int32(0))),
        ("state_out", lambda: layer.run([4], state=state, state_in=int32(0), state_out=int32(2))),
        ("state_out", lambda: layer.run([4], state_out=int32(0))),
        ("state_out", lambda: layer.run([2, 2], state=state, state_in=int32(0, -1), state_out=int32(1, 0))),
        ("do", lambda: ops.kda_backward(q[:2], q, k, v, f, b, a, dt, -5.0, cu_of([4]))),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()
    assert state.isnan().all()


def test_no_tokens_keep_the_state():
    layer, start = Layer(0), fp32(1, 2, 8, 8)
    state = torch.cat([start, start * NAN])
    assert layer.run([0], state=state, state_in=int32(0), state_out=int32(1)).shape == (0, 16)
    assert same_bits(state[1], start[0])
    assert layer.run([]).shape == (0, 16)
    assert [g.shape[0] for g in layer.backward([0])] == [0] * 5


def test_meta_tensors_get_their_shapes():
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, cu, at = meta(5, 64), meta(3, dtype=torch.int32), meta(2, dtype=torch.int32)
    a, dt, state = meta(2, dtype=torch.float32), meta(64, dtype=torch.float32), meta(2, 2, 32, 32, dtype=torch.float32)
    assert kda(x, x, x, x, meta(5, 2), a, dt, -5.0, cu, state, at, at).shape == (5, 64)
    assert kda(x, x, x, x, meta(5, 2), a, dt, -5.0, cu).shape == (5, 64)
