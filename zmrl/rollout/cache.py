"""Where vLLM keeps the state of each sequence, and how a step's metadata becomes a `SequenceContext`.

vLLM allocates one int8 buffer of block rows. With the block-outermost layout BLHNC a row holds, side by side, either
the latent and index pages of all MLA layers or the states of one group of KDA layers (v1/core/kv_cache_utils.py:1860).
The objects here own a view of that buffer each; vLLM finds them in `static_forward_context` by name.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImplBase,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import mamba_get_block_table_tensor
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec, MLAAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from zmrl.model.config import K3Config
from zmrl.model.context import KdaCache, MlaCache, SequenceContext
from zmrl.model.transformer import KimiK31

KDA_BACKEND = "ZMRL_KDA"
"""Name under which `KdaBackend` stands in vLLM's registry of state-space backends."""


NO_PAGES = torch.empty(0, 0, dtype=torch.uint8)
"""The index pages of a model without an indexer."""


@dataclass
class PageMetadata(AttentionMetadata):
    """What the MLA layers of a step need, T tokens of R requests."""

    cu_seqlens: Tensor
    """int32 [R + 1]"""
    positions: Tensor
    """int32 [T]"""
    block_table: Tensor
    """int32 [R, blocks per request]"""
    slot_mapping: Tensor
    """int64 [T]"""


@dataclass
class StateMetadata(AttentionMetadata):
    """What a group of KDA layers needs in a step: the block that holds each request's state, int32 [R]."""

    state_in: Tensor
    """-1 where a sequence starts."""
    state_out: Tensor


class PageMetadataBuilder(AttentionMetadataBuilder[PageMetadata]):
    """Metadata of the group of latent and index pages."""

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> PageMetadata:
        m = common_attn_metadata
        assert m.positions is not None
        return PageMetadata(
            m.query_start_loc[: m.num_reqs + 1],
            m.positions[: m.num_actual_tokens].to(torch.int32),
            m.block_table_tensor[: m.num_reqs],
            m.slot_mapping[: m.num_actual_tokens],
        )


class StateMetadataBuilder(AttentionMetadataBuilder[StateMetadata]):
    """Metadata of a group of KDA states.

    In cache mode "align" vLLM has, before the forward pass, copied a request's state into the block that the step
    ends in (v1/worker/mamba_utils.py:1446), so a state is read and written in the same block. vLLM's CPU runner does
    not zero a new block; a sequence that starts is told by its zero computed tokens instead.
    """

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.mode = vllm_config.cache_config.mamba_cache_mode

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StateMetadata:
        m = common_attn_metadata
        seq_lens = m.seq_lens[: m.num_reqs]
        table = mamba_get_block_table_tensor(
            m.block_table_tensor[: m.num_reqs], seq_lens, self.kv_cache_spec, self.mode
        )
        block = table[:, 0].to(torch.int32).contiguous()
        starts = seq_lens == m.query_start_loc[: m.num_reqs + 1].diff()
        return StateMetadata(block.masked_fill(starts, -1), block)


def context_slots(
    query_start_loc: Tensor, positions: Tensor, block_table: Tensor, block_size: int, rank: int, size: int
) -> Tensor:
    """Slots of a step's tokens on one of `size` context ranks: int64 [T], -1 where another rank holds the token.

    query_start_loc int32 [R + 1]; positions int64 [T]; block_table int32 [R or more, blocks per request]; block_size:
    tokens that this rank holds of a block. The rank holds the positions rank, rank + size, ...
    """
    tokens = torch.arange(len(positions), dtype=query_start_loc.dtype)
    request = torch.searchsorted(query_start_loc[1:], tokens, right=True)
    local = positions // size
    slots = block_table[request, local // block_size].long() * block_size + local % block_size
    return slots.masked_fill_(positions % size != rank, -1)


class NoImpl(AttentionImplBase):
    """vLLM asks for a class; the layers call their kernels themselves."""


class PageBackend(AttentionBackend):
    """Describes the paged caches to vLLM."""

    supported_dtypes = [torch.bfloat16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "ZMRL_PAGES"

    @staticmethod
    def get_impl_cls() -> type[AttentionImplBase]:
        return NoImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return PageMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.BLHNC,)

    @classmethod
    def is_mla(cls) -> bool:
        return True


class KdaBackend(PageBackend):
    """Describes the KDA states to vLLM."""

    @staticmethod
    def get_name() -> str:
        return KDA_BACKEND

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        return StateMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class PagedCache(AttentionLayerBase):
    """A per-token cache of one MLA layer, `width` bytes a token; pages as docs/cache.md says."""

    def __init__(self, name: str, width: int) -> None:
        self.name, self.width = name, width
        self.pages = torch.empty(0, 0, dtype=torch.uint8)
        self.kv_cache = torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return PageBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        block_size = vllm_config.cache_config.block_size
        return MLAAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=self.width, dtype=torch.uint8)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """[blocks, 1, block_size, width] with any block stride -> uint8 pages [blocks, page_bytes]."""
        self.kv_cache = kv_cache
        self.pages = kv_cache.view(torch.uint8).flatten(1)
        assert self.pages.data_ptr() == kv_cache.data_ptr(), f"{self.name}: the tokens of a page must be adjacent"

    def block_bytes(self) -> int:
        """Bytes of a page."""
        return self.pages.shape[1]


class StateCache(MambaBase):
    """The states of one KDA layer, of this rank's heads: BF16 [3, 3 * heads * head_dim] and FP32 [heads, head_dim,
    head_dim] a block."""

    def __init__(self, name: str, config: K3Config, ranks: int) -> None:
        linear = config.linear_attn_config
        self.name = name
        heads, dim = linear.num_heads // ranks, linear.head_dim
        self.shapes = ((linear.short_conv_kernel_size - 1, 3 * heads * dim), (heads, dim, dim))
        self.kv_cache = (torch.empty(0), torch.empty(0))

    @property
    def mamba_type(self) -> MambaAttentionBackendEnum:
        return MambaAttentionBackendEnum[KDA_BACKEND]

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shapes

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return KdaBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        cache = vllm_config.cache_config
        return MambaSpec(
            shapes=self.shapes,
            dtypes=self.get_state_dtype(),
            block_size=cache.mamba_block_size,
            page_size_padded=None,
            mamba_type=self.mamba_type,
            mamba_cache_mode=cache.mamba_cache_mode,
        )

    def block_bytes(self) -> int:
        """Bytes of the states of a block."""
        return sum(tensor[0].nbytes for tensor in self.kv_cache)


class ModelCaches:
    """The caches of all layers, registered with vLLM under `<prefix>layers.<i>.{latent,index,state}`.

    A model without an indexer has no index caches.
    """

    def __init__(self, model: KimiK31, vllm_config: VllmConfig, prefix: str) -> None:
        config, cache_format = model.config, model.cache_format
        self.block_size = vllm_config.cache_config.block_size
        self.layers: list[StateCache | tuple[PagedCache, ...]] = []
        registry = vllm_config.compilation_config.static_forward_context
        for layer in range(config.num_hidden_layers):
            stem = f"{prefix}layers.{layer}"
            if config.is_full_attention(layer):
                pages = [PagedCache(f"{stem}.latent", cache_format.latent_bytes(config))]
                if config.has_indexer:
                    pages.append(PagedCache(f"{stem}.index", cache_format.index_bytes(config)))
                self.layers.append(tuple(pages))
                registry.update({cache.name: cache for cache in pages})
            else:
                state = StateCache(f"{stem}.state", config, model.ranks.tensor.size)
                self.layers.append(state)
                registry[state.name] = state

    def context(self, metadata: dict[str, AttentionMetadata], slots: Tensor | None) -> SequenceContext:
        """The context of a step from vLLM's metadata by cache name; slots int32 [T] or None."""
        caches: list[KdaCache | MlaCache] = []
        pages: PageMetadata | None = None
        for owned in self.layers:
            if isinstance(owned, StateCache):
                state = metadata[owned.name]
                assert isinstance(state, StateMetadata)
                caches.append(KdaCache(*owned.kv_cache, state.state_in, state.state_out))
            else:
                latent = owned[0]
                index_pages = owned[1].pages if len(owned) > 1 else NO_PAGES
                found = metadata[latent.name]
                assert isinstance(found, PageMetadata)
                pages = found
                where = (pages.block_table, pages.slot_mapping, self.block_size)
                caches.append(MlaCache(latent.pages, index_pages, *where))
        assert pages is not None, "the model has no MLA layer"
        flags = torch.zeros(pages.positions.shape[0], dtype=torch.int32)
        return SequenceContext(pages.cu_seqlens, pages.positions, caches, slots, flags)

    def bytes_used(self, blocks: dict[str, int]) -> dict[str, int]:
        """Bytes by kind ("latent", "index", "state") of so many blocks of each cache, by cache name."""
        used: Counter[str] = Counter()
        for owned in self.layers:
            for cache in owned if isinstance(owned, tuple) else (owned,):
                used[cache.name.rsplit(".", 1)[1]] += blocks[cache.name] * cache.block_bytes()
        return dict(used)
