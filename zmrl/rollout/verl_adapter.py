"""The trainer's end of the rollout: sends the adapter, with its version and the digest of what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from torch import Tensor
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from zmrl.rollout.verl_replica import VERSION_KEY, adapter_version
from zmrl.trainer.checker import tensors_sha256

TRANSFER_SECONDS = 300.0
"""How long to wait for the server's side of a transfer. verl waits for ever, also for a server that is dead."""


class ZmrlServerAdapter(ServerAdapter):
    """verl's adapter to the vLLM server. Only LoRA adapters are sent; the base model is on disk on both sides."""

    sent_digest: str | None = None
    """SHA-256 of the adapter sent last."""
    _receiving: Any = None
    """The server's answer to the transfer under way."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Send the adapter that step `global_steps` has produced, and switch the server to it.

        Raises RuntimeError if the server does not take it, with the server's own error as cause if there is one.
        """
        if not kwargs.get("peft_config") or not kwargs.get("base_sync_done"):
            raise RuntimeError("only an adapter may be sent to the rollout, not base weights")
        tensors = list(weights)
        version = adapter_version(global_steps)
        self.sent_digest = tensors_sha256(tensors)
        kwargs["peft_config"] = kwargs["peft_config"] | {VERSION_KEY: version}
        try:
            with _socket_timeout(TRANSFER_SECONDS):
                await super().update_weights(
                    iter(tensors), global_steps=global_steps, wire_format=wire_format, **kwargs
                )
        except zmq.Again:
            await self._raise_servers_error()
        if self._has_server:
            await self.server_handle.zmrl_use_adapter.remote(version)

    async def _execute_method(self, method: str, non_block: bool = False, **kwargs: Any) -> Any:
        result = await super()._execute_method(method, non_block=non_block, **kwargs)
        if non_block:
            self._receiving = result
        return result

    async def _raise_servers_error(self) -> None:
        message = f"the rollout server did not take the adapter within {TRANSFER_SECONDS:g} s; see its log"
        try:
            if self._receiving is not None:
                await asyncio.wait_for(asyncio.wrap_future(self._receiving.future()), timeout=1)
        except Exception as error:
            raise RuntimeError(message) from error
        raise RuntimeError(message)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Sockets made meanwhile give up with `zmq.Again`: verl's sender makes its own and has no setting for it."""
    context: zmq.Context = zmq.Context.instance()
    for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
        context.setsockopt(option, int(seconds * 1000))
    try:
        yield
    finally:
        for option in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            context.setsockopt(option, -1)
