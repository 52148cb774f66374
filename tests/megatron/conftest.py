"""Fixtures of the checks. Megatron is imported in their process only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.megatron.hosts import write_base

    path = tmp_path_factory.mktemp("base") / "model"
    write_base(path)
    return path


@pytest.fixture(scope="module")
def host(base: Path) -> Any:
    """For checks that change nothing."""
    from tests.megatron.hosts import make_host

    return make_host(base)


@pytest.fixture(scope="module", autouse=True)
def restore_threads() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
