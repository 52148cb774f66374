"""Rollout tests run engines in this process, on the embedded nano checkpoint."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from pathlib import Path

import pytest

from zmrl.model.checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """The embedded nano checkpoint: trained, 896 experts."""
    return Path(__file__).parents[2] / "checkpoints" / "nano"


@pytest.fixture(scope="session")
def random_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """nano with random weights: nearly uniform samples, where tests need many different ones."""
    path = tmp_path_factory.mktemp("random") / "checkpoint"
    write_random_checkpoint("nano", path, seed=5)
    return path
