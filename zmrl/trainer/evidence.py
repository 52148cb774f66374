"""A step's samples as the checker compares them: what the server returned beside what the trainer computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta

from zmrl.rollout.verl_replica import IDENTITY, ROW_DIGESTS, TOKEN_IDS
from zmrl.trainer.checker import Identity, Sample
from zmrl.trainer.columns import plain, rows_of, sample_ids
from zmrl.trainer.samples import exact_mean
from zmrl.trainer.scores import SampleScores
from zmrl.trainer.seeds import sample_name

_FIELDS = [
    "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields", "data_source", "index", "uid",
    "session_id",
]  # fmt: skip


@dataclass(frozen=True)
class RolloutSamples:
    """The real samples of a batch, in its order; verl's padding is left out."""

    rows: list[dict[str, Any]]
    ids: list[str]
    """`columns.sample_ids`"""
    rewards: Tensor
    """FP64 [B]"""

    def beside(self, scores: Mapping[str, SampleScores], version: int) -> list[Sample]:
        """Each sample with the trainer's scores of it; one that was not scored has none, which is VOID.

        version: the adapter version that the samples should have been drawn from.
        """
        identities = _Identities(version)
        return [_sample(row, scores.get(name), identities) for row, name in zip(self.rows, self.ids, strict=True)]

    def mean_entropy(self, scores: Mapping[str, SampleScores]) -> float | None:
        """Mean over all active tokens of the entropy that the compared forward gave, in nats.

        The sum is exact, so that it depends on no order and no number of threads. None if there is no such token.
        """
        return exact_mean(
            value
            for row, name in zip(self.rows, self.ids, strict=True)
            if name in scores
            for value in scores[name].entropy[row["response_mask"].bool()].double().tolist()
        )


def read_samples(batch: KVBatchMeta) -> RolloutSamples:
    """What the rollout put into TransferQueue for the samples of `batch`."""
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    if not keys:
        return RolloutSamples([], [], torch.zeros(0, dtype=torch.float64))
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    columns = {name: rows_of(data[name]) for name in _FIELDS}
    rows = [{name: column[i] for name, column in columns.items()} for i in range(len(keys))]
    return RolloutSamples(rows, sample_ids(data), torch.stack([row["rm_scores"].double().sum() for row in rows]))


class _Identities:
    """Identities from what servers reported: the samples of a step report the same, or nearly so."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._known: list[tuple[Mapping[str, Any], Identity]] = []

    def of(self, reported: Mapping[str, Any]) -> Identity:
        for known, identity in self._known:
            if known == reported:
                return identity
        self._known.append((reported, Identity.from_host(reported, self._version)))
        return self._known[-1][1]


def _sample(row: dict[str, Any], scores: SampleScores | None, identities: _Identities) -> Sample:
    extra = row["extra_fields"]
    extra = extra if isinstance(extra, dict) else extra.data
    tokens = row["responses"]
    held = extra.get(IDENTITY)
    digests, returned = extra.get(ROW_DIGESTS), extra.get(TOKEN_IDS)
    name = sample_name(str(plain(row["data_source"])), int(plain(row["index"])), int(plain(row["session_id"])))
    return Sample(
        name=name,
        tokens=tokens,
        mask=row["response_mask"].bool(),
        trainer_log_probs=None if scores is None else scores.log_probs,
        rollout_log_probs=row["rollout_log_probs"],
        trainer_digests=None if scores is None else scores.digests,
        rollout_digests=None if digests is None else torch.tensor(digests, dtype=torch.int64),
        rollout_tokens=None if returned is None else torch.tensor(returned, dtype=torch.int64),
        rollout_identity=None if held is None else identities.of(held),
    )
