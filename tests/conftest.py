"""Fixtures of several packages of tests."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
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


@pytest.fixture(scope="session")
def few_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano with random weights and 64 experts: an adapter of 896 has 21,504 tensors, and tests write many adapters."""
    from zmrl.model.checkpoint import export_tensors, write_checkpoint
    from zmrl.model.config import PRESETS
    from zmrl.model.initialise import initial_tensors

    config = dataclasses.replace(PRESETS["nano"], num_experts=64, num_experts_per_token=8)
    path = tmp_path_factory.mktemp("few") / "checkpoint"
    write_checkpoint(path, export_tensors(config, initial_tensors(config, seed=2)), config)
    return path
