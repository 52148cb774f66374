"""Where the kernels add the gradients of the adapter."""

from __future__ import annotations

from collections.abc import Sequence
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

    Where the experts lie on the ranks of several copies of the model (`Ranks.copies`), tokens of all copies meet at an
    expert, of one sample shard of each: a copy's tokens get expert buffers of their own.

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
        """From now on every backward adds to `gradients`, zeroed by the caller: all, or all but those of experts."""
        self._bound = gradients
        self._hand_out(gradients | {key: slices.zero_() for key, slices in self._slices.items()})

    def bind_experts(self, by_copy: Sequence[dict[str, Tensor]]) -> None:
        """From now on the experts add the gradients of copy c's tokens to `by_copy[c]`, zeroed by the caller."""
        for item in self.model.adapted_modules():
            lora: Any = item.module.lora
            if isinstance(lora, ExpertLoraBuffers):
                lora.by_copy = tuple(_of_experts(item.key, gradients) for gradients in by_copy)

    def finish(self) -> None:
        """The buffers of `bind` get what is still in slices, and are let go."""
        for key, slices in self._slices.items():
            subtree, group = tree_sum(slices).view(-1, LANES), self.model.ranks.tensor
            rows = reduce_rows(group, subtree, "head sums")
            whole = gather_rows(group, rows, len(subtree), "head sums")
            self._bound[key].copy_(whole.view_as(self._bound[key]))
        self._let_go()

    def release(self) -> None:
        """No gradients are wanted."""
        self._let_go()
        self.bind_experts(())

    def _let_go(self) -> None:
        self._bound = {}
        self._hand_out({})

    def _hand_out(self, gradients: dict[str, Tensor]) -> None:
        """None to a module whose buffers are not there."""
        for item in self.model.adapted_modules():
            lora: Any = item.module.lora
            if isinstance(lora, ExpertLoraBuffers):
                lora.gradients = _of_experts(item.key, gradients) if f"{item.key}.a1" in gradients else None
            else:
                lora.grad_a, lora.grad_b = (gradients[f"{item.key}.{f}"] if gradients else None for f in "ab")


def _of_experts(key: str, gradients: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """In the order of `ExpertLoraBuffers.gradients`."""
    return tuple(gradients[f"{key}.{field}"] for field in ("a1", "b1", "a3", "b3", "a2", "b2"))
