"""Where the state of each sequence lives: the one thing that differs between the hosts.

The rollout points these tensors into vLLM's block rows; the trainer and the re-scorer into scratch buffers of the same
layout (`scratch_context`). The layers and kernels cannot tell which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.config import K3Config
from zmrl.parallel.prefill import PrefillShards
from zmrl.parallel.ranks import SINGLE, Ranks


@dataclass
class KdaCache:
    """State of one KDA layer. `state_in[r]` -1: the sequence starts here; `state_out[r]` -1: its state is not kept."""

    conv_state: Tensor
    """BF16 [slots, 3, 3 * heads * head_dim]: the last inputs of the short convolutions of q, k, v; any slot stride.

    Here and below: this rank's heads.
    """
    state: Tensor
    """FP32 [slots, heads, head_dim (K), head_dim (V)]; any slot stride."""
    state_in: Tensor
    """int32 [R]"""
    state_out: Tensor
    """int32 [R]"""


@dataclass
class MlaCache:
    """Pages of one MLA layer, in the model's `CacheFormat` (docs/cache.md).

    On rank r of W context ranks they hold the positions r, r + W, ...; position p is the rank's local position p // W.
    """

    latent_pages: Tensor
    """uint8 [blocks, block_size * latent_bytes]; any block stride."""
    index_pages: Tensor
    """uint8 [blocks, block_size * index_bytes]; any block stride. Nothing reads it without an indexer."""
    block_table: Tensor
    """int32 [R, blocks per request]"""
    slot_mapping: Tensor
    """int64 [T]: block * block_size + place of each token, -1: not stored, or by another rank."""
    block_size: int


@dataclass
class SequenceContext:
    """A step's packed sequences. T tokens of R requests; request r owns rows cu_seqlens[r]..cu_seqlens[r+1]."""

    cu_seqlens: Tensor
    """int32 [R + 1]"""
    positions: Tensor
    """int32 [T]: absolute position of each token in its sequence."""
    caches: list[KdaCache | MlaCache]
    """One per layer."""
    slots: Tensor | None = None
    """int32 [T]: adapter slot of each token, -1 for the base model. None: no token has an adapter."""
    flags: Tensor | None = None
    """int32 [T]: set to 1 where an operator met NaN."""
    shards: PrefillShards | None = None
    """Which rows the MLA layers take by tokens; the model sets it. None: all go by heads."""

    def of_rows(self, rows: Tensor, cu_seqlens: Tensor) -> SequenceContext:
        """Some rows of the step, int64 ascending, for the attention of one layer: all requests, with the boundaries
        `cu_seqlens` among them. The tokens are stored by then; flags are the rows' own, a copy."""
        slots, flags = (None if x is None else x[rows] for x in (self.slots, self.flags))
        return SequenceContext(cu_seqlens, self.positions[rows], [], slots, flags)


def scratch_context(
    config: K3Config,
    lengths: list[int],
    slots: Tensor | None = None,
    cache_format: CacheFormat = DEFAULT_CACHE_FORMAT,
    ranks: Ranks = SINGLE,
) -> SequenceContext:
    """Whole sequences from position 0, one block each, in buffers that live as long as the context does.

    cache_format, ranks: the model's.
    """
    count, longest, total = len(lengths), max(lengths), sum(lengths)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.zeros(count + 1, dtype=torch.int32)
    torch.cumsum(sizes, 0, out=cu_seqlens[1:])
    positions = torch.arange(total, dtype=torch.int32)
    positions -= torch.repeat_interleave(cu_seqlens[:-1], sizes)
    request = torch.repeat_interleave(torch.arange(count), sizes)
    group = ranks.context
    longest = -(-longest // group.size)
    slot_mapping = request * longest + positions // group.size
    slot_mapping.masked_fill_(positions % group.size != group.rank, -1)
    block_table = torch.arange(count, dtype=torch.int32).unsqueeze(1)
    nowhere = torch.full((count,), -1, dtype=torch.int32)
    linear = config.linear_attn_config
    heads = linear.num_heads // ranks.tensor.size
    caches: list[KdaCache | MlaCache] = []
    for layer in range(config.num_hidden_layers):
        if config.is_full_attention(layer):
            latent = torch.zeros(count, longest * cache_format.latent_bytes(config), dtype=torch.uint8)
            index = torch.zeros(count, longest * cache_format.index_bytes(config), dtype=torch.uint8)
            caches.append(MlaCache(latent, index, block_table, slot_mapping, longest))
        else:
            width = 3 * heads * linear.head_dim
            conv = torch.zeros(0, linear.short_conv_kernel_size - 1, width, dtype=torch.bfloat16)
            state = torch.zeros(0, heads, linear.head_dim, linear.head_dim)
            caches.append(KdaCache(conv, state, nowhere, nowhere))
    return SequenceContext(cu_seqlens, positions, caches, slots, torch.zeros(total, dtype=torch.int32))
