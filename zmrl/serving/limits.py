"""What a client may send: checked before vLLM sees a request. And the count of running requests, for a graceful stop.

vLLM validates fields; this is about what it has no limit for (size, depth, numbers, concurrency), and about fields that
would reach our sampler or change other requests' answers.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from http import HTTPStatus
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zmrl.serving.errors import error_answer
from zmrl.serving.options import Limits

MAX_DEPTH = 32
"""Nested lists and objects of a body."""
INT64 = range(-(2**63), 2**63)
_SURROGATE = re.compile("[\ud800-\udfff]")
_REFUSED = {
    "use_beam_search": "beam search is not served: no trainer scores its candidates; drop it",
    # v1/sample/sampler.py:136: in a batch with such a request, every other request loses its top log-probs.
    "logprob_token_ids": "log-probs of chosen ids are not served; ask for the top ones by logprobs",
}


_OBJECTS = (
    "structured_outputs", "response_format", "stream_options", "vllm_xargs", "chat_template_kwargs",
    "repetition_detection", "kv_transfer_params", "ec_transfer_params",
)  # fmt: skip
"""Fields that vLLM's validators take for objects before they are checked to be some: a list would be a 500."""


class RequestError(ValueError):
    """A request that is refused."""

    def __init__(self, status: HTTPStatus, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param = status, param


class Gate:
    """Counts running requests; closed, it lets none in."""

    def __init__(self) -> None:
        self.running = 0
        self.closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        self.running += 1
        self._idle.clear()

    def leave(self) -> None:
        self.running -= 1
        if not self.running:
            self._idle.set()

    async def drained(self, seconds: float) -> bool:
        """Closes, and waits until nothing runs; False if something still runs after `seconds`."""
        self.closed = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True


class LimitsMiddleware:
    """ASGI middleware around vLLM's application."""

    def __init__(self, app: ASGIApp, limits: Limits, gate: Gate) -> None:
        self.app, self.limits, self.gate = app, limits, gate
        self._busy = 0
        """Requests whose bodies are here: a client that is slow to send takes no other's place."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self.gate.closed and (scope["method"] != "GET" or scope["path"] == "/health"):
            headers = {"Retry-After": "5", "Connection": "close"}
            answer = error_answer(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping", headers=headers)
            await answer(scope, receive, send)
        elif scope["method"] == "POST":
            self.gate.enter()
            try:
                await self._post(scope, receive, send)
            finally:
                self.gate.leave()
        else:
            await self.app(scope, receive, send)

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await self._body(scope, receive)
            if body is None:
                return
            check_body(body, self.limits)
            if self._busy >= self.limits.max_concurrent_requests:
                raise RequestError(HTTPStatus.TOO_MANY_REQUESTS, f"{self._busy} requests are running; try again later")
        except RequestError as error:
            headers = {"Connection": "close"}  # some of the body may be unread
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                headers = {"Retry-After": "1"}
            await error_answer(error.status, str(error), error.param, headers)(scope, receive, send)
            return
        self._busy += 1
        try:
            await self.app(scope, _replayed(body, receive), send)
        finally:
            self._busy -= 1

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone."""
        limit = self.limits.max_body_bytes
        large = RequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request may have {limit} bytes")
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced[:20]) > limit:
            raise large
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise large
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            seconds = f"{self.limits.body_seconds:g}"
            raise RequestError(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {seconds} s") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` for the application: the body first, then whatever the connection says (a disconnect)."""
    first = True

    async def replay() -> Message:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def check_body(body: bytes, limits: Limits) -> None:
    """RequestError unless `body` is JSON that is safe to hand on and within the limits."""
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not UTF-8: byte {error.start} is invalid") from None
    except RecursionError:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {str(error)[:200]}") from None
    _check_values(found)
    if isinstance(found, dict):
        _check_fields(found, limits)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _check_values(found: Any) -> None:
    """Depth, integers that no field can hold, and text that cannot be written as UTF-8 (half a surrogate pair)."""
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, str):
                if _SURROGATE.search(value):
                    raise RequestError(HTTPStatus.BAD_REQUEST, "the body holds half of a surrogate pair")
            elif isinstance(value, int) and value not in INT64:
                raise RequestError(HTTPStatus.BAD_REQUEST, "the body holds an integer of more than 64 bits")
        if not below:
            return
        level = below
    raise RequestError(HTTPStatus.BAD_REQUEST, f"the body is nested deeper than {MAX_DEPTH}")


def _check_fields(body: dict[str, Any], limits: Limits) -> None:
    for name, reason in _REFUSED.items():
        if body.get(name):
            raise RequestError(HTTPStatus.BAD_REQUEST, reason, name)
    for name in _OBJECTS:
        if not isinstance(body.get(name), dict | None):
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{name} must be an object", name)
    messages = body.get("messages")
    if messages == []:  # vLLM looks at the last one
        raise RequestError(HTTPStatus.BAD_REQUEST, "there is no message", "messages")
    if isinstance(messages, list) and not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        raise RequestError(HTTPStatus.BAD_REQUEST, "a message is an object with a role", "messages")
    extra = body.get("vllm_xargs") or {}
    if any(str(key).startswith("zmrl_") for key in extra):
        raise RequestError(HTTPStatus.BAD_REQUEST, "keys that begin with zmrl_ are the server's own", "vllm_xargs")
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], list | str)
    prompts = len(prompt) if several and isinstance(prompt, list) else 1
    if prompts * _integer(body.get("n"), 1) > limits.max_n:
        raise RequestError(
            HTTPStatus.BAD_REQUEST, f"n times the number of prompts may be {limits.max_n}; send several requests", "n"
        )
    if limits.max_tokens is not None:
        for name in ("max_tokens", "max_completion_tokens"):
            if _integer(body.get(name), 0) > limits.max_tokens:
                raise RequestError(HTTPStatus.BAD_REQUEST, f"{name} may be {limits.max_tokens}", name)


def _integer(value: Any, default: int) -> int:
    """What pydantic would make of a field: it also takes "12" and 12.0."""
    if isinstance(value, int | float):
        return int(value)
    if isinstance(value, str):
        try:
            return int(value[:32])
        except ValueError:
            return default
    return default
