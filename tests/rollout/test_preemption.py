"""A pool too small for its requests, and a vocabulary that is no multiple of the kernels' 16 lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.harness import PlainModel, Prompt, Rollout, assert_equal, proved, text
from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.initialise import initial_tensors

pytestmark = pytest.mark.slow

VOCABULARY = 281
PROMPTS = [Prompt(text(60 + 11 * i, 20 + i), seed=i, max_tokens=60) for i in range(8)]


@pytest.fixture(scope="module")
def odd_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = dataclasses.replace(PRESETS["nano"], vocab_size=VOCABULARY)
    path = tmp_path_factory.mktemp("odd") / "checkpoint"
    write_checkpoint(path, export_tensors(config, initial_tensors(config, seed=9)), config)
    return path


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def rollout(odd_checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Rollout]:
    """Without a prefix cache a request has one block for its KDA states, and resumes from nothing."""
    cache = {"enable_prefix_caching": request.param}
    blocks = 48 if request.param else 24
    engine = Rollout(odd_checkpoint, max_model_len=256, num_gpu_blocks_override=blocks, max_num_seqs=16, **cache)
    yield engine
    engine.close()


@pytest.mark.parametrize("tokens", [0, 7])
def test_samples_survive_preemption(rollout: Rollout, odd_checkpoint: Path, tokens: int) -> None:
    rollout.forget()
    with rollout.chunks_of(tokens):
        found = rollout.generate(PROMPTS)
    proved(rollout.counters()["preemptions"] > 0, "nothing was preempted")
    plain = PlainModel(odd_checkpoint)
    assert_equal(found, [plain.score(sample) for sample in found])
    assert_equal(found, rollout.alone(PROMPTS))
    proved(rollout.counters()["preemptions"] == 0, "a request alone was preempted")


def test_padding_of_the_vocabulary_is_outside_the_row(rollout: Rollout) -> None:
    """RL-Kernel#329: padded vocabulary entries took part on one side."""
    seen = []
    sampler = rollout.runner.sampler
    forward = sampler.forward
    sampler.forward = lambda logits, **more: (seen.append(logits.shape[1]), forward(logits, **more))[1]
    try:
        found = rollout.generate(PROMPTS[:2])
    finally:
        sampler.forward = forward
    assert set(seen) == {VOCABULARY} and len(seen) > 0
    assert all(token < VOCABULARY for sample in found for token in sample.tokens)
