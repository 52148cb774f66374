"""Prefill by tokens: each rank takes some rows with all heads, in place of all rows with some heads.

Under tensor parallelism the latents and index keys are on every rank, and heads are spread. The indexer has no heads to
spread: each rank would rank every position for every row, and would read every selected latent for its few heads. Here
a request's new tokens are cut in 2W slices; rank r takes slices r and 2W-1-r, whose causal work adds up to about the
same for every r. All-to-all brings it their queries of all heads, it selects and attends for its rows, all-to-all takes
the outputs back to their heads. Rows are independent of each other in every operator, so no bit changes.

Under decode context parallelism the pages of a rank hold every W-th position. `gather_context` first collects the
context of these requests on every rank, in order: nothing is merged, and the same code follows.

A step may have both kinds of requests: `requests_by_tokens` says which go by tokens, the rows of the others by heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from zmrl.batch_invariant.library import check
from zmrl.batch_invariant.ops.indexer import index_select
from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.model.cache_format import CacheFormat
from zmrl.model.config import K3Config
from zmrl.parallel.costs import prefill_by_heads, prefill_by_tokens
from zmrl.parallel.group import Group
from zmrl.parallel.ranks import Ranks


@dataclass
class PrefillShards:
    """The rows of a step, by the rank that takes them."""

    requests: Tensor
    """Those of the step's requests that go by tokens, ascending, int64 [P]."""
    rows: list[Tensor]
    """Per rank: its rows of the step, ascending, int64."""
    cu_seqlens: list[Tensor]
    """Per rank: the boundaries of `requests` among its rows, int32 [P + 1]."""
    others: Tensor
    """The rows of the other requests, ascending, int64."""
    others_cu_seqlens: Tensor
    """The boundaries of all requests among them, int32 [R + 1]."""

    @staticmethod
    def of(cu_seqlens: Tensor, size: int, requests: Sequence[int] | None = None) -> PrefillShards:
        """cu_seqlens int32 [R + 1] of the step; requests: those that go by tokens, ascending, by default all.

        Slice i of a request's n rows is rows i*n//2W to (i+1)*n//2W.
        """
        bounds = list(pairwise(cu_seqlens.tolist()))
        chosen = torch.arange(len(bounds)) if requests is None else torch.tensor(requests, dtype=torch.int64)
        edges = torch.cat([cu_seqlens[chosen], cu_seqlens[-1:]])
        rows, boundaries = [], []
        for rank in range(size):
            parts = [
                torch.arange(start + i * (stop - start) // (2 * size), start + (i + 1) * (stop - start) // (2 * size))
                for start, stop in (bounds[request] for request in chosen.tolist())
                for i in (rank, 2 * size - 1 - rank)
            ]
            rows.append(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64))
            boundaries.append(torch.searchsorted(rows[-1].int(), edges, out_int32=True))
        left = torch.ones(bounds[-1][1] if bounds else 0, dtype=torch.bool)
        left[torch.cat(rows)] = False
        others = left.nonzero().flatten()
        return PrefillShards(
            chosen, rows, boundaries, others, torch.searchsorted(others.int(), cu_seqlens, out_int32=True)
        )


def requests_by_tokens(
    config: K3Config, cache_format: CacheFormat, ranks: Ranks, cu_seqlens: Tensor, positions: Tensor
) -> list[int]:
    """Which requests of a step go by tokens; alike on all ranks. cu_seqlens int32 [R + 1], positions int32 [T].

    Those that have new tokens for all 2W slices, and gain. Without context ranks that is a context of more than
    `index_topk` positions: with fewer nothing is ranked, so there is no work to share out. Context ranks share that
    work in any case, and what counts is which form sends fewer bytes.
    """
    assert config.index_topk is not None
    tensor, context = ranks.tensor.size, ranks.context.size
    token_bytes = cache_format.latent_bytes(config) + cache_format.index_bytes(config)
    found = []
    for request, (start, stop) in enumerate(pairwise(cu_seqlens.tolist())):
        rows = stop - start
        if rows < 2 * tensor:
            continue
        length = int(positions[stop - 1]) + 1
        sizes = rows, length, tensor, context
        if context == 1:
            gains = length > config.index_topk
        else:
            gains = prefill_by_tokens(config, token_bytes, *sizes) < prefill_by_heads(config, *sizes)
        if gains:
            found.append(request)
    return found


def count_work(positions: Tensor, topk: int) -> dict[str, int]:
    """What rows at `positions` cost: positions that the indexer ranks, and rows of latents that attention reads."""
    held = positions.long() + 1
    return {
        "positions ranked": int(held[held > topk].sum()),
        "latents read": int(held.clamp_max(topk).sum()),
    }


def prefill_attention(
    group: Group,
    shards: PrefillShards,
    q: Tensor,
    index_q: Tensor,
    index_w: Tensor,
    hadamard: bool,
    latent_pages: Tensor,
    index_pages: Tensor,
    block_table: Tensor,
    positions: Tensor,
    topk: int,
    block_size: int,
    kv_b: Tensor,
    dims: MlaDims,
    lora: LoraBuffers | None = None,
    slots: Tensor | None = None,
    flags: Tensor | None = None,
    latents: LatentFormat = BF16_LATENTS,
    index_format: str = "fp8",
) -> Tensor:
    """Indexer and attention of a step: q BF16 `[T, H*(N+P)]` of this rank's heads -> BF16 `[T, H*V]` of them.

    The rows `shards.others` of the result are left as they happen to be. index_q BF16, index_w FP32: the indexer's
    queries and head weights of this rank's rows, `shards.rows[rank]`. Pages, block_table: the whole context of
    `shards.requests`, in the formats `latents` and `index_format`. kv_b, b of `lora`, dims: of all heads. positions,
    slots int32 `[T]`: of all rows. flags int32 `[T]` (mutated, on all ranks): 1 where a score is NaN. Counts in
    `group.events` this rank's rows and what `count_work` foretells of them.
    """
    rows, cu_seqlens = shards.rows[group.rank], shards.cu_seqlens[group.rank]
    counts = [len(r) for r in shards.rows]
    check(dims.heads % group.size == 0, f"dims: {dims.heads} heads on {group.size} ranks: not divisible")
    queries = torch.cat(group.all_to_all([q[r] for r in shards.rows], "queries", [len(rows)] * group.size), 1)
    own_positions = positions[rows]
    met = None if flags is None else torch.zeros(len(rows), dtype=torch.int32)
    where = (block_table, cu_seqlens, own_positions)
    selected = index_select(index_q, index_w, hadamard, index_pages, *where, topk, block_size, met, index_format)
    group.events.update(count_work(own_positions, topk) | {"rows by tokens": len(rows)})
    own_slots = None if slots is None else slots[rows]
    o = mla_attention(queries, None, latent_pages, *where, selected, block_size, kv_b, dims, lora, own_slots, latents)
    of_ranks = o.split(dims.heads // group.size * dims.v, 1)
    out = torch.empty(len(q), dims.heads // group.size * dims.v, dtype=o.dtype)
    for at, part in zip(shards.rows, group.all_to_all(of_ranks, "outputs", counts), strict=True):
        out[at] = part
    if flags is not None and met is not None:
        for at, part in zip(shards.rows, group.all_to_all([met] * group.size, "flags", counts), strict=True):
            flags[at] |= part
    return out


def gather_context(
    group: Group, pages: Tensor, block_table: Tensor, lengths: Sequence[int], block_size: int, fields: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The whole context of a step from pages of every W-th position -> (pages, block table), on all ranks.

    pages uint8 `[blocks, page_bytes]`, block_table int32 `[R, columns]`, block_size: this rank's, by local position; by
    position those of the result are alike. lengths: positions of each request. fields: bytes per token of each field
    of a page, which holds block_size of the first, then block_size of the second, ... (latents: one; index keys: codes
    and scales). Bytes are moved, so any cache format will do.
    """
    mine = torch.cat(
        [_token_bytes(pages, t, _held(n, group), block_size, fields) for t, n in zip(block_table, lengths, strict=True)]
    )
    counts = [[_held(n, group, r) for n in lengths] for r in range(group.size)]
    received = group.all_to_all([mine] * group.size, "context", [sum(c) for c in counts])
    blocks = [-(-n // block_size) for n in lengths]
    first = [0, *accumulate(blocks)]
    tokens = torch.zeros(first[-1] * block_size, sum(fields), dtype=torch.uint8)
    for r, (part, held) in enumerate(zip(received, counts, strict=True)):
        for block, rows in zip(first[:-1], part.split(held), strict=True):
            start = block * block_size + r
            tokens[start : start + group.size * len(rows) : group.size] = rows
    of_blocks = tokens.view(-1, block_size, sum(fields)).split(list(fields), 2)
    columns = torch.arange(max(blocks, default=0), dtype=torch.int32)
    table = torch.tensor(first[:-1], dtype=torch.int32)[:, None] + columns
    return torch.cat([field.flatten(1) for field in of_blocks], 1), table.clamp_max(max(first[-1] - 1, 0))


def _held(length: int, group: Group, rank: int | None = None) -> int:
    """How many of `length` positions a rank (by default this one) holds."""
    return -(-max(length - (group.rank if rank is None else rank), 0) // group.size)


def _token_bytes(pages: Tensor, table: Tensor, count: int, block_size: int, fields: Sequence[int]) -> Tensor:
    """uint8 [count, sum(fields)]: the first `count` tokens in the blocks of `table`, their fields side by side."""
    blocks = pages[table[: -(-count // block_size)].long()]
    start, columns = 0, []
    for width in fields:
        field = blocks[:, start : start + block_size * width]
        columns.append(field.reshape(-1, width)[:count])
        start += block_size * width
    return torch.cat(columns, 1)
