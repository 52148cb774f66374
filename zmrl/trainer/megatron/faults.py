"""Fault injection: flips one bit in a live parameter, in the cache, or in the logits of the adapter's next forward."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmrl.model.context import MlaCache, SequenceContext
from zmrl.model.tensors import flip_bit, whole
from zmrl.model.transformer import KimiK31

_CACHE_NAME = re.compile(r"layers\.(\d+)\.(latent|index)")


class _Flip(NamedTuple):
    tensor: str
    element: int
    bit: int


class Faults:
    """Armed flips; each acts once, on the first micro-batch of the next forward with the adapter.

    A forward without it, the reference policy's, is left alone: no verdict would show the flip.
    """

    def __init__(self, model: KimiK31) -> None:
        self.model = model
        self._cache: list[_Flip] = []
        self._logits: list[_Flip] = []

    def flip(self, what: str, tensor: str, element: int, bit: int) -> None:
        """what: "parameter" (a base or adapter tensor by name, at once), "cache" or "logits" (in the next forward
        with the adapter).

        Cache tensors: `layers.N.latent` (elements: the BF16 values of the scratch pages, sequence after sequence;
        bytes, if the latents have another format) and `layers.N.index` (bytes) of an MLA layer N; a KDA layer of the
        trainer has no state between forwards. Logits: `logits`, elements of the FP32 rows of the response tokens, or of
        the first part of them where a pack is scored in parts (its gradient is then that of the logits before the
        flip). KeyError for an unknown name.
        """
        if what == "parameter":
            with torch.no_grad():
                flip_bit([*self.model.tensor_slices(), *self.model.lora_slices(0)], tensor, element, bit)
        elif what == "cache":
            match, config = _CACHE_NAME.fullmatch(tensor), self.model.config
            if not match or int(match[1]) >= config.num_hidden_layers or not config.is_full_attention(int(match[1])):
                raise KeyError(f"no cache tensor {tensor!r}: name layers.N.latent or layers.N.index of an MLA layer N")
            if match[2] == "index" and not config.has_indexer:
                raise KeyError(f"no cache tensor {tensor!r}: this model has no indexer")
            self._cache.append(_Flip(tensor, element, bit))
        elif what == "logits":
            self._logits.append(_Flip(tensor, element, bit))
        else:
            raise KeyError(f"cannot flip a bit in {what!r}: choose parameter, cache or logits")

    @contextmanager
    def in_cache(self, context: SequenceContext) -> Iterator[None]:
        """During the forward: flips after the pages are written and before they are read."""
        flips, self._cache = self._cache, []
        with ExitStack() as stack:
            for item in flips:
                match = _CACHE_NAME.fullmatch(item.tensor)
                assert match is not None
                layer, kind = int(match[1]), match[2]
                cache = context.caches[layer]
                assert isinstance(cache, MlaCache)
                pages = cache.latent_pages if kind == "latent" else cache.index_pages
                if kind == "latent" and self.model.cache_format.latent == "bf16":
                    pages = pages.view(torch.int16)

                def act(*_: Any, pages: Tensor = pages, item: _Flip = item) -> None:
                    flip_bit([whole(item.tensor, pages)], item.tensor, item.element, item.bit)

                # The latent is stored before the indexer (or what stands in for it) runs; the index keys before its
                # weights are computed.
                attention: Any = self.model.layers[layer].self_attn
                indexer = attention.indexer
                hooked = indexer if kind == "latent" else indexer.weights_proj
                handle = hooked.register_forward_pre_hook(act)
                stack.callback(handle.remove)
            yield

    def in_logits(self, logits: Tensor) -> None:
        """Flips in place."""
        flips, self._logits = self._logits, []
        for item in flips:
            flip_bit([whole(item.tensor, logits.detach())], item.tensor, item.element, item.bit)
