"""One random nano checkpoint for all rollout tests; engines run in this process."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from pathlib import Path

import pytest

from zmrl.model.checkpoint import write_random_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nano") / "checkpoint"
    write_random_checkpoint("nano", path, seed=5)
    return path
