"""Routed experts: the bits follow the contract's order and depend on nothing else; gradients against float64."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.batch_invariant.chains import bf16, floats, fma, same_bits
from tests.batch_invariant.exactness import (
    assert_rows_are_independent,
    assert_same,
    outputs,
    recorded,
    threads,
)
from tests.batch_invariant.experts_oracle import SCALE, SILU, SITU, Moe, Oracle, output_gradient
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import experts as module
from zmrl.batch_invariant.ops.activation import situ
from zmrl.batch_invariant.ops.experts import Bf16ExpertWeights, ExpertWeights, experts
from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.panels import pack_panels, unpack_panels

MXFP4 = {"quantised": True, "betas": SITU}
BF16 = {"quantised": False, "betas": SILU}
CASES = [
    (64, 32, 16, 3, MXFP4),
    (32, 64, 32, 1, MXFP4),
    (288, 32, 16, 2, MXFP4),
    (80, 48, 16, 3, BF16),
    (16, 16, 16, 2, BF16),
    (64, 32, 16, 2, MXFP4 | {"betas": SILU}),
]


@pytest.mark.parametrize("latent, width, rank, topk, kind", CASES)
@pytest.mark.parametrize("isa", native.available_isas())
def test_forward_and_backward_are_the_contracts_chains(latent, width, rank, topk, kind, isa):
    moe = Moe(4, latent, width, topk, rank, **kind)
    z, ids, weights, slots = moe.tokens(6)
    slots[0] = 0
    du = output_gradient(6, latent)
    with native.use_isa(isa):
        for adapted in (True, False):
            given = slots if adapted else None
            buffers = moe.gradients()
            for i, buffer in enumerate(buffers):
                buffer.normal_(generator=torch.Generator().manual_seed(i))
            shapes = [rank, width, rank, width, rank, latent]
            grads = [unpack_panels(b, n).numpy() for b, n in zip(buffers, shapes, strict=True)]
            out = moe(z, ids, weights, given)
            dz, dweights = moe.backward(du, z, ids, weights, given)
            for t in range(6):
                total = np.zeros((1, latent), np.float32)
                total_dz = np.zeros((1, latent), np.float32)
                for j in range(topk):
                    e, slot = int(ids[t, j]), int(slots[t]) if adapted else -1
                    oracle = Oracle(moe, e, slot, floats(z[t : t + 1]))
                    weight = np.float32(weights[t, j])
                    total = fma(weight, oracle.r, total)
                    of_expert = [(grads[2 * i][e], grads[2 * i + 1][e]) for i in range(3)] if slot == 0 else None
                    one_dz, one_dweight = oracle.backward(weight, floats(du[t : t + 1]), of_expert)
                    total_dz = total_dz + one_dz
                    assert one_dweight[0] == dweights[t, j].item()
                assert same_bits(out[t].float(), torch.from_numpy(bf16(total))[0])
                assert same_bits(dz[t].float(), torch.from_numpy(bf16(total_dz))[0])
            for buffer, n, wanted in zip(buffers, shapes, grads, strict=True):
                assert same_bits(unpack_panels(buffer, n), torch.from_numpy(wanted))


@pytest.mark.parametrize("isa", native.available_isas())
def test_equal_weights_in_either_format_give_equal_bits(isa):
    """Every MXFP4 weight is a BF16 number: which of the two the kernel reads changes no bit."""
    quantised = Moe(5, topk=3, latent=96, width=64)
    arguments = *quantised.tokens(150), output_gradient(150, 96)
    with native.use_isa(isa):
        expected = run_all(quantised, *arguments)
        plain = Moe(5, topk=3, latent=96, width=64)
        plain.weights = Bf16ExpertWeights(*(pack_panels(torch.from_numpy(w).bfloat16()) for w in quantised.w))
        assert_same(run_all(plain, *arguments), expected)
        plain.weights.w2.view(torch.int16)[2, 0, 5, 3] ^= 1 << 14
        assert not all(same_bits(a, b) for a, b in zip(run_all(plain, *arguments), expected, strict=True))


@pytest.mark.parametrize("scales, exponent", [((0, 3), 118), ((238, 241), -113)])
@pytest.mark.parametrize("isa", native.available_isas())
def test_extreme_scales_are_exact(scales, exponent, isa):
    moe = Moe(1, topk=1, scales=scales)
    z, ids, weights, _ = moe.tokens(3)
    z, du = z * 2.0**exponent, output_gradient(3, 64) * 2.0**exponent
    with native.use_isa(isa):
        out = moe(z, ids, weights)
        dz, _ = moe.backward(du, z, ids, weights)
    for t in range(3):
        oracle = Oracle(moe, 0, -1, floats(z[t : t + 1]))
        weight = np.float32(weights[t, 0])
        wanted = bf16(fma(weight, oracle.r, np.zeros_like(oracle.r)))
        assert np.isfinite(wanted).all() and wanted.any()
        assert same_bits(out[t].float(), torch.from_numpy(wanted)[0])
        wanted = bf16(0 + oracle.backward(weight, floats(du[t : t + 1]), None)[0])
        assert np.isfinite(wanted).all() and wanted.any()
        assert same_bits(dz[t].float(), torch.from_numpy(wanted)[0])


def test_scale_255_is_nan():
    moe = Moe(1, topk=1)
    moe.weights.w2_scales[0, 0, 0, 3] = 255
    z, ids, weights, _ = moe.tokens(2)
    assert moe(z, ids, weights).isnan().nonzero().tolist() == [[0, 3], [1, 3]]


def test_one_expert_is_the_composition_of_the_other_operators():
    """SiTU inside is the stand-alone operator; w1, w3 inside are linear layers, base and adapted."""
    moe = Moe(1, topk=1, slots=1)
    z, ids, weights, _ = moe.tokens(40)
    weights.fill_(1.0)
    w1, w3, w2 = (torch.from_numpy(w[0]).bfloat16() for w in moe.w)
    up = torch.cat([linear(z, pack_panels(w), [32]) for w in (w1, w3)], 1)
    assert same_bits(moe(z, ids, weights), linear(situ(up, 4.0, 25.0), pack_panels(w2), [64]))


@pytest.mark.parametrize("adapted", [False, True])
def test_token_is_independent_of_the_batch(adapted):
    moe = Moe(12, topk=3)
    z, ids, weights, slots = moe.tokens(130)
    du = output_gradient(130, 64)

    def forward(part):
        return moe(z[part], ids[part], weights[part], slots[part] if adapted else None)

    def backward(part):
        return moe.backward(du[part], z[part], ids[part], weights[part], slots[part] if adapted else None)

    assert_rows_are_independent(forward)
    with threads(1):
        dz, dweights = backward(slice(0, 130))
        for i in range(130):
            part = slice(i, min(i + 1 + i % 14, 130))
            assert_same(backward(part), [dz[part], dweights[part]])


def test_position_and_company_do_not_matter():
    moe = Moe(3, topk=2)  # more than one block of rows per expert
    z, ids, weights, slots = moe.tokens(301)
    wanted = moe(z, ids, weights, slots)
    for seed in range(3):
        order = torch.randperm(301, generator=torch.Generator().manual_seed(seed))
        assert same_bits(moe(z[order], ids[order], weights[order], slots[order]), wanted[order])


def run_all(moe, z, ids, weights, slots, du):
    results = [moe(z, ids, weights), moe(z, ids, weights, slots)]
    gradients = moe.gradients()
    return [*results, *moe.backward(du, z, ids, weights), *moe.backward(du, z, ids, weights, slots), *gradients]


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_threads_do_not_matter(isa):
    if isa not in native.available_isas():
        pytest.skip(f"this CPU does not run {isa}")
    moe = Moe(40, topk=8)
    arguments = *moe.tokens(300), output_gradient(300, 64)
    results = []
    for count in (1, 2):
        with native.use_isa(isa), threads(count):
            with recorded(module, "_experts") as used, recorded(module, "_experts_backward") as used_backward:
                results.append(run_all(moe, *arguments))
            assert used == [count] * 4 and used_backward == [count] * 2
    assert_same(*results)


def test_instruction_sets_agree():
    moe = Moe(5, topk=3, latent=96, width=64)
    arguments = *moe.tokens(30), output_gradient(30, 96)
    results = []
    for isa in native.available_isas():
        with native.use_isa(isa):
            results.append(run_all(moe, *arguments))
    for other in results[1:]:
        assert_same(results[0], other)


def test_row_stride_does_not_matter():
    moe = Moe(5, topk=3)
    z, ids, weights, slots = moe.tokens(30)
    wide = torch.full((30, 100), torch.nan).bfloat16()
    wide[:, 17:81] = z
    assert same_bits(moe(wide[:, 17:81], ids, weights, slots), moe(z, ids, weights, slots))
    du = output_gradient(30, 64)
    wide_du = torch.full((30, 70), torch.nan).bfloat16()
    wide_du[:, 2:66] = du
    got = torch.ops.zmrl.experts_backward(wide_du[:, 2:66], wide[:, 17:81], ids, weights, moe.weights)
    assert_same(got, torch.ops.zmrl.experts_backward(du, z, ids, weights, moe.weights))


def test_every_output_element_is_written():
    moe = Moe(5, topk=3)
    arguments = *moe.tokens(30), output_gradient(30, 64)
    wanted = run_all(moe, *arguments)
    assert_same(outputs(lambda: run_all(moe, *arguments)), wanted)


def test_no_adapter_leaves_the_bits_and_a_zero_adapter_the_values():
    moe = Moe(5, topk=3)
    z, ids, weights, slots = moe.tokens(30)
    assert same_bits(moe(z, ids, weights, torch.full_like(slots, -1)), moe(z, ids, weights))
    for b in (moe.lora.b1, moe.lora.b3, moe.lora.b2):
        b.zero_()
    assert torch.equal(moe(z, ids, weights, torch.zeros_like(slots)), moe(z, ids, weights))


@pytest.mark.parametrize("adapted", [False, True])
def test_values_and_gradients_against_float64(adapted):
    moe = Moe(6, topk=3, rank=32, slots=1)
    z, ids, weights, slots = moe.tokens(80)
    du = output_gradient(80, 64)
    buffers = moe.gradients()
    given = slots if adapted else None
    out = moe(z, ids, weights, given)
    dz, dweights = moe.backward(du, z, ids, weights, given)
    leaf, weight_leaf = z.double().requires_grad_(), weights.double().requires_grad_()
    a = [m[0].double().requires_grad_() for m in moe.a]
    b = [m[0].double().requires_grad_() for m in moe.b]
    w = [torch.from_numpy(m).double() for m in moe.w]

    def project(i, e, x, on):
        base = x @ w[i][e].T
        return base + SCALE * on * ((x @ a[i][e].T) @ b[i][e].T) if adapted else base

    total = []
    for t in range(80):
        on, sum_ = float(slots[t] >= 0), 0.0
        for j, e in enumerate(ids[t].tolist()):
            g, u = project(0, e, leaf[t], on), project(1, e, leaf[t], on)
            h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
            sum_ = sum_ + weight_leaf[t, j] * project(2, e, h, on)
        total.append(sum_)
    wanted = torch.stack(total)
    wanted.backward(du.double())

    def close(got, exact, tolerance):  # through BF16 roundings of g, u, h and t
        assert (got.double() - exact).abs().max() < tolerance * exact.abs().max()

    close(out, wanted, 0.01)
    close(dz, leaf.grad, 0.02)
    close(dweights, weight_leaf.grad, 0.01)
    if adapted:
        rows = [32, 32, 32, 32, 32, 64]
        for i, (buffer, n) in enumerate(zip(buffers, rows, strict=True)):
            close(unpack_panels(buffer, n), (b if i % 2 else a)[i // 2].grad, 0.02)


@pytest.mark.parametrize("isa", native.available_isas())
def test_what_the_forward_pass_keeps_gives_the_bits_of_computing_again(isa, monkeypatch):
    moe = Moe(5, topk=3)
    z, ids, weights, slots = moe.tokens(150)  # more than a block of rows for some experts
    du = output_gradient(150, moe.latent)
    with native.use_isa(isa):
        module._kept_buffers.clear()
        wanted = [*moe.gradients(), *moe.backward(du, z, ids, weights, slots)]
        assert len(module._kept_buffers) == 1, "nothing was kept"
        (buffer,) = module._kept_buffers
        assert_same([*moe.gradients(), *moe.backward(du, z, ids, weights, slots)], wanted)
        assert module._kept_buffers[0].data_ptr() == buffer.data_ptr(), "the buffer was not used again"
        monkeypatch.setattr(module, "KEPT_BYTES", 0)
        assert_same([*moe.gradients(), *moe.backward(du, z, ids, weights, slots)], wanted)
        # a changed byte of what was kept shows: it is read
        buffer[0, 0] ^= 0x40
        arguments = du, z, ids, weights, moe.weights, moe.lora.tensors, slots, SCALE, *moe.betas
        changed = torch.ops.zmrl.experts_lora_backward(*arguments, list(moe.gradients()), buffer)
        assert not all(same_bits(a, b) for a, b in zip(changed, wanted[6:], strict=True))


def test_micro_batches_continue_the_chain_of_one_big_batch():
    moe = Moe(4, topk=2)
    z, ids, weights, slots = moe.tokens(260)
    du = output_gradient(260, 64)
    wanted = moe.gradients()
    moe.backward(du, z, ids, weights, slots)
    for cuts in ([0, 1, 260], [0, 50, 97, 260], list(range(0, 261, 4))):
        again = moe.gradients()
        for start, end in pairwise(cuts):
            part = slice(start, end)
            moe.backward(du[part], z[part], ids[part], weights[part], slots[part])
        assert_same(again, wanted)


def test_many_tokens_in_blocks_give_the_bits_of_few():
    """More per-expert results than the kernel keeps at a time."""
    moe = Moe(17, topk=16, latent=512, width=32)
    z, ids, weights, slots = moe.tokens(1300)
    assert 1300 * 16 * 512 > 8 << 20
    du = output_gradient(1300, 512)
    whole, buffers = moe(z, ids, weights, slots), moe.gradients()
    dz, _ = moe.backward(du, z, ids, weights, slots)
    again = moe.gradients()
    for part in (slice(0, 700), slice(700, 1300)):
        assert same_bits(moe(z[part], ids[part], weights[part], slots[part]), whole[part])
        assert same_bits(moe.backward(du[part], z[part], ids[part], weights[part], slots[part])[0], dz[part])
    assert_same(buffers, again)


def test_adapters_learn_although_no_input_needs_a_gradient():
    moe = Moe(4, topk=2)
    z, ids, weights, slots = moe.tokens(9)
    buffers = moe.gradients()
    moe(z, ids, weights, torch.zeros_like(slots)).backward(output_gradient(9, 64))
    assert all(buffer.abs().max() > 0 for buffer in buffers)
    moe.lora.gradients = None
    assert not moe(z, ids, weights, slots).requires_grad


def test_no_rows_and_meta():
    moe = Moe(4, topk=2)
    z, ids, weights, slots = moe.tokens(0)
    assert moe(z, ids, weights, slots).shape == (0, 64)
    assert moe.backward(output_gradient(0, 64), z, ids, weights, slots)[0].shape == (0, 64)
    meta = [t.to("meta") for t in moe.tokens(5)[:3]]
    out = experts(*meta, ExpertWeights(*(t.to("meta") for t in moe.weights)))
    assert out.is_meta and out.shape == (5, 64) and out.dtype == torch.bfloat16


def test_wrong_arguments_are_refused_by_name():
    moe = Moe(4, topk=2)
    z, ids, weights, slots = moe.tokens(5)
    cut = [t[:3] for t in moe.weights]
    bad = [
        ("z", lambda: moe(z.float(), ids, weights)),
        ("z", lambda: moe(z[:, :32], ids, weights)),
        ("ids", lambda: moe(z, ids.long(), weights)),
        ("ids", lambda: moe(z, ids[:4], weights)),
        ("ids", lambda: moe(z, ids.flip(1), weights)),
        ("ids", lambda: moe(z, ids * 0 + torch.tensor([0, 4], dtype=torch.int32), weights)),
        ("ids", lambda: moe(z, ids * 0 + torch.tensor([-1, 2], dtype=torch.int32), weights)),
        ("ids", lambda: moe(z, ids * 0, weights)),
        ("weights", lambda: moe(z, ids, weights.double())),
        ("w3_codes", lambda: experts(z, ids, weights, ExpertWeights(*moe.weights[:2], *cut[2:]))),
        ("w2_scales", lambda: experts(z, ids, weights, ExpertWeights(*moe.weights[:5], cut[5]))),
        ("w", lambda: experts(z, ids, weights, moe.weights[:5])),
        ("w1", lambda: experts(z, ids, weights, moe.weights[:3])),
        ("slots", lambda: experts(z, ids, weights, moe.weights, lora=moe.lora)),
        ("slots", lambda: moe(z, ids, weights, slots[:3])),
        ("slots", lambda: moe(z, ids, weights, torch.full_like(slots, 2))),
    ]
    for name, call in bad:
        with pytest.raises(OperatorError, match=rf"^{name}:"):
            call()
    moe.lora.a3 = moe.lora.a3[:, :3]
    with pytest.raises(OperatorError, match=r"^a3:"):
        moe(z, ids, weights, slots)
