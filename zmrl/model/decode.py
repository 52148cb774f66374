"""Decode steps of few requests: the whole decoder in one native call, the same kernels and so the same bits.

A step in which every request has one token does the same calls on the same sizes as the last such step of as many
requests. Its kernels are recorded the first time (`zmrl.batch_invariant.program`) and then repeated from copies of the
step's inputs, which saves the dispatch of about a hundred operators.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant import native
from zmrl.batch_invariant.program import Program, recorded
from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.transformer import KimiK31

MOST_REQUESTS = 64
"""Beyond it the kernels' own time leaves little to save."""
MOST_BYTES = 256 << 20
"""Of all recorded steps: each keeps its intermediate results. The one used longest ago goes first."""
_SHARED = ("cu_seqlens", "positions", "slots", "flags")
_OF_KDA, _OF_MLA = ("state_in", "state_out"), ("block_table", "slot_mapping")


def _step_tensors(context: SequenceContext) -> list[tuple[object, str, Tensor]]:
    """Where the inputs of a step lie, as (owner, field, tensor); one that several layers share comes once."""
    owners: list[tuple[object, tuple[str, ...]]] = [(context, _SHARED)]
    owners += [(cache, _OF_KDA if isinstance(cache, KdaCache) else _OF_MLA) for cache in context.caches]
    fields = [(owner, name, getattr(owner, name)) for owner, names in owners for name in names]
    return list({id(tensor): (owner, name, tensor) for owner, name, tensor in fields if tensor is not None}.values())


def _buffers(cache: KdaCache | MlaCache) -> tuple[Tensor, Tensor]:
    return (cache.conv_state, cache.state) if isinstance(cache, KdaCache) else (cache.latent_pages, cache.index_pages)


class _Step:
    """A recorded step: its inputs, its calls, its result."""

    def __init__(self, model: KimiK31, token_ids: Tensor, context: SequenceContext) -> None:
        own = {id(tensor): tensor.clone() for _, _, tensor in _step_tensors(context)}

        def copied(owner: object, names: tuple[str, ...]) -> dict[str, Any]:
            found = {name: getattr(owner, name) for name in names}
            return {name: own[id(tensor)] for name, tensor in found.items() if tensor is not None}

        caches = [replace(c, **copied(c, _OF_KDA if isinstance(c, KdaCache) else _OF_MLA)) for c in context.caches]
        self.context = replace(context, **copied(context, _SHARED), caches=caches)
        self.inputs = list(own.values())
        self.embeddings = torch.nn.functional.embedding(token_ids, model.embed_tokens)
        with recorded() as recording:
            self.hidden = model.decoder(self.embeddings, self.context)
        self.bytes = _own_bytes(recording.calls, model, context)
        kept = not recording.other and self.bytes <= MOST_BYTES
        self.program = Program(recording.calls) if kept else None
        if not kept:
            self.bytes = 0

    def __call__(self, model: KimiK31, token_ids: Tensor, context: SequenceContext) -> Tensor:
        for own, (_, _, new) in zip(self.inputs, _step_tensors(context), strict=True):
            own.copy_(new)
        torch.index_select(model.embed_tokens, 0, token_ids, out=self.embeddings)
        assert self.program is not None
        self.program()
        return self.hidden


class DecodeSteps:
    """The decode steps of one model, by number of requests."""

    def __init__(self, model: KimiK31) -> None:
        self.model, self.replayed = model, 0
        self._steps: dict[object, _Step] = {}
        self._recordable = model.config.has_indexer and model.ranks.tensor.size == model.ranks.expert.size == 1

    def __call__(self, token_ids: Tensor, context: SequenceContext) -> tuple[Tensor, SequenceContext] | None:
        """Hidden states BF16 [T, hidden] and the context with the step's flags; valid until the next call.

        None if this is no such step: the caller then runs the model. Attention over all positions is not recorded,
        since its sizes grow from step to step; nor is a model over ranks, whose exchanges are no kernels.
        """
        rows = token_ids.shape[0]
        if rows != context.cu_seqlens.shape[0] - 1 or rows > MOST_REQUESTS or not self._recordable:
            return None
        key = (rows, native.isa(), torch.get_num_threads(), *_identity(context))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(self.model, token_ids, context)
            while sum(kept.bytes for kept in self._steps.values()) > MOST_BYTES:
                del self._steps[next(iter(self._steps))]
            return step.hidden.clone(), step.context
        if step.program is None:
            return None
        self._steps[key] = self._steps.pop(key)  # the latest comes last
        self.replayed += 1
        return step(self.model, token_ids, context), step.context


def _own_bytes(calls: list[native.Call], model: KimiK31, context: SequenceContext) -> int:
    """Bytes that live as long as the calls do, and not by themselves as parameters, adapters and caches."""
    lasting = [*model.parameters(), *model.lora_buffers().values()]
    lasting += [buffer for cache in context.caches for buffer in _buffers(cache)]
    tensors = [value for _, _, arguments in calls for value in arguments if isinstance(value, Tensor)]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    for tensor in lasting:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(sizes.values())


def _identity(context: SequenceContext) -> list[object]:
    """What a recorded step may not see change: the caches, and which layers share an input."""
    tables = [c.block_table.shape for c in context.caches if isinstance(c, MlaCache)]
    pointers = [buffer.data_ptr() for cache in context.caches for buffer in _buffers(cache)]
    return [context.slots is None, context.flags is None, len(_step_tensors(context)), *tables[:1], *pointers]
