"""An engine in this process, what it returns in bits, and the same numbers by a plain forward pass.

A cell of the matrix proves its own condition from the engine's counters (`proved`); one that cannot is VOID: it fails.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zmrl.batch_invariant.ops.head import log_probs
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.context import scratch_context
from zmrl.model.transformer import KimiK31
from zmrl.rollout.engine import engine_args, quiet_environment

RANK = 32
set_num_threads = torch._C._set_num_threads if hasattr(torch._C, "_set_num_threads") else torch._C.set_num_threads
"""torch's own function: vLLM's CPU worker replaces `torch.set_num_threads` (v1/worker/cpu_worker.py:130)."""


@dataclass(frozen=True)
class Prompt:
    """One sample to draw."""

    ids: tuple[int, ...]
    seed: int
    temperature: float = 1.0
    adapter: int | None = None
    """Version of the adapter."""
    max_tokens: int = 24
    ignore_eos: bool = True


@dataclass
class Sample:
    """What came back for a `Prompt`: token ids, FP32 log-probs and digests."""

    prompt: Prompt
    tokens: list[int]
    logp: np.ndarray
    digests: list[int]
    cached: int = field(compare=False)
    finish_reason: str | None = None

    def bits(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return tuple(self.tokens), tuple(self.logp.view(np.int32).tolist()), tuple(self.digests)


def proved(condition: bool, what: str) -> None:
    """The cell's condition occurred; otherwise the comparison proves nothing."""
    assert condition, f"VOID: {what}"


def assert_equal(found: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Equal in every bit of tokens, log-probs and digests, and not empty."""
    assert len(found) == len(expected) and all(s.tokens for s in found)
    different = [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a.bits() != b.bits()]
    assert not different, f"samples {different} differ, e.g. {found[different[0]]} against {expected[different[0]]}"


class Rollout:
    """A vLLM engine in this process, with LoRA."""

    def __init__(self, checkpoint: Path, **overrides: Any) -> None:
        quiet_environment()
        from vllm import LLM

        from zmrl.rollout.plugin import register

        register()
        set_num_threads(1)
        settings = {"max_loras": 3, "max_cpu_loras": 4, "kv_cache_memory_bytes": 128 << 20} | overrides
        self.llm = LLM(**engine_args(checkpoint, lora_rank=RANK, **settings))
        self.core = self.llm.llm_engine.engine_core.engine_core
        executor = self.core.model_executor
        self.runner = executor.driver_worker.worker.model_runner if hasattr(executor, "driver_worker") else None
        """None: workers are processes of their own."""
        self._tags = itertools.count()

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core, self.runner
        cleanup_dist_env_and_memory()
        gc.collect()

    def rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.llm.collective_rpc(method, args=args, kwargs=kwargs)[0]

    def forget(self) -> None:
        """Empties the prefix cache and sets the counters to zero."""
        assert self.llm.reset_prefix_cache()
        self.rpc("zmrl_counters", reset=True)

    def counters(self) -> dict[str, int]:
        return self.rpc("zmrl_counters")

    @contextmanager
    def chunks_of(self, tokens: int) -> Iterator[None]:
        """Prefill in chunks of at most `tokens`; 0: whole."""
        config, scheduler = self.core.scheduler.scheduler_config, self.core.scheduler
        before = config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold
        config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = tokens, False
        try:
            yield
        finally:
            config.long_prefill_token_threshold, scheduler.adaptive_long_prefill_threshold = before

    def new_tag(self) -> str:
        """A tag under which the digests of a request are kept."""
        return f"t{next(self._tags)}"

    @staticmethod
    def parameters(prompt: Prompt, tag: str, **more: Any) -> Any:
        """vLLM's sampling parameters of a prompt."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=prompt.temperature,
            seed=prompt.seed,
            max_tokens=prompt.max_tokens,
            ignore_eos=prompt.ignore_eos,
            logprobs=0,
            extra_args={"zmrl_tag": tag},
            **more,
        )

    def generate(self, prompts: Sequence[Prompt], **params: Any) -> list[Sample]:
        """One batch."""
        from zmrl.rollout.lora import adapter_request

        tags = [self.new_tag() for _ in prompts]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p.ids)} for p in prompts],
            [self.parameters(p, tag, **params) for p, tag in zip(prompts, tags, strict=True)],
            lora_request=[None if p.adapter is None else adapter_request(p.adapter) for p in prompts],
            use_tqdm=False,
        )
        digests = self.rpc("zmrl_take_digests", tags)
        return [
            self.sample(prompt, output, digests.get(tag, []))
            for prompt, tag, output in zip(prompts, tags, outputs, strict=True)
        ]

    @staticmethod
    def sample(prompt: Prompt, output: Any, digests: list[int]) -> Sample:
        """What vLLM's output says, finished or not."""
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        assert len(answer.logprobs) == len(tokens), "a log-prob is missing"
        logp = np.array([row[token].logprob for row, token in zip(answer.logprobs, tokens, strict=True)], np.float32)
        return Sample(prompt, tokens, logp, digests, output.num_cached_tokens or 0, answer.finish_reason)

    def alone(self, prompts: Sequence[Prompt]) -> list[Sample]:
        """Each prompt by itself, with an empty prefix cache."""
        found = []
        for prompt in prompts:
            self.forget()
            found += self.generate([prompt])
        return found

    def prompt_logprobs(self, sequences: Sequence[Sequence[int]], adapters: Sequence[int | None]) -> list[np.ndarray]:
        """Log-probs of tokens 1.. of each sequence, at temperature 1, FP32."""
        from vllm import SamplingParams

        from zmrl.rollout.lora import adapter_request

        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in sequences],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            lora_request=[None if a is None else adapter_request(a) for a in adapters],
            use_tqdm=False,
        )
        return [
            np.array([d[t].logprob for d, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)], "f4")
            for o in outputs
        ]


class PlainModel:
    """`KimiK31` without any host: what the trainer computes."""

    def __init__(self, checkpoint: Path, cache_format: CacheFormat = DEFAULT_CACHE_FORMAT) -> None:
        self.model = KimiK31.from_checkpoint(checkpoint, cache_format)

    @torch.no_grad()
    def logits(self, ids: Tensor, slot: int | None = None) -> Tensor:
        """FP32 [T, vocab] of one sequence."""
        slots = None if slot is None else torch.full((len(ids),), slot, dtype=torch.int32)
        context = scratch_context(self.model.config, [len(ids)], slots, self.model.cache_format)
        return self.model.logits(self.model(ids, context))

    def score(self, sample: Sample, slot: int | None = None) -> Sample:
        """The sample's log-probs and digests by one forward pass over prompt and answer."""
        ids = torch.tensor([*sample.prompt.ids, *sample.tokens[:-1]])
        logits = self.logits(ids, slot)[len(sample.prompt.ids) - 1 :]
        temperature = torch.full((logits.shape[0],), sample.prompt.temperature)
        logp, _, digest = log_probs(logits, torch.tensor(sample.tokens), temperature)
        return Sample(sample.prompt, sample.tokens, logp.numpy(), digest.tolist(), 0)


def random_adapter(model: KimiK31, seed: int) -> dict[str, Tensor]:
    """A strong adapter: packed BF16 buffers for one slot, keyed like `lora_buffers()`."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for key, buffer in model.lora_buffers().items():
        found[key] = torch.zeros_like(buffer[0])
        found[key].copy_(torch.randn(buffer[0].shape, generator=generator) * 0.05)
    for item in model.lora_slices(found):  # rows that fill a panel up are zero
        item.write(item.read())
    return found


def text(length: int, seed: int) -> tuple[int, ...]:
    """Random bytes."""
    return tuple(torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist())
