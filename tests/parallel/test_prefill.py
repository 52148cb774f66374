"""Prefill by tokens and over a gathered context: the bits of prefill by heads, and what it saves."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.batch_invariant import index_oracle, mla_oracle
from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import poisoned
from tests.parallel.shards import WORLDS, local_cache, of_heads
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops.indexer import index_select, index_store
from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat, latent_store
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.batch_invariant.ops.panels import pack_panels
from zmrl.parallel.group import Group, simulate
from zmrl.parallel.prefill import PrefillShards, count_work, gather_context, prefill_attention

DIMS = mla_oracle.NANO._replace(heads=8)
TOPK, BLOCK = 16, 8


@dataclass
class Step:
    """A chunked prefill: of each request, `cached` positions lie in the pages and its new tokens follow."""

    mla: mla_oracle.Case
    index: index_oracle.Case
    new: Tensor
    """The rows of the cases that are new tokens."""
    cu: Tensor
    lengths: list[int]

    @property
    def positions(self) -> Tensor:
        return self.mla.positions[self.new]

    @property
    def slots(self) -> Tensor:
        return self.mla.slots[self.new]


def make_step(
    cached: list[int], new: list[int], latents: LatentFormat = BF16_LATENTS, index_format: str = "fp8"
) -> Step:
    lengths = [a + b for a, b in zip(cached, new, strict=True)]
    mla = mla_oracle.make_case(DIMS, lengths, TOPK, BLOCK, latents=latents)
    index = index_oracle.make_case(lengths, topk=TOPK, block_size=BLOCK, format=index_format)
    index.k[3] = float("nan")
    index.store()
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    rows = torch.cat([torch.arange(s + c, s + n) for s, c, n in zip(starts, cached, lengths, strict=False)])
    return Step(mla, index, rows, torch.tensor([0, *new]).cumsum(0).int(), lengths)


STEPS = {"from the start": ([0, 0, 0], [100, 3, 41]), "after a prefix": ([60, 0, 30], [50, 70, 1])}


def by_heads(step: Step, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Prefill by heads: this rank's heads of all rows, every position ranked; and the flags."""
    mla, index, new = step.mla, step.index, step.new
    flags = torch.zeros(len(new), dtype=torch.int32)
    where = (step.cu, step.positions)
    selected = index_select(
        index.q[new],
        index.w[new],
        index.hadamard,
        index.pages,
        index.block_table,
        *where,
        TOPK,
        BLOCK,
        flags,
        index.format,
    )
    dims, kv_b, lora = of_rank(step, rank, size)
    q = of_heads(mla.q, 1, rank, size)[new]
    table = (mla.pages, mla.block_table)
    return mla_attention(q, None, *table, *where, selected, BLOCK, kv_b, dims, lora, step.slots, mla.latents), flags


def of_rank(step: Step, rank: int, size: int) -> tuple[MlaDims, Tensor, LoraBuffers]:
    """dims, kv_b and adapters of a rank's heads."""
    mla = step.mla
    b = pack_panels(of_heads(mla.lora_b, 1, rank, size))
    lora = LoraBuffers(pack_panels(mla.lora_a), b, mla.scale)
    return DIMS._replace(heads=8 // size), pack_panels(of_heads(mla.weight, 0, rank, size)), lora


def by_tokens(step: Step, group: Group, latents: tuple, keys: tuple) -> tuple[Tensor, Tensor]:
    """latents, keys: pages, block table, block size of the whole context."""
    mla, index, new = step.mla, step.index, step.new
    assert latents[2] == keys[2] and torch.equal(latents[1], keys[1])
    shards = PrefillShards.of(step.cu, group.size)
    own = new[shards.rows[group.rank]]
    dims, kv_b, lora = of_rank(step, 0, 1)
    flags = torch.zeros(len(new), dtype=torch.int32)
    queries = (index.q[own], index.w[own], index.hadamard)
    pages = (latents[0], keys[0], latents[1])
    q = of_heads(mla.q, 1, group.rank, group.size)[new]
    projection = (latents[2], kv_b, dims, lora, step.slots, flags, mla.latents, index.format)
    out = prefill_attention(group, shards, q, *queries, *pages, step.positions, TOPK, *projection)
    return out, flags


FORMATS = [(BF16_LATENTS, "fp8"), (LatentFormat("fp8"), "mxfp4")]


@pytest.mark.parametrize("formats", FORMATS, ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", [1, *WORLDS])
def test_prefill_by_tokens_has_the_bits_of_prefill_by_heads(size, name, formats):
    step = make_step(*STEPS[name], *formats)

    def run(group: Group) -> tuple[Tensor, Tensor, dict]:
        latents = (step.mla.pages, step.mla.block_table, BLOCK)
        keys = (step.index.pages, step.index.block_table, BLOCK)
        return *by_tokens(step, group, latents, keys), dict(group.events)

    with poisoned():
        results = simulate(size, run)
    for rank, (out, flags, _) in enumerate(results):
        wanted, wanted_flags = by_heads(step, rank, size)
        assert same_bits(out, wanted)
        assert torch.equal(flags, wanted_flags)
        assert flags.any() and not flags.all()
    # What the ranks really did is what is foretold, and together it is the work of one rank.
    work = count_work(step.positions, TOPK)
    for key, total in work.items():
        assert sum(events[key] for _, _, events in results) == total > 0


def by_gathered_tokens(step: Step, group: Group) -> tuple[Tensor, Tensor]:
    """From pages of every W-th position, a page of three; collected, ordered, then prefill by tokens."""
    mla, index, size = step.mla, step.index, group.size
    width = (DIMS.rank + DIMS.pe) * 2
    pages, table, slots = local_cache(mla.cu, group.rank, size, 3, width)
    latent_store(mla.kv, pages, slots, 3, DIMS.rank)
    latents = (*gather_context(group, pages, table, step.lengths, 3, [width]), 3)
    pages, table, slots = local_cache(mla.cu, group.rank, size, 3, index.d + 4, seed=1)
    index_store(index.k, index.ln_w, index.ln_b, 1e-6, index.hadamard, pages, slots, 3)
    keys = (*gather_context(group, pages, table, step.lengths, 3, [index.d, 4]), 3)
    return by_tokens(step, group, latents, keys)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("size", WORLDS)
def test_gathered_context_has_the_bits_of_one_rank(size, name):
    step = make_step(*STEPS[name])
    width = (DIMS.rank + DIMS.pe) * 2

    def run(group: Group) -> tuple[Tensor, Tensor, dict]:
        return *by_gathered_tokens(step, group), dict(group.sent)

    for rank, (out, flags, sent) in enumerate(simulate(size, run)):
        wanted, wanted_flags = by_heads(step, rank, size)
        assert same_bits(out, wanted)
        assert torch.equal(flags, wanted_flags)
        held = sum(-(-max(n - rank, 0) // size) for n in step.lengths)
        assert sent["context"] == held * (width + step.index.d + 4) * (size - 1)


def test_a_context_in_another_order_shows():
    step = make_step(*STEPS["from the start"])
    width = (DIMS.rank + DIMS.pe) * 2

    def run(group: Group) -> Tensor:
        pages, table, slots = local_cache(step.mla.cu, group.rank, 2, BLOCK, width)
        latent_store(step.mla.kv, pages, slots, BLOCK, DIMS.rank)
        whole, table = gather_context(group, pages, table, step.lengths, BLOCK, [width])
        rows = whole.view(-1, width)
        rows[[10, 11]] = rows[[11, 10]].clone()
        keys = gather_keys(step)
        return by_tokens(step, group, (whole, table, BLOCK), keys)[0]

    assert not same_bits(simulate(2, run)[0], by_heads(step, 0, 2)[0])


def gather_keys(step: Step) -> tuple:
    """The index keys of one rank as `gather_context` lays them out."""
    index = step.index

    def run(group: Group) -> tuple:
        return *gather_context(group, index.pages, index.block_table, step.lengths, BLOCK, [index.d, 4]), BLOCK

    return simulate(1, run)[0]


@pytest.mark.parametrize("size", [1, *WORLDS])
def test_every_row_has_one_rank_and_the_work_is_even(size):
    cu = torch.tensor([0, 4000, 4000, 4001, 10000]).int()
    shards = PrefillShards.of(cu, size)
    assert torch.cat(shards.rows).sort().values.tolist() == list(range(10000))
    positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])
    ranked = []
    for rows, boundaries in zip(shards.rows, shards.cu_seqlens, strict=True):
        assert (rows.diff() > 0).all()
        request = torch.searchsorted(cu, rows.int(), right=True) - 1
        assert boundaries.tolist() == [int((request < r).sum()) for r in range(5)]
        ranked.append(count_work(positions[rows], 16)["positions ranked"])
    assert max(ranked) < 1.01 * sum(ranked) / size
    # Contiguous shares, in comparison, are uneven: the last rank has almost twice the mean.
    if size > 1:
        last = count_work(positions[:4000].chunk(size)[-1], 16)["positions ranked"]
        assert last > 1.4 * count_work(positions[:4000], 16)["positions ranked"] / size


@pytest.mark.parametrize("tokens", [27_000, 108_000, 340_000])
def test_saving_at_eight_ranks(tokens):
    """The busiest of 8 ranks, against prefill by heads, where every rank ranks and reads for all rows."""
    positions = torch.arange(tokens)
    shards = PrefillShards.of(torch.tensor([0, tokens]).int(), 8)
    work = [count_work(positions[rows], 2048) for rows in shards.rows]
    whole = count_work(positions, 2048)
    for key, share in (("positions ranked", 0.126), ("latents read", 0.130)):
        assert sum(w[key] for w in work) == whole[key]
        assert 1 / 8 <= max(w[key] for w in work) / whole[key] < share


def test_requests_that_go_by_heads_keep_their_rows():
    """Rows of some requests are nobody's, the others' have the bits of a step in which all go by tokens."""
    cu = torch.tensor([0, 5, 45, 45, 46, 70]).int()
    shards = PrefillShards.of(cu, 2, [1, 4])
    assert shards.others.tolist() == [*range(5), 45] and shards.others_cu_seqlens.tolist() == [0, 5, 5, 5, 6, 6]
    assert torch.cat([*shards.rows, shards.others]).sort().values.tolist() == list(range(70))
    every = PrefillShards.of(cu, 2)
    for mine, boundaries, rows in zip(shards.rows, shards.cu_seqlens, every.rows, strict=True):
        request = torch.searchsorted(cu, rows.int(), right=True) - 1
        assert torch.equal(mine, rows[(request == 1) | (request == 4)])
        assert boundaries.tolist() == [0, int((request == 1).sum()), len(mine)]
    assert len(every.others) == 0 and every.others_cu_seqlens.tolist() == [0] * 6


def test_heads_that_do_not_divide_are_refused():
    step = make_step([0], [20])
    shards = PrefillShards.of(step.cu, 2)
    dims, kv_b, _ = of_rank(step, 0, 1)

    def run(group: Group) -> None:
        own = shards.rows[group.rank]
        index = (step.index.q[own], step.index.w[own], False, step.mla.pages, step.index.pages, step.mla.block_table)
        where = (step.positions, TOPK, BLOCK, kv_b, dims._replace(heads=7))
        prefill_attention(group, shards, step.mla.q, *index, *where)

    with pytest.raises(OperatorError, match="dims: 7 heads on 2 ranks"):
        simulate(2, run)
