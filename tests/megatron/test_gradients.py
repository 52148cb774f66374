"""The order in which gradients are summed does not depend on micro-batches, and the norm on nothing but the values."""

import itertools

import pytest
import torch

from zmrl.model.tensors import PANELS, TensorSlice
from zmrl.parallel.group import simulate
from zmrl.trainer.megatron.accumulation import MiniBatchGradients
from zmrl.trainer.megatron.gradients import (
    SHARDS,
    ShardTree,
    gradient_norm,
    in_lockstep,
    micro_batches,
    sum_over_ranks,
)


@pytest.mark.parametrize("count, size", itertools.product((1, 2, 7, 8, 9, 64, 100), (1, 2, 3, 8, 1000)))
def test_micro_batches_cover_the_samples_in_order_and_stay_within_shards(count, size):
    batches = micro_batches(count, size)
    assert [i for batch in batches for i in batch.samples] == list(range(count))
    for shard, samples in batches:
        assert 1 <= len(samples) <= size
        assert shard * count // SHARDS <= samples.start and samples.stop <= (shard + 1) * count // SHARDS
    assert batches[-1].shard == SHARDS - 1


def _leaf(shard):
    return torch.randn(1000, generator=torch.Generator().manual_seed(shard))


@pytest.mark.parametrize("present", [range(8), (7,), (3, 7), (0, 7), (1, 2, 5, 7), (2, 3, 4, 7)])
def test_shards_are_summed_by_the_tree(present):
    tree = ShardTree(torch.full((1000,), torch.nan))
    for _ in range(2):  # buffers of the first mini-batch are used again
        tree.reset()
        for shard in present:
            tree.begin(shard).add_(_leaf(shard))
            tree.end()
        sums = [_leaf(shard) if shard in present else None for shard in range(8)]
        while len(sums) > 1:
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [a + b if a is not None and b is not None else b if a is None else a for a, b in pairs]
        assert tree.complete
        assert torch.equal(tree.total, sums[0])
        assert len(tree._spare) <= 3


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("count", [8, 16, 40, 56])
def test_ranks_finish_the_tree_that_one_rank_sums(world, count):
    """Each with its part of the samples and micro-batches of a size of its own."""

    def run(group):
        shards, own = SHARDS // group.size, count // group.size
        tree = ShardTree(torch.empty(1024), shards)
        for shard, batches in itertools.groupby(micro_batches(own, 1 + group.rank, shards), lambda batch: batch.shard):
            buffer = tree.begin(shard)
            for sample in (s for batch in batches for s in batch.samples):
                buffer.add_(torch.randn(1024, generator=torch.Generator().manual_seed(group.rank * own + sample)))
            tree.end()
        assert tree.complete
        sum_over_ranks(group, tree.total)
        return tree.total, sum(group.sent.values())

    ((wanted, _),) = simulate(1, run)
    for total, sent in simulate(world, run):
        assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))
        assert (sent > 0) == (world > 1)
    plain = torch.zeros(1024)
    for sample in range(count):
        plain += torch.randn(1024, generator=torch.Generator().manual_seed(sample))
    assert not torch.equal(plain, wanted)  # the order matters


class _Adapter:
    """Takes what `MiniBatchGradients` binds."""

    def __init__(self):
        self.own, self.by_copy = {}, []

    def bind(self, gradients):
        self.own = gradients

    def bind_experts(self, by_copy):
        self.by_copy = by_copy

    def finish(self):
        self.own = {}

    release = finish


@pytest.mark.parametrize(("world", "count"), [(2, 44), (4, 44), (8, 56)])
def test_experts_of_all_copies_end_with_the_sums_of_one_rank(world, count):
    """Copy c has micro-batches of c + 1 samples; every expert sees every sample."""
    experts, size = 512, 768

    def run(group, ignore_the_others=False):
        own, adapter, idle = count // group.size, _Adapter(), 0
        places = {"experts": (0, torch.Size([experts])), "rest": (experts, torch.Size([size - experts]))}
        total = torch.full((size,), torch.nan)
        sums = MiniBatchGradients(adapter, total, places, experts, group, group.size)
        for micro, shards in in_lockstep(group, micro_batches(own, 1 + group.rank, sums.shards)):
            sums.enter([shards[group.rank]] * group.size if ignore_the_others else shards)
            idle += not micro.samples
            samples = group.all_gather(torch.tensor([micro.samples.start, micro.samples.stop]), "samples").tolist()
            for copy, (start, stop) in enumerate(samples):
                for sample in range(copy * own + start, copy * own + stop):
                    leaf = torch.randn(size, generator=torch.Generator().manual_seed(sample))
                    (adapter.by_copy[copy] if group.size > 1 else adapter.own)["experts"].add_(leaf[:experts])
                    if copy == group.rank:
                        adapter.own["rest"].add_(leaf[experts:])
        sums.finish()
        assert sums.complete
        return total, idle

    ((wanted, _),) = simulate(1, run)
    assert bool(wanted.any())
    results = simulate(world, run)
    assert any(idle for _, idle in results)
    for total, _ in results:
        assert torch.equal(total.view(torch.int32), wanted.view(torch.int32))
    for total, _ in simulate(world, lambda group: run(group, ignore_the_others=True)):
        assert torch.equal(total[experts:], wanted[experts:])
        # Of eight copies each has one shard only.
        assert torch.equal(total[:experts], wanted[:experts]) == (world == SHARDS)


def test_an_abandoned_mini_batch_leaves_nothing_behind():
    tree = ShardTree(torch.zeros(1000))
    for shard in range(5):
        tree.begin(shard).fill_(torch.nan)
        tree.end()
    tree.begin(5)
    tree.reset()
    for shard in range(8):
        tree.begin(shard).add_(_leaf(shard))
        tree.end()
    assert bool(torch.isfinite(tree.total).all())


def _slices(gradients):
    """Two fused linears [24, 10] and [16, 10] in one panel buffer, and 3 experts [32, 5] in another."""
    fused, experts = torch.zeros(3, 10, 16), torch.zeros(3, 2, 5, 16)
    parts = [("b", fused, slice(0, 2), (24, 10)), ("a", fused, slice(2, 3), (16, 10))]
    parts += [(f"e{i}", experts, i, (32, 5)) for i in range(3)]
    slices = [TensorSlice(name, buffer, index, shape, PANELS) for name, buffer, index, shape in parts]
    for item in slices:
        item.write(gradients[item.name])
    return slices


@pytest.fixture
def gradients():
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (16, 10), "b": (24, 10), "e0": (32, 5), "e1": (32, 5), "e2": (32, 5)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_the_norm_is_that_of_all_elements(gradients):
    expected = torch.cat([g.double().flatten() for g in gradients.values()]).norm()
    assert gradient_norm(_slices(gradients)) == pytest.approx(float(expected), rel=1e-14)


def test_the_norm_does_not_depend_on_the_order_of_buffers_or_threads(gradients):
    slices = _slices(gradients)
    before, threads = gradient_norm(slices), torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert gradient_norm(reversed(slices)) == before
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["a", "e1"])
def test_a_gradient_that_is_not_finite_is_named(gradients, name, value):
    gradients[name][3, 4] = value
    with pytest.raises(ValueError, match=f"gradient of {name} is not finite"):
        gradient_norm(_slices(gradients))


def test_torchs_adam_is_elementwise():
    """Megatron takes torch.optim.AdamW here; its bits must not depend on threads or on what lies beside an element."""
    count = 100_003
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(count, generator=generator) for _ in range(4)]

    def run(threads, start, stop):
        torch.set_num_threads(threads)
        parameter = torch.nn.Parameter(values[0][start:stop].clone())
        adam = torch.optim.AdamW([parameter], lr=1e-2, weight_decay=0.1)
        for gradient in values[1:]:
            parameter.grad = gradient[start:stop] * 1e-3
            adam.step()
        return torch.stack([parameter.detach(), *(adam.state[parameter][n] for n in ("exp_avg", "exp_avg_sq"))])

    threads = torch.get_num_threads()
    try:
        whole = run(1, 0, count)
        for number, (start, stop) in itertools.product((1, 2, 3), ((0, count), (1, 70_002), (99_990, count), (5, 6))):
            part = run(number, start, stop)
            assert torch.equal(part.view(torch.int32), whole[:, start:stop].contiguous().view(torch.int32))
    finally:
        torch.set_num_threads(threads)
