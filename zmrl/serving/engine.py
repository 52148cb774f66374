"""vLLM's asynchronous engine with what the front end lacks: clear failures, adapters in use, and a transcript."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

from vllm.exceptions import GenerationError, VLLMNotFoundError, VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM

from zmrl.serving.transcript import Record, Transcript


class ServingEngine(AsyncLLM):
    """An `AsyncLLM` whose failed requests say why, and whose adapters are freed when the last request has left them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.transcript: Transcript | None = None
        self.loaded: set[int] = set()
        """Ids of adapters that the engine holds."""
        self.retired: set[int] = set()
        """Those of them that no new request can name: they are removed when their last request ends."""
        self._users: Counter[int] = Counter()
        self._tasks: set[asyncio.Task] = set()
        super().__init__(*args, **kwargs)

    async def worker(self, method: str, *args: Any) -> Any:
        """Call a method of vLLM's worker (`zmrl.rollout.worker`)."""
        results = await self.collective_rpc(method, args=args)
        return results[0]

    async def generate(  # type: ignore[override]
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        lora_request: LoRARequest | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As vLLM's. GenerationError says why a request failed: vLLM's front end would say "Internal server error"."""
        if any(key.startswith("zmrl_") for key in sampling_params.extra_args or {}):
            raise VLLMValidationError("keys that begin with zmrl_ are the server's own", parameter="vllm_xargs")
        kwargs["data_parallel_rank"] = None  # from a header; there is one engine
        record: Record | None = None
        try:
            async with self._using(lora_request):
                if self.transcript is not None:
                    record, sampling_params = self.transcript.begin(request_id, sampling_params, lora_request)
                outputs = super().generate(prompt, sampling_params, request_id, lora_request=lora_request, **kwargs)
                async with aclosing(outputs):
                    async for output in outputs:
                        _raise_failure(output)
                        if record is not None:
                            record.add(output)
                            if output.finished:  # before the client has it: no answer without its evidence
                                await record.write()
                        yield output
        finally:
            if record is not None and not record.written:
                self.spawn(record.abandon())

    @asynccontextmanager
    async def _using(self, lora_request: LoRARequest | None) -> AsyncIterator[None]:
        if lora_request is None:
            yield
            return
        lora_id = lora_request.lora_int_id
        if lora_id not in self.loaded:
            raise VLLMNotFoundError(f"adapter {lora_request.lora_name} was unloaded")
        self._users[lora_id] += 1
        try:
            yield
        finally:
            self._users[lora_id] -= 1
            self._free_if_unused(lora_id)

    def retire(self, lora_id: int) -> None:
        """No new request names the adapter; free it as soon as none uses it."""
        self.retired.add(lora_id)
        self._free_if_unused(lora_id)

    def _free_if_unused(self, lora_id: int) -> None:
        if lora_id in self.retired and not self._users[lora_id]:
            self.retired.discard(lora_id)
            self.loaded.discard(lora_id)
            del self._users[lora_id]
            if self.transcript is not None:
                self.transcript.adapters.pop(lora_id, None)
            self.spawn(self.remove_lora(lora_id))

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Runs `work` beside the requests."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Returns when all work started by `spawn` is done."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _raise_failure(output: RequestOutput) -> None:
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise GenerationError(f"the request failed: {answer.stop_reason or 'see the log of the server'}")
