"""MLA under decode context parallelism: rank r of W holds the latents of every W-th position, and 1/W of the heads.

Rule 6 of the numerics contract cuts the selected positions by their remainder mod 8 on one rank, too. So the maximum of
all ranks comes first, each rank finishes the subtree of its remainders, and the owner of a head adds the subtrees by
the rest of the tree. Nothing is rounded between: the output is that of `mla_attention` on one rank.

Per token and layer a rank sends, to each other rank: its heads' queries in BF16, all heads' maxima, and the other's
heads' sums in FP32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat
from zmrl.batch_invariant.ops.linear_parallel import add_adapter
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import HEAD_SLICES, MlaDims, SumHeads
from zmrl.batch_invariant.ops.mla_partial import mla_partial, mla_queries, mla_scores, mla_values
from zmrl.parallel.exchange import gather_rows, reduce_rows
from zmrl.parallel.group import Group


def head_sums(group: Group) -> SumHeads:
    """How `ops.mla.mla_attention`, on the heads of each rank of a tensor group, sums the latents' gradient over all."""

    def finish(partial: Tensor) -> Tensor:
        rows = add_adapter(reduce_rows(group, partial, "latent gradients"), None, None, 0.0)
        return gather_rows(group, rows, len(partial), "latent gradient rows")

    return SumHeads(HEAD_SLICES // group.size, finish)


def own_positions(selected: Tensor, rank: int, size: int) -> Tensor:
    """Of positions int32 `[T, topk]` (ascending, then -1) those that a rank holds: `[T, n]`, n at least 1, likewise."""
    mine = (selected >= 0) & (selected % size == rank)
    counts = mine.sum(1)
    out = torch.full((len(selected), max(1, int(counts.max()) if len(counts) else 0)), -1, dtype=torch.int32)
    out[torch.arange(out.shape[1]) < counts[:, None]] = selected[mine]
    return out


def every_position(positions: Tensor) -> Tensor:
    """positions int32 `[T]` -> int32 `[T, n]`: what dense attention attends to, 0 to each token's own, then -1."""
    columns = torch.arange(int(positions.max()) + 1 if len(positions) else 1, dtype=torch.int32)
    return torch.where(columns <= positions[:, None], columns, -1)


def mla_attention(
    group: Group,
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    block_size: int,
    kv_b: Tensor,
    dims: MlaDims,
    lora: LoraBuffers | None = None,
    slots: Tensor | None = None,
    latents: LatentFormat = BF16_LATENTS,
) -> Tensor:
    """`ops.mla.mla_attention` over the ranks of a group; forward only.

    q BF16 `[T, H*(N+P)]`, kv_b, b of `lora` and the result `[T, H*V]`: of this rank's heads, as dims says; every rank
    has as many. pages, block_table: this rank's, by local position. selected int32 `[T, topk]`: the positions on all
    ranks, as `selection.index_select` gives them; None: dense attention. cu_seqlens, positions, slots: equal on all
    ranks.
    """
    adapter = () if lora is None else (lora.a, lora.b, slots, lora.scale)
    queries = group.all_gather(mla_queries(q, kv_b, dims, *adapter), "queries")
    queries = queries.transpose(0, 1).flatten(1, 2).contiguous()
    every = dims._replace(heads=dims.heads * group.size)
    mine = own_positions(every_position(positions) if selected is None else selected, group.rank, group.size)
    shard = (pages, block_table, cu_seqlens, positions, mine, block_size, every, group.size, group.rank, latents)
    scores, maximum = mla_scores(queries, *shard)
    maximum = group.all_gather(maximum, "maxima").amax(0)
    partial = mla_partial(scores, maximum, *shard)
    of_ranks = partial.split(dims.heads, dim=1)
    partials = torch.stack(group.all_to_all(of_ranks, "partial sums", [len(q)] * group.size))
    return mla_values(partials, kv_b, dims, *adapter)
