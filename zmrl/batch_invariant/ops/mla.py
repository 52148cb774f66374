"""Absorbed MLA over selected rows of a paged latent cache, with adapters of several slots in one batch; its autograd.

H heads; N, P: nope and pe width of a query head; R: latent rank; V: value width (N, R, V multiples of 16). A latent row
is R + P BF16 values, shared by all heads; stored in another format it is decoded to them first (ops/latents.py). Per
head, kv_b holds N key rows (W_UK), then V value rows (W_UV).

Rounding points, per token and head ("chain", "lanes": docs/operators.md):
    q_lat = bf16(chain over the N rows of W_UK^T q_nope)
    score = lanes over the R + P features of [q_lat | q_pe] . row, times (N + P)^-0.5
    p = exp(score - maximum over all selected rows); per shard (position mod 8), positions ascending: sum = sum + p and
    acc = fma(p, latent, acc); both combined by the tree ((0+4)+(2+6))+((1+5)+(3+7)); o_lat = bf16(acc / sum)
    o = bf16(chain over R of W_UV o_lat)
With an adapter of slot >= 0:
    t = bf16(B_k^T q_nope); q_lat = bf16(fma(scale, A^T t, W_UK^T q_nope))
    u = bf16(A o_lat);      o = bf16(fma(scale, B_v u, W_UV o_lat))

Backward, all FP32, roundings passed straight through:
    do_lat = chain over V of W_UV^T do, continued by the chain over r of A^T du; du = scale * B_v^T do
    P = p / sum; ds = (P * (lanes(do_lat . latent) - lanes(do_lat . acc/sum))) * (N + P)^-0.5
    d[q_lat | q_pe] = the sum of ds * row by shards and tree as above
    dq_nope = chain over R of W_UK dq_lat, continued by the chain over r of B_k dt; dt = scale * A dq_lat
    dkv: per row and slice one chain over tokens, then the slice's heads, ascending, of fma(P, do_lat, .), then
    fma(ds, [q_lat | q_pe], .); slices combined by the tree of rule 2
    dA: per slice one chain over tokens, then the slice's heads, ascending, of fma(scale*dq_lat, t, .), then
    fma(o_lat, du, .); the slices are combined when the sample shard is complete
    dB: one chain over tokens ascending: key rows fma(dt, q_nope, .), value rows fma(u, scale*do, .)
The heads are 8 slices, slice s = heads floor(s*H/8) to floor((s+1)*H/8), empty ones +0.0: a rank that owns whole slices
of heads finishes their subtree. dq and dkv are rounded to BF16 once; dA (one buffer a slice) and dB, of slot 0,
continue the chains in their FP32 buffers. The selection gets no gradient.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat, latent_format_code
from zmrl.batch_invariant.ops.linear import ANCHOR
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.pages import check_pages, check_sequences, check_status
from zmrl.batch_invariant.ops.panels import LANES, check_shape
from zmrl.batch_invariant.ops.sequences import check_cu_seqlens

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_SELECTED, _WEIGHTS = "pii", "piiiii" + "ppipi" + "ff"
_mla_attention = kernel("zm_mla_attention", "pii" + "piipiiiif" + "pip" + _SELECTED + _WEIGHTS + "p")
_mla_attention_backward = kernel(
    "zm_mla_attention_backward", "pi" + "pii" + "pi" + "pip" + _SELECTED + _WEIGHTS + "i" + "ppi" + "pp"
)

HEAD_SLICES = 8
"""Slices of the heads in sums over heads (numerics.md rule 2)."""


class MlaDims(NamedTuple):
    """Sizes of one MLA layer (of the heads of one rank)."""

    heads: int
    nope: int
    """qk_nope_head_dim, a multiple of 16."""
    pe: int
    """qk_rope_head_dim; never rotated."""
    rank: int
    """kv_lora_rank, a multiple of 16."""
    v: int
    """v_head_dim, a multiple of 16."""


class SumHeads(NamedTuple):
    """How sums over heads are finished where each of several ranks has some of the heads."""

    slices: int
    """Those of the 8 slices that this rank has; 8: all heads are here."""
    finish: Callable[[Tensor], Tensor]
    """Subtree of dkv FP32 `[T, R+P]` -> dkv BF16 over the heads of all ranks."""


@lru_cache
def check_dims(dims: tuple[int, ...]) -> MlaDims:
    check(len(dims) == 5, f"dims: expected heads, nope, pe, rank and v, got {dims}")
    d = MlaDims(*dims)
    if d.heads < 1 or d.pe < 0 or min(d.nope, d.rank, d.v) < 1 or any(n % LANES for n in (d.nope, d.rank, d.v)):
        raise OperatorError(f"dims: nope, rank and v must be positive multiples of {LANES}, got {d}")
    return d


def check_weights(
    d: MlaDims, rows: int, kv_b: Tensor, a: Tensor | None, b: Tensor | None, slots: Tensor | None
) -> tuple:
    """Returns (a, b, rank of the adapter, slots, number of slots)."""
    panels = d.heads * (d.nope + d.v) // LANES
    check_shape("kv_b", kv_b, _BF16, (panels, d.rank, LANES))
    if a is None:
        return None, None, 0, None, 0
    if b is None or slots is None:
        raise OperatorError("b, slots: an adapter needs a, b and the slot of every token")
    if b.dim() != 4 or b.shape[2] < 1 or b.shape[2] % LANES:
        raise OperatorError(f"b: expected [S, {panels}, r, {LANES}] with r a multiple of {LANES}, got {tuple(b.shape)}")
    count, r = b.shape[0], b.shape[2]
    check_shape("b", b, _BF16, (count, panels, r, LANES))
    check_shape("a", a, _BF16, (count, r // LANES, d.rank, LANES))
    check_vector("slots", slots, _INT32, rows)
    return a, b, r, slots, count


def _check_queries(d: MlaDims, q: Tensor, positions: Tensor, selected: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Returns (selected, its row stride, most positions of a token)."""
    check_rows("q", q, _BF16, d.heads * (d.nope + d.pe))
    if selected is None:
        longest = 0 if positions.is_meta or not len(positions) else int(positions.max()) + 1
        return None, 0, max(longest, 1)
    check_rows("selected", selected, _INT32)
    if selected.shape[0] != q.shape[0] or selected.shape[1] < 1:
        raise OperatorError(f"selected: expected [{q.shape[0]}, topk], got {tuple(selected.shape)}")
    return selected, selected.stride(0), selected.shape[1]


def _mla_attention_impl(
    q: Tensor,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    block_size: int,
    kv_b: Tensor,
    dims: Sequence[int],
    format: str,
    latent_scale: float,
    a: Tensor | None = None,
    b: Tensor | None = None,
    slots: Tensor | None = None,
    scale: float = 0.0,
) -> Tensor:
    d, rows = check_dims(tuple(dims)), q.shape[0]
    code, row = latent_format_code(format, latent_scale, d.rank, d.pe)
    check_pages(pages, block_size, row, 2 if format == "bf16" else 1)
    requests = check_sequences(rows, block_table, cu_seqlens, positions)
    chosen = _check_queries(d, q, positions, selected)
    adapters = check_weights(d, rows, kv_b, a, b, slots)
    out = torch.empty((rows, d.heads * d.v), dtype=_BF16, device=q.device)
    if q.is_meta:
        return out
    check_status(
        _mla_attention(
            q, q.stride(0), rows, pages, pages.stride(0), pages.shape[0], block_table, block_table.stride(0),
            block_table.shape[1], block_size, code, latent_scale, cu_seqlens, requests, positions, *chosen, kv_b, *d,
            *adapters, scale, (d.nope + d.pe) ** -0.5, out,
        )
    )  # fmt: skip
    return out


def _mla_attention_backward_impl(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    selected: Tensor | None,
    kv_b: Tensor,
    dims: Sequence[int],
    a: Tensor | None,
    b: Tensor | None,
    slots: Tensor | None,
    scale: float,
    slices: int,
    grad_a: Tensor | None,
    grad_b: Tensor | None,
) -> tuple[Tensor, Tensor]:
    d, rows = check_dims(tuple(dims)), q.shape[0]
    check_rows("grad", grad, _BF16, d.heads * d.v)
    check_rows("kv", kv, _BF16, d.rank + d.pe)
    check(grad.shape[0] == rows and kv.shape[0] == rows, f"grad, kv: expected {rows} rows")
    requests = check_cu_seqlens(cu_seqlens)
    check_vector("positions", positions, _INT32, rows)
    chosen = _check_queries(d, q, positions, selected)
    adapters = check_weights(d, rows, kv_b, a, b, slots)
    check(slices in (1, 2, 4, HEAD_SLICES), f"slices: expected 1, 2, 4 or {HEAD_SLICES}, got {slices}")
    for name, buffer, like in (("grad_a", grad_a, a), ("grad_b", grad_b, b)):
        if buffer is not None:
            if like is None:
                raise OperatorError(f"{name}: there is no adapter")
            leading = (slices,) if name == "grad_a" else ()
            check_shape(name, buffer, _FP32, leading + tuple(like.shape[1:]))
    partial = slices < HEAD_SLICES
    dq = torch.empty(q.shape, dtype=_BF16, device=q.device)
    dkv = torch.empty(kv.shape, dtype=_FP32 if partial else _BF16, device=kv.device)
    if q.is_meta:
        return dq, dkv
    check_status(
        _mla_attention_backward(
            grad, grad.stride(0), q, q.stride(0), rows, kv, kv.stride(0), cu_seqlens, requests, positions,
             *chosen, kv_b, *d, *adapters, scale,
            (d.nope + d.pe) ** -0.5, slices, dq, dkv, partial, grad_a, grad_b,
        )
    )  # fmt: skip
    return dq, dkv


register(
    "mla_attention(Tensor q, Tensor pages, Tensor block_table, Tensor cu_seqlens, Tensor positions, Tensor? selected, "
    "int block_size, Tensor kv_b, int[] dims, str format, float latent_scale, Tensor? a=None, Tensor? b=None, "
    "Tensor? slots=None, float scale=0.0) -> Tensor",
    _mla_attention_impl,
    _mla_attention_impl,
)
register(
    "mla_attention_backward(Tensor grad, Tensor q, Tensor kv, Tensor cu_seqlens, Tensor positions, Tensor? selected, "
    "Tensor kv_b, int[] dims, Tensor? a, Tensor? b, Tensor? slots, float scale, int slices, Tensor(a!)? grad_a, "
    "Tensor(b!)? grad_b) -> (Tensor, Tensor)",
    _mla_attention_backward_impl,
    _mla_attention_backward_impl,
)
_op = operator("mla_attention")
_op_backward = operator("mla_attention_backward")


class _MlaAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        anchor: Tensor,
        pages: Tensor,
        block_table: Tensor,
        cu_seqlens: Tensor,
        positions: Tensor,
        selected: Tensor | None,
        block_size: int,
        kv_b: Tensor,
        dims: MlaDims,
        lora: LoraBuffers | None,
        slots: Tensor | None,
        latents: LatentFormat,
        sum_heads: SumHeads | None,
    ) -> Tensor:
        ctx.save_for_backward(q, kv, cu_seqlens, positions, selected)
        ctx.arguments = kv_b, dims, lora, slots, sum_heads
        adapter = (None, None, None, 0.0) if lora is None else (lora.a, lora.b, slots, lora.scale)
        where = (pages, block_table, cu_seqlens, positions, selected, block_size)
        return _op(q, *where, kv_b, dims, *latents, *adapter)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv, cu_seqlens, positions, selected = ctx.saved_tensors
        kv_b, dims, lora, slots, sum_heads = ctx.arguments
        adapter, buffers = (None, None, None, 0.0), (None, None)
        if lora is not None:
            adapter, buffers = (lora.a, lora.b, slots, lora.scale), (lora.grad_a, lora.grad_b)
        if grad.shape[1] > 1 and grad.stride(1) != 1:
            grad = grad.contiguous()
        slices = HEAD_SLICES if sum_heads is None else sum_heads.slices
        sequences = cu_seqlens, positions, selected
        dq, dkv = _op_backward(grad, q, kv, *sequences, kv_b, dims, *adapter, slices, *buffers)
        if sum_heads is not None and slices < HEAD_SLICES:
            dkv = sum_heads.finish(dkv)
        wanted = ctx.needs_input_grad
        return (dq if wanted[0] else None), (dkv if wanted[1] else None), *[None] * 13


def mla_attention(
    q: Tensor,
    kv: Tensor | None,
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
    sum_heads: SumHeads | None = None,
) -> Tensor:
    """q BF16 `[T, H*(N+P)]` (any row stride; per head nope, then pe) -> BF16 `[T, H*V]`. Rounding: see the module.

    The forward reads latents from pages only, in the format `latents`. kv BF16 `[T, R+P]` is what the pages give back
    (`latent_values` of what was stored); it carries the gradient, and the backward reads it in place of the pages,
    which may be reused by then. Needed for training only, where every sequence starts at position 0 in the call.
    selected int32 `[T, topk]`: absolute positions ascending, -1 after the last; at least one, none beyond the token's
    own; None: dense attention, to every position up to the token's own, with the bits of a selection of all of them.
    kv_b: panels `[H*(N+V)/16, R, 16]`. lora: a `[S, r/16, R, 16]`, b `[S, H*(N+V)/16, r, 16]`, with slots int32 `[T]`,
    -1 for none; the gradients of slot 0 go to its buffers, that of a to one per slice: FP32 `[8, r/16, R, 16]`.
    sum_heads: for the heads of one of several ranks.
    """
    if lora is not None:
        check(slots is not None, "slots: an adapter needs the slot of every token")
    if torch.is_grad_enabled() and (
        q.requires_grad or (kv is not None and kv.requires_grad) or (lora is not None and lora.wants_gradients)
    ):
        check(kv is not None, "kv: the backward needs the latents that were stored")
        return _MlaAttention.apply(
            q, kv, ANCHOR, pages, block_table, cu_seqlens, positions, selected, block_size, kv_b, dims, lora, slots,
            latents, sum_heads,
        )  # fmt: skip
    adapter = () if lora is None else (lora.a, lora.b, slots, lora.scale)
    where = (pages, block_table, cu_seqlens, positions, selected, block_size)
    return _op(q, *where, kv_b, dims, *latents, *adapter)
