"""The DSA indexer: index keys in pages, scores and the exact top-k (`numerics.md`, Selection). No gradient.

HI heads of D values. An index page holds block_size rows of codes, then block_size rows of scales: "fp8" has D e4m3
codes and an FP32 scale, "mxfp4" D/2 bytes of e2m1 codes and D/32 e8m0 scales. Queries are quantised like keys.

Rounding points. A vector (a key after its LayerNorm, or one head of a query) in FP32, optionally Walsh-Hadamard
transformed (butterflies (a+b, a-b) at distance 1, 2, 4, ..., then times D^-0.5). amax passes over NaN and takes
infinity as the largest finite number; codes round to nearest even.
    fp8    scale = 2^ceil(log2(max(amax, 1e-4)/448)), codes = e4m3(x / scale), saturating at 448, NaN to NaN;
           the dot product q.k is that of the codes' values
    mxfp4  per 32 values: scale = 2^ceil(log2(max(amax, 6*2^-126)/6)), codes = e2m1(x / scale); a group with NaN has
           the NaN scale and zero codes; the dot product is that of codes times scales, and `query scale` and
           `key scale` below are 1
w' = ((w * query scale) * D^-0.5) * HI^-0.5. score = key scale * (chain over heads ascending of
fma(w', relu(lanes(q.k)), .)), rounded to BF16, -0 becomes +0; relu keeps NaN.
Order: score descending, NaN last, then position ascending. A token with at most topk positions takes all of them:
nothing is scored and nothing flagged.
"""

import torch
from torch import Tensor

from zmrl.batch_invariant.library import check, check_rows, check_vector, operator, register
from zmrl.batch_invariant.native import kernel
from zmrl.batch_invariant.ops.latents import index_format_code
from zmrl.batch_invariant.ops.pages import check_pages, check_sequences, check_status, check_stored

_BF16, _FP32, _INT32 = torch.bfloat16, torch.float32, torch.int32
_index_store = kernel("zm_index_store", "piii" + "ppififi" + "piipi")
_index_select = kernel("zm_index_select", "piiii" + "piiffi" + "piipiii" + "pip" + "ipp")
LARGEST_D = 4096


def _check_vectors(d: int, hadamard: bool) -> None:
    check(0 < d <= LARGEST_D, f"D: expected 1 to {LARGEST_D}, got {d}")
    check(not hadamard or d & (d - 1) == 0, f"hadamard: needs vectors of a power of two, got {d}")


def _index_store_meta(
    k: Tensor,
    ln_w: Tensor,
    ln_b: Tensor,
    eps: float,
    hadamard: bool,
    pages: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    format: str,
) -> None:
    check_rows("k", k, _BF16)
    tokens, d = k.shape
    _check_vectors(d, hadamard)
    check(ln_w.dtype in (_FP32, _BF16), f"ln_w: expected {_FP32} or {_BF16}, got {ln_w.dtype}")
    check_vector("ln_w", ln_w, ln_w.dtype, d)
    check_vector("ln_b", ln_b, ln_w.dtype, d)
    check_pages(pages, block_size, index_format_code(format, d)[1], 1)
    check_vector("slot_mapping", slot_mapping, torch.int64, tokens)


def _index_store_cpu(
    k: Tensor,
    ln_w: Tensor,
    ln_b: Tensor,
    eps: float,
    hadamard: bool,
    pages: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    format: str,
) -> None:
    _index_store_meta(k, ln_w, ln_b, eps, hadamard, pages, slot_mapping, block_size, format)
    tokens, d = k.shape
    check_stored(
        _index_store(
            k, k.stride(0), tokens, d, ln_w, ln_b, ln_w.dtype == _FP32, eps, hadamard, d**-0.5,
            index_format_code(format, d)[0], pages, pages.stride(0), pages.shape[0], slot_mapping, block_size,
        )
    )  # fmt: skip


def _index_select_impl(
    q: Tensor,
    w: Tensor,
    hadamard: bool,
    pages: Tensor,
    block_table: Tensor,
    cu_seqlens: Tensor,
    positions: Tensor,
    topk: int,
    block_size: int,
    flags: Tensor | None,
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
    _check_vectors(d, hadamard)
    check(topk > 0, f"topk: expected a positive number, got {topk}")
    code, key_bytes = index_format_code(format, d)
    check_pages(pages, block_size, key_bytes, 1)
    requests = check_sequences(tokens, block_table, cu_seqlens, positions)
    if flags is not None:
        check_vector("flags", flags, _INT32, tokens)
    out = torch.empty((tokens, topk), dtype=_INT32, device=q.device)
    if q.is_meta:
        return out
    check_status(
        _index_select(
            q, q.stride(0), tokens, heads, d, w, w.stride(0), hadamard, d**-0.5, heads**-0.5, code, pages,
            pages.stride(0), pages.shape[0], block_table, block_table.stride(0), block_table.shape[1], block_size,
            cu_seqlens, requests, positions, topk, flags, out,
        )
    )  # fmt: skip
    return out


register(
    "index_store(Tensor k, Tensor ln_w, Tensor ln_b, float eps, bool hadamard, Tensor(a!) pages, Tensor slot_mapping, "
    "int block_size, str format) -> ()",
    _index_store_cpu,
    _index_store_meta,
)
register(
    "index_select(Tensor q, Tensor w, bool hadamard, Tensor pages, Tensor block_table, Tensor cu_seqlens, "
    "Tensor positions, int topk, int block_size, Tensor(a!)? flags, str format) -> Tensor",
    _index_select_impl,
    _index_select_impl,
)
_op_store = operator("index_store")
_op_select = operator("index_select")


def index_store(
    k: Tensor,
    ln_w: Tensor,
    ln_b: Tensor,
    eps: float,
    hadamard: bool,
    pages: Tensor,
    slot_mapping: Tensor,
    block_size: int,
    format: str = "fp8",
) -> None:
    """Stores index keys: k BF16 `[T, D]` (any row stride) through LayerNorm, quantised.

    ln_w, ln_b: both FP32 or both BF16 `[D]`. pages: index pages, mutated at slot_mapping int64 `[T]` (-1: not stored).
    Raises OperatorError for a slot outside the pages, before storing anything.
    """
    _op_store(k.detach(), ln_w, ln_b, eps, hadamard, pages, slot_mapping, block_size, format)


def index_select(
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
    """q BF16 `[T, HI*D]`, head weights w FP32 `[T, HI]` (any row strides) -> selected positions int32 `[T, topk]`.

    The topk best of the positions 0 to the token's own, ascending, -1 after the last. flags int32 `[T]` (mutated): set
    to 1 where a score is NaN, else left alone. Definition and order: see the module.
    """
    return _op_select(
        q.detach(), w.detach(), hadamard, pages, block_table, cu_seqlens, positions, topk, block_size, flags, format
    )
