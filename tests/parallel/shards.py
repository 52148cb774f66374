"""What a rank of a test holds of a cache, of heads and of weights."""

import torch
from torch import Tensor

from tests.batch_invariant.mla_oracle import pages_for

WORLDS = (2, 4, 8)


def local_cache(cu: Tensor, rank: int, size: int, block_size: int, token_bytes: int, seed: int = 0):
    """Empty pages for the positions of one rank, its block table and the slots of all tokens (-1: another rank's).

    Position p of a request is local position p // size of rank p mod size.
    """
    lengths = cu.diff().tolist()
    held = [-(-max(n - rank, 0) // size) for n in lengths]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    pages, table, local = pages_for([max(n, 1) for n in held], block_size, token_bytes, generator)
    slots, at = torch.full((sum(lengths),), -1, dtype=torch.int64), 0
    for start, n, own in zip(cu.tolist(), lengths, held, strict=False):
        slots[start + rank : start + n : size] = local[at : at + own]
        at += max(own, 1)
    return pages, table, slots


def of_heads(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """A rank's part of a dimension in which heads (or outputs, or inputs) lie one after the other."""
    return x.chunk(size, dim)[rank].contiguous()
