"""Fixtures of several packages of tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.trainer.killing import Run


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts runs as processes (`Run`'s arguments); what still runs at the end is ended."""
    runs: list[Run] = []

    def begin(*arguments: Any, **environment: str) -> Run:
        runs.append(Run(*arguments, **environment))
        return runs[-1]

    yield begin
    for run in runs:
        run.end()
