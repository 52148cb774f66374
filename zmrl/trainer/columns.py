"""Columns of verl's batches: one value a sample, as tensors or in tensordict's wrappers of other values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def rows_of(column: Any) -> list[Any]:
    """The rows of a column; `plain` unwraps what is not a tensor."""
    return list(column.unbind()) if isinstance(column, Tensor) else list(column)


def plain(value: Any) -> Any:
    """A column's element as str or int: TransferQueue hands out tensors, or tensordict's wrappers."""
    value = getattr(value, "data", value) if not hasattr(value, "item") else value
    return value.item() if hasattr(value, "item") else value


def sample_ids(batch: Mapping[str, Any]) -> list[str]:
    """What tells the samples of a batch apart, verl's padding too: uid of the problem and number of the session.

    Data set and problem would not do: padding carries those of the first sample.
    """
    uids, sessions = (map(plain, rows_of(batch[name])) for name in ("uid", "session_id"))
    return [f"{uid}_{session}" for uid, session in zip(uids, sessions, strict=True)]
