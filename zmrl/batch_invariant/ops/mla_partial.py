"""Absorbed MLA in the pieces between which W ranks exchange (`zmrl/parallel/mla.py`); forward only.

Rank r holds the latents of the positions r, r + W, ...: position p is local position p // W of its pages. The pieces
are those of `ops/mla.py`, where the sizes and the rounding points stand, and give its bits:

    mla_queries   q -> [q_lat | q_pe], BF16, where the fused operator rounds it, too
    mla_scores    the scores of the rows that a rank holds, and their maximum
    mla_partial   with the maximum of all ranks: the subtree of rule 6 that a rank finishes alone, FP32
    mla_values    the ranks' subtrees, added up by the rest of the tree; o_lat = bf16(acc / sum); o

A rank whose rows were not selected brings the maximum -infinity and +0.0 in its sums, as an empty shard does.
"""

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat, latent_format_code
from zmrl.batch_invariant.ops.mla import MlaDims, check_dims, check_weights
from zmrl.batch_invariant.ops.pages import check_pages, check_sequences, check_status
from zmrl.batch_invariant.ops.panels import check_shape

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_PAGES = "piipiii" + "if" + "pip" + "pii" + "ii"
_WEIGHTS = "piiiii" + "ppipi" + "f"
_mla_queries = kernel("zm_mla_queries", "pii" + _WEIGHTS + "p")
_mla_scores = kernel("zm_mla_scores", "piiiif" + _PAGES + "pp")
_mla_partial = kernel("zm_mla_partial", "ppiiii" + _PAGES + "p")
_mla_values = kernel("zm_mla_values", "pii" + _WEIGHTS + "p")


def _check_ranks(world: int, rank: int) -> None:
    if world not in (1, 2, 4, 8) or not 0 <= rank < world:
        raise OperatorError(f"world, rank: expected a rank of 1, 2, 4 or 8, got rank {rank} of {world}")


def _check_shard(
    d: MlaDims,
    tokens: int,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor,
    block_size: int,
    world: int,
    rank: int,
    format: str,
    latent_scale: float,
) -> tuple:
    """Returns the kernel's arguments of pages and selection."""
    _check_ranks(world, rank)
    code, row = latent_format_code(format, latent_scale, d.rank, d.pe)
    check_pages(pages, block_size, row, 2 if format == "bf16" else 1)
    requests = check_sequences(tokens, block_table, cu_seqlens, positions)
    check_rows("selected", selected, _INT32)
    if selected.shape[0] != tokens or selected.shape[1] < 1:
        raise OperatorError(f"selected: expected [{tokens}, n], got {tuple(selected.shape)}")
    return (
        pages, pages.stride(0), pages.shape[0], block_table, block_table.stride(0), block_table.shape[1], block_size,
        code, latent_scale, cu_seqlens, requests, positions, selected, selected.stride(0), selected.shape[1], world,
        rank,
    )  # fmt: skip


def _mla_queries_impl(
    q: Tensor,
    kv_b: Tensor,
    dims: list[int],
    a: Tensor | None = None,
    b: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    d, tokens = check_dims(tuple(dims)), q.shape[0]
    check_rows("q", q, _BF16, d.heads * (d.nope + d.pe))
    adapters = check_weights(d, tokens, kv_b, a, b, slots)
    out = torch.empty((tokens, d.heads, d.rank + d.pe), dtype=_BF16, device=q.device)
    if not q.is_meta:
        check_status(_mla_queries(q, q.stride(0), tokens, kv_b, *d, *adapters, scale, out))
    return out


def _mla_scores_impl(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor,
    block_size: int,
    dims: list[int],
    world: int,
    rank: int,
    format: str,
    latent_scale: float,
) -> tuple[Tensor, Tensor]:
    d, tokens = check_dims(tuple(dims)), queries.shape[0]
    check_shape("queries", queries, _BF16, (tokens, d.heads, d.rank + d.pe))
    ranks = world, rank, format, latent_scale
    shard = _check_shard(d, tokens, pages, block_table, cu_seqlens, positions, selected, block_size, *ranks)
    scores = torch.empty(_scores_shape(d, tokens, selected.shape[1]), dtype=_FP32, device=queries.device)
    maximum = torch.empty((tokens, d.heads), dtype=_FP32, device=queries.device)
    if not queries.is_meta:
        sizes = tokens, d.heads, d.rank, d.pe, (d.nope + d.pe) ** -0.5
        check_status(_mla_scores(queries, *sizes, *shard, scores, maximum))
    return scores, maximum


def _scores_shape(d: MlaDims, tokens: int, selected: int) -> tuple[int, ...]:
    return tokens, -(-d.heads // 4), -(-selected // 4) * 4, 4


def _mla_partial_impl(
    scores: Tensor,
    maximum: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor,
    block_size: int,
    dims: list[int],
    world: int,
    rank: int,
    format: str,
    latent_scale: float,
) -> Tensor:
    d, tokens = check_dims(tuple(dims)), maximum.shape[0]
    ranks = world, rank, format, latent_scale
    shard = _check_shard(d, tokens, pages, block_table, cu_seqlens, positions, selected, block_size, *ranks)
    check_shape("scores", scores, _FP32, _scores_shape(d, tokens, selected.shape[1]))
    check_shape("maximum", maximum, _FP32, (tokens, d.heads))
    out = torch.empty((tokens, d.heads, d.rank + 1), dtype=_FP32, device=scores.device)
    if not scores.is_meta:
        check_status(_mla_partial(scores, maximum, tokens, d.heads, d.rank, d.pe, *shard, out))
    return out


def _mla_values_impl(
    partials: Tensor,
    kv_b: Tensor,
    dims: list[int],
    a: Tensor | None = None,
    b: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    d = check_dims(tuple(dims))
    check(partials.dim() == 4, f"partials: expected [W, T, {d.heads}, {d.rank + 1}], got {tuple(partials.shape)}")
    world, tokens = partials.shape[:2]
    _check_ranks(world, 0)
    check_shape("partials", partials, _FP32, (world, tokens, d.heads, d.rank + 1))
    adapters = check_weights(d, tokens, kv_b, a, b, slots)
    out = torch.empty((tokens, d.heads * d.v), dtype=_BF16, device=partials.device)
    if not partials.is_meta:
        check_status(_mla_values(partials, world, tokens, kv_b, *d, *adapters, scale, out))
    return out


_PROJECTION = "Tensor kv_b, int[] dims, Tensor? a=None, Tensor? b=None, Tensor? slots=None, float scale=0.0"
_SHARD = (
    "Tensor pages, Tensor block_table, Tensor cu_seqlens, Tensor positions, Tensor selected, int block_size, "
    "int[] dims, int world, int rank, str format, float latent_scale"
)
for _schema, _implementation in (
    (f"mla_queries(Tensor q, {_PROJECTION}) -> Tensor", _mla_queries_impl),
    (f"mla_scores(Tensor queries, {_SHARD}) -> (Tensor, Tensor)", _mla_scores_impl),
    (f"mla_partial(Tensor(a!) scores, Tensor maximum, {_SHARD}) -> Tensor", _mla_partial_impl),
    (f"mla_values(Tensor partials, {_PROJECTION}) -> Tensor", _mla_values_impl),
):
    register(_schema, _implementation, _implementation)

_op_queries = operator("mla_queries")
_op_scores = operator("mla_scores")
_op_partial = operator("mla_partial")
_op_values = operator("mla_values")


def mla_queries(
    q: Tensor,
    kv_b: Tensor,
    dims: MlaDims,
    a: Tensor | None = None,
    b: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    """q BF16 `[T, H*(N+P)]` -> `[q_lat | q_pe]` BF16 `[T, H, R+P]`; weights and adapters as in `mla_attention`."""
    return _op_queries(q.detach(), kv_b, dims, a, b, slots, scale)


def mla_scores(
    queries: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor,
    block_size: int,
    dims: MlaDims,
    world: int,
    rank: int,
    latents: LatentFormat = BF16_LATENTS,
) -> tuple[Tensor, Tensor]:
    """queries BF16 `[T, H, R+P]` -> (scores, maximum FP32 `[T, H]`); `scores` is for `mla_partial` alone.

    pages, block_table: the rank's, by local position, in the format `latents`. positions int32 `[T]`; selected int32
    `[T, n]`: the selected positions that the rank holds, ascending, -1 after the last; there may be none.
    """
    where = (pages, block_table, cu_seqlens, positions, selected, block_size)
    return _op_scores(queries, *where, dims, world, rank, *latents)


def mla_partial(
    scores: Tensor,
    maximum: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor,
    block_size: int,
    dims: MlaDims,
    world: int,
    rank: int,
    latents: LatentFormat = BF16_LATENTS,
) -> Tensor:
    """scores of `mla_scores` (overwritten), maximum FP32 `[T, H]` over all ranks -> FP32 `[T, H, R+1]`: acc, sum."""
    where = (pages, block_table, cu_seqlens, positions, selected, block_size)
    return _op_partial(scores, maximum, *where, dims, world, rank, *latents)


def mla_values(
    partials: Tensor,
    kv_b: Tensor,
    dims: MlaDims,
    a: Tensor | None = None,
    b: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    """partials FP32 `[W, T, H, R+1]` in rank order -> BF16 `[T, H*V]`; weights and adapters as in `mla_attention`."""
    return _op_values(partials, kv_b, dims, a, b, slots, scale)
