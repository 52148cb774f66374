"""The limits, around an application that answers at once: no engine."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from starlette.types import Message

from zmrl.serving import server as serving_server
from zmrl.serving.limits import Gate, LimitsMiddleware
from zmrl.serving.options import Limits

LIMITS = Limits(max_body_bytes=2000, max_n=8, max_tokens=50, max_concurrent_requests=2, body_seconds=0.3)


class Application:
    """Echoes how long the body was; /slow waits until it may answer."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.go = asyncio.Event()
        app = FastAPI()

        @app.post("/slow")
        async def slow(request: Request) -> int:
            await self.go.wait()
            return len(await request.body())

        @app.post("/")
        async def echo(request: Request) -> Any:
            return await request.json()

        @app.get("/health")
        async def health() -> str:
            return "well"

        self.app = LimitsMiddleware(app, LIMITS, self.gate)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://test")


def post(content: bytes | AsyncIterator[bytes]) -> httpx.Response:
    async def run() -> httpx.Response:
        async with Application().client() as client:
            return await client.post("/", content=content)

    return asyncio.run(run())


def refusal(content: bytes) -> tuple[int, str]:
    answer = post(content)
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == answer.status_code
    return answer.status_code, error["message"]


def test_what_is_sound_passes_unchanged() -> None:
    body = {"a": [1, 2.5, "é", None, True, {"n": -(2**63)}], "n": 8, "max_tokens": 50, "prompt": [1] * 100}
    answer = post(json.dumps(body).encode())
    assert answer.status_code == 200 and answer.json() == body


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b'{"a": 1}}', "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": -Infinity}', "is no number"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": 9223372036854775808}', "64 bits"),
        (b'{"a": ' + b"9" * 1500 + b"}", "64 bits"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8: byte 0"),
        (b'{"prompt": "\xc3\x28"}', "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[" * 33 + b"]" * 33, "nested deeper"),
        (b'{"a":' * 300 + b"1" + b"}" * 300, "nested deeper"),
        (b"[" * 999 + b"]" * 999, "nested deeper"),
        (b'{"n": 9}', "n times"),
        (b'{"n": "9"}', "n times"),
        (b'{"n": 9.0}', "n times"),
        (b'{"n": 3, "prompt": ["a", "b", "c"]}', "n times"),
        (b'{"prompt": [[1],[1],[1],[1],[1],[1],[1],[1],[1]]}', "n times"),
        (b'{"max_tokens": 51}', "max_tokens may be 50"),
        (b'{"max_completion_tokens": 1e300}', "max_completion_tokens may be 50"),
        (b'{"use_beam_search": true}', "beam search"),
        (b'{"logprob_token_ids": [1]}', "chosen ids"),
        (b'{"vllm_xargs": {"zmrl_seed": "x"}}', "zmrl_"),
        (b'{"vllm_xargs": []}', "must be an object"),
        (b'{"structured_outputs": []}', "must be an object"),
        (b'{"messages": [{"role": "user", "content": ""}, {"author": {"role": "tool"}}]}', "with a role"),
        (b'{"messages": ["a"]}', "with a role"),
        (b'{"messages": []}', "there is no message"),
    ],
)
def test_what_is_not_is_refused_with_the_reason(body: bytes, reason: str) -> None:
    status, message = refusal(body)
    assert status == 400 and reason in message and len(message) < 400


def test_a_large_body_is_refused_announced_or_not() -> None:
    status, message = refusal(b'"' + b"a" * 2000 + b'"')
    assert status == 413 and "2000 bytes" in message

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield b"a" * 100

    assert post(chunks()).status_code == 413


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def run() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            if not sent:
                await asyncio.sleep(5)
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        application = Application()
        scope = {"type": "http", "method": "POST", "path": "/", "headers": []}
        await application.app(scope, receive, send)
        assert application.gate.running == 0
        return sent

    assert asyncio.run(run())[0]["status"] == 408


def test_more_requests_than_allowed_are_sent_away_and_the_rest_is_answered() -> None:
    async def run() -> None:
        application = Application()
        async with application.client() as client:
            tasks = [asyncio.create_task(client.post("/slow", content=b"{}")) for _ in range(5)]
            done, _ = await asyncio.wait(tasks, timeout=0.3)
            assert [task.result().status_code for task in done] == [429] * 3
            assert all(task.result().headers["retry-after"] for task in done)
            application.go.set()
            assert sorted(r.status_code for r in await asyncio.gather(*tasks)) == [200, 200, 429, 429, 429]
            assert application.gate.running == 0
            assert (await client.post("/slow", content=b"{}")).status_code == 200

    asyncio.run(run())


def test_a_stopping_server_ends_what_runs_and_lets_nothing_in() -> None:
    async def run() -> None:
        application = Application()
        async with application.client() as client:
            running = asyncio.create_task(client.post("/slow", content=b"{}"))
            await asyncio.sleep(0.1)
            assert not await application.gate.drained(0.1), "it is still running"
            for answer in (await client.post("/", content=b"{}"), await client.get("/health")):
                assert answer.status_code == 503 and "stopping" in answer.json()["error"]["message"]
            application.go.set()
            assert await application.gate.drained(5)
            assert (await running).status_code == 200

    asyncio.run(run())


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """A real HTTP server with our protocol around the application."""
    monkeypatch.setattr(serving_server, "HEAD_SECONDS", 0.5)
    application = Application()
    config = uvicorn.Config(application.app, http=serving_server.PatientProtocol, lifespan="off", log_level="error")
    running = uvicorn.Server(config)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=asyncio.run, args=(running.serve(sockets=[sock]),))
        thread.start()
        while not running.started:
            time.sleep(0.01)
        yield sock.getsockname()
        running.should_exit = True
        thread.join()


def closed_after(address: tuple[str, int], *parts: bytes, pause: float = 0.0) -> tuple[bytes, float]:
    """What the server says to these bytes, and after how many seconds it closes."""
    with socket.create_connection(address, timeout=10) as connection:
        begun = time.monotonic()
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        found = b""
        while data := connection.recv(4096):
            found += data
        return found, time.monotonic() - begun


def test_a_half_open_connection_is_closed(address: tuple[str, int]) -> None:
    for parts in ((), (b"POST / HT",), (b"POST / HTTP/1.1\r\nHost: a\r\n",)):
        said, seconds = closed_after(address, *parts)
        assert said == b"" and 0.3 < seconds < 5, parts
    drip = [b"POST / HTTP/1.1\r\n", *(b"X-A: 1\r\n" for _ in range(5))]
    with pytest.raises(OSError, match=r"reset|pipe"):
        closed_after(address, *drip, *drip[1:], pause=0.2)
    said, seconds = closed_after(address, b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n{")
    assert b"408" in said and seconds < 5
    assert httpx.post(f"http://127.0.0.1:{address[1]}/", json={}).status_code == 200


def test_what_is_not_http_is_answered_or_closed(address: tuple[str, int]) -> None:
    for parts in ((b"\x16\x03\x01\x02\x00",), (b"GET / HTTP/9.9\r\n\r\n",), (b"\r\n\r\n\0\0\0",)):
        said, _ = closed_after(address, *parts)
        assert said == b"" or b" 400 " in said
    request = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    said, _ = closed_after(address, request)
    assert b" 400 " in said
    assert httpx.post(f"http://127.0.0.1:{address[1]}/", json={}).status_code == 200


def test_two_requests_on_one_connection(address: tuple[str, int]) -> None:
    """The wait for the second one's head begins when it begins."""
    with httpx.Client(base_url=f"http://127.0.0.1:{address[1]}") as client:
        assert client.post("/", json={}).status_code == 200
        time.sleep(0.8)
        assert client.post("/", json={}).status_code == 200
