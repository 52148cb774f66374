"""Pieces that every layer of the reference shares: context, norms, the activation and the MLP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zmrl.model.config import K3Config


@dataclass
class ForwardContext:
    """How one forward runs, and what it leaves besides logits."""

    kda_form: str = "chunked"
    """`"chunked"` (fast) or `"recurrent"` (the definition)."""
    sparse: bool = True
    """Whether MLA attends to the indexer's selection only. False: to all causal positions (indexer warm-up)."""
    want_index_loss: bool = False
    """Collect the indexer's KL loss (training)."""
    index_losses: list[Tensor] = field(default_factory=list)
    """One scalar per MLA layer."""
    router_loads: dict[int, Tensor] = field(default_factory=dict)
    """0-based layer -> int64 [num_experts]: tokens that chose each expert (training: bias balancing)."""
    intermediates: dict[str, Tensor] | None = None
    """If a dict: named intermediate tensors are put here, e.g. `layers.3.attention`."""
    state: list[dict[str, Any]] | None = None
    """One dict per layer with the state of the tokens before, updated in place (see `new_state`)."""

    def record(self, name: str, value: Tensor) -> None:
        """Keep an intermediate if asked to."""
        if self.intermediates is not None:
            self.intermediates[name] = value


def linear(in_features: int, out_features: int) -> nn.Linear:
    """A Linear without bias and without torch's (slow) initialisation; weights are loaded later."""
    return nn.utils.skip_init(nn.Linear, in_features, out_features, bias=False)


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def cap(x: Tensor, beta: float) -> Tensor:
    """beta tanh(x / beta), x itself where beta is infinite."""
    return x if math.isinf(beta) else beta * torch.tanh(x / beta)


def cap_slope(capped: Tensor, beta: float) -> Tensor:
    """The derivative of `cap` where its value is `capped`: 1 where beta is infinite."""
    return 1 - (capped / beta).square()


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU(g, u) = cap(g, b) sigmoid(g) cap(u, c) (specification 3.2); with infinite b and c SiLU(g) u."""
    return cap(gate, beta) * torch.sigmoid(gate) * cap(up, linear_beta)


class MLP(nn.Module):
    """Dense MLP: the first layers', and the shared experts as one."""

    def __init__(self, config: K3Config, width: int) -> None:
        super().__init__()
        self.gate_proj = linear(config.hidden_size, width)
        self.up_proj = linear(config.hidden_size, width)
        self.down_proj = linear(width, config.hidden_size)
        self.betas = config.activation_betas

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))
