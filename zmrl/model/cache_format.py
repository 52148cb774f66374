"""Which formats the caches of a model have: part of the function, and so of the identity that both hosts exchange.

A choice of the run, by recipe or engine argument, not of the checkpoint. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS, index_key_bytes, latent_row_bytes
from zmrl.model.config import K3Config


@dataclass(frozen=True)
class CacheFormat:
    """The formats of latents and index keys (docs/cache.md). KDA states are FP32, with BF16 convolution inputs."""

    latent: str = "bf16"
    """bf16, fp8 or nvfp4."""
    index: str = "fp8"
    """fp8 or mxfp4."""

    def __str__(self) -> str:
        return f"{self.latent} latents, {self.index} index keys"

    def latent_bytes(self, config: K3Config) -> int:
        """Bytes of a token's latent in one MLA layer. FormatError if the model's sizes do not allow the format."""
        return latent_row_bytes(self.latent, config.kv_lora_rank, config.qk_rope_head_dim)

    def index_bytes(self, config: K3Config) -> int:
        """Bytes of a token's index key in one MLA layer; 0 without an indexer. FormatError as above."""
        if config.index_head_dim is None:
            return 0
        return index_key_bytes(self.index, config.index_head_dim)

    def token_bytes(self, config: K3Config) -> int:
        """Bytes of a token in all MLA layers; every rank of a tensor-parallel group holds them."""
        layers = len(config.linear_attn_config.full_attn_layers)
        return layers * (self.latent_bytes(config) + self.index_bytes(config))


DEFAULT_CACHE_FORMAT = CacheFormat()
CACHE_FORMATS = tuple(CacheFormat(latent, index) for latent in LATENT_FORMATS for index in INDEX_FORMATS)
"""All six combinations."""
