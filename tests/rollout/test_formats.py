"""Every format of the cache in a running engine: the same bits as the trainer's forward through the same format.

A reduced matrix on each of the six. What the whole matrix (`test_exactness.py`, on the default formats) varies beyond
it (temperature, threads, instruction sets, the order of a batch) never reaches a codec: a row is encoded by itself,
once, and decoded by itself. What reaches it is where a row lies and when it is written and read: block and row
boundaries, chunks, cached prefixes, eviction and recomputation, adapters. Those are here, and random schedules of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.rollout.harness import RANK, PlainModel, Prompt, Rollout, Sample, assert_equal, proved, random_adapter, text
from tests.rollout.schedules import Tally, prompt_pool, run_schedule
from zmrl.model import attention
from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

BLOCK = 32
"""The same for all formats; smaller than the planner's, so that short prompts cross boundaries."""
ADAPTERS = (1, 2)
POOL_ROWS = 32
"""Some three requests of the longest kind."""
SCHEDULES = 17
"""Of each format in `make test`: 102 in all."""
SOAK_SCHEDULES = 1000
LENGTHS = (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5, 150)


class Host:
    """An engine with one format, the trainer's model with the same, and prompts with their samples."""

    def __init__(self, checkpoint: Path, formats: CacheFormat) -> None:
        self.formats = formats
        self.plain = PlainModel(checkpoint, formats)
        self.plain.model.create_lora(len(ADAPTERS), RANK, RANK)
        settings = {"max_model_len": 256, "max_num_seqs": 16, "num_gpu_blocks_override": POOL_ROWS}
        self.rollout = Rollout(checkpoint, cache_format=formats, block_size=BLOCK, **settings)
        for slot, version in enumerate(ADAPTERS):
            adapter = random_adapter(self.plain.model, version)
            self.rollout.rpc("zmrl_load_adapter", version, adapter, RANK, RANK)
            for key, tensor in adapter.items():
                self.plain.model.lora_buffers()[key][slot].copy_(tensor)

    def score(self, sample: Sample) -> Sample:
        adapter = sample.prompt.adapter
        return self.plain.score(sample, None if adapter is None else ADAPTERS.index(adapter))

    def alone(self, prompts: list[Prompt]) -> list[Sample]:
        """Each by itself, and equal to the trainer's forward."""
        found = self.rollout.alone(prompts)
        assert_equal(found, [self.score(sample) for sample in found])
        return found


@pytest.fixture(scope="module", params=CACHE_FORMATS, ids=str)
def host(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Host]:
    host = Host(checkpoint, request.param)
    yield host
    host.rollout.close()


@pytest.fixture(scope="module")
def alone(host: Host) -> list[Sample]:
    """Around block boundaries; the longest context is beyond the indexer's top-k of 32."""
    prompts = [Prompt(text(n, i), 500 + i, adapter=(None, 1, 2)[i % 3], max_tokens=40) for i, n in enumerate(LENGTHS)]
    found = host.alone(prompts)
    identity = host.rollout.rpc("zmrl_identity")["function_config"]
    assert (identity["latent_format"], identity["index_format"]) == (host.formats.latent, host.formats.index)
    return found


def test_requests_evicted_and_computed_again_in_chunks_have_the_same_bits(host: Host, alone: list[Sample]) -> None:
    host.rollout.forget()
    with host.rollout.chunks_of(7):
        found = host.rollout.generate([sample.prompt for sample in alone])
    counters = host.rollout.counters()
    proved(counters["preemptions"] > 0, "nothing was preempted")
    proved(counters["prefill_chunks"] > 5 * len(alone), "the prompts were not cut")
    proved(counters["max_adapters"] == 2, "there were not two adapters in a batch")
    assert_equal(found, alone)


def test_prefixes_cached_up_to_and_around_a_boundary_give_the_same_bits(host: Host) -> None:
    """A cached prefix ends with a block; the prompt goes on for a block less one, one block, or a block and one."""
    whole = text(3 * BLOCK + 1, 77)
    prompts = [Prompt(whole[:n], n, max_tokens=BLOCK + 2) for n in (2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK)]
    expected = host.alone(prompts)
    host.rollout.forget()
    for n in (BLOCK + 1, 2 * BLOCK + 1):  # a prompt leaves the state of its last boundary
        host.rollout.generate([Prompt(whole[:n], 1, max_tokens=2)])
    found = [host.rollout.generate([prompt])[0] for prompt in prompts]
    # the last token of a prompt is always computed
    proved([s.cached for s in found] == [BLOCK, BLOCK, 2 * BLOCK, 2 * BLOCK], f"cached {[s.cached for s in found]}")
    assert_equal(found, expected)


@pytest.mark.parametrize("tied", ["k_norm_weight", "weights_proj.weight"])
def test_ties_at_the_cut_give_the_same_bits(host: Host, tied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal keys, or scores that are all zero: every position ties with the last one selected, in all pages."""
    chosen: list[Tensor] = []
    select = attention.index_select

    def record(*arguments: Any) -> Tensor:
        chosen.append(select(*arguments))
        return chosen[-1]

    monkeypatch.setattr(attention, "index_select", record)
    host.rollout.forget()
    models = (host.rollout.runner.model.model, host.plain.model)
    indexers = [m.self_attn.indexer for model in models for m in model.layers if hasattr(m.self_attn, "indexer")]
    tensors = [indexer.get_parameter(tied) for indexer in indexers]
    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()  # in place: recorded decode steps read these very buffers
    try:
        prompts = [Prompt(text(n, n), n, max_tokens=4) for n in (5, 2 * BLOCK + 1, 110)]
        with host.rollout.chunks_of(7):
            found = host.rollout.generate(prompts)
        assert_equal(found, [host.score(sample) for sample in found])
    finally:
        for tensor, values in zip(tensors, before, strict=True):
            tensor.copy_(values)
        host.rollout.forget()
    topk = host.plain.model.config.index_topk
    last = [rows[-1].tolist() for rows in chosen]
    proved(sum(row == list(range(topk)) for row in last) > 10, "no token chose the first positions of many that tie")
    proved(all(row[-1] in (-1, topk - 1) for row in last), "a later position was chosen")


@contextmanager
def counted_evictions(rollout: Rollout) -> Iterator[list[int]]:
    """Ids of blocks that lose what the prefix cache held in them, since other requests need them."""
    pool, evicted = rollout.core.scheduler.kv_cache_manager.block_pool, []
    evict = pool._maybe_evict_cached_block

    def counting(block: Any) -> bool:
        gone = evict(block)
        if gone:
            evicted.append(block.block_id)
        return gone

    pool._maybe_evict_cached_block = counting
    try:
        yield evicted
    finally:
        del pool._maybe_evict_cached_block


def run_schedules(host: Host, count: int, first: int) -> None:
    pool = host.alone(prompt_pool(12, ADAPTERS, seed=3))
    host.rollout.forget()
    tally = Tally()
    with counted_evictions(host.rollout) as evicted:
        for seed in range(first, first + count):
            run_schedule(host.rollout, pool, seed, tally)
    counters = host.rollout.counters()
    print(f"{host.formats}: {count} schedules from {first}: {tally}, {len(evicted)} evictions, {counters}")
    proved(len(evicted) > 0, "the pool was large enough for all that was cached")
    proved(tally.requests > 4 * count and tally.tokens > 10 * count, "too little was compared")
    proved(tally.aborted > tally.partial > 0, "requests were not aborted at the beginning and in the middle")
    proved(tally.cached > 0, "no request began with cached blocks")
    proved(counters["preemptions"] > 0, "nothing was preempted")
    proved(counters["prefill_chunks"] > tally.requests, "no prompt was cut")
    proved(counters["max_adapters"] == 2, "there were not two adapters in a batch")
    changed = [replace(sample, digests=[digest ^ 1 for digest in sample.digests]) for sample in pool]
    with pytest.raises(AssertionError, match="differs"):
        run_schedule(host.rollout, changed, first, Tally())


def test_random_schedules_give_the_same_bits(host: Host) -> None:
    first = SCHEDULES * CACHE_FORMATS.index(host.formats)
    run_schedules(host, SCHEDULES, first)


@pytest.mark.soak
def test_a_thousand_random_schedules_give_the_same_bits(host: Host) -> None:
    run_schedules(host, SOAK_SCHEDULES, 10_000 + SOAK_SCHEDULES * CACHE_FORMATS.index(host.formats))
