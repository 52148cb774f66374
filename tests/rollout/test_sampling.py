"""Seeds, log-probs of the sampled id, end of sequence, truncation and penalties, failures of single requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.rollout.harness import PlainModel, Prompt, Rollout, assert_equal, proved, text

pytestmark = pytest.mark.slow
EOS = 258
PROMPTS = [Prompt(text(40 + i, i), seed=i) for i in range(8)]


@pytest.fixture(scope="module")
def rollout(random_checkpoint: Path) -> Iterator[Rollout]:
    engine = Rollout(random_checkpoint)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain(random_checkpoint: Path) -> PlainModel:
    return PlainModel(random_checkpoint)


def ask(rollout: Rollout, prompts: list[Prompt] | Prompt, **params: Any) -> list[Any]:
    """vLLM's own outputs."""
    from vllm import SamplingParams

    prompts = prompts if isinstance(prompts, list) else [prompts]
    settings = [
        SamplingParams(**({"temperature": p.temperature, "seed": p.seed, "max_tokens": p.max_tokens} | params))
        for p in prompts
    ]
    return rollout.llm.generate([{"prompt_token_ids": list(p.ids)} for p in prompts], settings, use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


def test_each_sample_of_a_group_has_its_own_seed(rollout: Rollout) -> None:
    """UniRL#208: one seed for the group gives n times the same sample."""
    for extra in ({"seed": 5}, {"seed": None, "extra_args": {"zmrl_seed": 5, "zmrl_tag": "g"}}):
        first = tokens_of(ask(rollout, PROMPTS[0], n=8, ignore_eos=True, **extra))
        again = tokens_of(ask(rollout, PROMPTS[0], n=8, ignore_eos=True, **extra))
        assert len({tuple(t) for t in first}) == 8 and first == again
    tags = [f"g/{i}" for i in range(8)]
    assert [len(rows) for rows in rollout.rpc("zmrl_take_digests", tags).values()] == [24] * 8
    unseeded = tokens_of(ask(rollout, PROMPTS[0], n=8, ignore_eos=True, seed=None))
    assert len({tuple(t) for t in unseeded}) == 8


def test_seeds_by_either_name_draw_the_same(rollout: Rollout) -> None:
    for seed in (0, 7, 2**63 - 1):
        by_seed = tokens_of(ask(rollout, PROMPTS[1], seed=seed, ignore_eos=True))
        assert by_seed == tokens_of(
            ask(rollout, PROMPTS[1], seed=None, extra_args={"zmrl_seed": seed}, ignore_eos=True)
        )
    big = {"zmrl_seed": 2**64 - 1}
    assert tokens_of(ask(rollout, PROMPTS[1], seed=None, extra_args=big, ignore_eos=True))


def test_the_logprob_is_the_sampled_ids(rollout: Rollout, plain: PlainModel) -> None:
    """NeMo-RL#3297: the top token's log-prob was stored instead of the sampled token's."""
    ranks = Counter()
    prompts = [replace(p, temperature=0.1) for p in PROMPTS]
    for output, prompt in zip(ask(rollout, prompts, logprobs=3, ignore_eos=True), prompts, strict=True):
        answer = output.outputs[0]
        for token, row in zip(answer.token_ids, answer.logprobs, strict=True):
            ranks[row[token].rank] += 1
            better = [entry.logprob for entry in row.values() if entry.logprob > row[token].logprob]
            assert len(better) == min(row[token].rank - 1, 3)
        found = rollout.generate([prompt])
        values = [row[t].logprob for row, t in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert found[0].logp.tolist() == values
        assert_equal(found, [plain.score(found[0])])
    proved(ranks[2] > 0, "no token of rank 2 was sampled")


def test_temperature_zero_takes_the_lowest_of_the_largest(rollout: Rollout, plain: PlainModel) -> None:
    found = rollout.generate([replace(p, temperature=0.0) for p in PROMPTS])
    for sample in found:
        again = plain.score(replace(sample, prompt=replace(sample.prompt, temperature=1.0)))
        assert np.array_equal(again.logp, sample.logp) and again.digests == sample.digests
        ids = torch.tensor([*sample.prompt.ids, *sample.tokens[:-1]])
        logits = plain.logits(ids)[len(sample.prompt.ids) - 1 :]
        assert logits.argmax(1).tolist() == sample.tokens  # torch's argmax is the lowest index, too


def test_the_sampled_end_of_sequence_counts(rollout: Rollout, plain: PlainModel) -> None:
    """TRL#6357: a sampled EOS was masked out. It is a token with a log-prob and a digest, on both sides."""
    found = rollout.generate([Prompt(text(20, i), i, max_tokens=40, ignore_eos=False) for i in range(64)])
    ended = [s for s in found if s.finish_reason == "stop"]
    proved(len(ended) > 0, "no sample ended by itself")
    assert all(s.tokens[-1] == EOS and EOS not in s.tokens[:-1] for s in ended)
    assert all(len(s.tokens) == len(s.logp) == len(s.digests) for s in found)
    assert_equal(ended, [plain.score(s) for s in ended])


def test_token_ids_are_kept_end_to_end(rollout: Rollout) -> None:
    """TRL#5224: decoding and encoding again changed ids. Bytes that are no UTF-8 cannot survive a round trip."""
    ids = (0xC3, 0x28, 0xFF, 257, 259, 265, 0xE2, 0x82, 100)
    tokenizer = rollout.llm.get_tokenizer()
    proved(tokenizer.encode(tokenizer.decode(list(ids))) != list(ids), "the ids survive a round trip")
    output = ask(rollout, Prompt(ids, 1), ignore_eos=True)[0]
    assert tuple(output.prompt_token_ids) == ids
    sample = rollout.generate([Prompt(ids, 1)])[0]
    assert sample.tokens == list(output.outputs[0].token_ids)


def test_truncation_and_penalties_work_and_leave_others_alone(rollout: Rollout) -> None:
    base = rollout.generate(PROMPTS)
    greedy = tokens_of(ask(rollout, PROMPTS, temperature=0, ignore_eos=True))
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert tokens_of(ask(rollout, PROMPTS, ignore_eos=True, **params)) == greedy
    few = tokens_of(ask(rollout, PROMPTS, ignore_eos=True, allowed_token_ids=[65, 66, 67]))
    assert {t for tokens in few for t in tokens} == {65, 66, 67}
    fresh = tokens_of(
        ask(rollout, PROMPTS, ignore_eos=True, frequency_penalty=2.0, presence_penalty=2.0, temperature=0)
    )
    proved(any(len(set(tokens)) < 24 for tokens in greedy), "nothing is repeated without a penalty")
    assert all(len(set(tokens)) == 24 for tokens in fresh)
    biased = tokens_of(ask(rollout, PROMPTS[0], ignore_eos=True, logit_bias={77: 100.0}))
    assert biased == [[77] * 24]
    # A batch in which others are truncated.
    from vllm import SamplingParams

    mixed = rollout.llm.generate(
        [{"prompt_token_ids": list(p.ids)} for p in PROMPTS],
        [
            SamplingParams(temperature=1, seed=p.seed, max_tokens=24, ignore_eos=True, logprobs=0)
            if i % 2
            else SamplingParams(temperature=0.8, seed=p.seed, max_tokens=24, top_p=0.9, top_k=20, min_p=0.01)
            for i, p in enumerate(PROMPTS)
        ],
        use_tqdm=False,
    )
    assert tokens_of(mixed)[1::2] == [s.tokens for s in base][1::2]


def test_raw_logprobs_are_those_of_temperature_one(rollout: Rollout, plain: PlainModel) -> None:
    """TRL#4873: one declared mode. The endpoint's log-probs are raw whatever the sampling."""
    sampler = rollout.runner.sampler
    sampler.logprobs_mode = "raw_logprobs"
    try:
        found = rollout.generate([replace(p, temperature=0.7) for p in PROMPTS], top_p=0.9, repetition_penalty=1.05)
    finally:
        sampler.logprobs_mode = "processed_logprobs"
    expected = [plain.score(replace(s, prompt=replace(s.prompt, temperature=1.0))) for s in found]
    for sample, score in zip(found, expected, strict=True):
        assert np.array_equal(sample.logp, score.logp) and sample.digests == score.digests


def test_nan_fails_its_request_and_the_engine_lives(rollout: Rollout) -> None:
    good = rollout.generate(PROMPTS)
    token = next(t for t in range(256) if all(t not in (*s.prompt.ids, *s.tokens) for s in good))
    row = rollout.runner.model.model.embed_tokens[token]
    before = row.clone()
    row.fill_(float("nan"))
    try:
        bad = Prompt((*PROMPTS[0].ids, token, 5, 6), 1)
        outputs = ask(rollout, [*PROMPTS, bad], ignore_eos=True)
    finally:
        row.copy_(before)
    assert outputs[-1].outputs[0].finish_reason == "error" and "NaN" in outputs[-1].outputs[0].stop_reason
    assert tokens_of(outputs[:-1]) == [s.tokens for s in good]
    healed = rollout.generate([bad])  # its blocks are not in the prefix cache
    assert healed[0].finish_reason == "length"
    assert_equal(rollout.generate(PROMPTS), good)


@pytest.mark.parametrize("extra", [{"zmrl_seed": "x"}, {"zmrl_seed": 1.5}, {"zmrl_tag": {"a": 1}}, {"zmrl_tag": 3}])
def test_a_clients_nonsense_fails_its_request_alone(rollout: Rollout, extra: dict[str, Any]) -> None:
    """`vllm serve` hands vllm_xargs on unchecked; an exception in the worker would end the engine."""
    from vllm import SamplingParams

    good = rollout.generate(PROMPTS)
    usual = [SamplingParams(temperature=1, seed=p.seed, max_tokens=24, ignore_eos=True) for p in PROMPTS]
    outputs = rollout.llm.generate(
        [{"prompt_token_ids": list(p.ids)} for p in (*PROMPTS, PROMPTS[0])],
        [*usual, SamplingParams(temperature=1, max_tokens=24, extra_args=extra)],
        use_tqdm=False,
    )
    assert outputs[-1].outputs[0].finish_reason == "error" and "zmrl_seed" in outputs[-1].outputs[0].stop_reason
    assert tokens_of(outputs[:-1]) == [s.tokens for s in good]


def test_aborted_and_unknown_tags_have_no_digests(rollout: Rollout) -> None:
    assert rollout.rpc("zmrl_take_digests", ["never used"]) == {}
    from vllm import SamplingParams

    engine = rollout.llm.llm_engine
    params = SamplingParams(temperature=1, max_tokens=100, ignore_eos=True, extra_args={"zmrl_tag": "gone"})
    name = engine.add_request("gone", {"prompt_token_ids": [1, 2, 3]}, params)
    for _ in range(5):
        engine.step()
    engine.abort_request([name or "gone"], internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    rows = rollout.rpc("zmrl_take_digests", ["gone"])["gone"]
    assert 0 < len(rows) < 100 and rollout.rpc("zmrl_take_digests", ["gone"]) == {}
    rollout.generate(PROMPTS[:1])
    assert not rollout.runner.identities or len(rollout.runner.identities) <= 1
