"""Dense MLP and mixture of experts (specification 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from zmrl.batch_invariant.ops.activation import situ
from zmrl.batch_invariant.ops.experts import Bf16ExpertWeights, ExpertWeights, experts
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.norm import rms_norm
from zmrl.batch_invariant.ops.panels import LANES, panel_count
from zmrl.batch_invariant.ops.residual import residual_add
from zmrl.batch_invariant.ops.router import router
from zmrl.model.config import MXFP4_GROUP_SIZE, K3Config
from zmrl.model.context import SequenceContext
from zmrl.model.linear import ColumnLinear, Linear, RowLinear, frozen
from zmrl.model.names import expert_projections
from zmrl.model.tensors import MXFP4_CODES, MXFP4_SCALES, PADDED_PANELS, PANELS, Cut, Form, TensorSlice, named, whole
from zmrl.parallel.exchange import join_rows, own_rows, split_rows
from zmrl.parallel.experts import experts as parallel_experts
from zmrl.parallel.ranks import Ranks


class Mlp(nn.Module):
    """W_down act(W_gate x, W_up x): the first layers' dense MLP and the shared experts. [T, hidden] -> [T, hidden]."""

    def __init__(self, config: K3Config, width: int, ranks: Ranks) -> None:
        super().__init__()
        self.betas = config.activation_betas
        self.gate_up_proj = ColumnLinear({"gate_proj": width, "up_proj": width}, config.hidden_size, ranks.tensor)
        self.down_proj = RowLinear("down_proj", config.hidden_size, width, ranks.tensor)

    def forward(self, x: Tensor, context: SequenceContext | None = None) -> Tensor:
        return self.down_proj(situ(self.gate_up_proj(x), *self.betas))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from self.gate_up_proj.tensor_slices()
        yield from self.down_proj.tensor_slices()


def _padded(width: int) -> int:
    """The expert kernels' widths are multiples of 16; MXFP4 widths are already."""
    return panel_count(width) * LANES


class Experts(nn.Module):
    """The routed experts of a layer that this rank holds, applied in one call: [T, width of the experts] -> the same.

    In BF16 any width will do: rows and columns are padded with zeros to a multiple of 16. A padded input is 0, so it
    leaves every chain as it is; a padded output is dropped.
    """

    def __init__(self, config: K3Config, ranks: Ranks) -> None:
        super().__init__()
        self.group, self.tensor = ranks.expert, ranks.tensor
        self.total, self.outer = config.num_experts, config.expert_hidden_size
        self.topk = config.num_experts_per_token
        self.count = self.total // self.group.size
        self.first = self.group.rank * self.count
        self.shapes = expert_projections(config)
        self.betas = config.activation_betas
        self.quantised = config.expert_format == "mxfp4"
        for name, (out, width) in self.shapes.items():
            if not self.quantised:
                self.register_parameter(name, frozen(self.count, panel_count(out), _padded(width), LANES))
                continue
            codes = frozen(self.count, panel_count(out), width, LANES // 2, dtype=torch.uint8)
            scales = frozen(self.count, panel_count(out), width // MXFP4_GROUP_SIZE, LANES, dtype=torch.uint8)
            self.register_parameter(f"{name}_codes", codes)
            self.register_parameter(f"{name}_scales", scales)
        self.lora: ExpertLoraBuffers | None = None

    def weights(self) -> ExpertWeights | Bf16ExpertWeights:
        """The live buffers, as the operator takes them."""
        if not self.quantised:
            return Bf16ExpertWeights(**{name: getattr(self, name) for name in self.shapes})
        fields = [f"{name}_{kind}" for name in self.shapes for kind in ("codes", "scales")]
        return ExpertWeights(**{field: getattr(self, field) for field in fields})

    def forward(self, z: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None) -> Tensor:
        """z BF16 [T, width of the experts], ids int32 [T, k] ascending, weights FP32 [T, k]."""
        missing = _padded(self.outer) - self.outer
        if missing:
            z = pad(z, (0, missing))
        lora = None if slots is None else self.lora
        if self.group.size == 1:
            u = experts(z, ids, weights, self.weights(), *self.betas, lora=lora, slots=slots)
        else:
            u = self._over_ranks(z, ids, weights, lora, slots)
        return u[:, : self.outer]

    def _over_ranks(
        self, z: Tensor, ids: Tensor, weights: Tensor, lora: ExpertLoraBuffers | None, slots: Tensor | None
    ) -> Tensor:
        tensor, tokens = self.tensor, len(z)
        if tensor.size > 1:  # its ranks have the same tokens: each takes a part of them to the experts
            z, weights = (
                split_rows(tensor, x, what) for x, what in ((z, "expert inputs"), (weights, "expert weights"))
            )
            ids = own_rows(ids, tensor.rank, tensor.size)
            slots = None if slots is None else own_rows(slots, tensor.rank, tensor.size)
        u = parallel_experts(self.group, z, ids, weights, self.total, self.weights(), *self.betas, lora, slots)
        return join_rows(tensor, u, tokens, "expert outputs") if tensor.size > 1 else u

    def idle(self, z: Tensor, adapter: bool) -> Tensor:
        """`forward` without tokens, for its exchanges: z BF16 [0, width of the experts] -> the same."""
        ids = torch.empty(0, self.topk, dtype=torch.int32)
        return self(z, ids, ids.float(), ids[:, 0] if adapter else None)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for name, (out, width) in self.shapes.items():
            for suffix, buffer, shape, form in self._stored(name, out, width):
                for expert, at, held in self._all():
                    yield TensorSlice(f"{expert}.{name}.{suffix}", buffer, at, shape, form, held=held)

    def _all(self) -> Iterator[tuple[int, int, bool]]:
        """Every expert, its place in this rank's buffers, and whether it is there."""
        for expert in range(self.total):
            yield expert, expert - self.first, 0 <= expert - self.first < self.count

    def _stored(self, name: str, out: int, width: int) -> Iterator[tuple[str, Tensor, tuple[int, int], Form]]:
        """Suffix, buffer, shape and form of the tensors that hold projection `name` of one expert."""
        if not self.quantised:
            yield "weight", getattr(self, name), (out, width), PADDED_PANELS
            return
        yield "weight_packed", getattr(self, f"{name}_codes"), (out, width // 2), MXFP4_CODES
        yield "weight_scale", getattr(self, f"{name}_scales"), (out, width // MXFP4_GROUP_SIZE), MXFP4_SCALES

    def create_lora(self, slots: int, rank: int, scale: float) -> None:
        """Zero adapters of every expert for `slots` slots."""
        buffers: dict[str, Any] = {}
        for name, (out, width) in self.shapes.items():
            digit, inputs = name[-1], _padded(width)
            buffers[f"a{digit}"] = torch.zeros(slots, self.count, rank // LANES, inputs, LANES, dtype=torch.bfloat16)
            buffers[f"b{digit}"] = torch.zeros(slots, self.count, panel_count(out), rank, LANES, dtype=torch.bfloat16)
        self.lora = ExpertLoraBuffers(**buffers, scale=scale)

    def lora_buffers(self) -> dict[str, Tensor]:
        """The live adapter buffers [slots, experts, ...], by field."""
        return (
            {}
            if self.lora is None
            else {f"{m}{n[-1]}": getattr(self.lora, f"{m}{n[-1]}") for n in self.shapes for m in "ab"}
        )

    def lora_slices(self, buffers: dict[str, Tensor]) -> Iterator[TensorSlice]:
        """Adapter tensors in `buffers`: one slot of `lora_buffers`, or the trainer's FP32 masters of that shape."""
        for name, (out, width) in self.shapes.items():
            a, b = buffers[f"a{name[-1]}"], buffers[f"b{name[-1]}"]
            rank = b.shape[2]
            for expert, at, held in self._all():
                yield TensorSlice(f"{expert}.{name}.lora_A.weight", a, at, (rank, width), PADDED_PANELS, held=held)
                yield TensorSlice(f"{expert}.{name}.lora_B.weight", b, at, (out, rank), PANELS, held=held)

    def lora_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one slot of the buffers that a single rank would have, by field."""
        return {field: (self.total, *buffer.shape[2:]) for field, buffer in self.lora_buffers().items()}

    def own_lora(self, whole: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of one slot of the buffers that a single rank would have."""
        return {field: Cut(0, self.group.rank, self.group.size).of(buffer) for field, buffer in whole.items()}


class Latent(nn.Module):
    """The way of the routed experts' input into a latent and back, with a norm after their sum."""

    def __init__(self, config: K3Config, width: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.down_proj = Linear({"routed_expert_down_proj": width}, config.hidden_size)
        self.norm = frozen(width)
        self.up_proj = Linear({"routed_expert_up_proj": config.hidden_size}, width)

    def enter(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, latent]."""
        return self.down_proj(x)

    def leave(self, u: Tensor) -> Tensor:
        """[T, latent] -> [T, hidden]."""
        return self.up_proj(rms_norm(u, self.norm, self.eps))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from self.down_proj.tensor_slices()
        yield from self.up_proj.tensor_slices()
        yield whole("routed_expert_norm.weight", self.norm)


class MixtureOfExperts(nn.Module):
    """Routed experts, at full width or in a latent, and shared experts at full width. [T, hidden] -> [T, hidden].

    Rounding points: those of the operators, and the BF16 sum of the routed and the shared result.
    """

    def __init__(self, config: K3Config, ranks: Ranks) -> None:
        super().__init__()
        self.topk, self.scale = config.num_experts_per_token, config.routed_scaling_factor
        self.gate = Linear({"gate": config.num_experts}, config.hidden_size, fp32_out=True)
        self.e_score_correction_bias = frozen(config.num_experts, dtype=torch.float32)
        width = config.routed_expert_hidden_size
        self.latent = None if width is None else Latent(config, width)
        self.shared_experts = Mlp(config, config.shared_intermediate_size, ranks)
        self.experts = Experts(config, ranks)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        ids, weights = router(self.gate(x), self.e_score_correction_bias, self.topk, self.scale, context.flags)
        z = x if self.latent is None else self.latent.enter(x)
        u = self.experts(z, ids, weights, context.slots)
        routed = u if self.latent is None else self.latent.leave(u)
        return residual_add(routed, self.shared_experts(x))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from self.gate.tensor_slices()
        yield whole("gate.e_score_correction_bias", self.e_score_correction_bias)
        if self.latent is not None:
            yield from self.latent.tensor_slices()
        yield from named("shared_experts.", self.shared_experts.tensor_slices())
        yield from named("experts.", self.experts.tensor_slices())
