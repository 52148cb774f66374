"""Where each named tensor lives in the buffers that the kernels read.

Kernels read panels (docs/operators.md), several checkpoint tensors fused into one buffer. A `TensorSlice` says which
part of which buffer a checkpoint or adapter tensor is, so that loading, exporting, digesting and fault injection are
each written once, for base and adapters, on both hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from zmrl.batch_invariant.ops.digest import tensor_digest, tensor_digests
from zmrl.batch_invariant.ops.panels import (
    LANES,
    pack_mxfp4_codes,
    pack_mxfp4_scales,
    pack_panels,
    unpack_mxfp4_codes,
    unpack_mxfp4_scales,
    unpack_panels,
)


@dataclass(frozen=True)
class Form:
    """How a logical tensor is written into its part of a buffer, and read back."""

    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, tuple[int, ...]], Tensor]


PLAIN = Form(lambda t: t, lambda b, shape: b.reshape(shape))
PANELS = Form(pack_panels, lambda b, shape: unpack_panels(b, shape[0]))
PADDED_PANELS = Form(
    lambda t: pack_panels(pad(t, (0, -t.shape[-1] % LANES))),
    lambda b, shape: unpack_panels(b, shape[0])[..., : shape[1]].contiguous(),
)
"""Inputs padded with zeros to a multiple of 16, as outputs always are: routed experts."""
MXFP4_CODES = Form(pack_mxfp4_codes, lambda b, shape: unpack_mxfp4_codes(b, shape[0]))
MXFP4_SCALES = Form(pack_mxfp4_scales, lambda b, shape: unpack_mxfp4_scales(b, shape[0]))


class Cut(NamedTuple):
    """A rank's part of a tensor: one of `size` equal parts of dimension `dim`."""

    dim: int
    rank: int
    size: int

    def of(self, tensor: Tensor) -> Tensor:
        """A view of the part of a whole tensor."""
        own = tensor.shape[self.dim] // self.size
        return tensor.narrow(self.dim, self.rank * own, own)

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The part's shape."""
        return (*whole[: self.dim], whole[self.dim] // self.size, *whole[self.dim + 1 :])


@dataclass(frozen=True)
class TensorSlice:
    """One logical tensor: `buffer[index]`, written in `form`. `index` is one expert, or a range of panels or rows."""

    name: str
    buffer: Tensor
    index: int | slice
    shape: tuple[int, ...]
    """Of the whole tensor, also where a rank holds a part of it."""
    form: Form
    cut: Cut | None = None
    """Which part of the tensor this rank holds; None: all of it."""
    held: bool = True
    """False: an expert of another rank. `live` and `read` then have no elements, `write` only checks."""

    def live(self) -> Tensor:
        """The view that the kernels read."""
        return self.buffer[self.index] if self.held else self.buffer[:0]

    def read(self) -> Tensor:
        """The logical tensor, or this rank's part of it, a copy."""
        if not self.held:
            return self.buffer.new_empty(0)
        shape = self.shape if self.cut is None else self.cut.shape(self.shape)
        return self.form.decode(self.live(), shape).clone()

    def write(self, tensor: Tensor) -> None:
        """Stores what this rank holds of the whole logical tensor; ValueError names it when the shape or the kind of
        number is wrong."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"{self.name}: shape {tuple(tensor.shape)}, expected {self.shape}")
        if tensor.is_floating_point() != self.buffer.is_floating_point():
            raise ValueError(f"{self.name}: {tensor.dtype} cannot be stored as {self.buffer.dtype}")
        if self.held:
            view = self.live()
            part = tensor if self.cut is None else self.cut.of(tensor)
            view.copy_(self.form.encode(part).reshape(view.shape))


def whole(name: str, buffer: Tensor, shape: tuple[int, ...] | None = None) -> TensorSlice:
    """A tensor that has a buffer of its own."""
    return TensorSlice(name, buffer, slice(None), tuple(buffer.shape) if shape is None else shape, PLAIN)


def digests(slices: Iterable[TensorSlice]) -> dict[str, int]:
    """The digest of each tensor's live bytes, by name (numerics.md, Digests and identity).

    Of the parts that this rank holds; `zmrl.model.shards` has those of whole tensors.
    """
    found: dict[str, int] = {}
    bulk: dict[int, list[int]] = {}
    for item in slices:
        if not item.held:
            continue
        if isinstance(item.index, int):  # one of many experts: all of them in one call
            key = item.buffer.data_ptr()
            if key not in bulk:
                bulk[key] = tensor_digests(item.buffer).tolist()
            found[item.name] = bulk[key][item.index]
        else:
            found[item.name] = int(tensor_digest(item.live()))
    return found


def combined_digest(buffers: Mapping[str, Tensor]) -> str:
    """One digest over all buffers, 16 hex digits: depends on every name, shape, type and bit, and on the order.

    Of whole buffers, some dozens: to walk over the tensors in them, tens of thousands of experts', would take longer
    than to read the bytes. `digests` does that when a tensor is to be named.
    """
    values = [int(tensor_digest(buffer.detach())) for buffer in buffers.values()]
    return combine([(name, tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()], values)


def combine(described: Iterable[tuple[str, tuple[int, ...], torch.dtype]], values: list[int]) -> str:
    """One digest, 16 hex digits, of (name, shape, type) and digest of each of several buffers."""
    lines = "\n".join(f"{name} {shape} {dtype}" for name, shape, dtype in described)
    text = torch.frombuffer(bytearray(lines.encode()), dtype=torch.uint8)
    total = torch.tensor([int(tensor_digest(text)), *values], dtype=torch.int64)
    return f"{int(tensor_digest(total)) & (2**64 - 1):016x}"


def flip_bit(slices: Iterable[TensorSlice], name: str, element: int, bit: int) -> None:
    """Flips one bit of one element of the live tensor `name`: fault injection. KeyError names an unknown tensor.

    Of a tensor that is shared out, an element of this rank's part; of another rank's expert nothing.
    """
    for item in slices:
        if item.name == name and not item.held:
            return
        if item.name == name:
            view = item.live()
            raw = view.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[view.element_size()]).view(-1)
            if not 0 <= element < raw.numel() or not 0 <= bit < 8 * view.element_size():
                raise ValueError(f"{name}: no element {element} bit {bit}; it has {raw.numel()} of {view.dtype}")
            raw[element] ^= torch.tensor(1 << bit, dtype=torch.int64).to(raw.dtype)
            return
    raise KeyError(f"no live tensor named {name!r}")


class TensorLoader:
    """Writes named tensors into a model and keeps account: `load` each, then `finish`."""

    def __init__(self, slices: Iterable[TensorSlice], what: str) -> None:
        self._missing = {item.name: item for item in slices}
        self._expected = len(self._missing)
        self._what = what
        self._seen: set[str] = set()

    def load(self, name: str, tensor: Tensor) -> None:
        item = self._missing.pop(name, None)
        if item is None:
            reason = "appears twice" if name in self._seen else "is not part of this model"
            raise ValueError(f"{self._what}: tensor {name!r} {reason}; was it written for another configuration?")
        self._seen.add(name)
        item.write(tensor)

    def finish(self) -> int:
        """The number of tensors loaded; ValueError names what is missing."""
        if self._missing:
            first = next(iter(self._missing))
            raise ValueError(
                f"{self._what}: {len(self._missing)} of {self._expected} tensors are missing, first {first!r}"
            )
        return self._expected


def named(prefix: str, slices: Iterable[TensorSlice]) -> Iterator[TensorSlice]:
    """The slices with `prefix` put before their names."""
    for item in slices:
        yield replace(item, name=prefix + item.name)
