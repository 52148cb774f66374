"""A small configuration with every feature of nano, for tests that need a model but not its size."""

import dataclasses

import pytest

from zmrl.model.config import PRESETS, K3Config


@pytest.fixture
def small_config() -> K3Config:
    """nano with 24 experts (4 active) and top-8 selection."""
    return dataclasses.replace(PRESETS["nano"], num_experts=24, num_experts_per_token=4, index_topk=8)
