"""Serving tests share one server: real HTTP on loopback, a thread of this process, an engine with 64 experts."""

import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rollout.harness import RANK, PlainModel, random_adapter
from tests.serving.harness import Served
from zmrl.lora.peft_io import write_adapter


@pytest.fixture(scope="session")
def checkpoint(few_experts: Path) -> Path:
    return few_experts


@pytest.fixture(scope="session")
def plain(checkpoint: Path) -> PlainModel:
    model = PlainModel(checkpoint)
    model.model.create_lora(1, RANK, RANK)
    return model


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory, plain: PlainModel) -> Path:
    """--lora-root, with adapters `1` and `2`, and `huge`, whose values overflow."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in ((1, "1"), (2, "2"), (1, "huge")):
        buffers = random_adapter(plain.model, seed)
        scale = 1e30 if name == "huge" else 1.0
        tensors = {item.name: item.read() * scale for item in plain.model.lora_slices(buffers)}
        write_adapter(root / name, tensors, plain.model.config, RANK, RANK, "nano")
    return root


def arguments(checkpoint: Path, root: Path, transcript: Path) -> list[str]:
    """Of the server that the tests share."""
    return [
        *(str(checkpoint), "--served-model-name", "base"),
        *("--lora", f"first={root / '1'}", "--lora-root", str(root), "--max-loras", "3"),
        *("--max-model-len", "1024", "--kv-cache-bytes", str(64 << 20), "--max-num-seqs", "64"),
        *("--max-n", "64", "--max-tokens", "400", "--transcript", str(transcript)),
    ]


@pytest.fixture(scope="session")
def server(checkpoint: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    transcript = tmp_path_factory.mktemp("transcript") / "served.jsonl"
    served = Served([*arguments(checkpoint, root, transcript), "--port", "0"])
    yield served
    served.stop()
