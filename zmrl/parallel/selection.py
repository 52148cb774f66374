"""The indexer under decode context parallelism: the exact top-k of positions that are spread over ranks.

Rank r of W holds the index keys of every W-th position, from r on. Each rank ranks its own and sends its best
`capacity(topk, W)` as 32-bit words (`ops/candidates.py`); all choose the same topk of what was sent. A rank may hold
more winners than it sent. All see on which rows and ranks that depends: a list is exhausted if its worst candidate was
chosen. Its rank then sends its topk best of that row, which contain every winner it can have, and the row is chosen
again. The other ranks need not repeat themselves: more candidates only raise the bar that theirs did not reach.

The result is that of `index_select` on one rank, ties included, whatever W (specification 9.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.candidates import KEY_BLOCK, SEGMENT, index_keys, merge_candidates, pick_candidates
from zmrl.parallel.group import Group

KEYS_AT_ONCE = 1 << 23
"""Ranking keys that a rank holds at once: longer batches are taken in parts, with one exchange each."""


def capacity(topk: int, size: int) -> int:
    """Candidates that a rank sends of a row: ceil(1.5 * topk / W), all that it can have to send if W is 1."""
    return topk if size == 1 else -(-3 * topk // (2 * size))


def held(positions: Tensor, rank: int, size: int) -> Tensor:
    """How many of the positions 0 to positions[t] lie on this rank: int32, like positions."""
    return torch.div(positions - rank, size, rounding_mode="floor") + 1


def exchange_top_k(group: Group, keys: Tensor, positions: Tensor, topk: int, flags: Tensor | None = None) -> Tensor:
    """The topk best positions of every row, int32 `[T, topk]` ascending, on all ranks.

    keys: this rank's ranking keys, uint16 `[T, n]`; positions int32 `[T]`: the tokens' own, each at least topk, equal
    on all ranks. flags int32 `[T]` (mutated): 1 where a rank met NaN.
    """
    counts = held(positions, group.rank, group.size)
    segments = _segments(positions, group.size)
    words = group.all_gather(pick_candidates(keys, counts, capacity(topk, group.size), segments), "candidates")
    selected, more = merge_candidates(words, positions, topk, segments, flags)
    group.events["candidate rows"] += len(positions)
    again = more.nonzero().flatten()
    if len(again):
        selected[again] = _choose_again(group, keys, words, positions, topk, again, more[again])
    return selected


def _segments(positions: Tensor, size: int) -> int:
    """Header words of a message: alike on all ranks, as the longest row needs them on rank 0, which holds most."""
    return -(-int(held(positions.max(), 0, size)) // SEGMENT)


def _choose_again(
    group: Group, keys: Tensor, words: Tensor, positions: Tensor, topk: int, again: Tensor, more: Tensor
) -> Tensor:
    """The rows `again` with the topk best of the ranks in the bits `more`, and what the others have sent."""
    segments = _segments(positions, group.size)
    full = segments + topk
    messages = torch.zeros(group.size, len(again), full, dtype=torch.int32)
    messages[:, :, : words.shape[2]] = words[:, again]
    asked = [(more >> r & 1).nonzero().flatten() for r in range(group.size)]
    rows = again[asked[group.rank]]
    counts = held(positions[rows], group.rank, group.size)
    mine = pick_candidates(keys.view(torch.int16)[rows].view(torch.uint16), counts, topk, segments)
    group.events["candidate rows sent again"] += len(rows)
    for r, message in enumerate(group.all_to_all([mine] * group.size, "candidates again", [len(a) for a in asked])):
        messages[r, asked[r]] = message
    selected, left = merge_candidates(messages, positions[again], topk, segments)
    if left.any():
        raise RuntimeError("the merge of full lists found a rank with more candidates: the kernels disagree")
    return selected


def index_select(
    group: Group,
    q: Tensor,
    w: Tensor,
    hadamard: bool,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    topk: int,
    block_size: int,
    flags: Tensor | None = None,
    format: str = "fp8",
) -> Tensor:
    """`ops.indexer.index_select` over the ranks of a group: the same positions, on all ranks.

    q, w, cu_seqlens, positions: equal on all ranks. pages, block_table: this rank's, indexed by local position.
    """
    selected = torch.arange(topk, dtype=torch.int32).repeat(len(positions), 1)
    selected.masked_fill_(selected > positions[:, None], -1)
    ranked = (positions >= topk).nonzero().flatten()
    if not len(ranked):
        return selected
    length = -(-int(held(positions.max(), 0, group.size)) // KEY_BLOCK) * KEY_BLOCK
    at_once = max(1, KEYS_AT_ONCE // length)
    for rows in ranked.split(at_once):
        row_positions = positions[rows]
        cu = torch.searchsorted(rows.int(), cu_seqlens, out_int32=True)
        counts = held(row_positions, group.rank, group.size)
        keys = index_keys(q[rows], w[rows], hadamard, pages, block_table, cu, counts, block_size, length, format)
        met = None if flags is None else torch.zeros(len(rows), dtype=torch.int32)
        selected[rows] = exchange_top_k(group, keys, row_positions, topk, met)
        if flags is not None and met is not None:
            flags[rows] |= met
    return selected
