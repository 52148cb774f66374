"""A minimal host for tests: sequences fed in chunks through shuffled pages and state slots, as vLLM does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.transformer import KimiK31

BLOCK_SIZE = 8


@dataclass
class Request:
    """One sequence: all its ids (teacher forced), how many are computed, its adapter slot."""

    ids: Tensor
    number: int
    computed: int = 0
    slot: int = -1


class PagedHost:
    """Runs chunks of requests in one forward; pages of all requests interleave in one pool."""

    def __init__(self, model: KimiK31, requests: list[Request], seed: int = 0) -> None:
        self.model, self.requests = model, requests
        self.forward: Callable[[Tensor, SequenceContext], Tensor] = model
        config = model.config
        longest = max(len(r.ids) for r in requests)
        self.group = model.ranks.context
        self.blocks_each = -(-longest // (BLOCK_SIZE * self.group.size))
        count = len(requests) * self.blocks_each + 3
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        self.tables = order[: len(requests) * self.blocks_each].reshape(len(requests), -1).to(torch.int32)
        self.caches = [_cache(model, layer, count, len(requests)) for layer in range(config.num_hidden_layers)]

    def step(self, chunks: list[tuple[Request, int]]) -> list[Tensor]:
        """Feeds the next n tokens of each request; hidden states [n, hidden] of each."""
        sizes = torch.tensor([n for _, n in chunks], dtype=torch.int32)
        cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int32), sizes.cumsum(0).to(torch.int32)])
        positions = torch.cat([torch.arange(r.computed, r.computed + n, dtype=torch.int32) for r, n in chunks])
        rows = torch.repeat_interleave(torch.arange(len(chunks)), sizes)
        table = torch.stack([self.tables[r.number] for r, _ in chunks])
        local = positions // self.group.size
        block = table[rows, (local // BLOCK_SIZE).long()].long()
        slot_mapping = block * BLOCK_SIZE + local % BLOCK_SIZE
        slot_mapping[positions % self.group.size != self.group.rank] = -1
        slot = torch.tensor([r.number for r, _ in chunks], dtype=torch.int32)
        start = torch.where(torch.tensor([r.computed == 0 for r, _ in chunks]), -1, slot).to(torch.int32)
        caches: list[KdaCache | MlaCache] = []
        for layer, cache in enumerate(self.caches):
            if self.model.config.is_full_attention(layer):
                caches.append(MlaCache(cache[0], cache[1], table, slot_mapping, BLOCK_SIZE))
            else:
                caches.append(KdaCache(cache[0], cache[1], start, slot))
        slots = torch.cat([torch.full((n,), r.slot, dtype=torch.int32) for r, n in chunks])
        context = SequenceContext(cu_seqlens, positions, caches, None if int(slots.max()) < 0 else slots)
        ids = torch.cat([r.ids[r.computed : r.computed + n] for r, n in chunks])
        with torch.no_grad():
            hidden = self.forward(ids, context)
        for r, n in chunks:
            r.computed += n
        return list(hidden.split(sizes.tolist()))


def _cache(model: KimiK31, layer: int, blocks: int, slots: int) -> tuple[Tensor, Tensor]:
    """Poisoned buffers with a block stride wider than a page, as in a packed block row."""
    config, formats = model.config, model.cache_format
    if config.is_full_attention(layer):
        latent, index = BLOCK_SIZE * formats.latent_bytes(config), BLOCK_SIZE * formats.index_bytes(config)
        row = torch.full((blocks, latent + index + 64), 0xFF, dtype=torch.uint8)
        return row[:, :latent], row[:, latent : latent + index]
    linear = config.linear_attn_config
    heads, dim = linear.num_heads // model.ranks.tensor.size, linear.head_dim
    conv = torch.full((slots, linear.short_conv_kernel_size - 1, 3 * heads * dim), torch.nan)
    return conv.bfloat16(), torch.full((slots, heads, dim, dim), torch.nan)
