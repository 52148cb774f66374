"""Fault injection: one flipped bit in a parameter, in the cache or in a logits row (the recipe's `debug.fault`).

A flip in the cache or in a logits row waits until a step in which it matters, and happens once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.rollout.cache import StateCache
from zmrl.rollout.model import KimiK31ForCausalLM

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Fault:
    """What to flip. `tensor` names a cache (`layers.3.latent`, `layers.0.state`) when `what` is "cache"."""

    what: str
    tensor: str
    element: int
    bit: int


def flip(view: Tensor, element: int, bit: int) -> None:
    """Flips `bit` of the `element`-th element of `view`, in place. ValueError if it has no such bit."""
    width = 8 * view.element_size()
    if not 0 <= element < view.numel() or not 0 <= bit < width:
        raise ValueError(f"no element {element} bit {bit}: there are {view.numel()} elements of {width} bits")
    at = np.unravel_index(element, tuple(view.shape))
    raw = view.view(_INTEGERS[view.element_size()])
    raw[at] ^= torch.tensor(1 << bit, dtype=torch.int64).to(raw.dtype)


class Faults:
    """Faults that wait for their moment, and those that have happened."""

    def __init__(self) -> None:
        self.waiting: list[Fault] = []
        self.done: list[Fault] = []

    def arm(self, fault: Fault, model: KimiK31ForCausalLM) -> None:
        """ValueError if the fault names nothing that exists."""
        if fault.what == "cache":
            names = [name for owned in model.caches.layers for name in _names(owned)]
            if fault.tensor not in names:
                raise ValueError(f"no cache is called {fault.tensor!r}; there are {', '.join(names)}")
        elif fault.what != "logits":
            raise ValueError(f"fault in {fault.what!r}: only 'parameter', 'cache' and 'logits' are known")
        elif fault.element >= model.model.config.vocab_size or not 0 <= fault.bit < 32:
            raise ValueError(f"a logits row has {model.model.config.vocab_size} elements of 32 bits")
        self.waiting.append(fault)

    def apply(self, model: KimiK31ForCausalLM, logits: Tensor, kept: np.ndarray, decoding: np.ndarray) -> None:
        """After a forward pass. kept, decoding [R]: whether a row is sampled from, and is past its prompt."""
        for fault in list(self.waiting):
            rows = np.flatnonzero(kept if fault.what == "logits" else kept & decoding)
            if rows.size == 0:
                continue
            row = int(rows[0])
            if fault.what == "logits":
                flip(logits[row], fault.element, fault.bit)
            else:
                assert model.context is not None
                flip(self._cached(model, model.context, fault.tensor, row), fault.element, fault.bit)
            self.waiting.remove(fault)
            self.done.append(fault)

    @staticmethod
    def _cached(model: KimiK31ForCausalLM, context: SequenceContext, name: str, row: int) -> Tensor:
        """What the next token of request `row` reads from cache `name`: its first page, or its state."""
        for owned, cache in zip(model.caches.layers, context.caches, strict=True):
            if name not in _names(owned):
                continue
            if isinstance(cache, KdaCache):
                return cache.state[int(cache.state_out[row])]
            assert isinstance(cache, MlaCache)
            block = int(cache.block_table[row, 0])
            return cache.latent_pages[block] if name.endswith(".latent") else cache.index_pages[block]
        raise AssertionError(name)


def _names(owned: object) -> list[str]:
    return [owned.name] if isinstance(owned, StateCache) else [cache.name for cache in owned]  # type: ignore[attr-defined]
