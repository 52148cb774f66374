"""verl's replay buffer, made deterministic: the same batch in the same order, whatever finished first.

verl orders a batch as TransferQueue lists it, and pads what is missing without a word. Here a batch is in the order of
data set, problem and sample number, and failures are kept in words for the verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from zmrl.trainer.columns import plain
from zmrl.trainer.rewards import RewardError

POLL_SECONDS = 0.02
"""verl looks every 2 s whether a batch is complete, which alone would be most of a small step."""

ERROR, ERROR_KIND, REWARD = "zmrl_error", "zmrl_error_kind", "reward"
"""Tags of a failed session: its message and whether it was grading that failed."""


class OrderedReplayBuffer(ReplayBuffer):
    """Synchronous replay buffer in data-set order. `problems` holds the failures of the last batch."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_SECONDS)
        self.problems: list[str] = []
        self.on_poll: Callable[[], None] | None = None
        """Called now and then while a batch is waited for; may raise."""
        self.on_validation_batch: Callable[[list[str]], None] | None = None
        """Called with the keys of every validation batch, in order: verl clears it before any of its own hooks."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        """Called whenever verl looks whether a batch is complete."""
        if self.on_poll is not None:
            self.on_poll()
        super()._sync_metadata_from_transfer_queue()

    def _materialize_batch(
        self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: dict[str, dict]
    ) -> KVBatchMeta:
        """The selected groups' trajectories in order. Raises RewardError if grading one of them failed."""
        batch = super()._materialize_batch(partition_id, selected_prompt_uids, partition_snapshot)
        tags = dict(zip(batch.keys, batch.tags, strict=True))
        failed = sorted(key for key, tag in tags.items() if ERROR in tag)
        if failed:
            tq.kv_clear(keys=failed, partition_id=partition_id)
        self.problems = sorted(tags[key][ERROR] for key in failed)
        rewards = sorted(tags[key][ERROR] for key in failed if tags[key][ERROR_KIND] == REWARD)
        if rewards:
            more = f" ({len(rewards)} of the batch's {len(batch.keys)} rewards failed)" if len(rewards) > 1 else ""
            raise RewardError(f"{rewards[0]}{more}")
        keys = [key for key in batch.keys if ERROR not in tags[key]]
        keys = self._in_order(keys, partition_id)
        if partition_id == "val" and self.on_validation_batch is not None:
            self.on_validation_batch(keys)
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[tags[key] for key in keys])

    @staticmethod
    def _in_order(keys: list[str], partition_id: str) -> list[str]:
        if not keys:
            return []
        fields = ["data_source", "index", "session_id"]
        rows = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=fields)
        columns = [[plain(value) for value in rows[name]] for name in fields]
        # The last part of a key numbers the outputs of one session.
        outputs = [int(key.rsplit("_", 1)[1]) for key in keys]
        places = list(zip(*columns, outputs, strict=True))
        return [key for _, key in sorted(zip(places, keys, strict=True))]
