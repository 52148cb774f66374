"""Registration of the operators `torch.ops.zmrl.*`: schema, CPU implementation, shape function, autograd.

`torch.library` keeps the operator boundary that a GPU backend will implement, gives the meta device its shapes (the
dry run of the full model) and lets autograd see coarse operators. Low-level registration is used because
`custom_op` costs 26 us a call here against 16 us.
"""

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("zmrl", "DEF")


class OperatorError(ValueError):
    """An argument of an operator has the wrong shape, type or layout; the message names it."""


def register(schema: str, cpu: Callable, meta: Callable) -> None:
    """Defines `torch.ops.zmrl.<name>`; schema as torch.library takes it (mutated arguments marked `(a!)`)."""
    LIBRARY.define(schema)
    name = schema.split("(", 1)[0]
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, meta, "Meta")


def register_autograd(name: str, backward: Callable, setup_context: Callable) -> None:
    torch.library.register_autograd(f"zmrl::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether an operator below autograd does nothing more for `tensor` than to call its CPU implementation.

    Then small operators may call that themselves: the way through torch's dispatcher to Python costs 5 to 10 us.
    """
    return tensor.is_cpu and torch._C._len_torch_dispatch_stack() == 0


def check(condition: bool, message: str) -> None:
    if not condition:
        raise OperatorError(message)


def check_rows(name: str, tensor: torch.Tensor, dtype: torch.dtype, columns: int | None = None) -> int:
    """A [T, N] tensor of `dtype` whose rows are contiguous (any row stride). Returns T."""
    shape = tensor.shape
    if len(shape) != 2 or tensor.dtype != dtype or (shape[1] > 1 and tensor.stride(1) != 1):
        raise OperatorError(
            f"{name}: expected {dtype} [T, N] with contiguous rows, got {tensor.dtype} {tuple(shape)} "
            f"with strides {tensor.stride()}"
        )
    if columns is not None and shape[1] != columns:
        raise OperatorError(f"{name}: expected {columns} columns, got {shape[1]}")
    return shape[0]


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    """A contiguous [length] tensor of `dtype`."""
    if tensor.dtype != dtype or tensor.shape != (length,) or not tensor.is_contiguous():
        raise OperatorError(f"{name}: expected {dtype} [{length}] contiguous, got {tensor.dtype} {tuple(tensor.shape)}")
