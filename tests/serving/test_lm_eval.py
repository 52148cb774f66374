"""`lm_eval` on a task of its own, over HTTP: its log-likelihoods are sums of the trainer's log-probs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.rollout.harness import PlainModel
from tests.serving.harness import Served, plain_bits

pytestmark = pytest.mark.slow
TASK = """
task: choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
DOCUMENTS = [
    {"question": f"Question {i}: what is {i} + {i}?", "choices": [str(2 * i), str(3 * i + 1)], "answer": 0}
    for i in range(1, 9)
]


def test_lm_evals_loglikelihoods_are_the_trainers(
    server: Served, plain: PlainModel, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    from zmrl.model.tokenizer import register

    register()
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (tmp_path / "choice.yaml").write_text(TASK.format(data=tmp_path / "data.jsonl"))
    found = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "base",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(checkpoint),
            "tokenized_requests": True,
            "num_concurrent": 4,
            "max_length": 512,
        },
        tasks=["choice"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = found["samples"]["choice"]
    assert len(samples) == len(DOCUMENTS)
    for sample in samples:
        doc = sample["doc"]
        for choice, response in zip(doc["choices"], sample["resps"], strict=True):
            prompt, tokens = list(doc["question"].encode()), list(f" {choice}".encode())
            _, values = plain_bits(plain, tokens, prompt)
            assert float(response[0][0]) == sum(values), (doc, choice)
