"""Checks shared by the operators over rows, and rows side by side.

Messages are made only when they are needed: an f-string costs as much as a check, and these run at every call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows, operator, register
from zmrl.batch_invariant.native import kernel

_join_columns = kernel("zm_join_columns", "piipiipi")


def check_matrix(name: str, tensor: Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
    """A [rows, columns] tensor of `dtype` whose rows are contiguous (any row stride)."""
    if tensor.shape != (rows, columns) or tensor.dtype != dtype or (columns > 1 and tensor.stride(1) != 1):
        check_rows(name, tensor, dtype, columns)
        raise OperatorError(f"{name}: expected {rows} rows, got {tensor.shape[0]}")


def as_rows(gradient: Tensor) -> Tensor:
    """A gradient from autograd in the layout of an operator: contiguous rows."""
    return gradient if gradient.shape[1] <= 1 or gradient.stride(1) == 1 else gradient.contiguous()


def _join_columns_meta(a: Tensor, b: Tensor) -> Tensor:
    check_rows("a", a, torch.bfloat16)
    check_matrix("b", b, torch.bfloat16, a.shape[0], b.shape[1] if b.dim() == 2 else 0)
    return torch.empty((a.shape[0], a.shape[1] + b.shape[1]), dtype=torch.bfloat16, device=a.device)


def _join_columns_cpu(a: Tensor, b: Tensor) -> Tensor:
    y = _join_columns_meta(a, b)
    _join_columns(a, a.stride(0), a.shape[1], b, b.stride(0), b.shape[1], y, y.shape[0])
    return y


register("join_columns(Tensor a, Tensor b) -> Tensor", _join_columns_cpu, _join_columns_meta)
_op_join_columns = operator("join_columns")


def join_columns(a: Tensor, b: Tensor) -> Tensor:
    """[a | b], BF16 [T, N] and [T, M] (any row strides) -> BF16 [T, N+M]. Differentiable."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return torch.cat([a, b], dim=1)
    return _op_join_columns(a, b)
