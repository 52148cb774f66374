"""Attention over positions that are spread over ranks: the bits of one rank, which are the trainer's."""

import pytest
import torch
from torch import Tensor

from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import assert_same_on_every_isa, poisoned, random, threads
from tests.batch_invariant.mla_oracle import FULL, NANO, Case, make_case
from tests.parallel.shards import WORLDS, local_cache, of_heads
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops.latents import LatentFormat, latent_store
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla_partial import mla_partial, mla_scores
from zmrl.batch_invariant.ops.panels import pack_panels
from zmrl.parallel.group import Group, simulate
from zmrl.parallel.mla import mla_attention, own_positions

EIGHT, ONE_HEAD = NANO._replace(heads=8), NANO._replace(heads=1)


def rank_attends(group: Group, case: Case, adapters: bool = True, block_size: int = 3) -> Tensor:
    """The rows of this rank's heads."""
    rank, size = group.rank, group.size
    d = case.dims._replace(heads=case.dims.heads // size)
    token_bytes = case.pages.shape[1] // case.block_size
    pages, table, slots = local_cache(case.cu, rank, size, block_size, token_bytes)
    _copy_tokens(case, pages, slots, block_size, token_bytes)
    q, kv_b = of_heads(case.q, 1, rank, size), pack_panels(of_heads(case.weight, 0, rank, size))
    b = pack_panels(of_heads(case.lora_b, 1, rank, size))
    lora = LoraBuffers(pack_panels(case.lora_a), b, case.scale) if adapters else None
    where = (pages, table, case.cu, case.positions, case.selected, block_size)
    return mla_attention(group, q, *where, kv_b, d, lora, case.slots, case.latents)


def _copy_tokens(case: Case, pages: Tensor, slots: Tensor, block_size: int, size: int) -> None:
    """The stored bytes of this rank's tokens."""
    request = torch.repeat_interleave(torch.arange(len(case.cu) - 1), case.cu.diff())
    for row, (slot, position) in enumerate(zip(slots.tolist(), case.positions.tolist(), strict=True)):
        if slot >= 0:
            block, at = case.block_table[request[row], position // case.block_size], position % case.block_size
            stored = case.pages[block, at * size : (at + 1) * size]
            pages[slot // block_size, slot % block_size * size : (slot % block_size + 1) * size] = stored


def attend(case: Case, size: int, adapters: bool = True) -> tuple[Tensor, list[dict[str, int]]]:
    """The rows of all heads, put together from the ranks, and what each sent."""
    with poisoned():
        ranks = simulate(size, lambda group: (rank_attends(group, case, adapters), dict(group.sent)))
    return torch.cat([out for out, _ in ranks], 1), [sent for _, sent in ranks]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("size", WORLDS)
def test_attention_over_ranks_has_the_bits_of_one_rank(size, adapters):
    """With the first tokens of sequences, whose positions not all ranks hold, and tokens with fewer rows than ranks."""
    case = make_case(EIGHT, [1, 37, 9, 130], topk=20)
    owners = [{int(p) % size for p in row if p >= 0} for row in case.selected]
    assert any(len(ranks) < size for ranks in owners) and any(len(ranks) == size for ranks in owners)
    got, _ = attend(case, size, adapters)
    assert same_bits(got, case.forward(adapters))


@pytest.mark.parametrize("latents", [LatentFormat("fp8", 0.037), LatentFormat("nvfp4")], ids=lambda f: f.name)
@pytest.mark.parametrize("size", WORLDS)
def test_attention_over_ranks_reads_every_format(size, latents):
    case = make_case(EIGHT, [1, 37, 9, 130], topk=20, latents=latents)
    assert not same_bits(case.forward(), make_case(EIGHT, [1, 37, 9, 130], topk=20).forward())
    got, _ = attend(case, size)
    assert same_bits(got, case.forward())


@pytest.mark.parametrize("size", WORLDS)
def test_dense_attention_over_ranks_has_the_bits_of_one_rank(size):
    case = make_case(EIGHT, [1, 37, 9], topk=8)
    selective = case.forward()
    case.selected = None
    wanted = case.forward()
    assert not same_bits(selective, wanted)
    got, _ = attend(case, size)
    assert same_bits(got, wanted)


def test_attention_over_ranks_on_every_isa_and_with_threads():
    case = make_case(EIGHT, [70, 9], topk=24, seed=3)
    (wanted,) = assert_same_on_every_isa(lambda: attend(case, 4)[0])
    with threads(2):
        assert same_bits(attend(case, 4)[0], wanted)


@pytest.mark.parametrize("size", WORLDS)
def test_full_size_dimensions(size):
    case = make_case(FULL, [70], topk=64)
    got, sent = attend(case, size)
    assert same_bits(got, case.forward())
    tokens, heads = 70, FULL.heads
    for by_rank in sent:
        assert by_rank == {
            "queries": tokens * heads // size * (512 + 64) * 2 * (size - 1),
            "maxima": tokens * heads * 4 * (size - 1),
            "partial sums": tokens * heads // size * (512 + 1) * 4 * (size - 1),
        }


def partial_sums(kv: Tensor, queries: Tensor, size: int, order: list[int] | None = None) -> Tensor:
    """[R + 1] of one token and head: the ranks' subtrees (in `order`), added by the rest of the tree."""
    cu, positions = torch.tensor([0, 1]).int(), torch.tensor([len(kv) - 1]).int()
    selected = torch.arange(len(kv)).int()[None]
    parts, maxima = [], []
    for finish in (False, True):
        for rank in range(size):
            pages, table, slots = local_cache(torch.tensor([0, len(kv)]), rank, size, 3, kv.shape[1] * 2)
            latent_store(kv, pages, slots, 3, ONE_HEAD.rank)
            shard = (pages, table, cu, positions, own_positions(selected, rank, size), 3, ONE_HEAD, size, rank)
            scores, maximum = mla_scores(queries, *shard)
            maxima.append(maximum)
            if finish:
                parts.append(mla_partial(scores, torch.stack(maxima).amax(0), *shard)[0, 0])
    parts = parts if order is None else [parts[rank] for rank in order]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[half:], strict=True)]
    return parts[0]


def test_subtrees_keep_the_sign_of_zero():
    """All sums are -0.0: weights that underflow, and -0.0 in the row of the maximum. Adding +0.0 would show."""
    d = ONE_HEAD
    kv, queries = torch.full((16, d.rank + d.pe), -1e-30).bfloat16(), torch.zeros(1, 1, d.rank + d.pe).bfloat16()
    kv[8] = -0.0
    kv[:, d.rank :], kv[8, d.rank], queries[0, 0, d.rank] = 0.0, 40.0, 15.0
    wanted = partial_sums(kv, queries, 1)
    assert (wanted[: d.rank] == 0).all() and wanted[: d.rank].signbit().all() and wanted[d.rank] > 0
    for size in WORLDS:
        assert same_bits(partial_sums(kv, queries, size), wanted)
        assert not same_bits(partial_sums(kv, queries, size) + 0.0, wanted)


def test_a_wrong_order_of_the_partial_sums_shows():
    kv, queries = random(130, 80, seed=1), random(1, 1, 80, seed=2)
    wanted = partial_sums(kv, queries, 1)
    for size in WORLDS:
        assert same_bits(partial_sums(kv, queries, size), wanted)
    assert not same_bits(partial_sums(kv, queries, 4, [1, 0, 2, 3]), wanted)


def test_own_positions_are_those_of_the_rank_in_order():
    selected = torch.tensor([[0, 1, 4, 6, 7], [2, 3, -1, -1, -1], [1, 3, 5, -1, -1]]).int()
    assert own_positions(selected, 0, 2).tolist() == [[0, 4, 6], [2, -1, -1], [-1, -1, -1]]
    assert own_positions(selected, 3, 4).tolist() == [[7], [3], [3]]
    assert own_positions(selected[:0], 0, 2).tolist() == []


def test_positions_of_another_rank_are_refused():
    case = make_case(EIGHT, [20], topk=8)
    queries = torch.zeros(20, 8, EIGHT.rank + EIGHT.pe).bfloat16()
    where = (case.pages, case.block_table, case.cu, case.positions)
    mine = own_positions(case.selected, 1, 2)
    mla_scores(queries, *where, mine, case.block_size, EIGHT, 2, 1)
    with pytest.raises(OperatorError, match="selected: token 0"):
        mla_scores(queries, *where, case.selected, case.block_size, EIGHT, 2, 1)
    with pytest.raises(OperatorError, match="world, rank"):
        mla_scores(queries, *where, mine, case.block_size, EIGHT, 3, 1)
