"""Registration of the operators `torch.ops.zmrl.*`: schema, CPU implementation, shape function.

`torch.library` keeps the operator boundary that a GPU backend will implement, gives the meta device its shapes (the
dry run of the full model). Low-level registration is used because `custom_op` costs 26 us a call here against 16 us.
"""

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("zmrl", "DEF")
_implementations: dict[str, Callable] = {}
"""Of the CPU, by the operator's name."""


class OperatorError(ValueError):
    """An argument of an operator has the wrong shape, type or layout; the message names it."""


def register(schema: str, cpu: Callable, meta: Callable) -> None:
    """Defines `torch.ops.zmrl.<name>`; schema as torch.library takes it (mutated arguments marked `(a!)`)."""
    LIBRARY.define(schema)
    name = schema.split("(", 1)[0]
    _implementations[name] = cpu
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, meta, "Meta")


def operator(name: str) -> Callable:
    """The registered operator `name`, below autograd; its first argument is a tensor.

    The way through torch's dispatcher to Python, 5 to 10 us, is left out where it would do nothing but call the CPU
    implementation: for tensors of the CPU that no mode of torch watches.
    """
    cpu, dispatched = _implementations[name], getattr(torch.ops.zmrl, name).default
    modes = torch._C._len_torch_dispatch_stack

    def call(first: torch.Tensor, *others: object) -> Any:
        return (cpu if first.is_cpu and not modes() else dispatched)(first, *others)

    return call


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
