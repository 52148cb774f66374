"""The scores of a step's samples as one message from a trainer's rank to the process that compares them.

verl's way for what a rank computes leads through TransferQueue: stored by sample and field, and fetched from there. For
a few thousand numbers that costs many times what sending them does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class SampleScores(NamedTuple):
    """What the trainer computed for one sample of R response tokens."""

    log_probs: Tensor
    """FP32 [R]"""
    digests: Tensor
    """int64 [R]: digest of the logits row that each token was drawn from."""
    entropy: Tensor
    """FP32 [R]"""


class PackedScores(NamedTuple):
    """Samples one after the other: few tensors, since a tensor costs more to send than what is in it."""

    names: list[str]
    """`columns.sample_ids`."""
    counts: list[int]
    """Response tokens of each; N in all."""
    log_probs: Tensor
    """FP32 [N]"""
    digests: Tensor
    """int64 [N]"""
    entropy: Tensor
    """FP32 [N]"""

    @classmethod
    def of(cls, scored: Mapping[str, Any]) -> PackedScores:
        """scored: by sample, with the fields of `SampleScores`."""
        rows = list(scored.values())
        columns = (
            torch.cat([torch.empty(0, dtype=dtype), *(getattr(row, name) for row in rows)])
            for name, dtype in (("log_probs", torch.float32), ("digests", torch.int64), ("entropy", torch.float32))
        )
        return cls(list(scored), [len(row.log_probs) for row in rows], *columns)

    def split(self) -> dict[str, SampleScores]:
        """By sample."""
        columns = (values.split(self.counts) for values in (self.log_probs, self.digests, self.entropy))
        return dict(zip(self.names, map(SampleScores, *columns), strict=True))


def joined(parts: Iterable[PackedScores]) -> dict[str, SampleScores]:
    """Of the ranks that have different samples. ValueError if two have the same."""
    found: dict[str, SampleScores] = {}
    for part in parts:
        scores = part.split()
        twice = found.keys() & scores.keys()
        if twice:
            raise ValueError(f"two ranks of the trainer scored sample {min(twice)}")
        found |= scores
    return found
