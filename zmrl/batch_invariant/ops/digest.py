"""Digests of rows and tensors: sum over i of mix64(i, bits of element i) mod 2^64, as int64.

Elements of 1, 2, 4 or 8 bytes, their bits zero-extended. mix64 (csrc/mix64.h) is a bijection in the bits for every
i: one changed element always changes the digest. The sum has no order: it shards over ranks (`offset`) and threads.
"""

import torch

from zmrl.batch_invariant.library import OperatorError, check, operator, register
from zmrl.batch_invariant.native import kernel

_digest = kernel("zm_digest", "piiiiip")


def _check(t: torch.Tensor) -> None:
    check(t.dim() >= 1, "t: expected at least one dimension")
    size = 1
    for n, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if n != 1 and stride != size and t.numel():
            raise OperatorError(f"t: expected every t[i] contiguous, got shape {tuple(t.shape)}, strides {t.stride()}")
        size *= n
    check(t.element_size() in (1, 2, 4, 8), f"t: expected elements of 1, 2, 4 or 8 bytes, got {t.dtype}")


def _rows_digest_meta(t: torch.Tensor, offset: int = 0) -> torch.Tensor:
    _check(t)
    return torch.empty(t.shape[0], dtype=torch.int64, device=t.device)


def _rows_digest_cpu(t: torch.Tensor, offset: int = 0) -> torch.Tensor:
    out = _rows_digest_meta(t)
    rows = t.shape[0]
    _digest(t, rows, t.stride(0), t.numel() // rows if rows else 0, offset, t.element_size(), out)
    return out


register("rows_digest(Tensor t, int offset=0) -> Tensor", _rows_digest_cpu, _rows_digest_meta)
_op_rows_digest = operator("rows_digest")


def rows_digest(t: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """t `[T, N]`, rows contiguous, any row stride -> int64 `[T]`. offset: index of column 0 in the whole row."""
    return _op_rows_digest(t.detach(), offset)


def tensor_digests(t: torch.Tensor) -> torch.Tensor:
    """int64 `[t.shape[0]]`: the digest of every contiguous sub-tensor t[i] (each of 896 experts) in one call."""
    return _op_rows_digest(t.detach(), 0)


def tensor_digest(t: torch.Tensor) -> torch.Tensor:
    """The digest of a contiguous tensor of any shape: int64 `[]`."""
    check(t.is_contiguous(), f"t: expected a contiguous tensor, got shape {tuple(t.shape)}, strides {t.stride()}")
    return _op_rows_digest(t.detach().reshape(1, -1), 0)[0]
