"""The exact top-k of the indexer over W ranks that each hold every W-th position (`zmrl/parallel/selection.py`).

Position p belongs to rank p mod W, where it is local position p // W. A ranking key is the BF16 score (definition and
rounding: `indexer`) as an order-preserving uint16: NaN is 0, then -infinity to +infinity, -0 as +0. No arithmetic
happens here. Order: key descending, position ascending, the order of `index_select`.

A message is int32 `[T, segments + capacity]`. A candidate is one word: key << 16 | local position mod 2^16. Candidates
ascend in position, and header word s counts those whose local position lies in segment s of 2^16: the 16 bits suffice
for any length, at one word more for every 2^16 local positions. Bit 31 of header word 0: the row has a NaN score.
"""

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.latents import index_format_code
from zmrl.batch_invariant.ops.pages import check_pages, check_sequences, check_status

SEGMENT = 1 << 16
"""Local positions that one header word counts."""
KEY_BLOCK = 64
"""Rows of keys are as long as a multiple of this."""
MOST_RANKS = 8

_FP32, _BF16, _INT32, _UINT16 = torch.float32, torch.bfloat16, torch.int32, torch.uint16
_index_keys = kernel("zm_index_keys", "piiii" + "piiffi" + "piipiii" + "pip" + "pi")
_pick = kernel("zm_pick_candidates", "pipiiip")
_merge = kernel("zm_merge_candidates", "piiiipippp")


def _index_keys_impl(
    q: Tensor,
    w: Tensor,
    hadamard: bool,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    counts: Tensor,
    block_size: int,
    length: int,
    format: str,
) -> Tensor:
    check_rows("w", w, _FP32)
    tokens, heads = w.shape
    check_rows("q", q, _BF16)
    check(
        heads > 0 and q.shape[0] == tokens and q.shape[1] % heads == 0,
        f"q: expected [{tokens}, {heads}*D] for w {tuple(w.shape)}, got {tuple(q.shape)}",
    )
    d = q.shape[1] // heads
    check(not hadamard or d & (d - 1) == 0, f"hadamard: needs vectors of a power of two, got {d}")
    check(length >= 0 and length % KEY_BLOCK == 0, f"length: expected a multiple of {KEY_BLOCK}, got {length}")
    code, key_bytes = index_format_code(format, d)
    check_pages(pages, block_size, key_bytes, 1)
    check_vector("counts", counts, _INT32, tokens)
    requests = check_sequences(tokens, block_table, cu_seqlens, counts)
    keys = torch.empty((tokens, length), dtype=_UINT16, device=q.device)
    if not q.is_meta:
        check_status(
            _index_keys(
                q, q.stride(0), tokens, heads, d, w, w.stride(0), hadamard, d**-0.5, heads**-0.5, code, pages,
                pages.stride(0), pages.shape[0], block_table, block_table.stride(0), block_table.shape[1], block_size,
                cu_seqlens, requests, counts, keys, length,
            )
        )  # fmt: skip
    return keys


def _pick_impl(keys: Tensor, counts: Tensor, capacity: int, segments: int) -> Tensor:
    check_rows("keys", keys, _UINT16)
    rows = keys.shape[0]
    check_vector("counts", counts, _INT32, rows)
    check(capacity > 0 and segments > 0, f"capacity, segments: expected positive numbers, got {capacity}, {segments}")
    words = torch.empty((rows, segments + capacity), dtype=_INT32, device=keys.device)
    if not keys.is_meta:
        status = _pick(keys, keys.stride(0), counts, rows, capacity, segments, words)
        if status < 0:
            row, largest = -1 - status, min(keys.shape[1], segments * SEGMENT)
            raise OperatorError(f"counts: row {row}: expected 0 to {largest}, got {int(counts[row])}")
    return words


def _merge_impl(
    words: Tensor, positions: Tensor, topk: int, segments: int, flags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check(
        words.dim() == 3 and words.dtype == _INT32 and words.is_contiguous() and words.shape[2] > segments > 0,
        f"words: expected {_INT32} [W, T, segments + capacity] contiguous, got {words.dtype} {tuple(words.shape)}",
    )
    world, rows, width = words.shape
    check(1 <= world <= MOST_RANKS, f"words: expected the messages of 1 to {MOST_RANKS} ranks, got {world}")
    check(topk > 0, f"topk: expected a positive number, got {topk}")
    check_vector("positions", positions, _INT32, rows)
    if flags is not None:
        check_vector("flags", flags, _INT32, rows)
    selected = torch.empty((rows, topk), dtype=_INT32, device=words.device)
    more = torch.empty(rows, dtype=_INT32, device=words.device)
    if not words.is_meta:
        capacity = width - segments
        status = _merge(words, world, rows, segments, capacity, positions, topk, selected, more, flags)
        if status < 0:
            raise OperatorError(f"words: row {-1 - status} is no message of ranks that hold its positions 0 to its own")
    return selected, more


for _schema, _implementation in (
    (
        "index_keys(Tensor q, Tensor w, bool hadamard, Tensor pages, Tensor block_table, Tensor cu_seqlens, "
        "Tensor counts, int block_size, int length, str format) -> Tensor",
        _index_keys_impl,
    ),
    ("pick_candidates(Tensor keys, Tensor counts, int capacity, int segments) -> Tensor", _pick_impl),
    (
        "merge_candidates(Tensor words, Tensor positions, int topk, int segments, Tensor(a!)? flags=None) "
        "-> (Tensor, Tensor)",
        _merge_impl,
    ),
):
    register(_schema, _implementation, _implementation)

_op_index_keys = operator("index_keys")
_op_pick = operator("pick_candidates")
_op_merge = operator("merge_candidates")


def index_keys(
    q: Tensor,
    w: Tensor,
    hadamard: bool,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    counts: Tensor,
    block_size: int,
    length: int,
    format: str = "fp8",
) -> Tensor:
    """Ranking keys uint16 `[T, length]` of the positions 0 to counts[t] - 1 in this rank's pages; then undefined.

    q, w, pages, block_table, cu_seqlens, format: as `index_select` takes them, positions being local. counts int32
    `[T]`, at most length, which is a multiple of 64.
    """
    where = (pages, block_table, cu_seqlens, counts, block_size, length)
    return _op_index_keys(q.detach(), w.detach(), hadamard, *where, format)


def pick_candidates(keys: Tensor, counts: Tensor, capacity: int, segments: int) -> Tensor:
    """The message of one rank, int32 `[T, segments + capacity]`: the best of keys uint16 `[T, n]`[:, :counts[t]].

    counts int32 `[T]`, at most segments * 2^16. OperatorError names the row that has more.
    """
    return _op_pick(keys, counts, capacity, segments)


def merge_candidates(
    words: Tensor, positions: Tensor, topk: int, segments: int, flags: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """words int32 `[W, T, segments + capacity]`, the messages of all ranks -> (selected, more).

    positions int32 `[T]`: the tokens' own, each at least topk. selected int32 `[T, topk]`: the best positions,
    ascending. more int32 `[T]`: bit r is set where rank r may hold more winners than it sent; that row of `selected` is
    not valid then, and rank r must send its topk best. flags int32 `[T]` (mutated): 1 where a score is NaN.
    OperatorError for a row that cannot be a message of these ranks.
    """
    return _op_merge(words, positions, topk, segments, flags)
