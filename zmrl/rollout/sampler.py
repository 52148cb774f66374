"""Sampling and log-probs without generator state, in the order that the trainer recomputes.

A token is a pure function of its logits row, the temperature and (seed, output position) (numerics.md, Log-probs and
sampling), so nothing is lost when a row is discarded by chunked prefill, preempted or moved. vLLM's own sampler draws
from torch.Generator objects, whose state depends on every discarded draw.

Truncation, penalties and grammars are vLLM's own processors, applied before our sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config.model import LogprobsMode
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from zmrl.batch_invariant.ops.head import log_probs, log_softmax, sample


@dataclass
class SampledRows:
    """Which draw each logits row of a step is."""

    seeds: Tensor
    """int64 [R]"""
    positions: Tensor
    """int64 [R]: the output position; 0 is the first token after the prompt. Rows to be discarded may hold anything."""
    raw_logits: Tensor | None = None
    """FP32 [R, vocab]: the rows before a grammar masked them; None: they were not masked."""


class ZmrlSampler(Sampler):
    """Replaces the runner's sampler. The runner sets `rows` before each step."""

    def __init__(self, logprobs_mode: LogprobsMode) -> None:
        super().__init__(logprobs_mode)
        self.rows: SampledRows | None = None

    def forward(
        self,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
        predict_bonus_token: bool = False,
        logprobs_mode_override: LogprobsMode | None = None,
    ) -> SamplerOutput:
        """FP32 logits [R, vocab] -> a token a row, and log-probs where a request asks for them."""
        metadata, mode = sampling_metadata, logprobs_mode_override or self.logprobs_mode
        rows = self.rows or self._dummy_rows(logits)
        self.rows = None
        raw = logits if rows.raw_logits is None else rows.raw_logits
        ones = torch.ones(logits.shape[0])
        greedy, scaled = self._process(logits, metadata, predict_bonus_token)
        sampled = sample(scaled, torch.where(greedy, 0.0, 1.0), rows.seeds, rows.positions)
        wanted = metadata.max_num_logprobs
        if wanted is None and not metadata.logprob_token_ids:
            return SamplerOutput(sampled.to(torch.int32).unsqueeze(1), None)
        source = raw if mode.startswith("raw") else scaled
        if metadata.logprob_token_ids:
            found = self.gather_specific_token_logprobs(self._values(source, mode), metadata.logprob_token_ids, sampled)
        elif wanted == -1:
            found = LogprobsTensors(torch.empty(0), self._values(source, mode), torch.empty(0))
        elif wanted == 0 and mode.endswith("logprobs"):
            values, _, _ = log_probs(source, sampled, ones)
            rank = (source >= source.gather(1, sampled.unsqueeze(1))).sum(1)
            found = LogprobsTensors(sampled.to(torch.int32).unsqueeze(1), values.unsqueeze(1), rank)
        else:
            found = self.gather_logprobs(self._values(source, mode), wanted, sampled)
        return SamplerOutput(sampled.to(torch.int32).unsqueeze(1), found)

    def _process(self, logits: Tensor, metadata: SamplingMetadata, bonus: bool) -> tuple[Tensor, Tensor]:
        """The rows to sample from at temperature 1, and which rows are greedy."""
        processed = self.apply_logits_processors(logits.clone(), metadata, bonus)
        if metadata.all_greedy:
            return torch.ones(logits.shape[0], dtype=torch.bool), processed
        temperature = metadata.temperature
        assert temperature is not None
        greedy = temperature == 0
        scaled = processed / torch.where(greedy, 1.0, temperature).unsqueeze(1)
        for processor in metadata.logitsprocs.argmax_invariant:
            scaled = processor.apply(scaled)
        if metadata.top_k is not None or metadata.top_p is not None:
            self._truncate(scaled, metadata, greedy)
        return greedy, scaled

    @staticmethod
    def _truncate(scaled: Tensor, metadata: SamplingMetadata, greedy: Tensor) -> None:
        """top-k and top-p, only in the rows that ask for them: vLLM's filter may touch the others."""
        chosen = torch.zeros_like(greedy)
        if metadata.top_k is not None:
            chosen |= metadata.top_k < scaled.shape[1]
        if metadata.top_p is not None:
            chosen |= metadata.top_p < 1
        at = (chosen & ~greedy).nonzero().flatten()
        if at.numel():
            k = None if metadata.top_k is None else metadata.top_k[at]
            p = None if metadata.top_p is None else metadata.top_p[at]
            scaled[at] = apply_top_k_top_p(scaled[at], k, p)

    @staticmethod
    def _values(source: Tensor, mode: str) -> Tensor:
        """What log-probs are picked from: log-softmax of all ids, or the logits in a `*_logits` mode. FP32."""
        return source.clone() if mode.endswith("logits") else ZmrlSampler.compute_logprobs(source)

    @staticmethod
    def _dummy_rows(logits: Tensor) -> SampledRows:
        zeros = torch.zeros(logits.shape[0], dtype=torch.int64)
        return SampledRows(zeros, zeros)

    @staticmethod
    def compute_logprobs(logits: Tensor) -> Tensor:
        """Log-softmax at temperature 1; the runner calls it for prompt_logprobs."""
        return log_softmax(logits, torch.ones(logits.shape[0]))

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        """As vLLM's, whose rank count is compiled by inductor at its first call, in the middle of serving."""
        values, ids = torch.topk(logprobs, num_logprobs, dim=1)
        token_ids = token_ids.unsqueeze(1)
        own = logprobs.gather(1, token_ids)
        rank = (logprobs >= own).sum(1)
        return LogprobsTensors(torch.cat([token_ids, ids], 1).to(torch.int32), torch.cat([own, values], 1), rank)
