"""KDA states across blocks: which the prefix cache keeps, what they take, and that resuming from one changes no bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rollout.harness import PlainModel, Prompt, Rollout, Sample, assert_equal, proved, text
from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import CacheLayout
from zmrl.model.context import KdaCache, scratch_context

pytestmark = pytest.mark.slow

BLOCK = 32
WHOLE = Prompt(text(150, 41), 7, max_tokens=40)
"""Its prompt ends behind the boundary at 128; its answer crosses the one at 160."""
POLICIES = [
    # interval, tokens of a step, boundaries whose states are kept, chunks of the prompt
    (None, 2048, [128, 160], 2),
    (None, BLOCK, [32, 64, 96, 128, 160], 5),
    (0, 2048, [128], 2),
    (0, BLOCK, [128], 5),
    (2 * BLOCK, 2048, [64, 128], 3),
    (BLOCK, 2048, [32, 64, 96, 128, 160], 5),
]


class Host(Rollout):
    """An engine whose retention interval can be changed, and the states that its prefix cache holds."""

    @contextmanager
    def steps_of(self, tokens: int) -> Iterator[None]:
        """At most so many tokens a step: vLLM's limit of a chunk does not hold for a request that is alone."""
        scheduler = self.core.scheduler
        before, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = before

    @contextmanager
    def keeping(self, interval: int | None) -> Iterator[None]:
        scheduler = self.core.scheduler
        config, coordinator = scheduler.cache_config, scheduler.kv_cache_manager.coordinator
        before = config.prefix_cache_retention_interval
        assert coordinator.retention_interval == before
        config.prefix_cache_retention_interval = coordinator.retention_interval = interval
        try:
            yield
        finally:
            config.prefix_cache_retention_interval = coordinator.retention_interval = before

    def kept(self, prompt: Prompt) -> dict[int, list[Tensor]]:
        """Boundary -> the bytes of each KDA layer's state there, of what the cache holds of a prompt and its answer."""
        engine, scheduler = self.llm.llm_engine, self.core.scheduler
        engine.add_request("kept", {"prompt_token_ids": list(prompt.ids)}, self.parameters(prompt, self.new_tag()))
        (request,) = scheduler.requests.values()
        while engine.has_unfinished_requests():
            engine.step()
        pool, layers = scheduler.kv_cache_manager.block_pool, self.runner.model.caches.layers
        groups = [g.layer_names for g in self.runner.kv_cache_config.kv_cache_groups]
        states = [i for i, names in enumerate(groups) if names[0].endswith(".state")]
        found = {}
        for i, block_hash in enumerate(request.block_hashes):
            blocks = pool.get_cached_block(block_hash, states)
            if blocks is not None:
                at = {name: b.block_id for g, b in zip(states, blocks, strict=True) for name in groups[g]}
                found[(i + 1) * BLOCK] = [
                    _bytes(t[at[c.name]] for t in c.kv_cache) for c in layers if hasattr(c, "shapes")
                ]
        held = [b for b in pool.blocks if b.block_hash is not None and _group(b.block_hash) in states]
        assert len(held) == len(found) * len(states), "the cache holds states of something else"
        self.held_bytes = len(held) * self.layout.row_bytes
        return found

    @property
    def layout(self) -> CacheLayout:
        model = self.runner.model.model
        return CacheLayout(model.config, model.cache_format, BLOCK)


def _group(block_hash: bytes) -> int:
    from vllm.v1.core.kv_cache_utils import get_group_id

    return get_group_id(block_hash)


def _bytes(tensors: Iterator[Tensor]) -> Tensor:
    return torch.cat([t.contiguous().view(torch.uint8).flatten() for t in tensors])


@torch.no_grad()
def unbroken(plain: PlainModel, ids: list[int]) -> list[Tensor]:
    """The bytes of each KDA layer's state after one pass over `ids`."""
    model = plain.model
    context = scratch_context(model.config, [len(ids)], cache_format=model.cache_format)
    for cache in context.caches:
        if isinstance(cache, KdaCache):
            cache.conv_state, cache.state = (
                t.new_full((1, *t.shape[1:]), torch.nan) for t in (cache.conv_state, cache.state)
            )
            cache.state_out = torch.zeros(1, dtype=torch.int32)
    model(torch.tensor(ids), context)
    return [_bytes((c.conv_state[0], c.state[0])) for c in context.caches if isinstance(c, KdaCache)]


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> PlainModel:
    return PlainModel(checkpoint)


@pytest.fixture(scope="module")
def host(checkpoint: Path) -> Iterator[Host]:
    engine = Host(checkpoint, block_size=BLOCK, max_model_len=256)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(host: Host, plain: PlainModel) -> Sample:
    (sample,) = host.alone([WHOLE])
    assert_equal([sample], [plain.score(sample)])
    return sample


@pytest.mark.parametrize("interval, tokens, boundaries, chunks", POLICIES)
def test_kept_states_are_those_of_one_pass_and_take_the_rows_that_the_layout_says(
    host: Host, plain: PlainModel, alone: Sample, interval: int | None, tokens: int, boundaries: list[int], chunks: int
) -> None:
    host.forget()
    with host.keeping(interval), host.steps_of(tokens):
        kept = host.kept(WHOLE)
    assert sorted(kept) == boundaries
    assert host.counters()["prefill_chunks"] == chunks
    assert host.held_bytes == len(boundaries) * host.layout.kept_state_bytes
    ids = [*WHOLE.ids, *alone.tokens]
    for boundary, states in kept.items():
        expected = unbroken(plain, ids[:boundary])
        assert len(states) == len(expected) == 3
        assert all(map(torch.equal, states, expected)), boundary
        assert not any(map(torch.equal, states, unbroken(plain, ids[: boundary - 1])))
        states[2][-1] ^= 1
        assert not all(map(torch.equal, states, expected)), "a flipped bit is not seen"


@pytest.mark.parametrize("interval, cached", [(None, 0), (0, 0), (BLOCK, 3 * BLOCK), (2 * BLOCK, 2 * BLOCK)])
def test_samples_resumed_from_a_kept_state_have_the_same_bits(host: Host, interval: int | None, cached: int) -> None:
    """Two prompts part after 100 tokens. The second resumes from what is kept below; the third always from 96, where
    the second, which met pages without a state there, left one."""
    common = text(100, 43)
    prompts = [Prompt(common + text(40, i), i, max_tokens=8) for i in range(3)]
    expected = host.alone(prompts)
    host.forget()
    with host.keeping(interval):
        found = [host.generate([prompt])[0] for prompt in prompts]
    proved([s.cached for s in found] == [0, cached, 3 * BLOCK], f"cached {[s.cached for s in found]}")
    assert_equal(found, expected)


def test_an_answer_is_resumed_only_where_states_of_decoding_are_kept(host: Host, alone: Sample) -> None:
    """The next turn of a dialogue: its prompt goes on after the answer."""
    longer = Prompt((*WHOLE.ids, *alone.tokens, *text(10, 5)), 9, max_tokens=8)
    expected = host.alone([longer])
    for interval, cached in ((None, 5 * BLOCK), (0, 4 * BLOCK)):
        host.forget()
        with host.keeping(interval):
            host.generate([WHOLE])
            found = host.generate([longer])
        proved(found[0].cached == cached, f"cached {found[0].cached}")
        assert_equal(found, expected)


def test_the_interval_of_the_engine_argument_is_in_use(checkpoint: Path) -> None:
    engine = Host(
        checkpoint, block_size=BLOCK, max_model_len=256, prefix_cache_retention_interval=2 * BLOCK,
        cache_format=CacheFormat("nvfp4", "mxfp4"),
    )  # fmt: skip
    assert sorted(engine.kept(WHOLE)) == [2 * BLOCK, 4 * BLOCK]
    engine.close()
