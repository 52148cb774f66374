"""The server as a process: the commands of docs/serving.md as written, and a stop with requests under way."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from fastapi import FastAPI, Request

from tests.serving.harness import ServedProcess
from zmrl.lora.peft_io import write_adapter
from zmrl.model.checkpoint import read_config, resolve_model
from zmrl.model.names import LoraSpec
from zmrl.serving import server as serving_server
from zmrl.serving.limits import Gate, LimitsMiddleware
from zmrl.serving.options import Limits, Options

REPOSITORY = Path(__file__).parents[2]
KEY = {"Authorization": "Bearer secret"}


@pytest.mark.slow
def test_the_commands_of_the_documentation(tmp_path: Path) -> None:
    """One script, in a folder that looks like a clone; the adapter is what training would have written."""
    (tmp_path / ".venv").symlink_to(REPOSITORY / ".venv")
    config = read_config(resolve_model("nano"))
    tensors = {n: torch.full(shape, 0.01).bfloat16() for n, shape, _ in LoraSpec(32).tensor_specs(config)}
    write_adapter(tmp_path / "adapters" / "step-30", tensors, config, 32, 32, "nano")
    text = (REPOSITORY / "docs" / "serving.md").read_text()
    commands = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    assert len(commands) > 8
    script = "set -e; trap 'kill $server 2> /dev/null || true' EXIT\n" + "".join(
        f"{command}\necho\n" for command in commands
    )
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    log = (tmp_path / "server.log").read_text()
    assert done.returncode == 0, (done.stdout, done.stderr, log[-3000:])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"id"')]
    assert [answer["model"] for answer in found] == ["nano", "tuned"]
    choice = found[0]["choices"][0]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"])
    verdicts = re.findall(r"^(EQUAL|DIFFERENT|VOID) ", done.stdout, re.MULTILINE)
    assert verdicts == ["EQUAL"] * 4, done.stdout
    assert "zmrl: stopping; 0 requests" in log and "Traceback" not in log
    assert "zmrl_cache_bytes" in (tmp_path / "metrics.txt").read_text()


class Stopping:
    """`server._run` around an application that waits for a word."""

    def __init__(self, drain_seconds: float) -> None:
        self.options = Options(Path("model"), "model", drain_seconds=drain_seconds)
        self.engine = SimpleNamespace(errored=False, is_running=True)
        self.ready = threading.Event()
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=asyncio.run, args=(self._main(),))
        self.thread.start()
        self.ready.wait()

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stop, self.word = asyncio.Event(), asyncio.Event()
        app = FastAPI()

        @app.post("/")
        async def answer(request: Request) -> str:
            await self.word.wait()
            return "done"

        app.state.gate, app.state.engine_client = Gate(), self.engine
        app.add_middleware(LimitsMiddleware, limits=Limits(), gate=app.state.gate)
        self.gate = app.state.gate
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/"
            sock.listen()
            self.ready.set()
            self.exit_code = await serving_server._run(app, self.options, sock, self.stop)

    def tell(self, event: asyncio.Event) -> None:
        self.loop.call_soon_threadsafe(event.set)

    def in_flight(self) -> tuple[threading.Thread, list[Any]]:
        found: list[Any] = []

        def ask() -> None:
            try:
                found.append(httpx.post(self.url, json={}, timeout=60).status_code)
            except httpx.HTTPError as error:
                found.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not self.gate.running:
            time.sleep(0.01)
        return thread, found


def test_running_requests_end_and_new_ones_get_503() -> None:
    server = Stopping(drain_seconds=60)
    thread, found = server.in_flight()
    server.tell(server.stop)
    while not server.gate.closed:
        time.sleep(0.01)
    assert httpx.post(server.url, json={}).status_code == 503
    server.tell(server.word)
    thread.join()
    server.thread.join(30)
    assert found == [200] and server.exit_code == 0
    with pytest.raises(httpx.ConnectError):
        httpx.post(server.url, json={})


def test_what_does_not_end_is_cut_off() -> None:
    server = Stopping(drain_seconds=0.2)
    thread, found = server.in_flight()
    server.tell(server.stop)
    server.thread.join(30)
    thread.join(30)
    assert server.exit_code == 0 and found != [200]


def test_a_dead_engine_is_told_by_the_exit_code() -> None:
    server = Stopping(drain_seconds=1)
    server.engine.errored = True
    server.tell(server.stop)
    server.thread.join(30)
    assert server.exit_code == 1


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """Of a reused connection: 40 ms each, with Nagle's algorithm."""
    with serving_server.listen(Options(Path("model"), "model", port=0)) as sock:
        sock.listen()
        with socket.create_connection(sock.getsockname()[:2]):
            connection, _ = sock.accept()
            with connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("ctrl_c", [False, True])
def test_a_stop_with_requests_under_way(tmp_path: Path, ctrl_c: bool) -> None:
    """By SIGTERM, or by Ctrl-C in a terminal, which every process of the group gets, the engine's too.

    Three requests end whole, a fourth is refused. Without the key nobody is answered.
    """
    arguments = ["nano", "--max-model-len", "4096", "--api-key", "secret"]
    served = ServedProcess(arguments, tmp_path / "log", start_new_session=True)
    process, url = served.process, served.url
    body = {"model": "nano", "prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True, "seed": 1}
    for stranger in ({}, {"Authorization": "Bearer other"}):
        for content in (b"{}", b"a" * (5 << 20)):
            assert httpx.post(f"{url}/v1/completions", content=content, headers=stranger).status_code == 401
    found: list[int] = []

    def ask() -> None:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300, headers=KEY)
        found.append(answer.json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while "zmrl_requests_running 3" not in httpx.get(f"{url}/metrics", timeout=30).text:
        assert not found, "VOID: the requests ended before the stop"
        time.sleep(0.1)
    if ctrl_c:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    refused = None
    while refused != 503:
        refused = httpx.post(
            f"{url}/v1/completions", json=body | {"max_tokens": 1}, timeout=30, headers=KEY
        ).status_code
    assert not found, "VOID: the requests ended before the refusal"
    for thread in threads:
        thread.join()
    assert found == [1500] * 3 and process.wait(120) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()
