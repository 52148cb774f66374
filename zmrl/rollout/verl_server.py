"""verl's vLLM server and replica: loopback, versioned adapters, and evidence with every response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY, TokenOutput
from verl.workers.rollout.vllm_rollout import vllm_async_server
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest

from zmrl.rollout.digests import DigestTaker
from zmrl.rollout.lora import adapter_request
from zmrl.rollout.verl_replica import IDENTITY, ROW_DIGESTS, TOKEN_IDS
from zmrl.startup import mark
from zmrl.trainer import early
from zmrl.trainer.patches_verl import expect_line

LOOPBACK = "127.0.0.1"


class VersionedEngine:
    """An AsyncLLM whose only adapter is the current version.

    verl asks for adapter 123 and falls back to the base model if it is absent. Here it is never absent, and the request
    for it becomes one for the version in use. Everything else is the engine's own.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._request: LoRARequest | None = None

    def use(self, request: LoRARequest) -> None:
        """Serve every request from now on with this adapter."""
        self._request = request

    async def list_loras(self) -> set[int]:
        """verl's number, so that verl attaches an adapter."""
        if self._request is None:
            raise RuntimeError("no adapter has been synced yet: the server would answer with the base model")
        return {VLLM_LORA_INT_ID}

    def generate(self, *args: Any, lora_request: LoRARequest | None = None, **kwargs: Any) -> AsyncGenerator:
        """Generate with the version in use."""
        if lora_request is None or lora_request.lora_int_id != VLLM_LORA_INT_ID:
            raise RuntimeError("verl did not ask for its adapter; its way of attaching adapters has changed")
        return self._engine.generate(*args, lora_request=self._request, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def joined(identities: list[dict[str, Any]]) -> dict[str, Any]:
    """One identity of all ranks: where they differ (each got the adapter by itself), one that no trainer has."""
    found = {}
    for key, value in identities[0].items():
        others = [identity[key] for identity in identities[1:] if identity[key] != value]
        found[key] = f"ranks differ: {[value, *others]}" if others else value
    return found


class ZmrlVllmHttpServer(vLLMHttpServer):
    """The rollout server of one node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mark("rollout server", "modules imported")
        super().__init__(*args, **kwargs)
        if self.nnodes == 1 and self._server_address != LOOPBACK:
            raise RuntimeError(
                f"the rollout server would listen on {self._server_address}, without a password: set "
                "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before Ray starts (zmrl.train does)"
            )
        self._held: asyncio.Task[dict[str, Any]] | None = None
        """What the workers answer, or have answered, since the adapter was switched."""
        self._digests = DigestTaker(self._take_from_worker)

    def _get_worker_extension_cls(self) -> str:
        return "zmrl.rollout.verl_worker.ZmrlWorkerExtension"

    async def run_server(self, args: Any) -> None:
        """Start the engine and the HTTP server; then put the versioned adapter between verl and the engine."""
        await super().run_server(args)
        self.engine: Any = VersionedEngine(self.engine)
        mark("rollout server", "engine up, listening")

    async def zmrl_use_adapter(self, version: int) -> None:
        """Serve adapter `version` from now on; the worker has loaded it."""
        self.engine.use(adapter_request(version))
        self._held = None

    async def zmrl_rpc(self, method: str, *args: Any) -> Any:
        """Call a method of vLLM's worker and return the first worker's result (verl's collective_rpc returns none)."""
        results = await self.engine.collective_rpc(method, args=args)
        return results[0]

    async def zmrl_identity(self) -> dict[str, Any]:
        """What the workers hold now; requests that begin later carry it, until the next call.

        They are sampled later: the engine's process takes calls and requests in their order. They need not wait for
        this one, and are answered after it.
        """
        self._held = asyncio.create_task(self._ask_workers())
        return await asyncio.shield(self._held)  # others wait for it too

    async def _ask_workers(self) -> dict[str, Any]:
        return joined(await self.engine.collective_rpc("zmrl_identity"))

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str, **kwargs: Any
    ) -> TokenOutput:
        """verl's token-in, token-out generation; the output carries row digests, token ids and the identity held."""
        tag = (sampling_params.get("extra_args") or {}).get("zmrl_tag")
        if tag is not None:
            held = self._held = self._held or asyncio.create_task(self._ask_workers())
            await asyncio.sleep(0)  # the call, if it is new, is sent before the request
        output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        if output.stop_reason == "error":  # verl would hand on what came before as a complete sample
            raise RuntimeError(
                f"vLLM failed request {tag or request_id} after {len(output.token_ids)} tokens: the model produced "
                "NaN, or its adapter could not be used; look for a diverged adapter or a damaged checkpoint"
            )
        if tag is not None:
            output.extra_fields[ROW_DIGESTS] = await self._digests.take(tag)
            output.extra_fields[TOKEN_IDS] = list(output.token_ids)
            output.extra_fields[IDENTITY] = await asyncio.shield(held)
        return output

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """vLLM 0.32 renamed the arguments of `pause_generation` that verl passes (vllm_async_server.py:980)."""
        expect_line(vLLMHttpServer.abort_all_requests, "wait_for_inflight_requests=False")
        if self.node_rank == 0:
            await self.engine.pause_generation(mode="abort", clear_cache=reset_prefix_cache)
        return {"aborted_count": 0, "request_ids": []}

    async def _take_from_worker(self, tags: list[str]) -> dict[str, list[int]]:
        return await self.zmrl_rpc("zmrl_take_digests", tags)


class ZmrlVllmReplica(vLLMReplica):
    """verl's replica with the server above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.server_class = early.actor_class(ZmrlVllmHttpServer)

    @staticmethod
    def start_early(max_num_seqs: int) -> None:
        """Start the process of the one server of a run on one node; name and concurrency are verl's."""
        concurrency = max(1000, max_num_seqs + CONTROL_METHOD_CONCURRENCY)  # replica.py:257
        workers = "zmrl.trainer.worker"  # it gets their handles
        early.start(ZmrlVllmHttpServer, workers, name="vllm_server_0_0", max_concurrency=concurrency)

    async def sleep(self) -> None:
        """Sleeping frees GPU memory; without any, verl's drain before it is only a wait."""
        if self.config.free_cache_engine:
            await super().sleep()


# verl's generate() must keep asking for the adapter in the way that VersionedEngine answers.
expect_line(vllm_async_server.vLLMHttpServer.generate, "VLLM_LORA_INT_ID in await self.engine.list_loras()")
