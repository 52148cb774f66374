"""The frozen projections and their adapters, as both hosts hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import LANES, pack_parts, panel_count, unpack_parts
from zmrl.model.tensors import PANELS, Cut, TensorSlice
from zmrl.parallel.group import Group
from zmrl.parallel.layout import REDUCTION_SLICES
from zmrl.parallel.linear import column_parallel, row_parallel


def frozen(*shape: int, dtype: torch.dtype = torch.bfloat16) -> nn.Parameter:
    """An uninitialised parameter without gradient."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """Projections that read the same input, fused: y = [W_1 x | W_2 x | ...], each with its own adapter.

    parts: checkpoint name (below the layer) -> output features. fp32_out: router and head. adapted: whether the
    recipe's LoRA covers it. Every rank holds all of it.
    """

    def __init__(self, parts: dict[str, int], in_features: int, fp32_out: bool = False, adapted: bool = False) -> None:
        super().__init__()
        self.parts, self.in_features = parts, in_features
        self.fp32_out, self.adapted = fp32_out, adapted
        self.splits = [self._own(rows, self.output_cut(name)) for name, rows in parts.items()]
        """Output features of the parts on this rank."""
        self.own_features = self._own(in_features, self.input_cut())
        self.weight = frozen(sum(map(panel_count, self.splits)), self.own_features, LANES)
        self.lora: LoraBuffers | None = None
        self.gradient_slices = 0
        """Where the gradient of A is a sum over heads (MLA's kv_b): the slices of it that this rank has."""

    def output_cut(self, name: str) -> Cut | None:
        """How the rows of a part's weight and B are shared out."""
        return None

    def input_cut(self) -> Cut | None:
        """How the columns of the weights and of A are shared out."""
        return None

    @staticmethod
    def _own(count: int, cut: Cut | None) -> int:
        return count if cut is None else count // cut.size

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x BF16 [T, inputs] -> BF16 (or FP32) [T, outputs]; slots int32 [T] or None: no adapter."""
        return linear(x, self.weight, self.splits, 1, self.fp32_out, self.active_lora(slots), slots)

    def active_lora(self, slots: Tensor | None) -> LoraBuffers | None:
        """The adapters, if the step has any."""
        return None if slots is None else self.lora

    def tensor_slices(self) -> Iterator[TensorSlice]:
        cut = self.input_cut()
        for name, index in self._panels():
            shape = (self.parts[name], self.in_features)
            yield TensorSlice(f"{name}.weight", self.weight, index, shape, PANELS, cut or self.output_cut(name))

    def _panels(self) -> Iterator[tuple[str, slice]]:
        """Where the panels of each part lie."""
        start = 0
        for name, rows in zip(self.parts, self.splits, strict=True):
            stop = start + panel_count(rows)
            yield name, slice(start, stop)
            start = stop

    def create_lora(self, slots: int, rank: int, scale: float) -> None:
        """Zero adapters for `slots` slots, if this projection takes adapters."""
        if self.adapted:
            a = torch.zeros(slots, len(self.parts) * rank // LANES, self.own_features, LANES, dtype=torch.bfloat16)
            b = torch.zeros(slots, self.weight.shape[0], rank, LANES, dtype=torch.bfloat16)
            self.lora = LoraBuffers(a, b, scale)

    def lora_buffers(self) -> dict[str, Tensor]:
        """The live adapter buffers [slots, ...], by field."""
        return {} if self.lora is None else {"a": self.lora.a, "b": self.lora.b}

    def lora_slices(self, buffers: dict[str, Tensor]) -> Iterator[TensorSlice]:
        """Adapter tensors in `buffers`: one slot of `lora_buffers`, or the trainer's FP32 masters of that shape."""
        a, b = buffers["a"], buffers["b"]
        rank = b.shape[1]
        for i, name in enumerate(self.parts):
            index = slice(i * rank // LANES, (i + 1) * rank // LANES)
            yield TensorSlice(f"{name}.lora_A.weight", a, index, (rank, self.in_features), PANELS, self.input_cut())
        for name, index in self._panels():
            shape = (self.parts[name], rank)
            yield TensorSlice(f"{name}.lora_B.weight", b, index, shape, PANELS, self.output_cut(name))

    def lora_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one slot of the buffers that a single rank would have, by field."""
        if self.lora is None:
            return {}
        rank, panels = self.lora.b.shape[2], sum(map(panel_count, self.parts.values()))
        return {"a": (self.lora.a.shape[1], self.in_features, LANES), "b": (panels, rank, LANES)}

    def own_lora(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of one slot of the buffers that a single rank would have."""
        cut = self.input_cut()
        a = whole["a"] if cut is None else Cut(1, cut.rank, cut.size).of(whole["a"])
        cuts = [self.output_cut(name) for name in self.parts]
        if not any(cuts):
            return {"a": a, "b": whole["b"]}
        b = unpack_parts(whole["b"], list(self.parts.values()))
        own = [part if cut is None else cut.of(part) for part, cut in zip(b, cuts, strict=True)]
        return {"a": a, "b": pack_parts(own)}


class ColumnLinear(Linear):
    """Outputs can be spread over ranks, but for the parts in `replicated`, which every rank has whole.

    The input gradient is a sum over outputs: 8 slices, whatever the group's size.
    """

    def __init__(
        self,
        parts: dict[str, int],
        in_features: int,
        group: Group,
        replicated: Collection[str] = (),
        fp32_out: bool = False,
        adapted: bool = False,
    ) -> None:
        self.group, self.replicated = group, replicated
        super().__init__(parts, in_features, fp32_out, adapted)

    def output_cut(self, name: str) -> Cut | None:
        whole = self.group.size == 1 or name in self.replicated
        return None if whole else Cut(0, self.group.rank, self.group.size)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x BF16 [T, in_features], equal on all ranks -> BF16 (or FP32) [T, this rank's outputs of each part]."""
        lora = self.active_lora(slots)
        if self.group.size == 1:
            return linear(x, self.weight, self.splits, 1, self.fp32_out, lora, slots, REDUCTION_SLICES)
        whole = [name in self.replicated for name in self.parts]
        return column_parallel(self.group, x, self.weight, self.splits, whole, self.fp32_out, lora, slots)


class RowLinear(Linear):
    """One projection whose inputs can be spread over ranks: its sum is 8 slices, whatever the group's size."""

    def __init__(self, name: str, out_features: int, in_features: int, group: Group, adapted: bool = False) -> None:
        self.group = group
        super().__init__({name: out_features}, in_features, adapted=adapted)

    def input_cut(self) -> Cut | None:
        return None if self.group.size == 1 else Cut(1, self.group.rank, self.group.size)

    def forward(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        """x BF16 [T, this rank's inputs] -> BF16 [T, out_features], on all ranks."""
        lora = self.active_lora(slots)
        if self.group.size == 1:
            return linear(x, self.weight, self.splits, REDUCTION_SLICES, False, lora, slots)
        return row_parallel(self.group, x, self.weight, self.splits[0], lora, slots)
