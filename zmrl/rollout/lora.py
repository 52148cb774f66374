"""Adapters in vLLM: from a PEFT directory or from the trainer's tensors into the slots that the kernels read.

vLLM's LoRA manager keeps the books (which adapter is in which slot, what is evicted); this module reads, checks and
packs. vLLM's own loader drops what it does not expect, and of per-expert tensors it expects nothing unless the model
has vLLM's MoE layers (lora/utils.py:99): here every tensor of an adapter is accounted for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest
from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager

from zmrl.lora.peft_io import AdapterError, fill, read_adapter
from zmrl.model.tensors import combined_digest
from zmrl.model.transformer import AdaptedModule, KimiK31
from zmrl.rollout.settings import lora_alpha

MEMORY = "zmrl:memory/"
"""Path of adapters that came as tensors; vLLM hashes it into the prefix-cache key, never opens it."""


def adapter_request(version: int) -> LoRARequest:
    """The request that selects the trainer's adapter `version` (>= 1): version in name, id and prefix-cache key."""
    return LoRARequest(f"zmrl-v{version}", version, f"{MEMORY}{version}")


class AdapterSlots(BaseLayerWithLoRA):
    """The slots of one adapted module as vLLM's manager sees them; the module itself reads the buffers.

    lora_a and lora_b are what `Adapter` holds of this module: a tensor each, or, of experts, one for w1, w2, w3.
    """

    def __init__(self, item: AdaptedModule) -> None:
        super().__init__()
        self.live: dict[str, Tensor] = dict(item.module.lora_buffers())  # type: ignore[operator]
        self.key = item.key

    def reset_lora(self, index: int) -> None:
        for buffer in self.live.values():
            buffer[index].zero_()

    def set_lora(self, index: int, lora_a: Tensor | list[Tensor], lora_b: Tensor | list[Tensor]) -> None:
        a, b = ([t] if isinstance(t, Tensor) else t for t in (lora_a, lora_b))
        for field, tensor in zip(_fields(self.live), [*a, *b], strict=True):
            self.live[field][index].copy_(tensor)

    @classmethod
    def can_replace_layer(cls, *args: Any, **kwargs: Any) -> bool:
        return False


def _fields(buffers: Mapping[str, Tensor]) -> list[str]:
    """Field names, all of A before all of B."""
    return sorted(buffers)


@dataclass
class Adapter:
    """One adapter outside the slots: the buffers of `KimiK31.lora_buffers()` without their slot dimension."""

    buffers: dict[str, Tensor]
    digest: str
    """`combined_digest` of the buffers."""

    def to_lora_model(self, lora_id: int, rank: int, slots: Mapping[str, AdapterSlots]) -> LoRAModel:
        """As vLLM's manager keeps it; `slots`: the modules by name."""
        loras = {}
        for name, module in slots.items():
            fields = [self.buffers[f"{module.key}.{field}"] for field in _fields(module.live)]
            half = len(fields) // 2
            a, b = (part[0] if half == 1 else part for part in (fields[:half], fields[half:]))
            loras[name] = LoRALayerWeights(name, rank, rank, a, b, scaling=1)  # our kernels scale
        return LoRAModel(lora_id, rank, loras)


def _empty_buffers(model: KimiK31) -> dict[str, Tensor]:
    return {key: torch.zeros_like(buffer[0]) for key, buffer in model.lora_buffers().items()}


def _finished(model: KimiK31, buffers: dict[str, Tensor], what: str) -> Adapter:
    """Checks for NaN and infinity."""
    if not all(bool(buffer.isfinite().all()) for buffer in buffers.values()):
        name = next(s.name for s in model.lora_slices(buffers) if not bool(s.read().isfinite().all()))
        raise AdapterError(f"{what}: tensor {name!r} holds NaN or infinity; the training that wrote it has diverged")
    return Adapter(buffers, combined_digest(buffers))


def adapter_from_tensors(model: KimiK31, tensors: Mapping[str, Tensor], what: str) -> Adapter:
    """An adapter from tensors under PEFT names, or from packed buffers keyed like `KimiK31.lora_buffers()`, of the
    whole model in either case: a rank takes its part.

    Packed buffers may have a leading slot dimension of 1. Everything is copied: the caller may reuse its memory.
    AdapterError names a tensor that is missing, extra, of a wrong shape, or not finite.
    """
    buffers = _empty_buffers(model)
    if any(name.startswith("base_model.") for name in tensors):
        fill(model.lora_slices(buffers), tensors)
        return _finished(model, buffers, what)
    for key in [*(buffers.keys() - tensors.keys()), *(tensors.keys() - buffers.keys())]:
        raise AdapterError(f"{what}: buffer {key!r} is {'missing' if key in buffers else 'not part of this model'}")
    whole = {}
    for key, shape in model.lora_shapes().items():
        tensor = tensors[key]
        tensor = tensor[0] if tensor.dim() == len(shape) + 1 and tensor.shape[0] == 1 else tensor
        if tensor.shape != shape or not tensor.is_floating_point():
            shapes = f"{tensor.dtype} {tuple(tensor.shape)}, expected {buffers[key].dtype} {shape}"
            raise AdapterError(f"{what}: buffer {key!r} is {shapes}; was it made for another rank or configuration?")
        whole[key] = tensor
    for key, tensor in model.own_lora(whole).items():
        buffers[key].copy_(tensor)
    return _finished(model, buffers, what)


def adapter_from_directory(model: KimiK31, path: str, rank: int, alpha: float) -> Adapter:
    """A PEFT directory (`zmrl.lora.peft_io`); AdapterError as there."""
    found = read_adapter(path, model.config, rank, alpha)
    return adapter_from_tensors(model, found.tensors, f"adapter {path}")


def check_rank(what: str, rank: object, alpha: object, engine_rank: int, engine_alpha: float) -> None:
    """One engine serves one rank and one alpha: both are part of the function that the slots compute."""
    if rank != engine_rank or alpha != engine_alpha:
        raise AdapterError(
            f"{what}: rank {rank} and alpha {alpha}, but this engine serves rank {engine_rank} and alpha "
            f"{engine_alpha:g}; start it with that max_lora_rank and additional_config lora_alpha"
        )


@dataclass
class _Known:
    """An adapter id that was loaded: a later load of the same id must be the same adapter."""

    name: str
    path: str
    digest: str


class AdapterManager(LRUCacheWorkerLoRAManager):
    """vLLM's manager with our loading, and activation that reports errors instead of raising them."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, embedding_modules: dict[str, str]) -> None:
        super().__init__(vllm_config, device, embedding_modules)
        self.rank, self.alpha = self.lora_config.max_lora_rank, lora_alpha(vllm_config)
        self.known: dict[int, _Known] = {}

    @property
    def model(self) -> KimiK31:
        return self._adapter_manager.model.model

    def activate(self, requests: list[LoRARequest]) -> tuple[dict[int, int], dict[int, str]]:
        """Brings the adapters of a step into slots: (slot by id, error by id). `load_inplace` is for `add_adapter`."""
        errors: dict[int, str] = {}
        loaded = self.list_adapters()
        for request in sorted(requests, key=lambda r: r.lora_int_id not in loaded):  # the present ones first: LRU
            try:
                self._add(request, replace=False)
            except (ValueError, OSError) as error:
                errors[request.lora_int_id] = str(error)
        index = self._adapter_manager.lora_index_to_id.index
        return {r.lora_int_id: index(r.lora_int_id) for r in requests if r.lora_int_id not in errors}, errors

    def add_adapter(self, lora_request: LoRARequest) -> bool:
        """Loads and activates; with `load_inplace` it replaces. AdapterError if the adapter is not fit."""
        return self._add(lora_request, lora_request.load_inplace)

    def put(self, request: LoRARequest, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> str:
        """An adapter from tensors, under a request of `adapter_request`; its digest. Idempotent for equal tensors."""
        what = f"adapter {request.lora_name}"
        check_rank(what, rank, alpha, self.rank, self.alpha)
        adapter = adapter_from_tensors(self.model, tensors, what)
        self._register(request, adapter, replace=False)
        self._adapter_manager.activate_adapter(request.lora_int_id)
        return adapter.digest

    def remove_adapter(self, adapter_id: int) -> bool:
        self.known.pop(adapter_id, None)
        return super().remove_adapter(adapter_id)

    def drop(self, adapter_id: int) -> None:
        """Frees an adapter but remembers what it was: its id cannot come back with other weights.

        The engine core does not hear of this, so blocks that were computed with it stay in the prefix cache.
        """
        super().remove_adapter(adapter_id)

    def remove_all_adapters(self) -> None:
        self.known.clear()
        super().remove_all_adapters()

    def add_dummy_lora(self, lora_request: LoRARequest, rank: int) -> bool:
        """A zero adapter for warm-up runs."""
        if lora_request.lora_int_id in self.list_adapters():
            return False
        adapter = Adapter(_empty_buffers(self.model), "")
        return self._adapter_manager.add_adapter(self._lora_model(lora_request.lora_int_id, adapter))

    def slot(self, lora_id: int) -> int:
        """The slot of an adapter, which is activated if it is not in one. KeyError if it is not loaded."""
        if lora_id not in self.list_adapters():
            raise KeyError(f"adapter {lora_id} is not loaded")
        self._adapter_manager.activate_adapter(lora_id)
        return self._adapter_manager.lora_index_to_id.index(lora_id)

    def _add(self, request: LoRARequest, replace: bool) -> bool:
        lora_id = request.lora_int_id
        known = self.known.get(lora_id)
        if known is not None and not replace and (known.name, known.path) != (request.lora_name, request.lora_path):
            raise AdapterError(
                f"adapter id {lora_id} is {known.name!r} from {known.path}, not {request.lora_name!r} from "
                f"{request.lora_path}; use another lora_int_id, or add_lora with load_inplace"
            )
        if lora_id not in self.list_adapters() or replace:
            if request.lora_path.startswith(MEMORY):
                raise AdapterError(f"adapter {request.lora_name} is not loaded: it was evicted, or never sent")
            adapter = adapter_from_directory(self.model, request.lora_path, self.rank, self.alpha)
            self._register(request, adapter, replace)
        self._adapter_manager.activate_adapter(lora_id)
        return True

    def _register(self, request: LoRARequest, adapter: Adapter, replace: bool) -> None:
        lora_id, manager = request.lora_int_id, self._adapter_manager
        known = self.known.get(lora_id)
        if known is not None and not replace and known.digest != adapter.digest:
            raise AdapterError(
                f"adapter {request.lora_name} (id {lora_id}) is not what was loaded before: {adapter.digest} "
                f"instead of {known.digest}; give it a new version or name, or replace it by add_lora with load_inplace"
            )
        if replace:
            manager.remove_adapter(lora_id)
        if lora_id not in self.list_adapters() and len(manager) >= manager.capacity:
            manager.remove_oldest_adapter()
        manager.add_adapter(self._lora_model(lora_id, adapter))
        self.known[lora_id] = _Known(request.lora_name, request.lora_path, adapter.digest)

    def _lora_model(self, lora_id: int, adapter: Adapter) -> LoRAModel:
        slots = {n: m for n, m in self._adapter_manager.modules.items() if isinstance(m, AdapterSlots)}
        return adapter.to_lora_model(lora_id, self.rank, slots)
