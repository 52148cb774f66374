"""The sampler by itself, without an engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zmrl.batch_invariant.ops.head import log_softmax, sample

VOCABULARY = 37


def metadata(rows: int, temperature: float, **more: Any) -> Any:
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    none = torch.zeros(rows)
    fields: dict[str, Any] = {
        "temperature": torch.full((rows,), temperature),
        "all_greedy": temperature == 0,
        "all_random": temperature != 0,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": 0,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": none,
        "presence_penalties": none,
        "repetition_penalties": none,
        "output_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(fields | more))


def rows_of(count: int, raw: torch.Tensor | None = None) -> Any:
    from zmrl.rollout.sampler import SampledRows

    return SampledRows(torch.arange(count) * 7, torch.arange(count) * 3, raw)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(50, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_grammar_masks_the_sample_but_not_the_raw_logprobs(logits: torch.Tensor, mode: str) -> None:
    from zmrl.rollout.sampler import ZmrlSampler

    masked = logits.clone()
    masked[:, 5:] = -torch.inf
    sampler = ZmrlSampler(mode)
    sampler.rows = rows_of(50, logits)
    found = sampler(masked, metadata(50, 0.7))
    ids = found.sampled_token_ids.long()
    assert int(ids.max()) < 5 and len(ids.unique()) == 5
    ones = torch.ones(50)
    expected = log_softmax(logits, ones) if mode.startswith("raw") else log_softmax(masked / 0.7, ones)
    assert torch.equal(found.logprobs_tensors.logprobs, expected.gather(1, ids))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_are_those_of_the_operator_whatever_else_is_asked(logits: torch.Tensor, temperature: float) -> None:
    from zmrl.rollout.sampler import ZmrlSampler

    rows = rows_of(50)
    expected = sample(logits, torch.full((50,), temperature), rows.seeds, rows.positions)
    values = log_softmax(logits, torch.full((50,), temperature or 1.0))
    for wanted in (None, 0, 4, -1):
        sampler = ZmrlSampler("processed_logprobs")
        sampler.rows = rows
        before = logits.clone()
        found = sampler(logits, metadata(50, temperature, max_num_logprobs=wanted))
        assert torch.equal(found.sampled_token_ids[:, 0].long(), expected) and torch.equal(before, logits)
        if wanted is None:
            assert found.logprobs_tensors is None
            continue
        got = found.logprobs_tensors
        own = values.gather(1, expected.unsqueeze(1))
        if wanted == -1:
            assert torch.equal(got.logprobs, values)
        else:
            assert torch.equal(got.logprobs[:, :1], own) and torch.equal(got.logprob_token_ids[:, 0].long(), expected)
            assert torch.equal(got.selected_token_ranks, (values >= own).sum(1))


def test_a_row_alone_draws_what_it_draws_among_others(logits: torch.Tensor) -> None:
    from zmrl.rollout.sampler import SampledRows, ZmrlSampler

    sampler = ZmrlSampler("processed_logprobs")
    sampler.rows = rows = rows_of(50)
    filters = {"top_k": torch.full((50,), 9), "top_p": torch.full((50,), 0.8)}
    filters["top_k"][::2], filters["top_p"][::2] = VOCABULARY, 1.0
    together = sampler(logits, metadata(50, 0.9, **filters))
    for i in range(50):
        sampler.rows = SampledRows(rows.seeds[i : i + 1], rows.positions[i : i + 1])
        mine = {name: value[i : i + 1] for name, value in filters.items()} if i % 2 else {}
        alone = sampler(logits[i : i + 1], metadata(1, 0.9, **mine))
        assert torch.equal(alone.sampled_token_ids[0], together.sampled_token_ids[i])
        assert torch.equal(alone.logprobs_tensors.logprobs[0], together.logprobs_tensors.logprobs[i])
