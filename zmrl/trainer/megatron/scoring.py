"""Scores the responses of packed samples with the model: log-probs, entropies and digests of the logits rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zmrl.batch_invariant.ops.head import log_probs
from zmrl.model.config import K3Config
from zmrl.model.context import scratch_context
from zmrl.model.transformer import KimiK31
from zmrl.trainer.megatron.faults import Faults

MIN_TEMPERATURE = 0.01
"""vLLM raises lower temperatures to this value, silently."""

LOGITS_BYTES = 256 << 20
"""Logits of at most this size are computed at once; in the backward pass their gradient comes on top. The rows of a
larger pack are scored in parts, and with gradients a part's logits are computed again in the backward pass. 32,768 rows
of 163,840 logits would be 21 GB."""


class SampleError(ValueError):
    """A sample that cannot be scored, or whose scores are not finite; the message names it."""


@dataclass(frozen=True)
class ScoredSample:
    """Entry i belongs to response token i. n: length of the response."""

    log_probs: Tensor
    """FP32 [n]"""
    digests: Tensor
    """int64 [n]: digest of the logits row that the token was drawn from, before the temperature."""
    entropy: Tensor
    """FP32 [n], of the distribution at the temperature."""


class Scores(NamedTuple):
    """Packed response tokens, samples in order; N of them."""

    log_probs: Tensor
    """FP32 [N], differentiable."""
    entropy: Tensor
    """FP32 [N], differentiable."""
    digests: Tensor
    """int64 [N]"""

    def split(self, counts: list[int]) -> list[ScoredSample]:
        """Detached, by sample."""
        parts = [t.detach().split(counts) for t in (self.log_probs, self.digests, self.entropy)]
        return [ScoredSample(*sample) for sample in zip(*parts, strict=True)]


@dataclass(frozen=True)
class PackedSamples:
    """Samples packed for one forward; left out: last tokens (only targets), and samples without a response."""

    token_ids: Tensor
    """int64 [T]"""
    lengths: list[int]
    """Tokens of each sequence in the pack."""
    names: list[int]
    """Which sample each sequence is."""
    rows: Tensor
    """int64 [N]: rows of the pack whose logits are wanted."""
    targets: Tensor
    """int64 [N]: the token that each of these rows predicts."""
    counts: list[int]
    """Response tokens of every sample, 0 for those left out."""

    def sample_of(self, row: int) -> tuple[int, int]:
        """(sample, position) of a row of the pack."""
        for name, length in zip(self.names, self.lengths, strict=True):
            if row < length:
                return name, row
            row -= length
        raise IndexError(row)


def check_samples(batch: Sequence[Tensor], response_starts: Sequence[int], config: K3Config) -> None:
    """SampleError unless every sample is int64 [length], within the vocabulary and the context, with a prompt."""
    if len(batch) != len(response_starts):
        raise SampleError(f"{len(batch)} samples but {len(response_starts)} response starts")
    for i, (ids, start) in enumerate(zip(batch, response_starts, strict=True)):
        if ids.dtype != torch.int64 or ids.dim() != 1:
            raise SampleError(f"sample {i}: token ids are {ids.dtype} {list(ids.shape)}, expected int64 [length]")
        if not 1 <= start <= len(ids):
            raise SampleError(
                f"sample {i}: its response starts at {start}, but it has {len(ids)} tokens; a prompt is needed"
            )
        if len(ids) > config.max_position_embeddings:
            raise SampleError(f"sample {i}: {len(ids)} tokens exceed the context of {config.max_position_embeddings}")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= config.vocab_size:
            bad = low if low < 0 else high
            raise SampleError(f"sample {i}: token id {bad} is outside the vocabulary of {config.vocab_size}")


def pack(batch: Sequence[Tensor], response_starts: Sequence[int], samples: Sequence[int]) -> PackedSamples:
    """Pack `samples` of the batch, in the order given."""
    ids, lengths, names, rows, targets, counts = [], [], [], [], [], []
    offset = 0
    for i in samples:
        tokens, start = batch[i], response_starts[i]
        counts.append(len(tokens) - start)
        if counts[-1] == 0:
            continue
        length = len(tokens) - 1
        ids.append(tokens[:-1])
        targets.append(tokens[start:])
        rows.append(torch.arange(offset + start - 1, offset + length))
        lengths.append(length)
        names.append(i)
        offset += length
    empty = [torch.empty(0, dtype=torch.int64)]
    return PackedSamples(
        torch.cat(ids or empty), lengths, names, torch.cat(rows or empty), torch.cat(targets or empty), counts
    )


def score(
    module: nn.Module, model: KimiK31, packed: PackedSamples, temperature: float, adapter: bool, faults: Faults
) -> Scores:
    """One forward. module: Megatron's wrapping of `model`. Logits are computed for `packed.rows` only.

    Without tokens it still takes part in what other copies of the model exchange.
    SampleError names the sample where an operator met NaN or a log-prob is not finite.
    """
    if not packed.lengths:
        nothing = model.idle(adapter) if model.ranks.copies > 1 else torch.empty(0)
        return Scores(nothing, nothing, torch.empty(0, dtype=torch.int64))
    total = len(packed.token_ids)
    slots = torch.zeros(total, dtype=torch.int32) if adapter else None
    context = scratch_context(model.config, packed.lengths, slots, model.cache_format, model.ranks)
    with faults.in_cache(context) if adapter else nullcontext():
        hidden = module(packed.token_ids, context)
    scores = _score_rows(model, hidden, packed, temperature, faults if adapter else None)
    _check_finite(packed, context.flags, scores)
    return scores


def _score_rows(
    model: KimiK31, hidden: Tensor, packed: PackedSamples, temperature: float, faults: Faults | None
) -> Scores:
    """hidden BF16 `[T, hidden]` of the pack -> scores of its rows. A row is scored by itself: parts change no bit."""

    def score_part(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = model.logits(hidden.index_select(0, rows))
        if faults is not None:
            faults.in_logits(logits)
        return log_probs(logits, targets, torch.full((len(rows),), temperature, dtype=torch.float32))

    size = max(1, LOGITS_BYTES // (4 * model.config.vocab_size))
    if len(packed.rows) <= size:
        return Scores(*score_part(packed.rows, packed.targets))
    parts = [
        checkpoint(score_part, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(packed.rows.split(size), packed.targets.split(size), strict=True)
    ]
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _check_finite(packed: PackedSamples, flags: Tensor | None, scores: Scores) -> None:
    remedy = "look for a diverged adapter (lower the learning rate) or a damaged checkpoint"
    if flags is not None and bool(flags.any()):
        sample, position = packed.sample_of(int(flags.nonzero()[0]))
        raise SampleError(f"sample {sample}: NaN in the forward pass at position {position}; {remedy}")
    wrong = ~torch.isfinite(scores.log_probs.detach())
    if bool(wrong.any()):
        sample, position = packed.sample_of(int(packed.rows[int(wrong.nonzero()[0])]))
        raise SampleError(f"sample {sample}: the log-prob of token {position + 1} is not finite; {remedy}")
