"""The trainer's end of the rollout: sends the adapter, with its version and the digest of what is sent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from zmrl.rollout.verl_replica import VERSION_KEY, adapter_version
from zmrl.trainer.checker import tensors_sha256


class ZmrlServerAdapter(ServerAdapter):
    """verl's adapter to the vLLM server. Only LoRA adapters are sent; the base model is on disk on both sides."""

    sent_digest: str | None = None
    """SHA-256 of the adapter sent last."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send the adapter that step `global_steps` has produced, and switch the server to it."""
        if not kwargs.get("peft_config") or not kwargs.get("base_sync_done"):
            raise RuntimeError("only an adapter may be sent to the rollout, not base weights")
        tensors = list(weights)
        version = adapter_version(global_steps)
        self.sent_digest = tensors_sha256(tensors)
        kwargs["peft_config"] = kwargs["peft_config"] | {VERSION_KEY: version}
        await super().update_weights(iter(tensors), global_steps=global_steps, wire_format=wire_format, **kwargs)
        if self._has_server:
            await self.server_handle.zmrl_use_adapter.remote(version)
