"""Answers with their grades, read from TransferQueue: for samples.jsonl, and for what validation reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from zmrl.data.prompts import parse_response
from zmrl.trainer.columns import plain, rows_of
from zmrl.trainer.logs import SAMPLES_KEPT, TEXT_LIMIT

_FIELDS = [
    "prompts", "responses", "rm_scores", "data_source", "index", "session_id", "extra_info", "reward_model",
]  # fmt: skip


@dataclass(frozen=True)
class GradedSample:
    """One answer and its grade."""

    dataset: str
    index: int
    """Number of the problem in its data set."""
    number: int
    """Number of the sample among those of its problem."""
    key: str
    """The problem's canonical key."""
    answer: str
    """The right answer."""
    reward: float
    prompt: list[int]
    """Token ids."""
    response: list[int]
    """Token ids."""

    @property
    def terse(self) -> bool:
        """Whether the answer shows no work: its thinking part is empty."""
        return not parse_response(self.response).work

    def line(self, step: int, phase: str, decode: Callable[[list[int]], str]) -> dict[str, Any]:
        """A line of samples.jsonl; texts of more than TEXT_LIMIT characters are cut."""
        return {
            "step": step,
            "phase": phase,
            "dataset": self.dataset,
            "key": self.key,
            "sample": self.number,
            "prompt": _cut(decode(self.prompt)),
            "response": _cut(decode(self.response)),
            "answer": self.answer,
            "reward": self.reward,
        }


def read_graded(keys: Sequence[str], partition_id: str) -> list[GradedSample]:
    """The samples under `keys`, in that order."""
    if not keys:
        return []
    data = tq.kv_batch_get(keys=list(keys), partition_id=partition_id, select_fields=_FIELDS)
    columns = {name: rows_of(data[name]) for name in _FIELDS}
    return [_graded({name: column[i] for name, column in columns.items()}) for i in range(len(keys))]


def read_first(batch: KVBatchMeta) -> list[GradedSample]:
    """Sample 0 of the first SAMPLES_KEPT problems of a training batch: a fixed choice, not the best or the worst."""
    return read_graded([key for key in _real(batch) if _number(key) == 0][:SAMPLES_KEPT], batch.partition_id)


def first_of_each(samples: Sequence[GradedSample]) -> list[GradedSample]:
    """Sample 0 of the first SAMPLES_KEPT problems of every data set."""
    kept: dict[str, list[GradedSample]] = {}
    for sample in samples:
        of_dataset = kept.setdefault(sample.dataset, [])
        if sample.number == 0 and len(of_dataset) < SAMPLES_KEPT:
            of_dataset.append(sample)
    return [sample for of_dataset in kept.values() for sample in of_dataset]


def exact_mean(values: Iterator[float]) -> float | None:
    """Mean of float values whose sum is rounded once; None of nothing."""
    listed = list(values)
    return math.fsum(listed) / len(listed) if listed else None


def _real(batch: KVBatchMeta) -> list[str]:
    """Keys of a batch without verl's padding."""
    return [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]


def _number(key: str) -> int:
    """verl's keys are `uid_session_output`."""
    return int(key.rsplit("_", 2)[1])


def _graded(row: dict[str, Any]) -> GradedSample:
    extra, graded_by = (getattr(row[name], "data", row[name]) for name in ("extra_info", "reward_model"))
    return GradedSample(
        dataset=str(plain(row["data_source"])),
        index=int(plain(row["index"])),
        number=int(plain(row["session_id"])),
        key=str(extra["key"]),
        answer=str(graded_by["ground_truth"]),
        reward=float(row["rm_scores"].double().sum()),
        prompt=row["prompts"].tolist(),
        response=row["responses"].tolist(),
    )


def _cut(text: str) -> str:
    rest = len(text) - TEXT_LIMIT
    return text if rest <= 0 else f"{text[:TEXT_LIMIT]} [and {rest} more characters]"
