"""Whole tensors, whole buffers and their digests from the parts that ranks hold.

Digests do not depend on the layout: they are those of the buffers that a single rank would have, so that two hosts can
compare them. Every rank of the model's tensor and expert groups makes these calls together, and gets the same result.
Copies that ranks should have alike are compared: where they differ, the digest is none that a single rank could have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from zmrl.batch_invariant.ops.digest import rows_digest, tensor_digest
from zmrl.model.tensors import PLAIN, TensorSlice, combine, combined_digest, digests
from zmrl.parallel.group import Group
from zmrl.parallel.ranks import Ranks


class RankBuffers:
    """Live buffers of one rank, and which tensors in them are parts: found once, experts are tens of thousands."""

    def __init__(self, buffers: Mapping[str, Tensor], slices: Iterable[TensorSlice], ranks: Ranks) -> None:
        """slices: of all tensors in `buffers`."""
        self.buffers, self.ranks = buffers, ranks
        self._alone = ranks.tensor.size == ranks.expert.size == 1
        self._parts = {} if self._alone else _by_buffer(slices)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """(key, buffer as a single rank has it), one at a time."""
        for key, buffer in self.buffers.items():
            yield key, buffer if self._alone else _whole_buffer(buffer, self._parts[buffer.data_ptr()], self.ranks)

    def digest(self) -> str:
        """`combined_digest` of the buffers that a single rank would have. Experts are not moved: their sums add up."""
        if self._alone:
            return combined_digest(self.buffers)
        described, values = [], []
        for key, buffer in self.buffers.items():
            parts, group = self._parts[buffer.data_ptr()], self.ranks.expert
            if _of_experts(parts):
                flat = buffer.detach().reshape(1, -1)
                own = rows_digest(flat, offset=group.rank * flat.shape[1])
                shape = len(parts), *buffer.shape[1:]
                values.append(int(group.all_gather(own, "digests").sum()))
            else:
                whole = _whole_buffer(buffer.detach(), parts, self.ranks)
                shape = tuple(whole.shape)
                values.append(int(tensor_digest(whole)))
            described.append((key, shape, buffer.dtype))
        return combine(described, _agreed(values, self.ranks.tensor))


def ranks_digests(slices: Iterable[TensorSlice], ranks: Ranks) -> dict[str, int]:
    """`digests` of the tensors that a single rank would have."""
    items = list(slices)
    found = digests(items)
    if ranks.tensor.size == ranks.expert.size == 1:
        return found
    for item in items:
        if item.cut is not None:
            found[item.name] = int(tensor_digest(_encoded(item, ranks.tensor)))
    experts = [item.name for item in items if isinstance(item.index, int)]  # in the same order on all ranks
    own = torch.tensor([found.get(name, 0) for name in experts], dtype=torch.int64)
    found |= dict(zip(experts, ranks.expert.all_gather(own, "digests").sum(0).tolist(), strict=True))
    names = [item.name for item in items]
    return dict(zip(names, _agreed([found[name] for name in names], ranks.tensor), strict=True))


def _by_buffer(slices: Iterable[TensorSlice]) -> dict[int, list[TensorSlice]]:
    found: dict[int, list[TensorSlice]] = {}
    for item in slices:
        found.setdefault(item.buffer.data_ptr(), []).append(item)
    return found


def _of_experts(parts: list[TensorSlice]) -> bool:
    return isinstance(parts[0].index, int)


def _whole_buffer(buffer: Tensor, parts: list[TensorSlice], ranks: Ranks) -> Tensor:
    if _of_experts(parts):
        return ranks.expert.all_gather(buffer, "experts").flatten(0, 1)
    if all(part.cut is None for part in parts):
        return buffer
    return torch.cat([whole_panels(part, ranks) for part in parts])


def whole_panels(item: TensorSlice, ranks: Ranks) -> Tensor:
    """The whole tensor, no expert's, as a single rank's buffer holds it: from the parts of all ranks if it is cut."""
    return item.live() if item.cut is None else _encoded(item, ranks.tensor)


def _encoded(item: TensorSlice, group: Group) -> Tensor:
    """The whole tensor in its form, from the parts of all ranks."""
    assert item.cut is not None
    parts = group.all_gather(item.read(), "tensors")
    whole = item.form.encode(torch.cat(list(parts), item.cut.dim))
    return whole.reshape(-1, *item.buffer.shape[1:]) if item.form is PLAIN else whole


def _agreed(values: list[int], group: Group) -> list[int]:
    """values if all ranks have the same; for one that differs, something else."""
    own = torch.tensor(values, dtype=torch.int64)
    every = group.all_gather(own, "digests")
    differ = (every != every[0]).any(0)
    mixed = [int(tensor_digest(column.contiguous())) for column in every.T[differ]]
    own[differ] = torch.tensor(mixed, dtype=torch.int64)
    return own.tolist()
