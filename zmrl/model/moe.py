"""Dense MLP and latent mixture of experts (specification 3.2)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zmrl.batch_invariant.ops.activation import situ
from zmrl.batch_invariant.ops.experts import ExpertWeights, experts
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.norm import rms_norm
from zmrl.batch_invariant.ops.panels import LANES, panel_count
from zmrl.batch_invariant.ops.residual import residual_add
from zmrl.batch_invariant.ops.router import router
from zmrl.model.config import MXFP4_GROUP_SIZE, K3Config
from zmrl.model.context import SequenceContext
from zmrl.model.linear import REDUCTION_SHARDS, Linear, frozen
from zmrl.model.names import expert_projections
from zmrl.model.tensors import MXFP4_CODES, MXFP4_SCALES, PANELS, TensorSlice, named, whole


class Mlp(nn.Module):
    """W_down SiTU(W_gate x, W_up x): layer 0's dense MLP and the shared experts. [T, hidden] -> [T, hidden]."""

    def __init__(self, config: K3Config, width: int) -> None:
        super().__init__()
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        self.gate_up_proj = Linear({"gate_proj": width, "up_proj": width}, config.hidden_size)
        self.down_proj = Linear({"down_proj": config.hidden_size}, width, shards=REDUCTION_SHARDS)

    def forward(self, x: Tensor, context: SequenceContext | None = None) -> Tensor:
        return self.down_proj(situ(self.gate_up_proj(x), self.beta, self.linear_beta))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        yield from self.gate_up_proj.tensor_slices()
        yield from self.down_proj.tensor_slices()


class Experts(nn.Module):
    """All routed experts of a layer in MXFP4, applied in one call in the latent: [T, latent] -> [T, latent]."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.count = config.num_experts
        self.shapes = expert_projections(config)
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta
        for name, (out, width) in self.shapes.items():
            codes = frozen(self.count, panel_count(out), width, LANES // 2, dtype=torch.uint8)
            scales = frozen(self.count, panel_count(out), width // MXFP4_GROUP_SIZE, LANES, dtype=torch.uint8)
            self.register_parameter(f"{name}_codes", codes)
            self.register_parameter(f"{name}_scales", scales)
        self.lora: ExpertLoraBuffers | None = None

    def forward(self, z: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None) -> Tensor:
        """z BF16 [T, latent], ids int32 [T, k] ascending, weights FP32 [T, k]."""
        buffers = {f"{n}_{kind}": getattr(self, f"{n}_{kind}") for n in self.shapes for kind in ("codes", "scales")}
        lora = None if slots is None else self.lora
        return experts(z, ids, weights, ExpertWeights(**buffers), self.beta, self.linear_beta, lora=lora, slots=slots)

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for name, (out, width) in self.shapes.items():
            for kind, form, columns in (
                ("packed", MXFP4_CODES, width // 2),
                ("scale", MXFP4_SCALES, width // MXFP4_GROUP_SIZE),
            ):
                buffer = getattr(self, f"{name}_codes" if kind == "packed" else f"{name}_scales")
                for expert in range(self.count):
                    yield TensorSlice(f"{expert}.{name}.weight_{kind}", buffer, expert, (out, columns), form)

    def create_lora(self, slots: int, rank: int, scale: float) -> None:
        """Zero adapters of every expert for `slots` slots."""
        buffers: dict[str, Any] = {}
        for name, (out, width) in self.shapes.items():
            digit = name[-1]
            buffers[f"a{digit}"] = torch.zeros(slots, self.count, rank // LANES, width, LANES, dtype=torch.bfloat16)
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
            for expert in range(self.count):
                yield TensorSlice(f"{expert}.{name}.lora_A.weight", a, expert, (rank, width), PANELS)
                yield TensorSlice(f"{expert}.{name}.lora_B.weight", b, expert, (out, rank), PANELS)


class LatentMoe(nn.Module):
    """Routed experts in a latent, norm after their sum, shared experts on the full width. [T, hidden] -> [T, hidden].

    Rounding points: those of the operators, and the BF16 sum of the routed and the shared result.
    """

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.topk, self.scale, self.eps = (
            config.num_experts_per_token,
            config.routed_scaling_factor,
            config.rms_norm_eps,
        )
        self.gate = Linear({"gate": config.num_experts}, hidden, fp32_out=True)
        self.e_score_correction_bias = frozen(config.num_experts, dtype=torch.float32)
        self.routed_expert_down_proj = Linear({"routed_expert_down_proj": latent}, hidden)
        self.routed_expert_norm = frozen(latent)
        self.routed_expert_up_proj = Linear({"routed_expert_up_proj": hidden}, latent)
        self.shared_experts = Mlp(config, config.shared_intermediate_size)
        self.experts = Experts(config)

    def forward(self, x: Tensor, context: SequenceContext) -> Tensor:
        ids, weights = router(self.gate(x), self.e_score_correction_bias, self.topk, self.scale, context.flags)
        u = self.experts(self.routed_expert_down_proj(x), ids, weights, context.slots)
        routed = self.routed_expert_up_proj(rms_norm(u, self.routed_expert_norm, self.eps))
        return residual_add(routed, self.shared_experts(x))

    def tensor_slices(self) -> Iterator[TensorSlice]:
        for projection in (self.gate, self.routed_expert_down_proj, self.routed_expert_up_proj):
            yield from projection.tensor_slices()
        yield whole("gate.e_score_correction_bias", self.e_score_correction_bias)
        yield whole("routed_expert_norm.weight", self.routed_expert_norm)
        yield from named("shared_experts.", self.shared_experts.tensor_slices())
        yield from named("experts.", self.experts.tensor_slices())
