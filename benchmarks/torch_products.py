"""The model with torch's products: linear layers and experts as an ordinary framework computes them.

Same weights, adapters and gradients; sums in whatever order torch takes. Attention, norms and head stay ours. What
torch needs in another layout (weights in FP32, adapters unpacked) is made once, or once per version of the adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, linear, pad

from zmrl.batch_invariant.ops.linear import ANCHOR
from zmrl.batch_invariant.ops.panels import LANES, unpack_mxfp4, unpack_panels, unpack_parts
from zmrl.model.linear import Linear
from zmrl.model.moe import Experts
from zmrl.model.mxfp4 import dequantise

FORM = "fused"
"""Of the experts, in FP32; on AVX-512 BF16 would be faster (`benchmarks.experts`)."""


def use_torch_products(model: nn.Module) -> None:
    """Replace the products of every `Linear` and `Experts` of `model`, on one rank, with one adapter in slot 0."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.forward = TorchLinear(module)  # type: ignore[method-assign]
        elif isinstance(module, Experts):
            module.forward = TorchExpertLayer(module)  # type: ignore[method-assign]


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
        gradient = pad(gradient, (0, missing))
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


class TorchExperts:
    """The experts in plain torch, sorted by expert. W [E, K, N] frozen, A [E, K, r] and B [E, r, N] trained."""

    def __init__(self, w: list[Tensor], a: list[Tensor], b: list[Tensor], form: str) -> None:
        """Matrices 1, 3, 2. form: "plain" or "fused" (padded to the largest expert), or "segments"."""
        self.w, self.a, self.b, self.form = w, a, b, form
        self.w13 = torch.cat(w[:2], 2)

    def project(self, x: Tensor, i: int, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return product(x, self.w[i]) + product(product(x, self.a[i]), self.b[i])

    def layer(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        if self.form == "fused":
            g, u = product(x, self.w13).chunk(2, -1)
            t1, t3 = product(x, torch.cat(self.a[:2], 2)).chunk(2, -1)
            g, u = g + product(t1, self.b[0]), u + product(t3, self.b[1])
        else:
            g, u = self.project(x, 0, product), self.project(x, 1, product)
        h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        return self.project(h, 2, product)

    def __call__(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        count, topk = len(self.w13), ids.shape[1]
        flat, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(flat, minlength=count)
        back = torch.empty_like(order)
        if self.form == "segments":
            ends = counts.cumsum(0).int()
            back[order] = torch.arange(len(order))
            rows = self.layer(z.index_select(0, order // topk), lambda x, w: grouped_mm(x, w, offs=ends))
        else:
            most = int(counts.max())
            place = flat * most + torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat]
            source = torch.full((count * most,), len(z))
            source[place] = order // topk
            back[order] = place
            x = pad(z, (0, 0, 0, 1)).index_select(0, source).view(count, most, -1)
            rows = self.layer(x, torch.bmm).flatten(0, 1)
        picked = rows.index_select(0, back).view(len(z), topk, -1)
        return torch.bmm(weights.to(picked.dtype).unsqueeze(1), picked).squeeze(1)


class TorchExpertLayer:
    """As `Experts.forward`."""

    def __init__(self, layer: Experts) -> None:
        self.layer = layer
        self.w = []
        for name in ("w1", "w3", "w2"):
            codes, scales = getattr(layer, f"{name}_codes"), getattr(layer, f"{name}_scales")
            packed, scale = unpack_mxfp4(codes, scales, layer.shapes[name][0])
            self.w.append(dequantise(packed, scale, torch.float32).transpose(-1, -2).contiguous())
        self.unpacked = Unpacked()

    def experts(self) -> TorchExperts:
        """With the adapter as it is now; no adapter: a zero one."""
        lora = self.layer.lora
        assert lora is not None

        def unpack() -> TorchExperts:
            rows = [buffer.shape[-3] * LANES for buffer in lora.tensors]
            plain = [unpack_panels(t[0], n).transpose(-1, -2).float() for t, n in zip(lora.tensors, rows, strict=True)]
            a, b = plain[0::2], [lora.scale * t for t in plain[1::2]]
            return TorchExperts(self.w, *([t.requires_grad_() for t in part] for part in (a, b)), FORM)

        return self.unpacked.of(lora.tensors, unpack)

    def __call__(self, z: Tensor, ids: Tensor, weights: Tensor, slots: Tensor | None) -> Tensor:
        experts = self.experts()
        if not torch.is_grad_enabled():
            return experts(z.float(), ids, weights).bfloat16()
        return _Experts.apply(z.float(), weights, ANCHOR, ids, self).bfloat16()


class _Experts(torch.autograd.Function):
    """Autograd inside, so that the adapters' gradients can be added to the kernels' buffers."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weights: Tensor, anchor: Tensor, ids: Tensor, layer: TorchExpertLayer) -> Tensor:
        ctx.inputs = z.detach().requires_grad_(), weights.detach().requires_grad_()
        ctx.layer, ctx.experts = layer.layer, layer.experts()
        with torch.enable_grad():
            ctx.out = ctx.experts(ctx.inputs[0], ids, ctx.inputs[1])
        return ctx.out.detach()

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        experts, lora = ctx.experts, ctx.layer.lora
        adapters = [t for pair in zip(experts.a, experts.b, strict=True) for t in pair]
        dz, dweights, *gradients = torch.autograd.grad(ctx.out, [*ctx.inputs, *adapters], du)
        for i, (buffer, gradient) in enumerate(zip(lora.gradients or (), gradients, strict=False)):
            add_transposed(buffer, gradient if i % 2 == 0 else lora.scale * gradient)
        return dz, dweights, None, None, None
