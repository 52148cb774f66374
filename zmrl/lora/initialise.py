"""PEFT's standard initial values: A Kaiming-uniform with a = sqrt(5), B zero."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor


def initial_lora_a(name: str, rank: int, in_features: int, seed: int) -> Tensor:
    """A of the adapter tensor `name`: FP32 [rank, in_features], uniform in +-1/sqrt(in_features).

    Drawn from a generator of its own, seeded by (seed, name): the values do not depend on how tensors are fused,
    ordered or sharded.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    bound = 1.0 / math.sqrt(in_features)  # sqrt(6 / ((1 + a^2) * in_features)) with a^2 = 5
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)
