"""Experts over ranks: outputs and gradients in the bits of one rank, whatever the routing and wherever the tokens."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import assert_same_on_every_isa, poisoned, threads
from tests.batch_invariant.test_experts import SILU, Moe, output_gradient
from tests.parallel.shards import WORLDS
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.parallel import experts as module
from zmrl.parallel.experts import experts
from zmrl.parallel.group import Group, simulate

COUNT, TOPK = 32, 4


def routed(moe: Moe, kind: str, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    z, ids, weights, slots = moe.tokens(tokens)
    if kind == "one rank":  # all tokens to the experts that are on one rank in every layout
        ids = torch.arange(TOPK).repeat(tokens, 1).int()
    elif kind == "few":  # most experts have no token
        ids = torch.stack([torch.arange(TOPK) * 8 + int(i) % 2 for i in range(tokens)]).int()
    return z, ids, weights, slots


def shares(tokens: int, size: int) -> list[int]:
    """Uneven; of four or eight ranks, the second has no token."""
    parts = {1: [1], 2: [1, 2], 4: [3, 0, 1, 2], 8: [3, 0, 1, 1, 2, 0, 4, 1]}[size]
    counts = [tokens * part // sum(parts) for part in parts]
    return [counts[0] + tokens - sum(counts), *counts[1:]]


def rank_experts(
    group: Group, moe: Moe, inputs: tuple[Tensor, ...], du: Tensor, adapted: bool, copies: int = 1
) -> tuple[list[Tensor], dict[str, int]]:
    """out, dz, dweights of this rank's tokens, the gradients of its experts' adapters, copy by copy; what it sent."""
    counts, per_rank = shares(len(du), group.size), COUNT // group.size
    own = slice(group.rank * per_rank, (group.rank + 1) * per_rank)
    w = type(moe.weights)(*(t[own].contiguous() for t in moe.weights))
    lora = ExpertLoraBuffers(*(t[:, own].contiguous() for t in moe.lora.tensors), scale=moe.lora.scale)
    by_copy = tuple(tuple(torch.zeros(t.shape[1:]) for t in lora.tensors) for _ in range(copies))
    if copies > 1:
        lora.by_copy = by_copy
    else:
        (lora.gradients,) = by_copy
    z, ids, weights, slots = (t.split(counts)[group.rank] for t in inputs)
    z, weights = z.clone().requires_grad_(), weights.clone().requires_grad_()
    adapters = (lora, slots) if adapted else (None, None)
    out = experts(group, z, ids, weights, COUNT, w, *moe.betas, *adapters)
    out.backward(du.split(counts)[group.rank])
    return [out.detach(), z.grad, weights.grad, *itertools.chain(*by_copy)], dict(group.sent)


def run_ranks(
    moe: Moe, inputs: tuple[Tensor, ...], du: Tensor, size: int, adapted: bool, copies: int = 1
) -> tuple[list, list[dict]]:
    """The results put together, and what each rank sent."""
    with poisoned():
        ranks = simulate(size, lambda group: rank_experts(group, moe, inputs, du, adapted, copies))
    results, sent = zip(*ranks, strict=True)
    return [torch.cat(parts) for parts in zip(*results, strict=True)], list(sent)


@pytest.mark.parametrize("kind", ["random", "one rank", "few"])
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", [1, *WORLDS])
def test_experts_over_ranks_have_the_bits_of_one_rank(size, adapted, kind):
    moe = Moe(COUNT, topk=TOPK)
    inputs = routed(moe, kind, 40)
    z, ids, weights, slots = inputs
    used = ids.unique()
    assert kind == "random" or len(used) < COUNT / 2
    assert kind != "one rank" or int(used.max()) < COUNT // 8
    du = output_gradient(40, moe.latent)
    grads = moe.gradients()
    out = moe(z, ids, weights, slots if adapted else None).detach()
    wanted = [out, *moe.backward(du, z, ids, weights, slots if adapted else None), *grads]
    got, sent = run_ranks(moe, inputs, du, size, adapted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert same_bits(a, b), f"result {i}"
    assert not adapted or all(g.any() for g in grads)
    if kind == "one rank" and size > 1:  # only the owners of tokens send rows, and only to rank 0
        counts = shares(40, size)
        assert [s["expert inputs"] for s in sent] == [0, *(n * moe.latent * 2 for n in counts[1:])]
        assert sum(s["expert results"] for s in sent) == sum(counts[1:]) * TOPK * moe.latent * 4


@pytest.mark.parametrize("kind", ["random", "one rank", "few"])
@pytest.mark.parametrize(("size", "copies"), [(2, 2), (4, 2), (4, 4), (8, 4)])
def test_tokens_of_several_copies_have_the_bits_of_each_copy_alone(size, copies, kind):
    """Of four copies on four ranks, one has no token."""
    moe = Moe(COUNT, topk=TOPK)
    inputs, du = routed(moe, kind, 40), output_gradient(40, moe.latent)
    counts, ranks = shares(40, size), size // copies
    parts = [sum(counts[first : first + ranks]) for first in range(0, size, ranks)]
    assert (copies == size == 4) == (0 in parts)
    results, gradients = [], []
    for du_of, *inputs_of in zip(du.split(parts), *(x.split(parts) for x in inputs), strict=True):
        grads = moe.gradients()
        results.append([moe(*inputs_of).detach(), *moe.backward(du_of, *inputs_of)])
        gradients += grads
    got, _ = run_ranks(moe, inputs, du, size, True, copies)
    wanted = [*map(torch.cat, zip(*results, strict=True)), *gradients]
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert same_bits(a, b), f"result {i}"
    one_chain = run_ranks(moe, inputs, du, size, True)[0][3:]
    summed = [torch.stack(gradients[i::6]).sum(0) for i in range(6)]
    assert not any(same_bits(a, b) for a, b in zip(one_chain, summed, strict=True)), "the order does not show: VOID"


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", WORLDS)
def test_bf16_experts_over_ranks_have_the_bits_of_one_rank(size, adapted):
    moe = Moe(COUNT, latent=48, width=16, topk=TOPK, quantised=False, betas=SILU)
    inputs, du = moe.tokens(40), output_gradient(40, moe.latent)
    z, ids, weights, slots = inputs
    grads = moe.gradients()
    out = moe(z, ids, weights, slots if adapted else None).detach()
    wanted = [out, *moe.backward(du, z, ids, weights, slots if adapted else None), *grads]
    got, _ = run_ranks(moe, inputs, du, size, adapted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert same_bits(a, b), f"result {i}"
    assert not adapted or all(g.any() for g in grads)
    moe.betas = (4.0, 25.0)
    assert not same_bits(run_ranks(moe, inputs, du, size, adapted)[0][0], out), "the activation does nothing: VOID"


def test_experts_over_ranks_on_every_isa_and_with_threads():
    moe = Moe(COUNT, topk=TOPK)
    inputs, du = moe.tokens(60), output_gradient(60, moe.latent)
    wanted = assert_same_on_every_isa(lambda: run_ranks(moe, inputs, du, 4, True)[0])
    with threads(2):
        got, _ = run_ranks(moe, inputs, du, 4, True)
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


def test_another_order_of_the_results_shows(monkeypatch):
    """With enough tokens for BF16 to show an order."""
    moe = Moe(COUNT, topk=TOPK)
    inputs, du = moe.tokens(2000), output_gradient(2000, moe.latent)
    wanted, _ = run_ranks(moe, inputs, du, 2, False)
    plain = module.combine_experts

    def backwards(results: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
        return plain(results, index.flip(1).contiguous(), None if weights is None else weights.flip(1).contiguous())

    monkeypatch.setattr(module, "combine_experts", backwards)
    got, _ = run_ranks(moe, inputs, du, 2, False)
    assert not same_bits(got[0], wanted[0])
    assert not same_bits(got[1], wanted[1])


def test_uneven_experts_are_refused():
    moe = Moe(6, topk=2)
    z, ids, weights, _ = moe.tokens(3)
    with pytest.raises(OperatorError, match="count: 6 experts on 4 ranks"):
        simulate(4, lambda group: experts(group, z, ids, weights, 6, moe.weights))
    with pytest.raises(OperatorError, match="expert_weights: of other experts"):
        simulate(2, lambda group: experts(group, z, ids, weights, 6, moe.weights))
