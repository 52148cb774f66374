"""The settings under which the rollout samples, and the proof that each setting's condition occurred.

Pure: names, numbers and predicates. Needs neither torch nor vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zmrl.parallel.layout import HEADS


@dataclass(frozen=True)
class Observation:
    """What the engine's counters and the samples say about the run of one setting."""

    prefill_chunks: int
    """Steps of requests that were still in their prompt."""
    max_requests: int
    """Most requests in one step."""
    max_adapters: int
    """Most adapters in one step."""
    preemptions: int
    cached_tokens: list[int]
    """Prompt tokens served from the prefix cache, per sample."""
    prompt_lengths: list[int]
    response_lengths: list[int]
    isa: str
    threads: int
    """Most threads of a kernel."""
    index_topk: int
    rows_by_tokens: int | None = None
    """The fewest that a rank took in prefills by tokens; None: prefills go by heads."""


Proof = Callable[[Observation], str | None]
"""None, or what did not occur."""


def _at_least(name: str, least: int) -> Proof:
    def proof(seen: Observation) -> str | None:
        value = getattr(seen, name)
        return None if value >= least else f"{name} is {value}, the setting needs at least {least}"

    return proof


def _alone(seen: Observation) -> str | None:
    return None if seen.max_requests == 1 else f"{seen.max_requests} requests ran together"


def _chunked(size: int) -> Proof:
    def proof(seen: Observation) -> str | None:
        # vLLM may cut one token later, to end a chunk with a block
        needed = sum(-(-length // (size + 1)) for length in seen.prompt_lengths)
        if max(seen.prompt_lengths) <= size:
            return f"no prompt is longer than a chunk of {size}"
        chunks = seen.prefill_chunks
        return None if chunks >= needed else f"{chunks} chunks; these prompts in chunks of {size} are {needed}"

    return proof


def _cached(seen: Observation) -> str | None:
    return None if sum(seen.cached_tokens) > 0 else "no token came from the prefix cache"


def _uncached(seen: Observation) -> str | None:
    return None if sum(seen.cached_tokens) == 0 else f"{sum(seen.cached_tokens)} tokens came from the prefix cache"


def _selective(seen: Observation) -> str | None:
    longest = max(p + r for p, r in zip(seen.prompt_lengths, seen.response_lengths, strict=True))
    return None if longest > seen.index_topk else f"no context exceeds index_topk = {seen.index_topk}"


@dataclass(frozen=True)
class Setting:
    """One way of running the same samples. What is not said is: a batch of all prompts, whole prefills, cold cache."""

    name: str
    what: str
    """The condition, in words."""
    proofs: tuple[Proof, ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    """Engine arguments that differ from `zmrl.rollout.engine.engine_args`."""
    samples: int = 1
    """Samples per prompt."""
    alone: bool = False
    """One request at a time."""
    temperature: float = 1.0
    least_tokens: int = 0
    """Responses are at least so long, whatever --max-tokens says."""
    adapters: int = 0
    """Adapters used, in turn with the base model."""
    threads: int = 1
    isa: str | None = None
    """None: the best this CPU has."""
    warm: bool = False
    """Run twice; the second run is compared."""
    rescore: bool = False
    """Score the samples in vLLM by prompt_logprobs rather than sample them."""

    @property
    def needs_one_rank(self) -> bool:
        """Threads and instruction set are changed in this process, where the engine's only rank is."""
        return self.threads != 1 or self.isa is not None

    @property
    def longest_chunk(self) -> int | None:
        """New tokens of a request in one step, if the setting limits them."""
        return self.engine.get("long_prefill_token_threshold")

    def failed_proofs(self, seen: Observation) -> list[str]:
        """What did not occur; empty if the setting tested what it says."""
        found = [proof(seen) for proof in (*self.proofs, _selective)]
        if self.isa is not None and seen.isa != self.isa:
            found.append(f"ran on {seen.isa}, not on {self.isa}")
        if seen.threads != self.threads:
            found.append(f"ran on {seen.threads} threads, not on {self.threads}")
        if seen.rows_by_tokens == 0:
            found.append("a rank took no row by tokens")
        seen_instead = (
            f"seen: at most {seen.max_requests} requests in a step, {seen.prefill_chunks} prefill chunks, "
            f"{seen.preemptions} preemptions, {sum(seen.cached_tokens)} cached tokens, prompts of "
            f"{min(seen.prompt_lengths)} to {max(seen.prompt_lengths)} tokens"
        )
        return [f"condition not met: {reason}; {seen_instead}" for reason in found if reason is not None]


BLOCK_SIZE = 32
"""Of the cache. Small, and the same for all formats, so that every prompt has boundaries for the settings to meet."""
_SMALL_POOL = {"num_gpu_blocks_override": 28, "enable_prefix_caching": False}
"""Blocks that hold a few of the default prompts at a time, and not a block more for each of them."""
_WIDE = {"max_num_batched_tokens": 16384, "enable_prefix_caching": False}
"""So that the prefills of all samples fit one step, and no sample waits for the prefix of another."""


def settings_for(ranks: int, isas: list[str], prefill: str = HEADS) -> list[Setting]:
    """Those that a rollout of so many ranks can run; by tokens, with a token for each of 2W slices."""
    found = [s for s in default_settings(isas) if ranks == 1 or not s.needs_one_rank]
    return [s for s in found if prefill == HEADS or s.longest_chunk is None or s.longest_chunk >= 2 * ranks]


def default_settings(isas: list[str]) -> list[Setting]:
    """All settings; `isas`: instruction sets of this CPU."""
    return [
        Setting("batch-8", "all prompts together", (_at_least("max_requests", 8),)),
        Setting("alone", "one request at a time", (_alone,), alone=True),
        Setting("batch-64", "eight samples of each prompt", (_at_least("max_requests", 64),), _WIDE, samples=8),
        *(
            Setting(f"chunk-{n}", f"prefill in chunks of {n}", (_chunked(n),), {"long_prefill_token_threshold": n})
            for n in (1, 7, 16, 64)
        ),
        Setting("cache-cold", "prefix cache on and empty", (_uncached,)),
        Setting("cache-warm", "prefixes from the cache", (_cached,), warm=True),
        Setting(
            "preempted",
            "requests evicted and recomputed",
            (_at_least("preemptions", 1),),
            _SMALL_POOL,
            samples=4,
            least_tokens=BLOCK_SIZE,
        ),
        Setting("rescored", "decode against vLLM's prompt log-probs", rescore=True),
        Setting("adapter-1", "one adapter", (_at_least("max_adapters", 1),), adapters=1),
        Setting("adapter-3", "three adapters and none in a batch", (_at_least("max_adapters", 3),), adapters=3),
        *(Setting(f"temperature-{t}", f"sampled at {t}", temperature=t) for t in (0.7, 1.3)),
        Setting("threads-2", "two threads", threads=2, samples=8),
        *(Setting(f"isa-{isa}", f"{isa} kernels", isa=isa) for isa in isas),
    ]


def sample_key(sample: dict[str, Any]) -> str:
    """Samples with equal keys have equal log-probs, wherever they were sampled."""
    return json.dumps([sample[part] for part in ("adapter", "temperature", "prompt_ids", "token_ids")])
