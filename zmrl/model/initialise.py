"""Initial weights of a model, tensor by tensor, from a seed.

Yields *module names* (no `language_model.` prefix) with unquantised float32 tensors, experts included. The same values
start pre-training (`zmrl.model.pretrain`) and fill random test checkpoints (`zmrl.model.checkpoint`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from zmrl.model.config import K3Config
from zmrl.model.names import PREFIX, TensorSpec, tensor_specs

_RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "routed_expert_up_proj", "w2")
"""Projections that write to the residual stream (or, w2, to the sum that a norm follows)."""


def initial_tensors(config: K3Config, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(module name, float32 tensor) for every parameter, in checkpoint order; equal seeds give equal tensors."""
    generator = torch.Generator().manual_seed(seed)
    residual_scale = (2 * config.num_hidden_layers) ** -0.5
    for spec in unquantised_specs(config):
        yield spec.name, _initial(spec, config, residual_scale, generator)


def unquantised_specs(config: K3Config) -> Iterator[TensorSpec]:
    """`tensor_specs` under module names, each MXFP4 pair replaced by one BF16 `.weight` [out, in]."""
    for name, shape, dtype in tensor_specs(config):
        name = name.removeprefix(PREFIX)
        if name.endswith(".weight_scale"):
            continue
        if name.endswith(".weight_packed"):
            yield TensorSpec(name.removesuffix("_packed"), (*shape[:-1], 2 * shape[-1]), "BF16")
        else:
            yield TensorSpec(name, shape, dtype)


def _initial(spec: TensorSpec, config: K3Config, residual_scale: float, generator: torch.Generator) -> Tensor:
    def normal(std: float) -> Tensor:
        return torch.randn(spec.shape, generator=generator) * std

    module = spec.name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module == "A_log":
        heads = config.linear_attn_config.num_heads
        out = torch.zeros(spec.shape)
        out[:heads] = torch.log(1 + torch.rand(heads, generator=generator))
        return out
    if module == "dt_bias":
        # With f = 0 the log-decay is l * sigmoid(dt_bias) (A_log ~ 0): spread it log-uniformly over 0.002 .. 0.5 per
        # token, from long memory to a few tokens.
        decay = torch.exp(torch.empty(spec.shape).uniform_(math.log(0.002), math.log(0.5), generator=generator))
        bound = config.linear_attn_config.gate_lower_bound
        if bound is None:
            return torch.log(torch.expm1(decay))  # log-decay -softplus(dt_bias)
        fraction = decay / -bound
        return torch.log(fraction / (1 - fraction))
    if module.endswith("bias"):
        return torch.zeros(spec.shape)
    if module.endswith("norm"):
        return torch.ones(spec.shape)
    if module.endswith("_res_proj"):
        return torch.zeros(spec.shape)  # a uniform mix, as in the technical report
    if module == "embed_tokens":
        return normal(0.5)
    if module == "lm_head":
        return normal(0.02)
    if module.endswith("conv1d"):
        out = normal(0.1)
        out[:, :, -1] += 1.0  # near the identity: the newest position
        return out
    return normal(spec.shape[-1] ** -0.5 * (residual_scale if module in _RESIDUAL_OUTPUTS else 1.0))
