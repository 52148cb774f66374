"""What the driver asks of a worker through `collective_rpc`: identities, digests, adapters, faults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.torch import load, save
from torch import Tensor

from zmrl.batch_invariant.build import kernel_id
from zmrl.batch_invariant.native import bytes_read, isa, most_threads
from zmrl.model.shards import RankBuffers, ranks_digests
from zmrl.model.tensors import flip_bit
from zmrl.model.transformer import function_config

if TYPE_CHECKING:
    from zmrl.rollout.runner import ZmrlModelRunner


def adapter_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """An adapter's tensors as one argument of `zmrl_load_adapter` for an engine in another process."""
    return save({name: tensor.contiguous() for name, tensor in tensors.items()})


class ZmrlWorkerMethods:
    """A `worker_extension_cls`, or the base of one: vLLM mixes it into its worker, so there is no `__init__`."""

    model_runner: ZmrlModelRunner

    def zmrl_identity(self) -> dict[str, Any]:
        """What this side computes with, from the live buffers of the forward pass, of all ranks.

        model_digest: hex; adapter_digests: name -> hex, of all loaded adapters that are in a slot; kernel_id;
        function_config; isa.
        """
        model = self.model_runner.model.model
        return {
            "model_digest": self._zmrl_buffers(None).digest(),
            "adapter_digests": {name: self._zmrl_slot_digest(slot) for name, slot in self._zmrl_slots().items()},
            "kernel_id": kernel_id(),
            "function_config": function_config(model),
            "isa": isa(),
        }

    def zmrl_tensor_digests(self, adapter: str | int | None = None) -> dict[str, int]:
        """Digest of every live tensor by name: of the base, or of an adapter by name or id (its version)."""
        model = self.model_runner.model.model
        slices = model.tensor_slices() if adapter is None else model.lora_slices(self._zmrl_slot(adapter))
        return ranks_digests(slices, model.ranks)

    def zmrl_adapter_digest(self, lora_id: int) -> str:
        """Digest of the live tensors of a loaded adapter, 16 hex digits. KeyError if it is not loaded."""
        return self._zmrl_slot_digest(self._zmrl_slot(lora_id))

    def zmrl_load_adapter(self, version: int, tensors: Mapping[str, Tensor] | bytes, rank: int, alpha: float) -> str:
        """Loads the trainer's adapter `version` (see `lora.adapter_from_tensors`); the digest of this rank's part.

        From another process send `adapter_bytes(tensors)`: vLLM's transport does not keep tensors inside arguments.
        Requests select it by `lora.adapter_request(version)`. AdapterError says what is wrong; the engine lives.
        """
        from zmrl.rollout.lora import adapter_request

        if isinstance(tensors, bytes):
            tensors = load(tensors)
        return self._zmrl_adapters().put(adapter_request(version), tensors, rank, alpha)

    def zmrl_drop_adapters(self, keep: list[int]) -> list[int]:
        """Frees all adapters but those with ids in `keep`; the freed ids. They may only return as the same adapters."""
        manager = self._zmrl_adapters()
        removed = sorted(manager.list_adapters() - set(keep))
        for lora_id in removed:
            manager.drop(lora_id)
        return removed

    def zmrl_take_digests(self, tags: list[str]) -> dict[str, list[int]]:
        """Row digests of finished requests by tag, signed 64-bit, in order of output tokens; they are forgotten."""
        return self.model_runner.digests.take(tags)

    def zmrl_flip_bit(self, what: str, tensor: str, element: int, bit: int, adapter: str | int | None = None) -> None:
        """Injects a fault. "parameter": flips a live tensor (of `adapter`, or of the base) at once.

        "cache": flips what a later token of a running request reads: `tensor` is `layers.<i>.latent`, `.index` or
        `.state`; `element` counts the first page's bytes, or the state's FP32 numbers. "logits": flips one number of
        one row of the next step. The last two wait for a step in which they matter (`zmrl_faults`).
        """
        from zmrl.rollout.faults import Fault

        model = self.model_runner.model
        if what == "parameter":
            if adapter is None:
                flip_bit(model.model.tensor_slices(), tensor, element, bit)
            else:
                flip_bit(model.model.lora_slices(self._zmrl_slot(adapter)), tensor, element, bit)
        else:
            self.model_runner.faults.arm(Fault(what, tensor, element, bit), model)

    def zmrl_faults(self) -> dict[str, int]:
        """How many cache and logits faults wait, and how many have happened."""
        faults = self.model_runner.faults
        return {"waiting": len(faults.waiting), "done": len(faults.done)}

    def zmrl_counters(self, reset: bool = False) -> dict[str, int]:
        """What the engine did since it started or since the last reset (`runner.Counters`); since the last call, the
        most `threads` of a kernel and the bytes of index keys and latents read; how many `digest_tags` are held now."""
        runner = self.model_runner
        found = dataclasses.asdict(runner.counters) | {"threads": most_threads(), "digest_tags": len(runner.digests)}
        found |= {f"{kind}_bytes_read": count for kind, count in bytes_read().items()}
        if reset:
            runner.counters = type(runner.counters)()
        return found

    def zmrl_exchanges(self) -> dict[str, dict[str, int]]:
        """What this rank sent to others since it started: bytes by exchange (`tensor`, `context`), and `events`."""
        ranks = self.model_runner.model.model.ranks
        events = ranks.tensor.events + ranks.context.events
        return {"tensor": dict(ranks.tensor.sent), "context": dict(ranks.context.sent), "events": dict(events)}

    def zmrl_cache_use(self) -> dict[str, int]:
        """Bytes of the cache that the requests of the last step hold, by kind: "latent", "index", "state"."""
        runner = self.model_runner
        tables = runner.input_batch.block_table.block_tables
        rows = [table.block_table.np[: runner.input_batch.num_reqs] for table in tables]
        blocks = {
            name: len(np.unique(row[row > 0]))  # block 0 is vLLM's null block
            for group, row in zip(runner.kv_cache_config.kv_cache_groups, rows, strict=True)
            for name in group.layer_names
        }
        return runner.model.caches.bytes_used(blocks)

    def _zmrl_adapters(self) -> Any:
        if not hasattr(self.model_runner, "lora_manager"):
            raise ValueError("this engine was started without LoRA; set enable_lora and max_lora_rank")
        return self.model_runner.lora_manager

    def _zmrl_slots(self) -> dict[str, int]:
        if not hasattr(self.model_runner, "lora_manager"):
            return {}
        manager = self.model_runner.lora_manager
        ids = manager._adapter_manager.lora_index_to_id
        return {manager.known[i].name: slot for slot, i in enumerate(ids) if i is not None and i in manager.known}

    def _zmrl_slot_digest(self, slot: int) -> str:
        return self._zmrl_buffers(slot).digest()

    def _zmrl_buffers(self, slot: int | None) -> RankBuffers:
        """The live buffers of the base (None) or of a slot, which stay where they are."""
        found: dict[int | None, RankBuffers] = self.__dict__.setdefault("_zmrl_rank_buffers", {})
        if slot not in found:
            model = self.model_runner.model.model
            buffers = model.base_buffers() if slot is None else model.adapter_buffers(slot)
            slices = model.tensor_slices() if slot is None else model.lora_slices(buffers)
            found[slot] = RankBuffers(buffers, slices, model.ranks)
        return found[slot]

    def _zmrl_slot(self, adapter: str | int) -> int:
        manager = self._zmrl_adapters()
        if isinstance(adapter, int):
            return manager.slot(adapter)
        found = [lora_id for lora_id, known in manager.known.items() if known.name == adapter]
        if not found:
            raise KeyError(f"no adapter named {adapter!r} is loaded")
        return manager.slot(found[-1])
