"""What a client is answered: real clients, and the bits of the trainer's forward pass."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import httpx
import openai
import pytest

from tests.rollout.harness import PlainModel, text
from tests.serving.harness import DEFAULTS, PROMPT, Served, bits, plain_bits

pytestmark = pytest.mark.slow
EXTRA = {"ignore_eos": True, "return_token_ids": True}


def choices(answer: Any) -> list[tuple[Any, ...]]:
    return [(tuple(c.token_ids), tuple(c.logprobs.token_logprobs)) for c in answer.choices]


def test_a_served_completion_is_the_trainers(server: Served, plain: PlainModel) -> None:
    (found,) = bits(server.complete(seed=4))
    assert found == plain_bits(plain, found[0])
    assert found != plain_bits(plain, [*found[0][:-1], found[0][-1] ^ 1])


def test_64_clients_at_once_get_what_one_gets_alone(server: Served) -> None:
    """TRL#4873, UniRL#208: the same seed and prompt are the same bits, whatever else runs."""

    async def ask(client: openai.AsyncOpenAI, seed: int) -> list[tuple[Any, ...]]:
        prompt = list(text(20 + seed, seed))
        return choices(
            await client.completions.create(
                model="base", prompt=prompt, max_tokens=16, seed=seed, logprobs=0, extra_body=EXTRA
            )
        )

    async def together() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(64)))

    async def alone() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return [await ask(client, seed) for seed in range(0, 64, 9)]

    server.worker("zmrl_counters", True)
    crowd = asyncio.run(together())
    most = server.worker("zmrl_counters")["max_requests"]
    assert most > 8, f"VOID: at most {most} requests ran together"
    assert asyncio.run(alone()) == crowd[::9]
    assert len(set(map(tuple, crowd))) == 64


def test_streaming_is_the_same_answer(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body: dict[str, Any] = {"model": "base", "prompt": PROMPT, "max_tokens": 20, "seed": 3, "n": 2, "logprobs": 2}
        whole = client.completions.create(**body, extra_body=EXTRA)
        parts: dict[int, tuple[list[int], list[float]]] = {0: ([], []), 1: ([], [])}
        chunks = 0
        for chunk in client.completions.create(**body, stream=True, extra_body=EXTRA):
            for choice in chunk.choices:
                chunks += 1
                parts[choice.index][0].extend(choice.token_ids)  # type: ignore[attr-defined]
                parts[choice.index][1].extend(choice.logprobs.token_logprobs)  # type: ignore[union-attr, arg-type]
        assert chunks > 10
        assert [(tuple(ids), tuple(values)) for ids, values in parts.values()] == choices(whole)


def test_choice_i_of_n_is_drawn_with_seed_plus_i(server: Served) -> None:
    group = bits(server.complete(n=3, seed=5))
    assert group == [bits(server.complete(seed=5 + i))[0] for i in range(3)] and len(set(group)) == 3
    assert bits(server.complete(prompt=[PROMPT, PROMPT], seed=5)) == [group[0]] * 2
    unseeded = bits(server.complete(n=3, max_tokens=24))
    assert len(set(unseeded)) == 3


def test_logprobs_are_raw_whatever_the_sampling(server: Served, plain: PlainModel) -> None:
    """TRL#4873: one declared mode; at temperature 0 too, whatever truncation, penalties or grammar."""
    for sampling in (
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        {"temperature": 1.3, "presence_penalty": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2},
        {"allowed_token_ids": [65, 66, 67], "logit_bias": {"66": 3.0}},
        {"structured_outputs": {"choice": ["yes, it is", "no, it is not"]}, "ignore_eos": False},
    ):
        (found,) = bits(server.complete(seed=1, **sampling))
        assert found == plain_bits(plain, found[0]), sampling


def test_prompt_logprobs_do_not_depend_on_the_order_of_requests(server: Served, plain: PlainModel) -> None:
    """vllm#42019, with the prefix cache on. And they are the decoded ones."""

    def ask(prompt: list[int]) -> list[float]:
        rows = server.complete(prompt=prompt, max_tokens=1, prompt_logprobs=0)["choices"][0]["prompt_logprobs"]
        assert rows[0] is None
        return [row[str(token)]["logprob"] for row, token in zip(rows[1:], prompt[1:], strict=True)]

    prompts = [list(text(200 + i, 40)) for i in range(3)]  # each begins with the one before
    assert prompts[1][:200] == prompts[0]
    forward = [ask(prompt) for prompt in prompts]
    backward = [ask(prompt) for prompt in reversed(prompts)]
    assert forward == backward[::-1]
    assert tuple(forward[2]) == plain_bits(plain, prompts[2][1:], prompts[2][:1])[1]


def test_stops(server: Served) -> None:
    whole = server.complete(seed=2, max_tokens=30)["choices"][0]
    ids = whole["token_ids"]
    by_id = server.complete(seed=2, max_tokens=30, stop_token_ids=[ids[9]])["choices"][0]
    cut = ids.index(ids[9]) + 1
    assert by_id["token_ids"] == ids[:cut] and by_id["finish_reason"] == "stop"
    letters = [i for i in range(5, 29) if chr(ids[i]).isascii() and ids[i] < 128]
    word = chr(ids[letters[0]])
    by_text = server.complete(seed=2, max_tokens=30, stop=[word])["choices"][0]
    assert by_text["finish_reason"] == "stop" and by_text["stop_reason"] == word and word not in by_text["text"]
    assert by_text["token_ids"] == ids[: len(by_text["token_ids"])]


def test_chat(server: Served, plain: PlainModel) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "What is 2 + 2?"}]
        body: dict[str, Any] = {"model": "base", "messages": messages, "max_tokens": 8, "seed": 6, "logprobs": True}
        first = client.chat.completions.create(**body, extra_body=EXTRA)
        again = client.chat.completions.create(**body, extra_body=EXTRA)
        prompt, ids = first.prompt_token_ids, first.choices[0].token_ids  # type: ignore[attr-defined]
        values = tuple(item.logprob for item in first.choices[0].logprobs.content)  # type: ignore[union-attr]
        assert (tuple(ids), values) == plain_bits(plain, ids, prompt)
        assert again.choices[0].token_ids == ids  # type: ignore[attr-defined]
        streamed = client.chat.completions.create(**body, stream=True, extra_body=EXTRA)
        assert [t for c in streamed for ch in c.choices for t in getattr(ch, "token_ids", None) or []] == ids


def test_curl(server: Served) -> None:
    body = json.dumps(DEFAULTS | {"seed": 11})
    command = ["curl", "-sS", "-m", "60", f"{server.url}/v1/completions", "-H", "Content-Type: application/json"]
    found = subprocess.run([*command, "-d", body], capture_output=True, check=True, text=True).stdout
    assert bits(json.loads(found)) == server.reference()


def test_models_health_and_metrics(server: Served) -> None:
    assert {m["id"] for m in server.http.get("/v1/models").json()["data"]} >= {"base", "first"}
    assert server.http.get("/health").status_code == 200
    metrics = server.http.get("/metrics").text
    for name in ("vllm:kv_cache_usage_perc", "vllm:request_success_total", 'zmrl_cache_bytes{kind="state"}'):
        assert name in metrics


def test_only_what_is_answered_for_is_served(server: Served) -> None:
    paths = set(server.http.get("/openapi.json").json()["paths"])
    assert paths == {
        "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
        "/health", "/version", "/metrics",
    }  # fmt: skip
    for path in ("/invocations", "/pause", "/tokenize", "/inference/v1/generate", "/scale_elastic_ep", "/docs"):
        assert server.http.get(path).status_code == 404 and server.post(path).status_code == 404
    with pytest.raises(httpx.HTTPError), httpx.stream("GET", f"{server.url}/v1/realtime", timeout=1) as answer:
        answer.raise_for_status()


def test_fields_that_would_reach_other_requests_are_refused(server: Served) -> None:
    before = server.reference()
    for body in (
        {"vllm_xargs": {"zmrl_seed": "x"}},
        {"vllm_xargs": {"zmrl_tag": "t"}},
        {"logprob_token_ids": [1, 2]},
        {"use_beam_search": True},
        {"prompt": [[1]] * 65},
        {"n": "65"},
        {"max_tokens": 401},
        {"logprobs": 21},
    ):
        answer = server.post("/v1/completions", **(DEFAULTS | body))
        assert answer.status_code == 400 and answer.json()["error"]["message"], (body, answer.text)
    assert server.reference() == before


def test_a_request_without_max_tokens_is_cut_at_the_limit(server: Served) -> None:
    answer = server.post(
        "/v1/chat/completions", model="base", messages=[{"role": "user", "content": "?"}], ignore_eos=True
    ).json()
    assert answer["usage"]["completion_tokens"] == 400


def test_a_client_that_leaves_frees_its_blocks(server: Served) -> None:
    body = DEFAULTS | {"max_tokens": 400, "stream": True, "seed": 1}
    before = len(server.lines())
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        used = [server.gauge(f'zmrl_cache_bytes{{kind="{kind}"}}') for kind in ("latent", "index", "state")]
        assert all(used), f"VOID: {used}"
    for _ in range(200):
        if not server.gauge('vllm:num_requests_running{engine="0",model_name="base"}'):
            break
        server.reference()  # a step: the worker hears of what ended
    assert server.gauge("zmrl_requests_running") == 0
    server.call(server.engine.settled())
    server.reference()
    left = [line for line in server.lines()[before:] if line["finish_reason"] == "abort"]
    assert len(left) == 1 and 0 < len(left[0]["token_ids"]) < 400, "what was sent before is in the transcript"
    usage = server.gauge('vllm:kv_cache_usage_perc{engine="0",model_name="base"}')
    assert usage == 0
