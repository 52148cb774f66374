"""Checks that the operators over packed sequences and paged caches share, and their kernels' messages (csrc/paged.h).

Layouts: docs/operators.md. A paged cache is uint8 `[num_blocks, page_bytes]`, any block stride; `block_table` int32
`[R, columns]`: position s of request r lies in block `block_table[r, s // block_size]`, place `s % block_size`.
"""

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check, check_vector
from zmrl.batch_invariant.ops.sequences import check_cu_seqlens

_REASONS = {
    1: "selected: token {}: expected ascending positions from 0 to the token's own, at least one, then -1",
    2: "block_table: token {}: a position that it reads has no block in the pages",
    3: "slots: token {}: no such adapter slot",
    4: "cu_seqlens: expected boundaries that rise from 0 to the number of tokens",
    5: "positions: token {}: the backward needs sequences that start at position 0 and are contiguous",
    6: "positions: token {}: expected at least 0",
}


def check_status(status: int) -> None:
    """Raises if a kernel reported -(reason << 32 | token) and not the number of its threads."""
    if status < 0:
        raise OperatorError(_REASONS[-status >> 32].format(-status & 0xFFFFFFFF))


def check_pages(pages: Tensor, block_size: int, token_bytes: int, alignment: int) -> None:
    if pages.dim() != 2 or pages.dtype != torch.uint8 or (pages.shape[1] > 1 and pages.stride(1) != 1):
        raise OperatorError(
            f"pages: expected torch.uint8 [num_blocks, page_bytes] with contiguous pages, got {pages.dtype} "
            f"{tuple(pages.shape)} with strides {pages.stride()}"
        )
    check(block_size > 0, f"block_size: expected a positive number, got {block_size}")
    if pages.shape[1] < block_size * token_bytes:
        raise OperatorError(
            f"pages: {block_size} tokens of {token_bytes} bytes need {block_size * token_bytes} bytes a page, "
            f"got {pages.shape[1]}"
        )
    if not pages.is_meta and (pages.data_ptr() % alignment or pages.stride(0) % alignment):
        raise OperatorError(f"pages: expected pages aligned to {alignment} bytes, got stride {pages.stride(0)}")


def check_sequences(tokens: int, block_table: Tensor, cu_seqlens: Tensor, positions: Tensor) -> int:
    """Returns the number of requests."""
    requests = check_cu_seqlens(cu_seqlens)
    check_vector("positions", positions, torch.int32, tokens)
    if (
        block_table.dim() != 2
        or block_table.dtype != torch.int32
        or block_table.shape[0] != requests
        or (block_table.shape[1] > 1 and block_table.stride(1) != 1)
    ):
        raise OperatorError(
            f"block_table: expected torch.int32 [{requests}, columns] with contiguous rows, got {block_table.dtype} "
            f"{tuple(block_table.shape)}"
        )
    return requests


def check_stored(status: int) -> None:
    """Raises if a storing kernel reported -1 - the first token whose slot lies outside the pages."""
    if status < 0:
        raise OperatorError(f"slot_mapping: token {-1 - status}: expected -1 or a slot inside the pages")
