"""The buffers of an adapter as the operators take them (docs/operators.md, Adapters and Adapter gradients).

The BF16 buffers are the live ones that the forward reads; autograd never sees them as parameters. A backward adds to
the FP32 gradient buffers by continuing the chains in them, token ascending, so micro-batches of one sample shard give
the bits of one big batch. The caller zeroes them.
"""

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class LoraBuffers:
    """Adapters of one linear layer of P parts, stacked over S slots: y = base + scale * B (A x)."""

    a: torch.Tensor
    """BF16 panels `[S, P*r/16, K, 16]`."""
    b: torch.Tensor
    """BF16 panels `[S, panels of W, r, 16]`."""
    scale: float
    """alpha / r."""
    grad_a: torch.Tensor | None = None
    """FP32 `[P*r/16, K, 16]`: the gradient of slot 0; None if not wanted. Of MLA's kv_b one for each slice of heads:
    `[slices, r/16, K, 16]`; whoever zeroed them combines them (`ops.linear_parallel.tree_sum`) when the shard ends."""
    grad_b: torch.Tensor | None = None
    """FP32 `[panels of W, r, 16]`."""

    @property
    def wants_gradients(self) -> bool:
        return self.grad_a is not None or self.grad_b is not None


@dataclass(slots=True)
class ExpertLoraBuffers:
    """Adapters of all E routed experts, stacked over S slots. L: latent width, I: expert width."""

    a1: torch.Tensor
    """BF16 panels `[S, E, r/16, L, 16]`; a3 alike."""
    b1: torch.Tensor
    """BF16 panels `[S, E, I/16, r, 16]`; b3 alike."""
    a3: torch.Tensor
    b3: torch.Tensor
    a2: torch.Tensor
    """BF16 panels `[S, E, r/16, I, 16]`."""
    b2: torch.Tensor
    """BF16 panels `[S, E, L/16, r, 16]`."""
    scale: float
    """alpha / r."""
    gradients: tuple[torch.Tensor, ...] | None = None
    """FP32 gradients of slot 0: a1, b1, a3, b3, a2, b2, each shaped like its buffer without S; None if not wanted."""
    by_copy: tuple[tuple[torch.Tensor, ...], ...] = ()
    """In place of `gradients` where the tokens of several copies of the model meet: those of each copy's tokens."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.a1, self.b1, self.a3, self.b3, self.a2, self.b2]

    @property
    def wants_gradients(self) -> bool:
        return self.gradients is not None
