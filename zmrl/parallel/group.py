"""Ranks that exchange tensors: over `torch.distributed`, or simulated in one process.

A group moves bytes and never adds: the numerics contract fixes the order of every sum, so the receivers add. Code that
takes a `Group` cannot tell which kind it has.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Group(ABC):
    """One rank's view of a group of `size` ranks. All ranks call the same methods in the same order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent: Counter[str] = Counter()
        """Bytes that this rank sent to other ranks, by the `what` of the exchange."""
        self.events: Counter[str] = Counter()
        """What the code above the group counts, such as rows that were sent again."""

    def all_gather(self, x: Tensor, what: str) -> Tensor:
        """x: one shape and type on all ranks -> `[size, *x.shape]`, in rank order."""
        self.sent[what] += x.nbytes * (self.size - 1)
        return self._all_gather(x.contiguous(), what)

    def all_to_all(self, parts: Sequence[Tensor], what: str, rows: Sequence[int] | None = None) -> list[Tensor]:
        """parts[r] `[n, ...]` goes to rank r; result[r] came from rank r. Types and shapes agree but for n.

        rows: the n of every result where the caller knows them; otherwise the ranks tell each other first.
        """
        if len(parts) != self.size:
            raise ValueError(f"{what}: {len(parts)} parts for a group of {self.size} ranks")
        if rows is None:
            sizes = torch.tensor([part.shape[0] for part in parts], dtype=torch.int64)
            rows = self.all_gather(sizes, f"{what}: sizes")[:, self.rank].tolist()
        self.sent[what] += sum(part.nbytes for r, part in enumerate(parts) if r != self.rank)
        return self._all_to_all([part.contiguous() for part in parts], what, rows)

    @abstractmethod
    def _all_gather(self, x: Tensor, what: str) -> Tensor: ...

    @abstractmethod
    def _all_to_all(self, parts: list[Tensor], what: str, rows: Sequence[int]) -> list[Tensor]: ...


class TorchGroup(Group):
    """A process group of `torch.distributed`; None: the default group. Tensors travel as bytes, so any type does."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__(dist.get_rank(process_group), dist.get_world_size(process_group))
        self.process_group = process_group

    def _all_gather(self, x: Tensor, what: str) -> Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        if x.numel():
            dist.all_gather([_bytes(row) for row in out], _bytes(x), group=self.process_group)
        return out

    def _all_to_all(self, parts: list[Tensor], what: str, rows: Sequence[int]) -> list[Tensor]:
        like = parts[0]
        row_bytes = like[:1].new_empty((1, *like.shape[1:])).nbytes
        received = torch.empty((sum(rows), *like.shape[1:]), dtype=like.dtype)
        sent = torch.cat(parts)
        if row_bytes and (len(sent) or len(received) or self.size > 1):
            dist.all_to_all_single(
                _bytes(received),
                _bytes(sent),
                [n * row_bytes for n in rows],
                [len(part) * row_bytes for part in parts],
                group=self.process_group,
            )
        return list(received.split(list(rows)))


class OneRank(Group):
    """A group of one: nothing moves."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def _all_gather(self, x: Tensor, what: str) -> Tensor:
        return x[None]

    def _all_to_all(self, parts: list[Tensor], what: str, rows: Sequence[int]) -> list[Tensor]:
        return parts


ONE_RANK = OneRank()


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor as flat uint8."""
    return x.view(-1).view(torch.uint8)


# ---- simulation ----------------------------------------------------------------------------------------------------


class SimulationError(RuntimeError):
    """The ranks did not make the same exchanges."""


def simulate(size: int, run: Callable[[Group], T]) -> list[T]:
    """run(group) on `size` ranks of this process; their results in rank order. The first error of a rank is raised.

    Every rank is a thread, and one thread at a time runs, from exchange to exchange, with the caller's number of
    kernel threads: ranks do not compete for cores, and Python objects that they share are safe.
    """
    world = _World(size, torch.get_num_threads())
    results: list[Any] = [None] * size
    ranks = [threading.Thread(target=world.run, args=(r, run, results), name=f"rank {r}") for r in range(size)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if world.error is not None:
        raise world.error
    return results


class _World:
    """What the ranks of a simulation share. `turn` is held by the rank that runs."""

    def __init__(self, size: int, kernel_threads: int) -> None:
        self.size, self.kernel_threads = size, kernel_threads
        self.turn = threading.Condition()
        self.posts: dict[int, dict[int, tuple[str, Any]]] = {}
        """Exchange number -> rank -> (what, value)."""
        self.left: set[int] = set()
        self.error: BaseException | None = None

    def run(self, rank: int, call: Callable[[Group], Any], results: list[Any]) -> None:
        with self.turn:
            try:
                torch.set_num_threads(self.kernel_threads)  # the setting belongs to the thread
                results[rank] = call(_SimulatedGroup(self, rank))
            except BaseException as error:
                self.error = self.error or error
            self.left.add(rank)
            self.turn.notify_all()

    def exchange(self, rank: int, number: int, what: str, value: Any) -> list[Any]:
        """The values that all ranks bring to their exchange `number`."""
        posts = self.posts.setdefault(number, {})
        posts[rank] = what, value
        self.posts.pop(number - 2, None)  # every rank has read it: all are past the exchange after it
        self.turn.notify_all()
        while len(posts) < self.size and self.error is None:
            if self.left - posts.keys():
                raise SimulationError(f"rank {rank} waits at {what!r}, rank {min(self.left - posts.keys())} has left")
            self.turn.wait()
        if self.error is not None:
            raise SimulationError("another rank failed")
        places = {what for what, _ in posts.values()}
        if len(places) > 1:
            raise SimulationError(f"the ranks are at different exchanges: {', '.join(sorted(places))}")
        return [posts[r][1] for r in range(self.size)]


class _SimulatedGroup(Group):
    def __init__(self, world: _World, rank: int) -> None:
        super().__init__(rank, world.size)
        self._world, self._number = world, 0

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self._number += 1
        return self._world.exchange(self.rank, self._number, what, value)

    def _all_gather(self, x: Tensor, what: str) -> Tensor:
        return torch.stack(self._exchange(what, x.detach().clone()))

    def _all_to_all(self, parts: list[Tensor], what: str, rows: Sequence[int]) -> list[Tensor]:
        sent = self._exchange(what, [part.detach().clone() for part in parts])
        received = [from_rank[self.rank] for from_rank in sent]
        if [len(part) for part in received] != list(rows):
            raise SimulationError(
                f"{what}: rank {self.rank} expected {list(rows)} rows, got {list(map(len, received))}"
            )
        return received
