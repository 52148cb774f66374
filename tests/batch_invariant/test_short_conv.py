"""The short convolution: the contract's bits, however a sequence is fed; gradients against float64 autograd."""

import numpy as np
import pytest
import torch

from tests.batch_invariant.chains import bf16, floats, fma, same_bits
from tests.batch_invariant.exactness import (
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    block_rows,
    cu_of,
    elementary,
    fp32,
    int32,
    outputs,
    random,
    relative_error,
    strided,
    threads,
)
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import kda as module
from zmrl.batch_invariant.ops.kda import short_conv

NAN = float("nan")
ops = torch.ops.zmrl


def conv_oracle(x, w, history):
    """One sequence in numpy; history: the 3 inputs before it."""
    padded = np.concatenate([history, x])
    c = np.zeros_like(x)
    for j in range(4):
        c = fma(w[:, j], padded[j : j + len(x)], c)
    return bf16(c * elementary("sigmoid", c))


@pytest.mark.parametrize("channels", [1, 16, 40, 257, 600])
def test_convolution_bits_are_the_contracts_on_every_isa(channels):
    x, w, history = random(9, channels), fp32(channels, 4, seed=1), random(3, 3, channels, seed=2)

    def run():
        state = block_rows(history)
        y = short_conv(x, w, cu_of([2, 7]), state, int32(1, -1), int32(0, 2))
        return y, state

    y, state = assert_same_on_every_isa(run)
    wanted = [
        conv_oracle(floats(x[:2]), w.numpy(), floats(history[1])),
        conv_oracle(floats(x[2:]), w.numpy(), np.zeros((3, channels), np.float32)),
    ]
    assert np.array_equal(floats(y).view(np.int32), np.concatenate(wanted).view(np.int32))
    assert same_bits(state[0].contiguous(), torch.cat([history[1, 2:], x[:2]]))
    assert same_bits(state[1].contiguous(), history[1])
    assert same_bits(state[2].contiguous(), x[6:])


@pytest.mark.parametrize("in_place", [True, False])
def test_convolution_of_chunks_is_that_of_the_whole(in_place):
    total, channels = 40, 48
    x, w = random(total, channels), fp32(channels, 4, seed=1)

    def fed(chunks):
        state, out, t, slot = block_rows(torch.full((4, 3, channels), NAN, dtype=torch.bfloat16)), [], 0, -1
        for i, chunk in enumerate(chunks):
            to = 0 if in_place else 1 + i % 3
            out.append(short_conv(x[t : t + chunk], w, cu_of([chunk]), state, int32(slot), int32(to)))
            slot, t = to, t + chunk
        return [torch.cat(out), state[slot]]

    whole = fed([total])
    for chunks in ([1] * total, [2] * 20, [7, 7, 7, 7, 7, 5], [16, 0, 24], [3, 1, 36]):
        assert_same(fed(chunks), whole)


def test_convolution_of_a_sequence_does_not_depend_on_its_batch():
    lengths = [1, 3, 0, 40, 2, 7]
    x, w, history = random(sum(lengths), 96), fp32(96, 4, seed=1), random(6, 3, 96, seed=2)
    at = int32(3, -1, 2, 0, 4, 5)
    state, t = block_rows(history), 0
    batch = short_conv(x, w, cu_of(lengths), state, at, int32(3, 1, 2, 0, 4, 5))
    for r, length in enumerate(lengths):
        alone = block_rows(history)
        y = short_conv(x[t : t + length], w, cu_of([length]), alone, at[r : r + 1], at[r : r + 1])
        assert same_bits(y, batch[t : t + length])
        if at[r] >= 0:
            assert same_bits(alone[at[r]].contiguous(), state[at[r]].contiguous())
        t += length
    for count in range(1, 131):
        y = short_conv(x[:5].repeat(count, 1), w, cu_of([5] * count))
        assert same_bits(y, y[:5].repeat(count, 1)) and same_bits(y[:1], short_conv(x[:1], w, cu_of([1])))


def test_convolution_threads_and_row_strides_change_nothing():
    lengths = [100, 1, 99]
    x, w, dy = random(200, 300), fp32(300, 4, seed=1), random(200, 300, seed=3)
    cu = cu_of(lengths)
    assert_same_with_threads(lambda: short_conv(x, w, cu), module, "_short_conv")
    assert_same_with_threads(lambda: ops.short_conv_backward(dy, x, w, cu), module, "_short_conv_backward")
    assert_same(outputs(lambda: short_conv(strided(x), w, cu)), outputs(lambda: short_conv(x, w, cu)))
    wide = outputs(lambda: ops.short_conv_backward(strided(dy), strided(x), w, cu))
    assert_same(wide, outputs(lambda: ops.short_conv_backward(dy, x, w, cu)))


def test_convolution_gradients_against_float64_and_their_bits():
    lengths = [1, 2, 3, 4, 50]
    x, w, dy = random(60, 40).requires_grad_(), fp32(40, 4, seed=1, scale=0.7), random(60, 40, seed=3)
    cu = cu_of(lengths)
    y = short_conv(x, w, cu)
    y.backward(dy)
    exact, parts = x.detach().double().requires_grad_(), []
    for part in exact.split(lengths):
        padded = torch.nn.functional.pad(part.T, (3, 0))
        c = torch.nn.functional.conv1d(padded, w.double().unsqueeze(1), groups=40).T
        parts.append(torch.nn.functional.silu(c))
    wanted = torch.cat(parts)
    wanted.backward(dy.double())
    assert relative_error(y, wanted) < 2.5e-3 and relative_error(x.grad, exact.grad) < 2.5e-3
    x = x.detach()
    (batch,) = assert_same_on_every_isa(lambda: ops.short_conv_backward(dy, x, w, cu))
    t = 0
    for n in lengths:
        assert_same([ops.short_conv_backward(dy[t : t + n], x[t : t + n], w, cu_of([n]))], [batch[t : t + n]])
        t += n


def test_training_takes_whole_sequences_only():
    x, w, cu, state = random(4, 8).requires_grad_(), fp32(8, 4), cu_of([4]), torch.zeros(1, 3, 8).bfloat16()
    short_conv(x, w, cu, state[:0], int32(-1), int32(-1))  # as the trainer does
    with pytest.raises(OperatorError, match=r"^state_in: training needs"):
        short_conv(x, w, cu, state, int32(0), int32(0))
    with torch.no_grad():
        assert not short_conv(x, w, cu, state, int32(0), int32(0)).requires_grad


def test_shapes_types_and_slots_are_checked_before_anything_is_written():
    x, w, cu, state = random(4, 8), fp32(8, 4), cu_of([4]), torch.full((2, 3, 8), NAN).bfloat16()
    wrong = [
        ("w", lambda: short_conv(x, w[:, :3], cu)),
        ("w", lambda: short_conv(x, w.bfloat16(), cu)),
        ("x", lambda: short_conv(x.float(), w, cu)),
        ("cu_seqlens", lambda: short_conv(x, w, int32(0, 3))),
        ("cu_seqlens", lambda: short_conv(x, w, int32(0, 5, 4))),
        ("conv_state", lambda: short_conv(x, w, cu, state.float(), int32(0), int32(0))),
        ("conv_state", lambda: short_conv(x, w, cu, state[:, :2], int32(0), int32(0))),
        ("conv_state", lambda: short_conv(x, w, cu, state.mT.contiguous().mT, int32(0), int32(0))),
        ("state_in", lambda: short_conv(x, w, cu, state, int32(7), int32(0))),
        ("state_in", lambda: short_conv(x, w, cu, None, int32(0), int32(-1))),
        ("state_out", lambda: short_conv(x, w, cu, state, int32(0), int32(7))),
        ("state_out", lambda: short_conv(x, w, cu, state, int32(0), torch.tensor([0]))),
        ("state_out", lambda: short_conv(x, w, cu_of([2, 2]), state, int32(-1, -1), int32(1, 1))),
        ("state_out", lambda: short_conv(x, w, cu_of([2, 2]), state, int32(1, -1), int32(0, 1))),
        ("dy", lambda: ops.short_conv_backward(x[:2], x, w, cu)),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()
    assert state.isnan().all()


def test_no_tokens_keep_the_state():
    w, state = fp32(8, 4), random(2, 3, 8)
    before = state.clone()
    for count in (1, 2):
        with threads(count):
            assert short_conv(random(0, 8), w, cu_of([0]), state, int32(0), int32(1)).shape == (0, 8)
            assert short_conv(random(0, 8), w, cu_of([])).shape == (0, 8)
    assert same_bits(state, before[[0, 0]])
    assert ops.short_conv_backward(random(0, 8), random(0, 8), w, cu_of([0])).shape == (0, 8)


def test_meta_tensors_get_their_shapes():
    x, w = torch.empty(5, 64, dtype=torch.bfloat16, device="meta"), torch.empty(64, 4, device="meta")
    cu, at = (torch.empty(n, dtype=torch.int32, device="meta") for n in (3, 2))
    state = torch.empty(2, 3, 64, dtype=torch.bfloat16, device="meta")
    assert short_conv(x, w, cu, state, at, at).shape == short_conv(x, w, cu).shape == (5, 64)
