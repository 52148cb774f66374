"""A server in a thread, and the few requests that all tests make."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.rollout.harness import PlainModel, Prompt, Sample, text
from zmrl.rollout.engine import quiet_environment
from zmrl.serving.options import parse

PROMPT = list(text(60, 7))


class Client:
    """What tests ask a server over HTTP."""

    def __init__(self, url: str) -> None:
        # The server closes idle connections after 5 s; one that the client reuses just then is reset.
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(keepalive_expiry=1))

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        answer = self.post("/v1/completions", **(DEFAULTS | body))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def reference(self) -> list[tuple[Any, ...]]:
        """A fixed request, in bits: equal as long as the server is sound."""
        return bits(self.complete(seed=11))

    def unload_all_but_first(self) -> None:
        """Leaves the adapter that the server was started with."""
        for card in self.http.get("/v1/models").json()["data"]:
            if card["id"] not in ("base", "first"):
                assert self.post("/v1/unload_lora_adapter", lora_name=card["id"]).status_code == 200

    def gauge(self, name: str) -> float:
        """A metric's value; `name` with its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        (value,) = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(name + " ")]
        return float(value)


class Served(Client):
    """The server of `python -m zmrl.serving` without its process: the same application, sockets and protocol."""

    def __init__(self, arguments: list[str]) -> None:
        quiet_environment()
        from zmrl.serving.app import serving_app
        from zmrl.serving.server import http_server, listen

        self.options = parse(arguments)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        url = ""

        async def run() -> None:
            nonlocal url
            self.loop = asyncio.get_running_loop()
            sock = listen(self.options)
            url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            async with serving_app(self.options) as app:
                self.engine, self.gate, self.adapters = app.state.engine_client, app.state.gate, app.state.adapters
                self._server = http_server(app, self.options)
                self._ready.set()
                await self._server.serve(sockets=[sock])

        def main() -> None:
            try:
                asyncio.run(run())
            except BaseException as error:
                self._failure = error
                self._ready.set()

        self._thread = threading.Thread(target=main, name="server", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure
        super().__init__(url)

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` where the server runs."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def worker(self, method: str, *args: Any) -> Any:
        return self.call(self.engine.worker(method, *args))

    def unload_all_but_first(self) -> None:
        super().unload_all_but_first()
        self.call(self.engine.settled())

    def lines(self) -> list[dict[str, Any]]:
        """The transcript."""
        assert self.options.transcript is not None
        return [json.loads(line) for line in self.options.transcript.read_text().splitlines()]

    def stop(self) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(90)
        assert not self._thread.is_alive(), "the server does not stop"


class ServedProcess(Client):
    """The server as a process, its engine and worker as processes too, ready; what it prints is in `log`."""

    def __init__(self, arguments: list[str], log: Path, start_new_session: bool = False) -> None:
        command = [sys.executable, "-m", "zmrl.serving", *arguments, "--port", "0"]
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=start_new_session
            )
        end = time.monotonic() + 600
        while not (found := re.search(r"^zmrl: serving \S+ on (\S+)$", log.read_text(), re.MULTILINE)):
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.2)
        super().__init__(found[1])

    def memory(self) -> dict[str, int]:
        """Resident bytes of each of its processes, by name and process id."""
        first = psutil.Process(self.process.pid)
        return {f"{p.name()} {p.pid}": p.memory_info().rss for p in (first, *first.children(recursive=True))}

    def stop(self) -> None:
        self.http.close()
        self.process.terminate()
        assert self.process.wait(120) == 0


DEFAULTS = {
    "model": "base", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0, "ignore_eos": True, "logprobs": 0,
    "return_token_ids": True,
}  # fmt: skip


def bits(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Token ids and log-probs of each choice. JSON carries an FP32 value exactly."""
    return [(tuple(c["token_ids"]), tuple(c["logprobs"]["token_logprobs"])) for c in answer["choices"]]


def plain_bits(
    plain: PlainModel, tokens: Sequence[int], prompt: Sequence[int] = PROMPT, slot: int | None = None
) -> tuple[Any, ...]:
    """What the trainer's forward pass says of a served answer."""
    sample = Sample(Prompt(tuple(prompt), seed=0), list(tokens), None, [], 0)  # type: ignore[arg-type]
    return tuple(tokens), tuple(float(value) for value in plain.score(sample, slot).logp)


def use_adapter(plain: PlainModel, path: Path) -> None:
    """Puts the adapter of a directory into the plain model's slot 0."""
    from zmrl.lora.peft_io import fill, read_adapter

    fill(plain.model.lora_slices(0), read_adapter(path, plain.model.config).tensors)
