"""Random schedules: requests that arrive, are cut in chunks, evicted and aborted, against what each gives alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tests.rollout.harness import Prompt, Rollout, Sample, text

CHUNKS = (0, 5, 7, 16, 33)
"""Largest chunks of a prefill; 0: whole."""


@dataclass
class Tally:
    """What happened over several schedules, beside the engine's own counters."""

    requests: int = 0
    aborted: int = 0
    partial: int = 0
    """Aborted after at least one token."""
    cached: int = 0
    """Requests that began with cached blocks."""
    tokens: int = 0


def prompt_pool(count: int, adapters: tuple[int, ...], seed: int) -> list[Prompt]:
    """Prompts of 5 to 110 tokens, half of them with a common beginning; some with adapters, at several temperatures."""
    rng = random.Random(seed)
    common = text(80, seed)
    pool = []
    for i in range(count):
        length = rng.randint(5, 110)
        ids = (common + text(110, seed + i))[:length] if i % 2 else text(length, 1000 * seed + i)
        adapter = rng.choice((None, *adapters))
        pool.append(Prompt(ids, rng.getrandbits(40), rng.choice((0.7, 1.0)), adapter, rng.randint(3, 14)))
    return pool


@dataclass
class _Request:
    prompt: Prompt
    expected: Sample
    name: str
    tag: str
    arrival: int
    abort: int | None
    output: Any = None
    """The latest of vLLM."""


def run_schedule(rollout: Rollout, pool: list[Sample], seed: int, tally: Tally) -> None:
    """Runs schedule `seed` over samples drawn from `pool`; AssertionError for a bit that differs from it."""
    rng = random.Random(seed)
    if rng.random() < 0.2:
        assert rollout.llm.reset_prefix_cache()
    requests = []
    for i in range(rng.randint(4, 9)):
        sample, arrival = rng.choice(pool), rng.randint(0, 8)
        abort = arrival + rng.randint(1, 14) if rng.random() < 0.2 else None
        requests.append(_Request(sample.prompt, sample, f"{seed}-{i}", rollout.new_tag(), arrival, abort))
    with rollout.chunks_of(rng.choice(CHUNKS)):
        _run(rollout, requests)
    digests = rollout.rpc("zmrl_take_digests", [r.tag for r in requests])
    for r in requests:
        tally.requests += 1
        finished = r.output is not None and r.output.finished
        assert finished or r.abort is not None, f"schedule {seed}: request {r.name} was lost"
        tally.aborted += not finished
        if r.output is None:
            continue
        found = rollout.sample(r.prompt, r.output, digests.get(r.tag, []))
        count = len(found.tokens)
        assert count == len(r.expected.tokens) or not finished
        tally.partial += count > 0 and not finished
        tally.cached += found.cached > 0
        tally.tokens += count
        seen = tuple(part[:count] for part in found.bits())  # the engine may be a token ahead of an abort
        assert seen == tuple(part[:count] for part in r.expected.bits()), f"schedule {seed}: {r.name} differs"


def _run(rollout: Rollout, requests: list[_Request]) -> None:
    from zmrl.rollout.lora import adapter_request

    engine = rollout.llm.llm_engine
    by_name = {r.name: r for r in requests}
    step, waiting, aborts = 0, list(requests), [r for r in requests if r.abort is not None]
    while waiting or engine.has_unfinished_requests():
        for r in [r for r in waiting if r.arrival <= step]:
            lora = None if r.prompt.adapter is None else adapter_request(r.prompt.adapter)
            ids = {"prompt_token_ids": list(r.prompt.ids)}
            engine.add_request(r.name, ids, rollout.parameters(r.prompt, r.tag), lora_request=lora)
            waiting.remove(r)
        for r in [r for r in aborts if r.abort <= step]:
            if r.output is None or not r.output.finished:
                engine.abort_request([r.name])
            aborts.remove(r)
        for output in engine.step() if engine.has_unfinished_requests() else []:
            by_name[output.request_id].output = output
        step += 1
