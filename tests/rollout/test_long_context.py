"""A long request: the trainer's bits, and what a decoded token reads in one layer. The whole context: tests/parity."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.harness import PlainModel, Prompt, Rollout, Sample, assert_equal, proved, text
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat

pytestmark = pytest.mark.slow

LENGTH = 3000
"""Of the longest prompt: it passes in two steps of at most 2,048 tokens."""


@pytest.fixture(scope="module", params=[DEFAULT_CACHE_FORMAT, CacheFormat("nvfp4", "mxfp4")], ids=str)
def host(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Rollout, PlainModel]]:
    engine = Rollout(checkpoint, cache_format=request.param, max_model_len=LENGTH + 64)
    yield engine, PlainModel(checkpoint, request.param)
    engine.close()


def test_a_long_request_has_the_trainers_bits(host: tuple[Rollout, PlainModel]) -> None:
    rollout, plain = host
    prompts = [Prompt(text(LENGTH, 3), 4, max_tokens=40)]
    rollout.forget()
    cold = rollout.generate(prompts)
    proved(rollout.counters()["prefill_chunks"] >= 2, "the prompt passed in one step")
    warm = rollout.generate(prompts)
    proved(warm[0].cached > LENGTH - 600, f"only {warm[0].cached} tokens came from the cache")
    expected = [plain.score(sample) for sample in cold]
    assert_equal(cold, expected)
    assert_equal(warm, expected)
    flipped = [Sample(s.prompt, s.tokens, s.logp, [*s.digests[:-1], s.digests[-1] ^ 1], 0) for s in expected]
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(cold, flipped)


def test_a_decoded_token_reads_all_index_keys_and_the_latents_of_the_selection(
    host: tuple[Rollout, PlainModel],
) -> None:
    """Counted by the kernels: the indexer's part is linear in the context, attention's is constant."""
    rollout, plain = host
    config, formats = plain.model.config, plain.model.cache_format
    layers, topk = len(config.linear_attn_config.full_attn_layers), config.index_topk
    engine = rollout.llm.llm_engine
    assert topk == 32
    for length in (8, topk - 1, topk, 512, 1024, LENGTH):
        rollout.forget()
        prompt = Prompt(text(length, length), 1, max_tokens=4)
        engine.add_request(
            "long", {"prompt_token_ids": list(prompt.ids)}, rollout.parameters(prompt, rollout.new_tag())
        )
        (request,) = rollout.core.scheduler.requests.values()
        while request.num_output_tokens == 0:
            engine.step()
        rollout.counters()
        for context in range(length + 1, length + 4):
            assert request.num_tokens == context
            engine.step()
            seen = rollout.counters()
            # a token with at most topk positions takes them all: nothing is scored
            scored = context if context > topk else 0
            assert seen["index_bytes_read"] == layers * scored * formats.index_bytes(config)
            assert seen["latent_bytes_read"] == layers * min(context, topk) * formats.latent_bytes(config)
        assert not engine.has_unfinished_requests()
