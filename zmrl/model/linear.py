"""The frozen projections and their adapters, as both hosts hold them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import LANES, panel_count
from zmrl.model.tensors import PANELS, TensorSlice

REDUCTION_SHARDS = 8
"""Slices of a product whose K may be sharded over ranks (numerics.md rule 2); part of the function config."""


def frozen(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def part_slices(parts: dict[str, int], width: int, buffer: Tensor, suffix: str) -> Iterator[TensorSlice]:
    """The panels of each part of a fused weight [panels, width, 16]."""
    start = 0
    for name, rows in parts.items():
        stop = start + panel_count(rows)
        yield TensorSlice(f"{name}.{suffix}", buffer, slice(start, stop), (rows, width), PANELS)
        start = stop


class Linear(nn.Module):
    """Projections that read the same input, fused: y = [W_1 x | W_2 x | ...], each with its own adapter.

    parts: checkpoint name (below the layer) -> output features. shards: 8 where K may be sharded over ranks; shards_n:
    8 where the outputs may. fp32_out: router and head. adapted: whether the recipe's LoRA covers it.
    """

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        shards: int = 1,
        fp32_out: bool = False,
        adapted: bool = False,
        shards_n: int = 1,
    ) -> None:
        super().__init__()
        self.parts, self.in_features, self.shards, self.shards_n = parts, in_features, shards, shards_n
        self.gradient_slices = 1
        """Buffers of the gradient of A: several where it is a sum over heads (MLA's kv_b)."""
        self.fp32_out, self.adapted = fp32_out, adapted
        self.splits = list(parts.values())
        self.weight = frozen(sum(map(panel_count, self.splits)), in_features, LANES)
        self.lora: LoraBuffers | None = None

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x BF16 [T, in_features] -> BF16 (or FP32) [T, sum(parts)]; slots int32 [T] or None: no adapter."""
        lora = None if slots is None else self.lora
        return linear(x, self.weight, self.splits, self.shards, self.fp32_out, lora, slots, self.shards_n)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from part_slices(self.parts, self.in_features, self.weight, "weight")

    def create_lora(self, slots: int, rank: int, scale: float) -> None:
        """Zero adapters for `slots` slots, if this projection takes adapters."""
        if self.adapted:
            a = torch.zeros(slots, len(self.parts) * rank // LANES, self.in_features, LANES, dtype=torch.bfloat16)
            b = torch.zeros(slots, self.weight.shape[0], rank, LANES, dtype=torch.bfloat16)
            self.lora = LoraBuffers(a, b, scale)

    def lora_buffers(self) -> dict[str, Tensor]:
        """The live adapter buffers [slots, ...], by field."""
        return {} if self.lora is None else {"a": self.lora.a, "b": self.lora.b}

    def lora_slices(self, buffers: dict[str, Tensor]) -> Iterator[TensorSlice]:
        """Adapter tensors in `buffers`: one slot of `lora_buffers`, or the trainer's FP32 masters of that shape."""
        rank = buffers["b"].shape[1]
        for i, name in enumerate(self.parts):
            index = slice(i * rank // LANES, (i + 1) * rank // LANES)
            yield TensorSlice(f"{name}.lora_A.weight", buffers["a"], index, (rank, self.in_features), PANELS)
        yield from part_slices(self.parts, rank, buffers["b"], "lora_B.weight")
