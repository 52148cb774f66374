"""How the caches of a model lie in memory: block rows, as vLLM 0.32 packs them, and the block size that wastes least.

One buffer of rows of equal size. A row holds either the latent and index pages of all MLA layers for `block_size`
tokens, side by side, or the states of one group of KDA layers of one sequence. It is as wide as the wider of the two;
the rest is padding. Pure arithmetic: needs neither torch nor vLLM. vLLM itself makes the groups when an engine starts
(v1/core/kv_cache_utils.py:1860); a test holds this module to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmrl.model.cache_format import CacheFormat
from zmrl.model.config import K3Config

BLOCK_SIZES = tuple(1 << n for n in range(4, 13))
"""What the planner chooses from: 16 to 4096 tokens."""

STATES_PER_REQUEST = 2
"""States of a layer that a running request holds with a prefix cache: the one being written and the boundary before."""


class CacheLayoutError(ValueError):
    """A block size or a pool that cannot work; the message holds the numbers."""


@dataclass(frozen=True)
class CacheLayout:
    """The block row of one rank."""

    config: K3Config
    cache_format: CacheFormat
    block_size: int
    """Tokens of a block, as this rank holds them."""
    tensor_parallel: int = 1
    """Ranks that share the KDA heads; latents and index keys are held by each of them."""
    context_parallel: int = 1
    """Ranks that share the tokens (DCP): token g lies on rank g mod this. States are not shared by it."""

    def __post_init__(self) -> None:
        """CacheLayoutError or FormatError names what does not fit."""
        check_block_size(self.block_size)
        heads, ranks = self.config.linear_attn_config.num_heads, self.tensor_parallel
        if ranks < 1 or heads % ranks:
            raise CacheLayoutError(f"tensor parallel size {ranks} does not divide the {heads} KDA heads")
        if self.context_parallel < 1 or ranks % self.context_parallel:
            raise CacheLayoutError(
                f"decode context parallel size {self.context_parallel} does not divide the tensor parallel size {ranks}"
            )
        self.cache_format.token_bytes(self.config)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's latents and index keys, on a rank that holds it."""
        return self.cache_format.token_bytes(self.config)

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages of a block."""
        return self.block_size * self.token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one KDA layer's state on this rank: FP32 recurrent state, BF16 inputs of the short convolutions."""
        linear = self.config.linear_attn_config
        width = linear.projection_size // self.tensor_parallel
        return 4 * width * linear.head_dim + 2 * 3 * width * (linear.short_conv_kernel_size - 1)

    @property
    def groups(self) -> list[int]:
        """Number of KDA layers in each group, whose states share a row."""
        linear = self.config.linear_attn_config
        mla, kda = len(linear.full_attn_layers), len(linear.kda_layers)
        if not kda:
            return []
        row = max(self.page_bytes if mla else 0, self.state_bytes)
        count = _ceil(kda, row // self.state_bytes)
        latent, index = self.cache_format.latent_bytes(self.config), self.cache_format.index_bytes(self.config)
        if index and latent != index:  # vLLM then lets no group of states hold more layers than this
            count = max(count, _ceil(kda, _layers_per_group(mla, kda)))
        return [len(range(i, kda, count)) for i in range(count)]

    @property
    def row_bytes(self) -> int:
        """Bytes of a block row."""
        return max(self.page_bytes, max(self.groups, default=0) * self.state_bytes)

    @property
    def padding(self) -> float:
        """Unused part of what a request of the model's full context takes: beside its pages, beside its states, and,
        since lengths end anywhere, half a row of pages."""
        tokens = self.config.max_position_embeddings / self.context_parallel
        rows = tokens / self.block_size + 0.5 + STATES_PER_REQUEST * len(self.groups)
        used = tokens * self.token_bytes + STATES_PER_REQUEST * sum(self.groups) * self.state_bytes
        return 1 - used / (rows * self.row_bytes)

    def request_rows(self, tokens: int, prefix_cache: bool = True) -> int:
        """Rows of this rank that one request of so many tokens holds at a time."""
        pages = _ceil(tokens, self.block_size * self.context_parallel)
        return pages + len(self.groups) * (STATES_PER_REQUEST if prefix_cache else 1)

    @property
    def kept_state_bytes(self) -> int:
        """Bytes of the rows that one kept prefix state takes: the states of all KDA layers at one boundary."""
        return len(self.groups) * self.row_bytes

    def check_retention(self, interval: int | None) -> None:
        """CacheLayoutError unless prefix states can be kept every `interval` tokens: they lie at ends of blocks.

        0: of each prompt the last one; None: wherever a step ends with a block.
        """
        block = self.block_size * self.context_parallel
        if interval is None or interval % block == 0 <= interval:
            return
        nearest = max(interval, block) // block * block
        raise CacheLayoutError(
            f"prefix_cache_retention_interval {interval} is no positive multiple of the block size {block} "
            f"({self.cache_format}); use {nearest}, or 0 for the last boundary of each prompt only"
        )

    def check_pool(self, pool_bytes: int, tokens: int, prefix_cache: bool = True) -> None:
        """CacheLayoutError if the pool does not hold a request of so many tokens and the row that vLLM keeps empty."""
        needed = self.request_rows(tokens, prefix_cache) + 1
        rows = pool_bytes // self.row_bytes
        if rows < needed:
            raise CacheLayoutError(
                f"a cache of {pool_bytes} bytes has {rows} rows of {self.row_bytes} bytes (blocks of {self.block_size} "
                f"tokens, {self.cache_format}); one request of {tokens} tokens needs {needed}: give it "
                f"{needed * self.row_bytes} bytes, or allow shorter requests"
            )


def plan(
    config: K3Config, cache_format: CacheFormat, tensor_parallel: int = 1, context_parallel: int = 1
) -> CacheLayout:
    """The layout whose padding is smallest; of equal ones that with the smaller block."""
    layouts = [CacheLayout(config, cache_format, size, tensor_parallel, context_parallel) for size in BLOCK_SIZES]
    return min(layouts, key=lambda layout: (layout.padding, layout.block_size))


def check_block_size(block_size: int) -> None:
    """CacheLayoutError unless it is a power of two: only then do the blocks of two layouts divide each other."""
    if block_size < 1 or block_size & (block_size - 1):
        lower = 1 << max(block_size, 1).bit_length() - 1
        raise CacheLayoutError(f"block size {block_size} is no power of two; use {lower} or {2 * lower}")


def _layers_per_group(mla: int, kda: int) -> int:
    """vLLM's unit of grouping: of the sizes from `mla` layers up that one that leaves the fewest empty places; of equal
    ones the largest."""
    return min(range(mla, max(mla, kda) + 1), key=lambda size: (-mla % size + -kda % size, -size))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
