"""Requests made from the server's own OpenAPI document, and broken ones: no crash, no leak, no changed bit."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from tests.serving.conftest import arguments
from tests.serving.harness import DEFAULTS, PROMPT, Client, Served, ServedProcess

pytestmark = pytest.mark.slow

NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**64, 10**400, 1e308, -1e308, 1e-320, 0.5]),
    st.sampled_from(["", "a", "\0", "<|open|>", "\U0001f600", "é" * 3000, "../../etc/passwd", "1", "-1", "zmrl_tag"]),
    st.text(max_size=8),
)
JUNK = st.recursive(
    NASTY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "content-type": st.sampled_from(["application/json", "application/json; charset=utf-16", "text/plain", "x"]),
        "x-request-id": st.sampled_from(["same", "", "a" * 2000]),
        "x-data-parallel-rank": st.sampled_from(["0", "7", "-1", "x", "9" * 50]),
        "x-vllm-priority": st.sampled_from(["0", "5", "x", "-9"]),
        "x-session-id": st.sampled_from(["s", "s" * 5000]),
        "traceparent": st.just("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        "endpoint-load-metrics-format": st.sampled_from(["json", "text", "x"]),
        "expect": st.just("100-continue"),
    },
)
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": DEFAULTS | {"prompt": PROMPT[:9], "max_tokens": 3},
    "/v1/chat/completions": {"model": "base", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/load_lora_adapter": {"lora_name": "fuzzed", "lora_path": "2", "load_inplace": True},
    "/v1/unload_lora_adapter": {"lora_name": "fuzzed"},
}
"""Requests that are answered: most of a document's own are refused by their first field."""


@dataclass(frozen=True)
class Drawn:
    """One request."""

    method: str
    path: str
    body: bytes | None
    headers: dict[str, str]


@st.composite
def requests(draw: st.DrawFn, document: dict[str, Any], cases: st.SearchStrategy[schemathesis.Case]) -> list[Drawn]:
    """One as the document says or breaks it; and one that is answered, with fields of that or nasty ones, or cut up."""
    case = draw(cases)
    headers = {"content-type": "application/json"} | draw(st.one_of(st.just({}), st.just({}), HEADERS))
    if case.method != "POST":
        return [Drawn(case.method, case.path, None, headers)]
    body: Any = case.body
    how = draw(st.integers(0, 3))
    if how < 2 and isinstance(body, dict):
        kept = draw(st.lists(st.sampled_from(sorted(body)), max_size=3, unique=True)) if body else []
        other = _encoded(BASE[case.path] | {name: body[name] for name in kept}, draw(st.booleans()))
    elif how == 2:
        names = fields(document, case.path)
        nasty = draw(st.dictionaries(st.sampled_from(names), JUNK, min_size=1, max_size=2))
        other = _encoded(BASE[case.path] | nasty, draw(st.booleans()))
    else:
        whole = _encoded(body, True) or b"{}"
        at = draw(st.integers(0, len(whole) - 1))
        other = draw(st.sampled_from([whole[:at], whole[:at] + b"\xff" + whole[at:], whole * 2, b"[" * 500 + whole]))
    return [Drawn(case.method, case.path, content, headers) for content in (_encoded(body, False), other)]


def _encoded(body: Any, escaped: bool) -> bytes:
    """Half surrogate pairs too."""
    return body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


def fields(document: dict[str, Any], path: str) -> list[str]:
    """Names of the fields of a route's body."""
    reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    return sorted(document["components"]["schemas"][reference.rsplit("/", 1)[1]]["properties"])


def fuzz(server: Client, count: int, number: int) -> Counter[int]:
    """Sends about 1.7 times `count` requests; how often each status came. Fails at a 5xx."""
    document = server.http.get("/openapi.json").json()
    operations = [result.ok() for result in schemathesis.openapi.from_dict(document).get_all_operations()]
    assert {operation.path for operation in operations if operation.method == "post"} == BASE.keys()
    modes = [(operation, GenerationMode.POSITIVE) for operation in operations]
    modes += [(operation, GenerationMode.NEGATIVE) for operation in operations if operation.method == "post"]
    cases = st.one_of([operation.as_strategy(generation_mode=mode) for operation, mode in modes])
    statuses: Counter[int] = Counter()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(requests(document, cases))
    def send(drawn: list[Drawn]) -> None:
        for request in drawn:
            answer = server.http.request(
                request.method, request.path, content=request.body, headers=request.headers, timeout=60
            )
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (request, answer.text)
            if answer.status_code >= 400 and request.method == "POST":
                assert answer.json()["error"]["message"], (request, answer.text)

    send()
    return statuses


def settle(server: Served) -> None:
    """Unloads what was loaded; nothing may still run."""
    server.unload_all_but_first()
    server.reference()  # a step: the worker hears of what ended
    server.call(server.engine.settled())
    assert server.engine.get_num_unfinished_requests() == 0 and server.gate.running == 0
    assert server.gauge('vllm:kv_cache_usage_perc{engine="0",model_name="base"}') == 0
    assert server.gauge("zmrl_adapters_loaded") == 1 and server.worker("zmrl_counters")["digest_tags"] == 0


def test_500_requests_from_the_openapi_document(server: Served) -> None:
    before = server.reference()
    statuses = fuzz(server, 330, 1)
    assert sum(statuses.values()) >= 500 and statuses[200] > 50 and statuses[400] > 50, f"VOID: {statuses}"
    settle(server)
    assert server.reference() == before


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_10000_requests_leave_no_memory_behind(checkpoint: Path, root: Path, tmp_path: Path) -> None:
    """Of the server's processes, each by itself; what generates the requests has memory of its own."""
    server = ServedProcess(arguments(checkpoint, root, tmp_path / "served.jsonl"), tmp_path / "log")
    try:
        before, sent = server.reference(), Counter[int]()
        sent += fuzz(server, 1500, 2)
        start = server.memory()
        for part in range(5):
            sent += fuzz(server, 1000, 3 + part)
            now = server.memory()
            grown = {name: (now[name] - start[name]) >> 20 for name in start}
            print(f"{sent.total():,} requests, {dict(sent)}; MiB more than after the first part: {grown}", flush=True)
        server.unload_all_but_first()
        assert server.reference() == before
        assert sent.total() > 10_000 and now.keys() == start.keys()
        assert server.gauge('vllm:kv_cache_usage_perc{engine="0",model_name="base"}') == 0
        assert server.gauge("zmrl_adapters_loaded") == 1 and server.gauge("zmrl_requests_running") == 0
        assert sum(grown.values()) < 100, grown
    finally:
        server.stop()


def test_a_client_that_breaks_off_anywhere_leaves_nothing(server: Served) -> None:
    """While it sends, right after, and while it reads the answer."""
    before = server.reference()
    body = json.dumps(DEFAULTS | {"max_tokens": 300, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    whole = head.encode() + b"\r\n\r\n" + body
    url = httpx.URL(server.url)
    for size in (10, len(whole) - len(body), len(whole) - 1, *[len(whole)] * 5):
        for wait in (0.0, 0.01, 0.05):
            with socket.create_connection((url.host, url.port or 80)) as connection:
                connection.sendall(whole[:size])
                time.sleep(wait)
    settle(server)
    assert server.reference() == before
