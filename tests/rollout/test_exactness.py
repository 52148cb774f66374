"""The matrix of the issue on bits: whatever the engine does, a sample's tokens, log-probs and logits rows are the same.

Expected values: each sample alone, its prompt in one piece, nothing cached, one thread, the best instruction set.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.batch_invariant.exactness import recorded
from tests.rollout.harness import (
    RANK,
    PlainModel,
    Prompt,
    Rollout,
    Sample,
    assert_equal,
    proved,
    random_adapter,
    set_num_threads,
    text,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.ops import linear, mla

pytestmark = pytest.mark.slow

LENGTHS = (3, 48, 63, 64, 65, 110, 128, 150)
"""Around the block size of 64 and above the indexer's top-k of 32."""
PROMPTS = [Prompt(text(length, i), seed=1000 + i) for i, length in enumerate(LENGTHS)]
FILLERS = [Prompt(text(5 + i % 60, 100 + i), seed=i, max_tokens=12 + i % 13) for i in range(56)]
ADAPTERS = (1, 2, 3)


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> PlainModel:
    model = PlainModel(checkpoint)
    model.model.create_lora(len(ADAPTERS), RANK, RANK)
    for slot, version in enumerate(ADAPTERS):
        for key, tensor in random_adapter(model.model, version).items():
            model.model.lora_buffers()[key][slot].copy_(tensor)
    return model


@pytest.fixture(scope="module")
def rollout(checkpoint: Path, plain: PlainModel) -> Iterator[Rollout]:
    engine = Rollout(checkpoint)
    for version in ADAPTERS:
        engine.rpc("zmrl_load_adapter", version, random_adapter(plain.model, version), RANK, RANK)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(rollout: Rollout) -> list[Sample]:
    found = rollout.alone(PROMPTS)
    proved(rollout.counters()["max_requests"] == 1, "the requests were not alone")
    topk = rollout.runner.model.model.config.index_topk
    proved(sum(len(p.ids) > topk for p in PROMPTS) >= 4, "no context exceeds the indexer's top-k")
    proved(len({s.bits() for s in found}) == len(found), "the samples are not distinct")
    return found


def test_logprobs_equal_the_trainers_forward_pass(alone: list[Sample], plain: PlainModel) -> None:
    assert_equal(alone, [plain.score(sample) for sample in alone])


@pytest.mark.parametrize("size", [8, 64])
def test_samples_are_independent_of_the_batch(rollout: Rollout, alone: list[Sample], size: int) -> None:
    rollout.forget()
    before = rollout.runner.model.decode_steps.replayed
    batch = [*FILLERS[: (size - 8) // 2], *PROMPTS, *FILLERS[(size - 8) // 2 : size - 8]]
    found = {s.prompt: s for s in rollout.generate(batch)}
    proved(rollout.counters()["max_requests"] == size, "the batch was never full")
    proved(rollout.runner.model.decode_steps.replayed > before, "no decode step was replayed")
    assert_equal([found[p] for p in PROMPTS], alone)


@pytest.mark.parametrize("tokens", [1, 7, 16, 64])
def test_samples_are_independent_of_prefill_chunks(rollout: Rollout, alone: list[Sample], tokens: int) -> None:
    rollout.forget()
    with rollout.chunks_of(tokens):
        found = rollout.generate(PROMPTS)
    least = sum(-(-len(p.ids) // tokens) for p in PROMPTS)
    proved(rollout.counters()["prefill_chunks"] >= least > len(PROMPTS), "the prompts were not cut")
    assert_equal(found, alone)


def test_samples_are_independent_of_the_prefix_cache(rollout: Rollout, alone: list[Sample]) -> None:
    rollout.forget()
    cold = rollout.generate(PROMPTS)
    warm = rollout.generate(PROMPTS)
    proved(all(s.cached == 0 for s in cold), "the first pass met cached blocks")
    proved(sum(s.cached > 0 for s in warm) >= 4, "the second pass hit no cached blocks")
    assert_equal(cold, alone)
    assert_equal(warm, alone)


def test_cached_blocks_of_the_answer_continue_it(rollout: Rollout, alone: list[Sample]) -> None:
    """A prompt that is another's prompt and answer finds the states that decoding left."""
    block = rollout.runner.model.caches.block_size
    crossing = [s for s in alone if (len(s.prompt.ids) + len(s.tokens)) // block > len(s.prompt.ids) // block]
    longer = [Prompt((*s.prompt.ids, *s.tokens, 7), s.prompt.seed, max_tokens=12) for s in crossing]
    rollout.forget()
    rollout.generate(PROMPTS)
    warm = rollout.generate(longer)
    within = [s.cached > len(old.prompt.ids) for s, old in zip(warm, crossing, strict=True)]
    proved(sum(within) >= 2, "no block that decoding filled was hit")
    assert_equal(warm, rollout.alone(longer))


@pytest.mark.parametrize("together", [True, False])
def test_prompt_logprobs_equal_those_of_decoding(rollout: Rollout, alone: list[Sample], together: bool) -> None:
    rollout.forget()
    sequences = [[*s.prompt.ids, *s.tokens] for s in alone]
    groups = [sequences] if together else [[s] for s in sequences]
    scores = [score for group in groups for score in rollout.prompt_logprobs(group, [None] * len(group))]
    for sample, score in zip(alone, scores, strict=True):
        again = score[len(sample.prompt.ids) - 1 :]
        assert np.array_equal(again.view(np.int32), sample.logp.view(np.int32))


def test_prompt_logprobs_are_independent_of_request_order(rollout: Rollout) -> None:
    """vllm#42019: prompt log-probs depended on the order of requests, with the prefix cache on."""
    sequences = [p.ids for p in PROMPTS[-3:]]
    rollout.forget()
    forward = rollout.prompt_logprobs(sequences, [None] * 3)
    backward = rollout.prompt_logprobs(sequences[::-1], [None] * 3)[::-1]
    for a, b in zip(forward, backward, strict=True):
        assert np.array_equal(a.view(np.int32), b.view(np.int32))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_temperature_is_applied_alike_on_both_sides(rollout: Rollout, plain: PlainModel, temperature: float) -> None:
    rollout.forget()
    found = rollout.generate([replace(p, temperature=temperature) for p in PROMPTS])
    assert_equal(found, [plain.score(sample) for sample in found])
    if temperature != 1:
        wrong = [plain.score(replace(s, prompt=replace(s.prompt, temperature=1.0))) for s in found]
        assert any(not np.array_equal(a.logp, b.logp) for a, b in zip(found, wrong, strict=True))


def test_adapters_of_one_batch_do_not_touch_each_other(rollout: Rollout, plain: PlainModel) -> None:
    prompts = [replace(p, adapter=a) for p in PROMPTS[1::2] for a in (None, *ADAPTERS)]
    rollout.forget()
    together = rollout.generate(prompts)
    proved(rollout.counters()["max_adapters"] == len(ADAPTERS), "the adapters never met in a step")
    proved(len({s.bits()[1] for s in together[:4]}) == 4, "the adapters change nothing")
    warm = rollout.generate(prompts)
    proved(sum(s.cached > 0 for s in warm) >= 8, "nothing was cached under an adapter's key")
    one = rollout.generate([p for p in prompts if p.adapter == 2])
    slot = {None: None, 1: 0, 2: 1, 3: 2}
    expected = [plain.score(s, slot[s.prompt.adapter]) for s in together]
    assert_equal(together, expected)
    assert_equal(warm, expected)
    assert_equal(one, [s for s in expected if s.prompt.adapter == 2])
    assert_equal(together[::4], rollout.alone(prompts[::4]))


def test_samples_are_independent_of_threads(rollout: Rollout, alone: list[Sample]) -> None:
    rollout.forget()
    set_num_threads(2)
    try:
        with recorded(linear, "_linear") as products, recorded(mla, "_mla_attention") as attention:
            found = rollout.generate([*PROMPTS, *FILLERS])[: len(PROMPTS)]
    finally:
        set_num_threads(1)
    proved(max(products) == max(attention) == 2, "no kernel used a second thread")
    assert_equal(found, alone)


@pytest.mark.parametrize("name", [isa for isa in ("avx2", "scalar") if isa in native.available_isas()])
def test_samples_are_independent_of_the_instruction_set(rollout: Rollout, alone: list[Sample], name: str) -> None:
    rollout.forget()
    with native.use_isa(name):
        proved(rollout.rpc("zmrl_identity")["isa"] == name, "the instruction set was not changed")
        assert_equal(rollout.generate(PROMPTS), alone)


@pytest.mark.parametrize(
    "what, tensor, elements, bit",
    [
        ("logits", "", [5], 6),
        ("cache", "layers.0.state", [33 * i for i in range(32)], 25),
        ("cache", "layers.3.latent", [5], 6),
        ("cache", "layers.4.index", list(range(32)), 7),
    ],
)
def test_flipped_bits_are_seen(
    rollout: Rollout, alone: list[Sample], what: str, tensor: str, elements: list[int], bit: int
) -> None:
    """One logit; the diagonal of one head's state; one latent of the first token; the signs of its index key.

    A single low bit of a state may vanish in BF16 outputs, and an index key matters only through the selection.
    """
    before = rollout.rpc("zmrl_faults")["done"]
    rollout.forget()
    for element in elements:
        rollout.rpc("zmrl_flip_bit", what, tensor, element, bit)
    long = [replace(p, max_tokens=60) for p in PROMPTS[3:]] if tensor.endswith("index") else PROMPTS
    found = rollout.generate(long)
    proved(rollout.rpc("zmrl_faults") == {"waiting": 0, "done": before + len(elements)}, "not all bits were flipped")
    rollout.forget()
    expected = alone if long is PROMPTS else rollout.generate(long)
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(found, expected)
    rollout.forget()
    assert_equal(rollout.generate(PROMPTS), alone)
