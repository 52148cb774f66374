"""Expert parallelism: rank r of W holds the experts rE/W to (r+1)E/W, every rank its own tokens.

A token goes once to each rank that holds one of its experts. Results come back in FP32, one per expert, and the token's
owner combines them in ascending expert id (numerics.md rule 3), so it does not matter where an expert was computed.
Backward alike: FP32 gradients per expert come back, the owner adds them in ascending expert id.

The ranks' tokens are consecutive parts of one micro-batch, in rank order; so an expert meets its pairs in token order,
and its adapter's gradient continues the chain that one rank would. Or of several micro-batches, one of each copy of the
model, whose ranks are consecutive too: then every copy's tokens continue chains of their own (`lora.by_copy`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zmrl.batch_invariant.library import check
from zmrl.batch_invariant.ops.experts import BETA, LINEAR_BETA, Bf16ExpertWeights, ExpertWeights
from zmrl.batch_invariant.ops.experts_parallel import combine_experts, expert_results, expert_results_backward
from zmrl.batch_invariant.ops.linear import ANCHOR
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.parallel.group import Group


@dataclass
class Dispatch:
    """Which tokens of this rank go where, and what arrived here. A pair is one expert of one token."""

    group: Group
    tokens: list[Tensor]
    """Per rank: the tokens that go there, ascending, int64."""
    places: list[Tensor]
    """Per rank: the pairs that go there, token * k + j, ascending, int64."""
    index: Tensor
    """int32 [T, k]: where a pair's result lies among those that come back, rank after rank."""
    token_counts: list[int]
    """Per rank: the rows that came from there."""
    pair_counts: list[int]
    rows: Tensor
    """int32 [n]: the row of every pair that came here, among all rows that came; ids, slots alike."""
    ids: Tensor
    slots: Tensor

    @staticmethod
    def of(group: Group, ids: Tensor, slots: Tensor | None, count: int) -> Dispatch:
        """ids int32 [T, k] of `count` experts of all ranks, ascending; slots int32 [T] or None."""
        per_rank = count // group.size
        target, k = ids // per_rank, ids.shape[1]
        places = [(target.flatten() == r).nonzero().flatten() for r in range(group.size)]
        tokens, messages = [], []
        for r, place in enumerate(places):
            unique, row = torch.unique_consecutive(place // k, return_inverse=True)
            tokens.append(unique)
            slot = torch.full_like(row, -1) if slots is None else slots[place // k]
            messages.append(torch.stack([row, ids.flatten()[place] - r * per_rank, slot], 1).int())
        index = torch.empty(ids.numel(), dtype=torch.int32)
        index[torch.cat(places)] = torch.arange(ids.numel(), dtype=torch.int32)
        numbers = torch.tensor([[len(t), len(p)] for t, p in zip(tokens, places, strict=True)])
        arriving = group.all_gather(numbers, "expert counts")[:, group.rank]
        token_counts, pair_counts = arriving.T.tolist()
        pairs = torch.cat(group.all_to_all(messages, "expert pairs", pair_counts))
        first = torch.tensor([0, *token_counts[:-1]]).cumsum(0).repeat_interleave(torch.tensor(pair_counts))
        rows, own_ids, own_slots = pairs.unbind(1)
        rows = (rows + first).int()
        return Dispatch(
            group, tokens, places, index.view_as(ids), token_counts, pair_counts, rows, own_ids.contiguous(),
            own_slots.contiguous(),
        )  # fmt: skip

    def send_tokens(self, x: Tensor, what: str) -> Tensor:
        """x [T, ...] of this rank's tokens -> the rows that came here, rank after rank."""
        return torch.cat(self.group.all_to_all([x[t] for t in self.tokens], what, self.token_counts))

    def send_pairs(self, x: Tensor, what: str) -> Tensor:
        """x [T, k] of this rank's pairs -> those that came here."""
        return torch.cat(self.group.all_to_all([x.flatten()[p] for p in self.places], what, self.pair_counts))

    def per_copy(self, counts: list[int], copies: int) -> list[int]:
        """Counts per rank -> per copy of the model."""
        ranks = self.group.size // copies
        return [sum(counts[first : first + ranks]) for first in range(0, self.group.size, ranks)]

    def send_back(self, x: Tensor, what: str) -> Tensor:
        """x [n, ...] of the pairs that came here -> those of this rank's pairs, as `index` numbers them."""
        return torch.cat(self.group.all_to_all(x.split(self.pair_counts), what, [len(p) for p in self.places]))


class _ParallelExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        weights: Tensor,
        anchor: Tensor,
        dispatch: Dispatch,
        w: ExpertWeights | Bf16ExpertWeights,
        lora: ExpertLoraBuffers | None,
        betas: tuple[float, float],
    ) -> Tensor:
        rows = dispatch.send_tokens(z, "expert inputs")
        results = expert_results(rows, dispatch.rows, dispatch.ids, w, lora, dispatch.slots, *betas)
        ctx.save_for_backward(rows, weights)
        ctx.arguments = dispatch, w, lora, betas
        return combine_experts(dispatch.send_back(results, "expert results"), dispatch.index, weights)

    @staticmethod
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights = ctx.saved_tensors
        dispatch, w, lora, betas = ctx.arguments
        gradients = dispatch.send_tokens(du.contiguous(), "expert output gradients")
        own_weights = dispatch.send_pairs(weights, "expert weights")
        dz, dweights = _results_backward(dispatch, gradients, rows, own_weights, w, lora, betas)
        dz = combine_experts(dispatch.send_back(dz, "expert input gradients"), dispatch.index)
        dweights = dispatch.send_back(dweights, "expert weight gradients")[dispatch.index.long()]
        return dz, dweights, *[None] * 5


def _results_backward(
    dispatch: Dispatch,
    du: Tensor,
    rows: Tensor,
    weights: Tensor,
    w: ExpertWeights | Bf16ExpertWeights,
    lora: ExpertLoraBuffers | None,
    betas: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """`expert_results_backward` of what came here: at once, or copy by copy, each with gradient buffers of its own."""
    if lora is None or not lora.by_copy:
        pairs = dispatch.rows, dispatch.ids, weights
        return expert_results_backward(du, rows, *pairs, w, lora, dispatch.slots, *betas)
    copies = len(lora.by_copy)
    row_counts = dispatch.per_copy(dispatch.token_counts, copies)
    pair_counts = dispatch.per_copy(dispatch.pair_counts, copies)
    results = []
    row = pair = 0
    for gradients, row_count, pair_count in zip(lora.by_copy, row_counts, pair_counts, strict=True):
        own, at = slice(row, row + row_count), slice(pair, pair + pair_count)
        pairs = dispatch.rows[at] - row, dispatch.ids[at], weights[at]
        adapter = replace(lora, gradients=gradients, by_copy=())
        results.append(expert_results_backward(du[own], rows[own], *pairs, w, adapter, dispatch.slots[at], *betas))
        row, pair = own.stop, at.stop
    dz, dweights = zip(*results, strict=True)
    return torch.cat(dz), torch.cat(dweights)


def experts(
    group: Group,
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    count: int,
    expert_weights: ExpertWeights | Bf16ExpertWeights,
    beta: float = BETA,
    linear_beta: float = LINEAR_BETA,
    lora: ExpertLoraBuffers | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """`ops.experts.experts` over the ranks of a group: z BF16 `[T, L]` of this rank's tokens -> BF16 `[T, L]`.

    ids int32 `[T, k]` strictly ascending among the `count` experts of all ranks, weights FP32 `[T, k]`; T differs from
    rank to rank. expert_weights, lora: of this rank's experts. Differentiable in z and weights; the gradients of this
    rank's adapters hold the tokens of all ranks, or of a copy's ranks each (`lora.by_copy`).
    """
    check(count % group.size == 0, f"count: {count} experts on {group.size} ranks: not divisible")
    check(expert_weights[0].shape[0] == count // group.size, "expert_weights: of other experts than this rank's")
    check(lora is None or slots is not None, "slots: adapters need the slot of every token")
    dispatch = Dispatch.of(group, ids, slots, count)
    return _ParallelExperts.apply(z, weights, ANCHOR, dispatch, expert_weights, lora, (beta, linear_beta))
