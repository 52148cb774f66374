"""A rollout that is not the policy that is trained: the linear projections by torch. For control runs only.

It shows what a run looks like whose sampler is an ordinary one: the same weights, the same rounding points, another
order of summation. `debug.torch_linear_in_rollout` of a recipe turns it on; experts, attention and head stay ours.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from zmrl.batch_invariant.ops.panels import unpack_panels, unpack_parts
from zmrl.model.linear import Linear


def use_torch_linear(model: nn.Module) -> int:
    """Replace the product of every `Linear` by `torch.nn.functional.linear` in FP32; returns how many there are."""
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    for layer in layers:
        weight = torch.cat(unpack_parts(layer.weight.detach(), layer.splits)).float()
        layer.forward = partial(_forward, layer, weight)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: Linear, weight: Tensor, x: Tensor, slots: Tensor | None = None) -> Tensor:
    """As `Linear.forward`; weight FP32 [N, K]."""
    x = x.float()
    y = functional.linear(x, weight)
    if slots is not None and layer.lora is not None:
        for slot in slots.unique().tolist():
            if slot >= 0:
                y += layer.lora.scale * (slots == slot).unsqueeze(1) * _adapter(layer, slot, x)
    return y if layer.fp32_out else y.bfloat16()


def _adapter(layer: Linear, slot: int, x: Tensor) -> Tensor:
    """B (A x) of one slot, FP32 [T, N]."""
    lora = layer.lora
    assert lora is not None
    rank = lora.b.shape[2]
    a = unpack_panels(lora.a[slot], rank * len(layer.splits)).float().split(rank)
    b = [part.float() for part in unpack_parts(lora.b[slot], layer.splits)]
    parts = [functional.linear(functional.linear(x, a_i), b_i) for a_i, b_i in zip(a, b, strict=True)]
    return torch.cat(parts, 1)
