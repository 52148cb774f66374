"""Runs inside vLLM's worker process (verl's `worker_extension_cls`): receives adapters from the trainer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from zmrl.rollout.verl_replica import VERSION_KEY
from zmrl.rollout.worker import ZmrlWorkerMethods
from zmrl.trainer.checker import tensors_sha256


class ZmrlWorkerExtension(ZmrlWorkerMethods, vLLMColocateWorkerExtension):
    """verl's worker methods and ours. vLLM mixes this into its worker, so there is no `__init__`."""

    _zmrl_received: tuple[dict[str, Tensor], dict[str, Any]] | None = None
    _zmrl_arrived: str | None = None
    """SHA-256 of the adapter that arrived last, as received."""

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """Not what verl does here (vllm_rollout/utils.py:106): set logits beyond the tokenizer to -inf in the rollout.

        The trainer normalises over the whole vocabulary, so masking on one side only shifts every log-prob.
        """

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive an adapter and load it; older ones are dropped.

        Loading waits until the transfer is over: an error inside verl's callback would leave the sender waiting for an
        acknowledgement for ever. AdapterError says what is wrong with an adapter.
        """
        self._zmrl_received = None
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
        if self._zmrl_received is None:
            raise RuntimeError("base weights arrived instead of an adapter")
        tensors, config = self._zmrl_received
        self._zmrl_received = None
        version = config[VERSION_KEY]
        self._zmrl_arrived = tensors_sha256(tensors.items())
        self.zmrl_load_adapter(version, tensors, config["r"], config["lora_alpha"])
        self.zmrl_drop_adapters([version])

    def _update_weights(
        self, weights: list[tuple[str, Tensor]], peft_config: dict[str, Any], base_sync_done: bool
    ) -> None:
        """verl's callback after the last bucket. The tensors are verl's copies, not views of its transfer buffer."""
        if peft_config and base_sync_done:
            self._zmrl_received = (dict(weights), peft_config)

    def zmrl_identity(self) -> dict[str, Any]:
        """What this worker holds now, from its live buffers, and the SHA-256 of the adapter that arrived last."""
        return super().zmrl_identity() | {"arrived_digest": self._zmrl_arrived}
