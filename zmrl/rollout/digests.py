"""Digests of the logits rows that tokens were sampled from, kept until the driver takes them."""

from __future__ import annotations

from collections import OrderedDict


class DigestStore:
    """Row digests by request tag, in order of output tokens. Holds at most `capacity` tags; the oldest are dropped.

    A request whose digests are never taken (aborted, or its client gone) is dropped that way. A dropped or incomplete
    list makes the checker's comparison VOID, never EQUAL.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self.capacity = capacity
        self._rows: OrderedDict[str, list[int]] = OrderedDict()

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
