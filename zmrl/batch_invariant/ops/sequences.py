"""Checks shared by the operators over packed sequences: cu_seqlens and state slots (docs/operators.md, Layouts)."""

from __future__ import annotations

import torch
from torch import Tensor

from zmrl.batch_invariant.library import OperatorError

_PROBLEMS = {
    -1: "cu_seqlens: must start with 0, never decrease and end with the number of rows",
    -2: "state_in: a slot must be -1 or one of the state's slots",
    -3: "state_out: a slot must be -1 or one of the state's slots",
    -4: "state_out: a slot that one request writes is used by another",
}


def check_status(status: int) -> None:
    """Raises for a SequenceStatus (csrc/sequences.h), which is negative: the kernel then has written nothing."""
    if status < 0:
        raise OperatorError(_PROBLEMS[status])


def check_cu_seqlens(cu_seqlens: Tensor) -> int:
    """int32 [R + 1] contiguous; returns R."""
    shape = cu_seqlens.shape
    if cu_seqlens.dtype != torch.int32 or len(shape) != 1 or shape[0] < 1 or not cu_seqlens.is_contiguous():
        raise OperatorError(
            f"cu_seqlens: expected torch.int32 [R + 1] contiguous, got {cu_seqlens.dtype} {tuple(shape)}"
        )
    return shape[0] - 1


def check_state(
    name: str,
    state: Tensor | None,
    inner: tuple[int, ...],
    dtype: torch.dtype,
    slots: tuple[Tensor | None, Tensor | None],
    requests: int,
) -> tuple[int, int]:
    """A state buffer [slots, *inner], inner dimensions contiguous, any slot stride, and the slot of every request.

    Returns (slot stride in elements, number of slots); (0, 0) without a buffer.
    """
    for label, tensor in zip(("state_in", "state_out"), slots, strict=True):
        if tensor is not None and (
            tensor.dtype != torch.int32 or tensor.shape != (requests,) or not tensor.is_contiguous()
        ):
            raise OperatorError(
                f"{label}: expected torch.int32 [{requests}] contiguous, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if state is None:
        return 0, 0
    if state.dtype != dtype or state.shape[1:] != inner or not _inner_contiguous(state):
        raise OperatorError(
            f"{name}: expected {dtype} [slots, {', '.join(map(str, inner))}] with contiguous slots, got {state.dtype} "
            f"{tuple(state.shape)} with strides {state.stride()}"
        )
    return state.stride(0), state.shape[0]


def _inner_contiguous(state: Tensor) -> bool:
    size = 1
    for length, stride in zip(reversed(state.shape[1:]), reversed(state.stride()[1:]), strict=True):
        if length != 1 and stride != size:
            return False
        size *= length
    return True


def check_starts_from_zero(state_in: Tensor | None) -> None:
    """The backward pass knows only sequences that start in the call."""
    if state_in is not None and state_in.device.type == "cpu" and bool((state_in >= 0).any()):
        raise OperatorError("state_in: training needs whole sequences (-1), a gradient does not pass through a state")
