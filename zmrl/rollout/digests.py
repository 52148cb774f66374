"""Digests of the logits rows that tokens were sampled from, kept until the driver takes them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable


class DigestStore:
    """Row digests by request tag, in order of output tokens. Holds at most `capacity` tags; the oldest are dropped.

    A request whose digests are never taken (aborted, or its client gone) is dropped that way. A dropped or incomplete
    list makes the checker's comparison VOID, never EQUAL.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self.capacity = capacity
        self._rows: OrderedDict[str, list[int]] = OrderedDict()

    def __len__(self) -> int:
        """Tags that are held."""
        return len(self._rows)

    def begin(self, tag: str) -> None:
        """A request with this tag was admitted; a former request's rows under the tag are forgotten."""
        self._rows.pop(tag, None)
        self._rows[tag] = []
        if len(self._rows) > self.capacity:
            self._rows.popitem(last=False)

    def add(self, tag: str, position: int, digest: int) -> None:
        """The row of output token `position`. Rows after a gap are ignored, so that the list stays too short."""
        rows = self._rows.get(tag)
        if rows is not None and position <= len(rows):
            del rows[position:]  # sampled again: the token was not delivered the first time
            rows.append(digest)

    def take(self, tags: list[str]) -> dict[str, list[int]]:
        """The rows of `tags`, signed 64-bit; they are forgotten. Unknown tags are absent."""
        return {tag: self._rows.pop(tag) for tag in tags if tag in self._rows}


class DigestTaker:
    """A server's end: takes the digests of finished requests. Those that finish during a call share the next one."""

    def __init__(self, call: Callable[[list[str]], Awaitable[dict[str, list[int]]]]) -> None:
        """call: `zmrl_take_digests` of the worker."""
        self._call = call
        self._waiting: dict[str, asyncio.Future] = {}
        self._task: asyncio.Task | None = None

    async def take(self, tag: str) -> list[int] | None:
        """The rows of `tag`; None if there are none."""
        future = asyncio.get_running_loop().create_future()
        self._waiting[tag] = future
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._take_all())
        return await future

    async def _take_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, {}
            try:
                found = await self._call(list(batch))
            except Exception as error:  # it belongs to the requests that wait, not to this task
                for future in batch.values():
                    if not future.done():
                        future.set_exception(error)
                continue
            for tag, future in batch.items():
                if not future.done():  # its request was cancelled
                    future.set_result(found.get(tag))
