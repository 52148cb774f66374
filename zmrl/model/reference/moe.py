"""Router, routed experts and the mixture of experts, in a latent or at full width (specification 3.2)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from zmrl.model.config import K3Config
from zmrl.model.reference.common import MLP, ForwardContext, RMSNorm, cap, cap_slope, linear, situ


class Router(nn.Module):
    """Sigmoid router; the correction bias takes part in the choice, not in the weights."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        self.top_k = config.num_experts_per_token
        self.scale = config.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> expert ids [N, k] ascending, weights [N, k].

        Chosen: the k largest of score + bias, ties to the lower id. Weights: score / (sum of chosen + 1e-20) * scale.
        """
        scores = torch.sigmoid(x @ self.weight.t())
        ids = top_k_lowest_index(scores.detach() + self.e_score_correction_bias, self.top_k)
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scale


def top_k_lowest_index(values: Tensor, k: int) -> Tensor:
    """Ids of the k largest of values [N, E], ties to the lower id, in ascending order: [N, k]."""
    if k < values.shape[-1]:
        best = torch.topk(values, k + 1)
        if not (best.values[:, k - 1] == best.values[:, k]).any():  # no tie at the cut: any top-k gives the same set
            return best.indices[:, :k].sort(-1).values
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k].sort(-1).values


class Expert(nn.Module):
    """One routed expert: w2(SiTU(w1 z, w3 z))."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.w1 = linear(latent, width)
        self.w2 = linear(width, latent)
        self.w3 = linear(latent, width)


class RoutedExperts(nn.ModuleList):
    """All routed experts. Their Linears' weights are views of two stacked tensors, which the fast path uses.

    Fast path (no adapter, no gradient asked for on a Linear): one autograd function over all experts; gradients go to
    `w13` [E, 2F, L] and `w2` [E, L, F] if those require one. Module path (`peft` has wrapped Linears): expert by
    expert through the modules.
    """

    def __init__(self, config: K3Config) -> None:
        latent, width = config.expert_hidden_size, config.moe_intermediate_size
        super().__init__(Expert(latent, width) for _ in range(config.num_experts))
        self.width = width
        self.w13: Tensor
        self.w2: Tensor
        self.betas = config.activation_betas
        self._stack()

    def _stack(self) -> None:
        """(Re)build the stacked tensors and make the Linears' weights views of them."""
        with torch.no_grad():
            w13 = torch.stack([torch.cat((e.w1.weight, e.w3.weight)) for e in self._experts()])
            w2 = torch.stack([e.w2.weight for e in self._experts()])
            for i, expert in enumerate(self._experts()):
                expert.w1.weight = nn.Parameter(w13[i, : self.width], requires_grad=False)
                expert.w3.weight = nn.Parameter(w13[i, self.width :], requires_grad=False)
                expert.w2.weight = nn.Parameter(w2[i], requires_grad=False)
        self.w13, self.w2 = w13, w2

    def _apply(self, fn: Any, recurse: bool = True) -> RoutedExperts:
        super()._apply(fn, recurse)  # a change of dtype or device replaces the views
        if self._all_plain():
            self._stack()
        return self

    def _experts(self) -> list[Expert]:
        return cast("list[Expert]", list(self))

    def _all_plain(self) -> bool:
        return all(type(e.w1) is type(e.w2) is type(e.w3) is nn.Linear for e in self._experts())

    def _fast(self) -> bool:
        return self._all_plain() and not any(
            e.w1.weight.requires_grad or e.w2.weight.requires_grad or e.w3.weight.requires_grad for e in self._experts()
        )

    def forward(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """z [N, latent], ids and weights [N, k] -> sum over chosen experts of weight * expert(z) [N, latent]."""
        if self._fast():
            return _StackedExperts.apply(z, weights, self.w13, self.w2, ids, *self.betas)
        out, experts = torch.zeros_like(z), self._experts()
        for e in ids.unique().tolist():
            token, slot = torch.nonzero(ids == e, as_tuple=True)
            expert, rows = experts[e], z[token]
            y = expert.w2(situ(expert.w1(rows), expert.w3(rows), *self.betas))
            out = out.index_add(0, token, y * weights[token, slot].unsqueeze(-1))
        return out


class _StackedExperts(torch.autograd.Function):
    """Tokens sorted by expert, one small matrix product per expert and direction, all inside one function."""

    @staticmethod
    def forward(ctx, z: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, beta: float, linear_beta: float):
        tokens, k = ids.shape
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=w13.shape[0])
        active = counts.nonzero().flatten().tolist()
        sizes = counts[active].tolist()
        x = z[order // k]
        gate_up = _products(x, w13, active, sizes, transpose=True)
        gate, up = gate_up.chunk(2, dim=-1)
        hidden = situ(gate, up, beta, linear_beta)
        y = _products(hidden, w2, active, sizes, transpose=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        ctx.save_for_backward(x, gate_up, hidden, y, weights, w13, w2, order, inverse)
        ctx.plan = (active, sizes, tokens, k, beta, linear_beta)
        return torch.einsum("nkl,nk->nl", y[inverse].view(tokens, k, -1), weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, gate_up, hidden, y, weights, w13, w2, order, inverse = ctx.saved_tensors
        active, sizes, tokens, k, beta, linear_beta = ctx.plan
        grad_rows = grad[order // k]
        grad_weights = (grad_rows * y).sum(-1)[inverse].view(tokens, k)
        grad_y = grad_rows.mul_(weights.flatten()[order].unsqueeze(-1))
        grad_w2 = _outer_products(grad_y, hidden, w2, active, sizes) if ctx.needs_input_grad[3] else None
        grad_hidden = _products(grad_y, w2, active, sizes, transpose=False)
        gate, up = gate_up.chunk(2, dim=-1)
        capped, sigmoid, b = cap(gate, beta), torch.sigmoid(gate), cap(up, linear_beta)
        grad_gate = grad_hidden * b * sigmoid * (cap_slope(capped, beta) + capped * (1 - sigmoid))
        grad_up = grad_hidden * capped * sigmoid * cap_slope(b, linear_beta)
        grad_gate_up = torch.cat((grad_gate, grad_up), dim=-1)
        grad_w13 = _outer_products(grad_gate_up, x, w13, active, sizes) if ctx.needs_input_grad[2] else None
        grad_x = _products(grad_gate_up, w13, active, sizes, transpose=False)
        grad_z = grad_x[inverse].view(tokens, k, -1).sum(1)
        return grad_z, grad_weights, grad_w13, grad_w2, None, None, None


def _products(rows: Tensor, weight: Tensor, active: list[int], sizes: list[int], transpose: bool) -> Tensor:
    """rows [R, in] sorted by expert, weight [E, out, in]: each expert's rows @ weight^T (or @ weight)."""
    weight = weight.transpose(1, 2) if transpose else weight
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    matrices = weight.unbind(0)
    for e, a, b in zip(active, rows.split(sizes), out.split(sizes), strict=True):
        torch.mm(a, matrices[e], out=b)
    return out


def _outer_products(grad: Tensor, rows: Tensor, weight: Tensor, active: list[int], sizes: list[int]) -> Tensor:
    """Weight gradients [E, out, in]: each expert's grad^T @ rows; zero for experts without tokens."""
    out = torch.empty_like(weight) if len(active) == weight.shape[0] else torch.zeros_like(weight)
    matrices = out.unbind(0)
    for e, a, b in zip(active, grad.t().split(sizes, dim=1), rows.split(sizes), strict=True):
        torch.mm(a, b, out=matrices[e])
    return out


class MixtureOfExperts(nn.Module):
    """y = up(norm(sum of experts in the latent)) + shared(x), the norm after the sum; at full width sum + shared(x)."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        hidden, latent = config.hidden_size, config.routed_expert_hidden_size
        self.gate = Router(config)
        self.in_latent = latent is not None
        if latent is not None:
            self.routed_expert_down_proj = linear(hidden, latent)
            self.routed_expert_norm = RMSNorm(latent, config.rms_norm_eps)
            self.routed_expert_up_proj = linear(latent, hidden)
        self.shared_experts = MLP(config, config.shared_intermediate_size)
        self.experts = RoutedExperts(config)

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        flat = x.flatten(0, -2)
        ids, weights = self.gate(flat)
        ctx.router_loads[layer] = torch.bincount(ids.flatten(), minlength=self.gate.weight.shape[0])
        ctx.record(f"layers.{layer}.router_ids", ids)
        ctx.record(f"layers.{layer}.router_weights", weights)
        u = self.experts(self.routed_expert_down_proj(flat) if self.in_latent else flat, ids, weights)
        ctx.record(f"layers.{layer}.expert_sum", u)
        y = self.routed_expert_up_proj(self.routed_expert_norm(u)) if self.in_latent else u
        return y.view_as(x) + self.shared_experts(x)
