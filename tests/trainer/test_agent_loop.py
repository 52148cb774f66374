"""Grading where the sample is: the reward function gets the response's text, and its failure names the sample."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.trainer import engines
from zmrl.trainer.rewards import RewardError

SAMPLE = {"data_source": "builtin", "index": 5, "reward_model": {"ground_truth": "12"}}

calls: list[tuple[str, str, str]] = []


def length(response: str, answer: str) -> float:
    calls.append((response, answer, threading.current_thread().name))
    return len(response) / 2


def failing(response: str, answer: str) -> float:
    raise KeyError("no such grade")


@pytest.fixture
def graded():
    engines.verl_environment()
    from zmrl.trainer.agent_loop import ZmrlAgentLoopWorker

    def grade(function: str):
        worker = object.__new__(ZmrlAgentLoopWorker)
        reward = SimpleNamespace(function=f"{__name__}:{function}", timeout_seconds=float("inf"))
        worker.config = SimpleNamespace(zmrl=SimpleNamespace(reward=reward))
        worker.tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(map(chr, ids)))
        worker._graders = ThreadPoolExecutor(thread_name_prefix="reward")
        outputs = [
            SimpleNamespace(response_ids=ids, extra_fields={}, metrics=SimpleNamespace(), reward_score=None)
            for ids in ([90], [65, 66, 67])
        ]
        asyncio.run(worker._compute_score(outputs, dict(SAMPLE)))
        return outputs

    return grade


def test_the_last_output_of_a_sample_is_graded_in_a_thread(graded):
    calls.clear()
    first, last = graded("length")
    assert (first.reward_score, last.reward_score) == (None, 1.5)
    assert last.extra_fields == {"reward_extra_info": {"score": 1.5, "acc": 1.0}}
    assert last.metrics.compute_score > 0
    ((response, answer, thread),) = calls
    assert (response, answer) == ("ABC", "12") and thread.startswith("reward")


def test_a_reward_that_fails_names_the_sample(graded):
    with pytest.raises(RewardError, match=r"builtin problem 5 failed: KeyError.*no such grade"):
        graded("failing")
