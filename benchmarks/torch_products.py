"""The model with torch's products: linear layers and experts as an ordinary framework computes them.

Same weights, adapters and gradients; sums in whatever order torch takes. Attention, norms and head stay ours. What
torch needs in another layout (weights in FP32, adapters unpacked) is made once, or once per version of the adapter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from zmrl.batch_invariant.ops.linear import ANCHOR
from zmrl.batch_invariant.ops.panels import LANES, pack_panels, unpack_panels, unpack_parts
from zmrl.model.linear import Linear
from zmrl.model.moe import Experts
from zmrl.model.mxfp4 import dequantise


def use_torch_products(model: nn.Module) -> None:
    """Replace the products of every `Linear` and `Experts` of `model`, on one rank, with one adapter in slot 0."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = TorchLinear(module)  # type: ignore[method-assign]
        elif isinstance(module, Experts):
            module.forward = TorchExperts(module)  # type: ignore[method-assign]


class Unpacked:
    """Adapter buffers in torch's layout, made anew when they have changed."""

    def __init__(self) -> None:
        self._versions: list[int] = []
        self._held: Any = None

    def of(self, buffers: list[Tensor], unpack: Any) -> Any:
        versions = [buffer._version for buffer in buffers]
        if versions != self._versions:
            self._versions, self._held = versions, unpack()
        return self._held


def add_transposed(buffer: Tensor | None, gradient: Tensor) -> None:
    """buffer: panels `[..., N/16, K, 16]`; gradient `[..., K, N]`."""
    if buffer is not None:
        missing = buffer.shape[-3] * LANES - gradient.shape[-1]
        gradient = torch.nn.functional.pad(gradient, (0, missing))
        buffer += gradient.unflatten(-1, (-1, LANES)).transpose(-3, -2)


class TorchLinear:
    """As `Linear.forward`: BF16 in, FP32 products, BF16 out."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self.weight = torch.cat(unpack_parts(layer.weight.detach(), layer.splits)).float()
        self.unpacked = Unpacked()

    def __call__(self, x: Tensor, slots: Tensor | None = None) -> Tensor:
        lora = None if slots is None else self.layer.lora
        if lora is None:
            y = linear(x.float(), self.weight)
        else:
            y = _AdaptedLinear.apply(x.float(), ANCHOR, self)
        return y if self.layer.fp32_out else y.bfloat16()

    def adapter(self) -> tuple[Tensor, list[Tensor]]:
        """(A [P*r, K], B_i [N_i, r]), FP32."""
        lora = self.layer.lora
        assert lora is not None

        def unpack() -> tuple[Tensor, list[Tensor]]:
            a = unpack_panels(lora.a[0], lora.a.shape[1] * LANES).float()
            return a, [part.float() for part in unpack_parts(lora.b[0], self.layer.splits)]

        return self.unpacked.of([lora.a, lora.b], unpack)


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: TorchLinear) -> Tensor:
        a, b = layer.adapter()
        t = linear(x, a)
        scale = layer.layer.lora.scale  # type: ignore[union-attr]
        y = linear(x, layer.weight)
        for part, t_i, b_i in zip(y.split(layer.layer.splits, 1), t.split(b[0].shape[1], 1), b, strict=True):
            part.addmm_(t_i, b_i.T, alpha=scale)
        ctx.save_for_backward(x, t)
        ctx.layer = layer
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, t), layer = ctx.saved_tensors, ctx.layer
        a, b = layer.adapter()
        lora, rank = layer.layer.lora, b[0].shape[1]
        parts = dy.split(layer.layer.splits, 1)
        dt = torch.cat([lora.scale * (d @ b_i) for d, b_i in zip(parts, b, strict=True)], 1)
        add_transposed(lora.grad_a, x.T @ dt)
        if lora.grad_b is not None:
            first = 0
            for d, t_i in zip(parts, t.split(rank, 1), strict=True):
                count = -(-d.shape[1] // LANES)
                add_transposed(lora.grad_b[first : first + count], lora.scale * (t_i.T @ d))
                first += count
        return (dy @ layer.weight).addmm_(dt, a), None, None
