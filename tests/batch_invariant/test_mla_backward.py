"""Backward of absorbed MLA: order, float64 autograd of explicit MLA, invariances in bits, gradients of the adapter."""

from functools import partial

import pytest
import torch
from torch import Tensor

from tests.batch_invariant import mla_oracle as oracle
from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import (
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    outputs,
    relative_error,
    threads,
)
from tests.batch_invariant.mla_oracle import FULL, NANO, ODD, Case, make_case
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import mla as module
from zmrl.batch_invariant.ops.linear_parallel import tree_sum
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import HEAD_SLICES, SumHeads
from zmrl.batch_invariant.ops.panels import pack_panels, unpack_panels


def gradient_case(dims, lengths, topk, seed: int = 0) -> Case:
    case = make_case(dims, lengths, topk, seed=seed, slot_count=1)  # the trainer has one slot; some tokens go without
    assert len(case.slots) < 4 or (-1 in case.slots and 0 in case.slots)
    return case


def gradients(
    case: Case, grad: Tensor, rows: slice = slice(None), cu: Tensor | None = None, lora: LoraBuffers | None = None
) -> tuple[Tensor, ...]:
    """(dq, dkv, grad_a, grad_b) of the tokens `rows`, which begin with a sequence; cu: their sequences."""
    lora = lora or case.lora(gradients=True)
    q, kv = case.q[rows].clone().requires_grad_(), case.kv[rows].clone().requires_grad_()
    first = int((case.cu == (rows.start or 0)).nonzero()[0])
    case.attend(q, kv, lora, rows, cu, case.block_table[first:]).backward(grad[rows])
    return q.grad, kv.grad, lora.grad_a, lora.grad_b


def random_gradient(case: Case, seed: int = 1) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(len(case.q), case.dims.heads * case.dims.v, generator=g).bfloat16()


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.mark.parametrize("dims", [NANO, ODD, FULL._replace(heads=2)], ids=["nano", "odd", "full"])
def test_gradients_are_close_to_float64_autograd_of_explicit_attention(dims):
    case = gradient_case(dims, [40, 1, 17], topk=24)
    grad = random_gradient(case)
    got = gradients(case, grad)
    leaves = [t.double().requires_grad_() for t in (case.q, case.kv, case.lora_a, case.lora_b)]
    oracle.explicit_attention(case, *leaves, range(58)).backward(grad.double())
    wanted = [t.grad for t in leaves]
    r, rows = case.lora_a.shape[1], len(case.weight)
    got = [got[0], got[1], unpack_panels(tree_sum(got[2]), r), unpack_panels(got[3], rows)]
    for name, a, b in zip(("dq", "dkv", "dA", "dB"), got, wanted, strict=True):
        assert relative_error(a, b.squeeze(0)) < 8e-3, name


@pytest.mark.parametrize("heads", [1, 5, 11])
@pytest.mark.parametrize("isa", native.available_isas())
def test_gradients_have_the_documented_order(isa, heads):
    """11 heads: slices of one and of two; fewer than 8: some are empty."""
    case = gradient_case(ODD._replace(heads=heads), [13, 4], topk=9)
    grad = random_gradient(case)
    with native.use_isa(isa):
        dq, dkv, grad_a, grad_b = gradients(case, grad)
    grad_a = tree_sum(grad_a)
    got = dq.float(), dkv.float(), unpack_panels(grad_a, 16), unpack_panels(grad_b, len(case.weight))
    for name, a, b in zip(("dq", "dkv", "dA", "dB"), got, oracle.exact_gradients(case, grad), strict=True):
        assert (a.numpy().view("int32") == b.view("int32")).all(), name


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_with_some_heads_each_finish_the_sums_of_one(world):
    case = gradient_case(ODD._replace(heads=16), [30, 9], topk=12)
    d, grad = case.dims, random_gradient(case)
    whole = gradients(case, grad)
    own, slices = d.heads // world, HEAD_SLICES // world
    dkv, grad_a, grad_b, dq = [], [], [], []
    for rank in range(world):
        heads = slice(rank * own, (rank + 1) * own)
        of = partial(of_heads, heads=heads, count=d.heads)
        q = of(case.q, 1).requires_grad_()
        a, b = pack_panels(case.lora_a), pack_panels(of(case.lora_b, 1))
        lora = LoraBuffers(a, b, case.scale, torch.zeros(slices, *a.shape[1:]), torch.zeros(b.shape[1:]))
        kv = case.kv.clone().requires_grad_()
        sums = []
        sum_heads = SumHeads(slices, lambda x, sums=sums: sums.append(x) or x.bfloat16())
        module.mla_attention(
            q, kv, case.pages, case.block_table, case.cu, case.positions, case.selected, case.block_size,
            pack_panels(of(case.weight, 0)), d._replace(heads=own), lora, case.slots, sum_heads=sum_heads,
        ).backward(of(grad, 1))  # fmt: skip
        dq.append(q.grad)
        dkv += sums
        grad_a.append(lora.grad_a)
        grad_b.append(unpack_panels(lora.grad_b, len(b[0]) * 16))
    assert same_bits(torch.cat(dq, 1), whole[0])
    assert same_bits(tree_sum(torch.stack(dkv)).bfloat16(), whole[1])
    assert not same_bits(tree_sum(torch.stack([*dkv[:-1], dkv[0]])).bfloat16(), whole[1])
    assert same_bits(torch.cat(grad_a), whole[2])
    assert not same_bits(torch.cat(grad_a[::-1]), whole[2])
    assert same_bits(torch.cat(grad_b), unpack_panels(whole[3], len(case.weight)))


def of_heads(t: Tensor, dim: int, heads: slice, count: int) -> Tensor:
    """What belongs to some of `count` heads."""
    return (
        t.unflatten(dim, (count, -1)).narrow(dim, heads.start, heads.stop - heads.start).flatten(dim, dim + 1).clone()
    )


def test_gradients_of_dense_attention_are_those_of_every_position():
    case = gradient_case(ODD, [40, 1, 17], topk=40)  # every position is selected
    grad = random_gradient(case)
    expected = gradients(case, grad)
    case.selected = None
    assert_same(gradients(case, grad), expected)


def test_gradients_without_adapter():
    case = gradient_case(NANO, [23], topk=16)
    grad = random_gradient(case)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    out = case.attend(q, kv)
    out.backward(grad)
    case.slots.fill_(-1)
    lora = case.lora(gradients=True)
    dq, dkv, grad_a, grad_b = gradients(case, grad, lora=lora)
    assert same_bits(q.grad, dq)
    assert same_bits(kv.grad, dkv)
    assert not grad_a.any()
    assert not grad_b.any()


def test_forward_under_autograd_is_the_forward():
    case = gradient_case(NANO, [23], topk=16)
    q = case.q.clone().requires_grad_()
    out = case.attend(q, case.kv, case.lora())
    assert out.grad_fn is not None
    assert same_bits(out.detach(), case.forward())


def test_sequences_and_micro_batches_are_independent():
    """Three sequences at once, or one by one with the adapter's chains continued in the buffers: the same bits."""
    case = gradient_case(ODD, [30, 9, 55], topk=20)
    grad = random_gradient(case)
    whole = gradients(case, grad)
    lora = case.lora(gradients=True)
    dq, dkv = torch.empty_like(whole[0]), torch.empty_like(whole[1])
    for rows in (slice(0, 30), slice(30, 94)):
        cu = case.cu[1:] - 30 if rows.start else case.cu[:2]
        dq[rows], dkv[rows], _, _ = gradients(case, grad, rows, cu.contiguous(), lora)
    assert_same((dq, dkv, lora.grad_a, lora.grad_b), whole)
    alone = gradients(case, grad, slice(30, 39), torch.tensor([0, 9]).int())
    assert same_bits(alone[0], whole[0][30:39])
    assert same_bits(alone[1], whole[1][30:39])


def test_gradient_of_a_query_is_independent_of_later_tokens():
    case = gradient_case(NANO, [130], topk=24)
    grad = random_gradient(case)
    whole = gradients(case, grad)[0]
    for m in range(1, 131):
        assert same_bits(gradients(case, grad, slice(0, m), torch.tensor([0, m]).int())[0], whole[:m])


def test_adapter_gradients_continue_the_chains_in_the_buffers():
    case = gradient_case(NANO, [12], topk=8)
    grad = random_gradient(case)
    clean = gradients(case, grad)
    lora = case.lora(gradients=True)
    lora.grad_a.fill_(1e4)
    gradients(case, grad, lora=lora)
    assert not torch.equal(lora.grad_a, clean[2] + 1e4)  # not a sum of two sums
    torch.testing.assert_close(lora.grad_a, clean[2] + 1e4)


def test_gradients_are_independent_of_threads():
    case = gradient_case(NANO, [160, 90], topk=32)
    grad = random_gradient(case)
    assert_same_with_threads(lambda: gradients(case, grad), module, "_mla_attention_backward")


@pytest.mark.parametrize("dims", [NANO, ODD], ids=["nano", "odd"])
def test_gradients_are_independent_of_the_instruction_set(dims):
    case = gradient_case(dims, [33, 8], topk=24)
    grad = random_gradient(case)
    assert_same_on_every_isa(lambda: gradients(case, grad))


def test_gradients_are_independent_of_how_tokens_are_cut_into_chunks():
    """At full size a wide selection leaves room for 13 tokens a chunk, a narrow one for 34: the same bits."""
    case = gradient_case(FULL, [20], topk=20)
    grad = random_gradient(case)
    narrow = gradients(case, grad)
    case.selected = torch.cat([case.selected, torch.full((20, 2028), -1).int()], 1)
    assert_same(gradients(case, grad), narrow)


def test_strides_of_rows_and_of_the_gradient_do_not_matter():
    case = gradient_case(NANO, [19], topk=8)
    ones = torch.ones(19, 128).bfloat16()
    expected = gradients(case, ones)
    wide_q, wide_kv = torch.cat([case.q] * 2, 1), torch.cat([case.kv] * 2, 1)
    lora = case.lora(gradients=True)
    wide_q.requires_grad_()
    wide_kv.requires_grad_()
    out = case.attend(wide_q[:, :192], wide_kv[:, :80], lora)
    out.sum().backward()  # an expanded gradient with stride 0
    assert same_bits(wide_q.grad[:, :192].contiguous(), expected[0])
    assert same_bits(wide_kv.grad[:, :80].contiguous(), expected[1])
    assert same_bits(lora.grad_a, expected[2])


def test_pages_may_be_reused_before_the_backward():
    case = gradient_case(NANO, [19], topk=8)
    grad = random_gradient(case)
    expected = gradients(case, grad)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    out = case.attend(q, kv, case.lora())
    case.pages.fill_(255)
    out.backward(grad)
    assert same_bits(q.grad, expected[0])
    assert same_bits(kv.grad, expected[1])


def test_adapter_is_trained_even_if_no_input_needs_a_gradient():
    case = gradient_case(NANO, [19], topk=8)
    grad = random_gradient(case)
    expected = gradients(case, grad)
    lora = case.lora(gradients=True)
    out = case.attend(case.q, case.kv, lora)
    out.backward(grad)
    assert same_bits(lora.grad_b, expected[3])
    assert lora.a.grad is None


def test_one_buffer_may_be_left_out():
    case = gradient_case(NANO, [19], topk=8)
    grad = random_gradient(case)
    expected = gradients(case, grad)
    lora = case.lora(gradients=True)
    lora.grad_a = None
    assert same_bits(gradients(case, grad, lora=lora)[3], expected[3])


def test_every_element_is_written():
    case = gradient_case(ODD, [21], topk=8)
    grad = random_gradient(case)
    got = outputs(lambda: gradients(case, grad))
    assert_same(got, gradients(case, grad))
    assert all(t.isfinite().all() for t in got)


def test_unused_latents_get_zero():
    case = gradient_case(NANO, [12], topk=12)
    case.selected = torch.cat([case.positions[:, None], torch.full((12, 3), -1).int()], 1)  # only itself
    case.selected[5:, 0] = 5
    dkv = gradients(case, random_gradient(case))[1]
    assert dkv[:6].any(1).all()
    assert not dkv[6:].any()


def test_sequence_that_does_not_start_at_zero_is_refused():
    case = gradient_case(NANO, [12], topk=12)
    case.positions += 1
    case.block_table = torch.cat([case.block_table, case.block_table], 1)
    with pytest.raises(OperatorError, match="positions: token 0"):
        gradients(case, random_gradient(case))


def test_wrong_gradient_buffer_is_named():
    case = gradient_case(NANO, [12], topk=12)
    lora = case.lora(gradients=True)
    lora.grad_b = lora.grad_b[1:]
    with pytest.raises(OperatorError, match="grad_b"):
        gradients(case, random_gradient(case), lora=lora)


def test_backward_needs_the_latents():
    case = gradient_case(NANO, [12], topk=12)
    with pytest.raises(OperatorError, match="kv"):
        case.attend(case.q.requires_grad_())
