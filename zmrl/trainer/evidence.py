"""Reads a step's samples back from TransferQueue: what the server returned beside what the trainer computed."""

from __future__ import annotations

from typing import Any

import torch
import transfer_queue as tq
from torch import Tensor
from transfer_queue import KVBatchMeta

from zmrl.rollout.verl_replica import IDENTITY, TOKEN_IDS
from zmrl.rollout.verl_replica import ROW_DIGESTS as ROLLOUT_DIGESTS
from zmrl.trainer.checker import Identity, Sample
from zmrl.trainer.columns import plain, rows_of
from zmrl.trainer.engine import ROW_DIGESTS
from zmrl.trainer.seeds import sample_name

_FIELDS = [
    "responses", "response_mask", "rollout_log_probs", "old_log_probs", ROW_DIGESTS, "rm_scores", "extra_fields",
    "data_source", "index", "session_id",
]  # fmt: skip


def read_samples(batch: KVBatchMeta, version: int) -> tuple[list[Sample], Tensor]:
    """The real samples of `batch`, in its order, and their rewards (FP64 [B]); verl's padding is left out.

    version: the adapter version that the samples should have been drawn from.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
    if not keys:
        return [], torch.zeros(0, dtype=torch.float64)
    data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=_FIELDS)
    columns = {name: rows_of(data[name]) for name in _FIELDS}
    samples = [_sample({name: column[i] for name, column in columns.items()}, version) for i in range(len(keys))]
    rewards = torch.stack([row.double().sum() for row in columns["rm_scores"]])
    return samples, rewards


def _sample(row: dict[str, Any], version: int) -> Sample:
    extra = row["extra_fields"]
    extra = extra if isinstance(extra, dict) else extra.data
    tokens = row["responses"]
    held = extra.get(IDENTITY)
    digests, returned = extra.get(ROLLOUT_DIGESTS), extra.get(TOKEN_IDS)
    name = sample_name(str(plain(row["data_source"])), int(plain(row["index"])), int(plain(row["session_id"])))
    return Sample(
        name=name,
        tokens=tokens,
        mask=row["response_mask"].bool(),
        trainer_log_probs=row["old_log_probs"],
        rollout_log_probs=row["rollout_log_probs"],
        trainer_digests=_response_part(row[ROW_DIGESTS], len(tokens)),
        rollout_digests=None if digests is None else torch.tensor(digests, dtype=torch.int64),
        rollout_tokens=None if returned is None else torch.tensor(returned, dtype=torch.int64),
        rollout_identity=None if held is None else Identity.from_host(held, version),
    )


def _response_part(values: Tensor, length: int) -> Tensor:
    """Values [P + R] in verl's layout, where entry t belongs to token t + 1 -> those of the R response tokens."""
    end = len(values) - 1
    return values[end - length : end]
