"""vLLM's OpenAI application over an engine in this process, whose answers are written by the test.

Request, renderer, engine, detokenizer, parsers and answer are the real ones; only the choice of each token is not: the
logits processor `Scripted` forces the ids that a request carries in `vllm_xargs`.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import torch
from torch import Tensor
from vllm.engine.protocol import EngineClient
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from zmrl.model.tokenizer import CONTROL_TOKENS, END_OF_MSG_ID
from zmrl.rollout.engine import engine_args, quiet_environment

FLAGS = ["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k3", "--reasoning-parser", "kimi_k3"]


class Scripted(AdapterLogitsProcessor):
    """Forces `vllm_xargs["script"]`, then the end of the message."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        script = (params.extra_args or {}).get("script")
        if script is None:
            return None

        def force(output_ids: Sequence[int], logits: Tensor) -> Tensor:
            forced = torch.full_like(logits, float("-inf"))
            forced[[*script, END_OF_MSG_ID][min(len(output_ids), len(script))]] = 0
            return forced

        return force


class LocalClient(EngineClient):
    """The part of `AsyncLLM` that the application needs, over an engine in this process."""

    def __init__(self, config: Any) -> None:
        from vllm.v1.engine.llm_engine import LLMEngine

        # Without statistics: their registry is the process's, and a second engine takes it from the first.
        self.engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        self.vllm_config, self.model_config = self.engine.vllm_config, self.engine.model_config
        self.renderer, self.input_processor = self.engine.renderer, self.engine.input_processor
        self._waiting: dict[str, deque[Any]] = defaultdict(deque)

    errored = is_stopped = False
    is_running = True

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        **_: Any,
    ) -> AsyncIterator[Any]:
        tasks = self.engine.get_supported_tasks()
        request = self.input_processor.process_inputs(request_id, prompt, sampling_params, supported_tasks=tasks)
        request.reasoning_ended, request.reasoning_parser_kwargs = reasoning_ended, reasoning_parser_kwargs
        self.engine.add_request(request_id, request, request.sampling_params)
        finished = False
        while not finished:
            while not self._waiting[request_id]:
                for output in self.engine.step():
                    self._waiting[output.request_id].append(output)
                await asyncio.sleep(0)
            output = self._waiting[request_id].popleft()
            finished = output.finished
            yield output
        del self._waiting[request_id]

    async def get_supported_tasks(self) -> Any:
        return self.engine.get_supported_tasks()


LocalClient.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


@dataclass
class Answer:
    """What a client sees: of a stream, its deltas put together."""

    status: int
    body: Any
    reasoning: str | None = None
    content: str | None = None
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Name and arguments of each call."""
    ids: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    prompt: list[int] = field(default_factory=list)

    def said(self) -> tuple[str, str, list[tuple[str, Any]], str | None]:
        return self.reasoning or "", self.content or "", self.calls, self.finish_reason


class Chat:
    """Requests to the application."""

    def __init__(self, app: Any, client: LocalClient) -> None:
        self.client = client
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local")

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def ask(
        self, script: Sequence[int] | None, messages: Any = None, path: str = "chat/completions", **body: Any
    ) -> Answer:
        """One request; `script` are the ids of the answer without the end of the message."""
        body = {"max_tokens": 400, "return_token_ids": True} | body
        if path == "chat/completions":
            body["messages"] = messages if messages is not None else [{"role": "user", "content": "hi"}]
        if script is not None:
            body["vllm_xargs"] = {"script": list(script)}
        response = self._runner.run(self._client.post(f"/v1/{path}", json=body, timeout=300))
        if response.status_code != 200:
            return Answer(response.status_code, response.json())
        return _streamed(response.text) if body.get("stream") else _whole(response.json())


def _whole(body: Any) -> Answer:
    choice = body["choices"][0]
    found = Answer(200, body, finish_reason=choice["finish_reason"], prompt=body.get("prompt_token_ids") or [])
    if "message" in choice:
        message = choice["message"]
        found.reasoning, found.content = message["reasoning"], message["content"]
        for call in message.get("tool_calls") or ():
            found.calls.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
            found.ids.append(call["id"])
    return found


def _streamed(text: str) -> Answer:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]", lines[-3:]
    chunks = [json.loads(line) for line in lines[:-1]]
    found = Answer(200, chunks, reasoning="", content="")
    written: dict[int, list[str]] = defaultdict(lambda: ["", ""])
    for chunk in chunks:
        assert "choices" in chunk, chunk
        found.prompt = chunk.get("prompt_token_ids") or found.prompt
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found.reasoning += delta.get("reasoning") or ""
            found.content += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                function = call["function"]
                written[call["index"]][0] += function.get("name") or ""
                written[call["index"]][1] += function.get("arguments") or ""
                found.ids += [call["id"]] if call.get("id") else []
            found.finish_reason = choice.get("finish_reason") or found.finish_reason
    found.calls = [(name, json.loads(arguments)) for _, (name, arguments) in sorted(written.items())]
    return found


@contextmanager
def chat_application(checkpoint: Path, *flags: str) -> Iterator[Chat]:
    """The application that `vllm serve CHECKPOINT` with these flags builds."""
    quiet_environment()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tests.rollout.harness import set_num_threads
    from zmrl.rollout.plugin import register

    register()
    set_num_threads(1)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([str(checkpoint), *flags])
    settings = engine_args(checkpoint, max_model_len=4096, max_num_seqs=8, kv_cache_memory_bytes=64 << 20)
    settings["logits_processors"] = [f"{__name__}:{Scripted.__name__}"]
    for name, value in settings.items():
        setattr(args, name, value)
    with patch.dict("os.environ", {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        client = LocalClient(AsyncEngineArgs.from_cli_args(args).create_engine_config())
    tasks = client.engine.get_supported_tasks()
    app = build_app(args, tasks, client.model_config)
    asyncio.run(init_app_state(client, app.state, args, tasks))
    chat = Chat(app, client)
    try:
        yield chat
    finally:
        chat.close()
        _stop(client)


def _stop(client: LocalClient) -> None:
    import gc

    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    client.engine.engine_core.shutdown()
    del client.engine
    cleanup_dist_env_and_memory()
    gc.collect()


def ids(text: str) -> list[int]:
    """The ids of a scripted answer: (open), (close), (sep) and so on are control tokens, all else bytes."""
    names = {f"({name.strip('<|>[]')})": 256 + i for i, name in enumerate(CONTROL_TOKENS)}
    found: list[int] = []
    while text:
        name = next((name for name in names if text.startswith(name)), None)
        found += [names[name]] if name else text[0].encode()
        text = text[len(name) if name else 1 :]
    return found
