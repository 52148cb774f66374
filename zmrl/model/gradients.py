"""Where the kernels add the gradients of the adapter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.linear_parallel import tree_sum
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.panels import LANES
from zmrl.model.linear import Linear
from zmrl.model.transformer import KimiK31
from zmrl.parallel.exchange import gather_rows, reduce_rows


class AdapterGradients:
    """Binds FP32 buffers, keyed and shaped like one slot of `KimiK31.lora_buffers`, to a model's adapter.

    A sum over heads is several chains, one for each slice of the heads: they have buffers here, which `finish`
    combines, over the heads of all tensor ranks, when the tokens of a sample shard are done (numerics.md, Backward).
    """

    def __init__(self, model: KimiK31) -> None:
        """model: with its adapter made."""
        self.model = model
        buffers = model.lora_buffers()
        self._slices = {
            f"{item.key}.a": torch.zeros(item.module.gradient_slices, *buffers[f"{item.key}.a"].shape[1:])
            for item in model.adapted_modules()
            if isinstance(item.module, Linear) and item.module.gradient_slices
        }
        self._bound: dict[str, Tensor] = {}

    def bind(self, gradients: dict[str, Tensor]) -> None:
        """From now on every backward adds to `gradients`, zeroed by the caller."""
        self._bound = gradients
        self._hand_out(gradients | {key: slices.zero_() for key, slices in self._slices.items()})

    def finish(self) -> None:
        """The bound buffers get what is still in slices, and are let go."""
        for key, slices in self._slices.items():
            subtree, group = tree_sum(slices).view(-1, LANES), self.model.ranks.tensor
            rows = reduce_rows(group, subtree, "head sums")
            whole = gather_rows(group, rows, len(subtree), "head sums")
            self._bound[key].copy_(whole.view_as(self._bound[key]))
        self.release()

    def release(self) -> None:
        """No gradients are wanted."""
        self._bound = {}
        self._hand_out(None)

    def _hand_out(self, gradients: dict[str, Tensor] | None) -> None:
        for item in self.model.adapted_modules():
            lora: Any = item.module.lora
            experts = isinstance(lora, ExpertLoraBuffers)
            fields = ("a1", "b1", "a3", "b3", "a2", "b2") if experts else ("a", "b")
            bound = None if gradients is None else tuple(gradients[f"{item.key}.{field}"] for field in fields)
            if experts:
                lora.gradients = bound
            else:
                lora.grad_a, lora.grad_b = bound or (None, None)
