"""Checks shared by the operators over rows. Messages are made only when they are needed: an f-string costs as much as a
check, and these run at every call."""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError, check_rows


def check_matrix(name: str, tensor: Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
    """A [rows, columns] tensor of `dtype` whose rows are contiguous (any row stride)."""
    if tensor.shape != (rows, columns) or tensor.dtype != dtype or (columns > 1 and tensor.stride(1) != 1):
        check_rows(name, tensor, dtype, columns)
        raise OperatorError(f"{name}: expected {rows} rows, got {tensor.shape[0]}")


def as_rows(gradient: Tensor) -> Tensor:
    """A gradient from autograd in the layout of an operator: contiguous rows."""
    return gradient if gradient.shape[1] <= 1 or gradient.stride(1) == 1 else gradient.contiguous()
