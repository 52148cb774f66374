"""The formats of a cached latent and of a cached index key: names, bytes, and which sizes they allow (docs/cache.md).

Needs no torch, so that a planner can count bytes without it. The codecs are csrc/latent.h and csrc/index_key.h.
"""

from __future__ import annotations

LATENT_FORMATS = ("bf16", "fp8", "nvfp4")
INDEX_FORMATS = ("fp8", "mxfp4")
"""In the order of the kernels' LatentFormat and IndexFormat."""

NVFP4_GROUP = 16
"""Values that share an e4m3 scale."""
MXFP4_GROUP = 32
"""Values that share an e8m0 scale."""


class FormatError(ValueError):
    """A format that is unknown or that the sizes of the model do not allow; the message holds the numbers."""


def latent_row_bytes(name: str, rank: int, pe: int) -> int:
    """Bytes of a token's latent of `rank` values and its `pe` further values, in one layer.

    bf16: two a value. fp8: one a value; its scale is one number for all, kept outside. nvfp4: rank/2 of codes, pe, and
    rank/16 of scales; the order of the scales needs a rank that is a multiple of 64.
    """
    _check_name("latent", name, LATENT_FORMATS)
    if name == "nvfp4":
        if rank % (4 * NVFP4_GROUP):
            raise FormatError(
                f"latent format nvfp4: kv_lora_rank {rank} is no multiple of {4 * NVFP4_GROUP} (groups of {NVFP4_GROUP}"
                ", whose scales are permuted by four); use bf16 or fp8"
            )
        return rank // 2 + pe + rank // NVFP4_GROUP
    return (2 if name == "bf16" else 1) * (rank + pe)


def index_key_bytes(name: str, dim: int) -> int:
    """Bytes of a token's index key of `dim` values in one layer: codes and scales."""
    return sum(index_key_fields(name, dim))


def index_key_fields(name: str, dim: int) -> tuple[int, int]:
    """Of them, (bytes of codes, bytes of scales): a page has the codes of all its tokens, then their scales."""
    _check_name("index", name, INDEX_FORMATS)
    if name == "mxfp4":
        if dim % MXFP4_GROUP:
            raise FormatError(
                f"index format mxfp4: index_head_dim {dim} is no multiple of {MXFP4_GROUP}, a group's size; use fp8"
            )
        return dim // 2, dim // MXFP4_GROUP
    return dim, 4


def _check_name(kind: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise FormatError(f"{kind} format {name!r} is unknown; choose {', '.join(known)}")
