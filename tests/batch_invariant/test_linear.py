"""Linear layers: the bits follow the contract's order and depend on nothing else; gradients against float64."""

from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.batch_invariant import chains
from tests.batch_invariant.chains import bf16, floats, same_bits
from tests.batch_invariant.exactness import assert_rows_are_independent, assert_same, outputs, recorded, threads
from zmrl.batch_invariant import native, program
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import linear as module
from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import pack_panels, pack_parts, unpack_panels

SCALE = 0.7


class Layer:
    """A fused projection with random weights and `slots` adapters of rank r per part."""

    def __init__(self, splits, k, rank=16, slots=3, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.splits, self.k, self.rank = splits, k, rank
        self.w = [self.random(g, n, k) / k**0.5 for n in splits]
        self.a = [[self.random(g, rank, k) / k**0.5 for _ in splits] for _ in range(slots)]
        self.b = [[self.random(g, n, rank) / rank**0.5 for n in splits] for _ in range(slots)]
        self.panels = pack_parts(self.w)
        self.lora = LoraBuffers(
            torch.stack([pack_parts(a) for a in self.a]), torch.stack([pack_parts(b) for b in self.b]), SCALE
        )

    @staticmethod
    def random(g, *shape):
        return torch.randn(shape, generator=g).bfloat16()

    def gradients(self):
        """Zero buffers for the gradients of slot 0, in `lora`."""
        self.lora.grad_a = torch.zeros(self.lora.a.shape[1:])
        self.lora.grad_b = torch.zeros(self.lora.b.shape[1:])
        return self.lora

    def __call__(self, x, slots=None, **options):
        return linear(x, self.panels, self.splits, lora=None if slots is None else self.lora, slots=slots, **options)

    def backward(self, x, dy, slots, **options):
        """dx and the (continued) adapter gradients."""
        x = x.detach().requires_grad_()
        self(x, slots, **options).backward(dy)
        return x.grad


def rows(t, k, seed=1, scale=1.0):
    return (torch.randn(t, k, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def mixed_slots(t, count=3, seed=2):
    return torch.randint(-1, count, (t,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def forward_oracle(layer, x, slots, shards, fp32_out=False):
    x = floats(x)
    out = []
    for p, w in enumerate(layer.w):
        y = chains.sliced(x, floats(w).T, shards)
        for i, slot in enumerate(slots):
            if slot >= 0:
                t = bf16(chains.sliced(x[i : i + 1], floats(layer.a[slot][p]).T, shards))
                d = chains.chain(t, floats(layer.b[slot][p]).T)
                y[i] = chains.fma(np.float32(SCALE), d, y[i : i + 1])
        out.append(y if fp32_out else bf16(y))
    return np.concatenate(out, 1)


def backward_oracle(layer, x, dy, slots, shards, shards_n, grad_a, grad_b):
    """dx, and the gradients of slot 0 continued from grad_a[p], grad_b[p]."""
    x, dy, scale = floats(x), floats(dy), np.float32(SCALE)
    starts = np.cumsum([0, *layer.splits])
    parts = [dy[:, a:b] for a, b in pairwise(starts)]
    slices = []
    for s in range(shards_n):
        c = None
        for part, w in zip(parts, layer.w, strict=True):
            a, b = chains.bounds(part.shape[1], shards_n)[s]
            c = chains.chain(part[:, a:b], floats(w)[a:b], c)
        slices.append(c)
    dx = chains.tree(slices)
    for i, slot in enumerate(slots):
        for p, part in enumerate(parts) if slot >= 0 else ():
            a, b = floats(layer.a[slot][p]), floats(layer.b[slot][p])
            dt = scale * chains.sliced(part[i : i + 1], b, shards_n)
            dx[i : i + 1] = chains.chain(dt, a, dx[i : i + 1])
            if slot == 0:
                t = bf16(chains.sliced(x[i : i + 1], a.T, shards))
                grad_a[p] = chains.fma(dt.T, x[i : i + 1], grad_a[p])
                grad_b[p] = chains.fma((scale * part[i : i + 1]).T, t, grad_b[p])
    return bf16(dx)


CASES = [([5], 3, 1), ([16], 33, 8), ([20, 16, 3], 40, 8), ([33, 1], 300, 1), ([48, 7], 270, 8)]


@pytest.mark.parametrize("splits, k, shards", CASES)
@pytest.mark.parametrize("isa", native.available_isas())
def test_forward_is_the_contracts_chain(splits, k, shards, isa):
    layer, x, slots = Layer(splits, k), rows(7, k), mixed_slots(7)
    with native.use_isa(isa):
        for fp32_out in (False, True):
            wanted = forward_oracle(layer, x, [-1] * 7, shards, fp32_out)
            got = layer(x, shards=shards, fp32_out=fp32_out)
            assert same_bits(got.float(), torch.from_numpy(wanted))
        got = layer(x, slots, shards=shards)
        assert same_bits(got.float(), torch.from_numpy(forward_oracle(layer, x, slots.tolist(), shards)))


@pytest.mark.parametrize("splits, k, shards", CASES)
@pytest.mark.parametrize("isa", native.available_isas())
def test_backward_is_the_contracts_chain(splits, k, shards, isa):
    layer, x, slots = Layer(splits, k), rows(7, k), mixed_slots(7)
    slots[0] = 0
    dy = rows(7, sum(splits), seed=5)
    lora = layer.gradients()
    lora.grad_a.normal_(generator=torch.Generator().manual_seed(6))
    lora.grad_b.normal_(generator=torch.Generator().manual_seed(7))
    size = layer.rank // 16
    grad_a = [unpack_panels(lora.grad_a[p * size : (p + 1) * size], layer.rank).numpy() for p in range(len(splits))]
    ends = np.cumsum([0, *(-(-n // 16) for n in splits)])
    grad_b = [unpack_panels(lora.grad_b[ends[p] : ends[p + 1]], n).numpy() for p, n in enumerate(splits)]
    pads = lora.grad_b.clone()
    with native.use_isa(isa):
        for shards_n in (1, 8):
            dx = layer.backward(x, dy, slots, shards=shards, shards_n=shards_n)
            wanted = backward_oracle(layer, x, dy, slots.tolist(), shards, shards_n, grad_a, grad_b)
            assert same_bits(dx.float(), torch.from_numpy(wanted))
            for p, n in enumerate(splits):
                got_a = unpack_panels(lora.grad_a[p * size : (p + 1) * size], layer.rank)
                got_b = unpack_panels(lora.grad_b[ends[p] : ends[p + 1]], n)
                assert same_bits(got_a, torch.from_numpy(grad_a[p]))
                assert same_bits(got_b, torch.from_numpy(grad_b[p]))
                if n % 16:
                    pad = lora.grad_b[ends[p + 1] - 1, :, n % 16 :]
                    assert torch.equal(pad, pads[ends[p + 1] - 1, :, n % 16 :])
            base = layer.backward(x, dy, None, shards=shards, shards_n=shards_n)
            wanted = backward_oracle(layer, x, dy, [-1] * 7, shards, shards_n, grad_a, grad_b)
            assert same_bits(base.float(), torch.from_numpy(wanted))


@pytest.mark.parametrize("shards", [1, 8])
def test_row_is_independent_of_the_batch(shards):
    layer, x, slots, dy = Layer([40, 9], 300), rows(130, 300), mixed_slots(130), rows(130, 49, seed=3)
    assert_rows_are_independent(
        lambda part: [layer(x[part], shards=shards), layer(x[part], slots[part], shards=shards)]
    )
    with threads(1):
        gradient = layer.backward(x, dy, slots, shards=shards, shards_n=shards)
        for i in range(130):
            part = slice(i, min(i + 1 + i % 14, 130))
            got = layer.backward(x[part], dy[part], slots[part], shards=shards, shards_n=shards)
            assert same_bits(got, gradient[part])


def test_position_and_company_do_not_matter():
    layer, x, slots = Layer([40, 9], 100), rows(67, 100), mixed_slots(67)
    assert len(set(slots.tolist())) == 4
    wanted = layer(x, slots)
    for seed in range(4):
        order = torch.randperm(67, generator=torch.Generator().manual_seed(seed))
        assert same_bits(layer(x[order], slots[order]), wanted[order])


@pytest.mark.parametrize("isa", ["avx512", "avx2"])
def test_threads_do_not_matter(isa):
    if isa not in native.available_isas():
        pytest.skip(f"this CPU does not run {isa}")
    layer, x, slots, dy = Layer([160, 96, 40], 320), rows(300, 320), mixed_slots(300), rows(300, 296, seed=3)
    results = []
    for count in (1, 2):
        with native.use_isa(isa), threads(count):
            lora = layer.gradients()
            with recorded(module, "_linear") as used, recorded(module, "_linear_backward") as used_backward:
                out = [layer(x, shards=8), layer(x, slots), layer.backward(x, dy, slots, shards_n=8)]
            results.append([*out, lora.grad_a, lora.grad_b])
            assert used == [count] * 3 and used_backward == [count]
    assert_same(*results)


def test_instruction_sets_agree():
    layer, x, slots, dy = Layer([40, 9], 300), rows(30, 300), mixed_slots(30), rows(30, 49, seed=3)
    results = []
    for isa in native.available_isas():
        with native.use_isa(isa):
            lora = layer.gradients()
            dx = layer.backward(x, dy, slots, shards=8, shards_n=8)
            results.append([layer(x, shards=8), layer(x, slots), dx, lora.grad_a, lora.grad_b])
    for other in results[1:]:
        assert_same(results[0], other)


def test_row_stride_does_not_matter():
    layer, x, slots, dy = Layer([40, 9], 100), rows(21, 100), mixed_slots(21), rows(21, 49, seed=3)
    wide, wide_dy = torch.full((21, 133), torch.nan).bfloat16(), torch.full((21, 60), torch.nan).bfloat16()
    wide[:, 7:107], wide_dy[:, 3:52] = x, dy
    assert same_bits(layer(wide[:, 7:107], slots), layer(x, slots))
    results = []
    for a, b in ((x, dy), (wide[:, 7:107], wide_dy[:, 3:52])):
        lora = layer.gradients()
        arguments = layer.panels, lora.a, lora.b, slots, SCALE, [40, 9], 1, 8, lora.grad_a, lora.grad_b
        results.append([torch.ops.zmrl.linear_lora_backward(b, a, *arguments), lora.grad_a, lora.grad_b])
    assert_same(*results)


def test_every_output_element_is_written():
    layer, x, slots, dy = Layer([40, 9], 100), rows(21, 100), mixed_slots(21), rows(21, 49, seed=3)

    def run():
        return [layer(x), layer(x, fp32_out=True), layer(x, slots), layer.backward(x, dy, slots)]

    assert_same(outputs(run), run())


def test_no_adapter_leaves_the_bits_and_a_zero_adapter_the_values():
    layer, x = Layer([40, 9], 100), rows(21, 100)
    none = torch.full((21,), -1, dtype=torch.int32)
    assert same_bits(layer(x, none), layer(x))
    layer.lora.b.zero_()
    assert torch.equal(layer(x, none + 1), layer(x))


@pytest.mark.parametrize("shards", [1, 8])
def test_accuracy_against_float64(shards):
    layer, x = Layer([200, 56], 1000, rank=32), rows(50, 1000)
    slots = mixed_slots(50)
    base = x.double() @ torch.cat(layer.w).double().T
    got = layer(x, shards=shards, fp32_out=True)
    assert (got - base).abs().max() < 3e-6
    wanted = base.clone()
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pairs = zip(layer.a[slot], layer.b[slot], strict=True)
            wanted[i] += SCALE * torch.cat([(x[i].double() @ a.double().T) @ b.double().T for a, b in pairs])
    assert (layer(x, slots, shards=shards).double() - wanted).abs().max() < 2e-2


@pytest.mark.parametrize("shards", [1, 8])
def test_gradients_against_float64(shards):
    layer, x, dy = Layer([40, 9], 100, rank=32), rows(60, 100), rows(60, 49, seed=3)
    slots = mixed_slots(60, count=1)
    lora = layer.gradients()
    dx = layer.backward(x, dy, slots, shards=shards, shards_n=shards)
    leaf = x.double().requires_grad_()
    a = [m.double().requires_grad_() for m in layer.a[0]]
    b = [m.double().requires_grad_() for m in layer.b[0]]
    delta = torch.cat([(leaf @ m.T) @ n.T for m, n in zip(a, b, strict=True)], 1)
    y = leaf @ torch.cat(layer.w).double().T + SCALE * delta * (slots >= 0)[:, None]
    y.backward(dy.double())
    assert (dx.double() - leaf.grad).abs().max() < 2e-2
    got_a = [unpack_panels(m, 32) for m in lora.grad_a.split(2)]
    got_b = [unpack_panels(lora.grad_b[:3], 40), unpack_panels(lora.grad_b[3:], 9)]
    for got, wanted in zip(got_a, a, strict=True):
        assert (got.double() - wanted.grad).abs().max() < 1e-5 * wanted.grad.abs().max()
    for got, wanted in zip(got_b, b, strict=True):  # through the rounding of t
        assert (got.double() - wanted.grad).abs().max() < 1e-2 * wanted.grad.abs().max()


def test_micro_batches_continue_the_chain_of_one_big_batch():
    layer, x, slots, dy = Layer([40, 9], 100), rows(130, 100), mixed_slots(130), rows(130, 49, seed=3)
    lora = layer.gradients()
    layer.backward(x, dy, slots)
    for cuts in ([0, 130], [0, 1, 130], [0, 50, 97, 130], list(range(131))):
        again = layer.gradients()
        for a, b in pairwise(cuts):
            layer.backward(x[a:b], dy[a:b], slots[a:b])
        assert same_bits(again.grad_a, lora.grad_a) and same_bits(again.grad_b, lora.grad_b)


def test_adapter_of_the_first_layer_learns_although_its_input_needs_no_gradient():
    layer, x, dy = Layer([16], 32), rows(5, 32), rows(5, 16, seed=3)
    slots = torch.zeros(5, dtype=torch.int32)
    lora = layer.gradients()
    layer(x, slots).backward(dy)
    assert lora.grad_a.abs().max() > 0 and lora.grad_b.abs().max() > 0
    with torch.no_grad():
        assert not layer(x, slots).requires_grad
    lora.grad_a = lora.grad_b = None
    assert not layer(x, slots).requires_grad


def test_only_slot_0_gets_gradients_and_only_if_wanted():
    layer, x, dy = Layer([16], 32), rows(5, 32), rows(5, 16, seed=3)
    lora = layer.gradients()
    layer.backward(x, dy, torch.tensor([-1, 1, 2, 1, -1], dtype=torch.int32))
    assert not lora.grad_a.any() and not lora.grad_b.any()
    both = layer.gradients()
    wanted = layer.backward(x, dy, torch.zeros(5, dtype=torch.int32))
    grad_b = both.grad_b
    layer.gradients().grad_a = None
    assert same_bits(layer.backward(x, dy, torch.zeros(5, dtype=torch.int32)), wanted)
    assert same_bits(layer.lora.grad_b, grad_b)


def test_a_broadcast_output_gradient_is_accepted():
    layer, x = Layer([16, 5], 32), rows(5, 32).requires_grad_()
    layer(x, fp32_out=True).sum().backward()
    got, x.grad = x.grad, None
    layer(x, fp32_out=True).backward(torch.ones(5, 21))
    assert same_bits(got, x.grad)


def test_denormals_survive_flush_to_zero():
    w = torch.full((16, 4), 2.0**-100).bfloat16()
    x = torch.full((2, 4), 2.0**-40).bfloat16()
    before = torch.set_flush_denormal(True)
    try:
        y = linear(x, pack_panels(w), [16], fp32_out=True)
    finally:
        torch.set_flush_denormal(False)
    assert before and torch.equal(y, torch.full((2, 16), 2.0**-138))


def test_no_rows():
    layer = Layer([16, 5], 32)
    slots = torch.zeros(0, dtype=torch.int32)
    assert layer(rows(0, 32)).shape == (0, 21) and layer(rows(0, 32), slots).shape == (0, 21)
    layer.gradients()
    assert layer.backward(rows(0, 32), rows(0, 21), slots).shape == (0, 32)


def test_meta_device_gives_shapes():
    layer = Layer([16, 5], 32)
    x, w, slots = torch.empty(7, 32, device="meta", dtype=torch.bfloat16), layer.panels.to("meta"), mixed_slots(7)
    y = linear(x, w, [16, 5], fp32_out=True)
    assert y.is_meta and y.shape == (7, 21) and y.dtype == torch.float32
    lora = LoraBuffers(layer.lora.a.to("meta"), layer.lora.b.to("meta"), SCALE)
    assert linear(x, w, [16, 5], lora=lora, slots=slots.to("meta")).shape == (7, 21)


def test_wrong_arguments_are_refused_by_name():
    layer, x, slots = Layer([16, 5], 32), rows(4, 32), mixed_slots(4)

    def with_adapter(a, b):
        linear(x, layer.panels, [16, 5], lora=LoraBuffers(a, b, 1.0), slots=slots)

    bad = [
        ("x", lambda: layer(x.float())),
        ("x", lambda: layer(rows(4, 31))),
        ("x", lambda: layer(rows(32, 4).T)),
        ("w", lambda: linear(x, layer.panels, [16, 5, 1])),
        ("w", lambda: linear(x, layer.panels.float(), [16, 5])),
        ("splits", lambda: linear(x, layer.panels, [])),
        ("splits", lambda: linear(x, layer.panels, [32, 0])),
        ("shards", lambda: layer(x, shards=4)),
        ("shards_n", lambda: layer(x.requires_grad_(), shards_n=2).sum().backward()),
        ("slots", lambda: linear(x, layer.panels, [16, 5], lora=layer.lora)),
        ("slots", lambda: layer(x, slots[:3])),
        ("slots", lambda: layer(x, slots.long())),
        ("slots", lambda: layer(x, torch.full_like(slots, 3))),
        ("slots", lambda: layer(x, torch.full_like(slots, -2))),
        ("fp32_out", lambda: layer(x, slots, fp32_out=True)),
        ("a", lambda: with_adapter(layer.lora.a[:, :1], layer.lora.b)),
        ("b", lambda: with_adapter(layer.lora.a, layer.lora.b[:, :, :8])),
    ]
    for name, call in bad:
        with pytest.raises(OperatorError, match=rf"^{name}:"):
            call()
    lora = layer.gradients()
    lora.grad_a = lora.grad_a.double()
    with pytest.raises(OperatorError, match="grad_a"):
        layer.backward(x.detach(), rows(4, 21), slots)


def test_a_call_past_torchs_dispatcher_is_the_operator():
    """Recording sees the operator; the bits and the refusals are the same either way."""
    x, w = torch.randn(5, 40).bfloat16(), pack_panels(torch.randn(24, 40).bfloat16())
    direct = linear(x, w, [24])
    with program.recorded() as recording:
        dispatched = linear(x, w, [24])
    assert [name for name, _, _ in recording.calls] == ["zm_linear"] and not recording.other
    assert torch.equal(direct.view(torch.int16), dispatched.view(torch.int16))
    assert linear(x.to("meta"), w.to("meta"), [24]).is_meta
    for seen in (nullcontext(), program.recorded()):
        with seen, pytest.raises(OperatorError, match="x: expected"):
            linear(x.float(), w, [24])
