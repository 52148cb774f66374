"""Independent oracle of the indexer: numpy code of the documented order, equal in bits, over independent codecs."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.batch_invariant import cache_oracle
from tests.batch_invariant.chains import bf16, fma
from tests.batch_invariant.exactness import dot_lanes, sum_lanes
from tests.batch_invariant.mla_oracle import pages_for
from zmrl.batch_invariant.formats import index_key_bytes
from zmrl.batch_invariant.ops.indexer import index_select, index_store


def hadamard(x: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard transform of the last axis."""
    d, half = x.shape[-1], 1
    while half < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * half), 2, half)
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(x.shape)
        half *= 2
    return x * np.float32(d**-0.5)


def quantise(x: np.ndarray, rotate: bool, name: str = "fp8") -> tuple[np.ndarray, np.ndarray]:
    """FP32 [rows, D] -> (values that dot products see [rows, D], what multiplies a product [rows])."""
    codes, scales = cache_oracle.encode_keys(hadamard(x) if rotate else x, name)
    return cache_oracle.decode_keys(codes, scales.reshape(len(x), -1), name)


def layer_norm(k: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    n = np.float32(k.shape[-1])
    centred = k - (sum_lanes(k) / n)[..., None]
    root = np.sqrt(dot_lanes(centred, centred) / n + np.float32(eps))
    return fma(centred / root[..., None], w, b)


def index_scores(
    q: np.ndarray, w: np.ndarray, keys: np.ndarray, scales: np.ndarray, rotate: bool, name: str = "fp8"
) -> np.ndarray:
    """BF16 scores (as FP32, -0 already +0) of one token over all keys: q [HI, D], w [HI], keys [S, D], scales [S]."""
    heads, d = q.shape
    q, q_scale = quantise(q, rotate, name)
    folded = ((w * q_scale) * np.float32(d**-0.5)) * np.float32(heads**-0.5)
    total = np.zeros(len(keys), np.float32)
    for h in range(heads):
        dot = dot_lanes(q[h], keys)
        total = fma(folded[h], np.where(dot < 0, np.float32(0), dot), total)
    return bf16(scales * total) + np.float32(0)


def best(scores: np.ndarray, topk: int) -> list[int]:
    """Score descending, NaN last, position ascending; emitted ascending, -1 after the end."""
    order = sorted(range(len(scores)), key=lambda s: (np.isnan(scores[s]), 0 if np.isnan(scores[s]) else -scores[s], s))
    chosen = sorted(order[:topk])
    return chosen + [-1] * (topk - len(chosen))


@dataclass
class Case:
    """Index keys of a batch of requests in permuted pages, and one query per position."""

    q: Tensor
    w: Tensor
    k: Tensor
    ln_w: Tensor
    ln_b: Tensor
    hadamard: bool
    pages: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    block_size: int
    cu: Tensor
    positions: Tensor
    topk: int
    format: str = "fp8"

    @property
    def d(self) -> int:
        return self.k.shape[1]

    def store(self) -> None:
        where = (self.pages, self.slot_mapping, self.block_size)
        index_store(self.k, self.ln_w, self.ln_b, 1e-6, self.hadamard, *where, self.format)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Values of the keys [tokens, D] and scales [tokens], read from the pages."""
        blocks, size = self.pages.shape[0], self.block_size
        width = self.d if self.format == "fp8" else self.d // 2
        pages = self.pages.numpy()
        codes = pages[:, : size * width].reshape(blocks * size, -1)[self.slot_mapping]
        scales = pages[:, size * width : size * index_key_bytes(self.format, self.d)].reshape(blocks * size, -1)
        return cache_oracle.decode_keys(codes, scales[self.slot_mapping], self.format)

    def select(self, rows: slice = slice(None), cu: Tensor | None = None, flags: Tensor | None = None) -> Tensor:
        cu = self.cu if cu is None else cu
        table = self.block_table[: len(cu) - 1]
        return index_select(
            self.q[rows],
            self.w[rows],
            self.hadamard,
            self.pages,
            table,
            cu,
            self.positions[rows],
            self.topk,
            self.block_size,
            flags,
            self.format,
        )

    def alone(self, token: int, flags: Tensor | None = None) -> Tensor:
        """A decode step of a single request."""
        return self.select(slice(token, token + 1), torch.tensor([0, 1]).int(), flags)

    def expected(self, token: int) -> tuple[list[int], np.ndarray]:
        """The selection and the scores by the oracle."""
        request = int(torch.searchsorted(self.cu, token, right=True)) - 1
        first = int(self.cu[request])
        keys, scales = (x[first : first + int(self.positions[token]) + 1] for x in self.stored())
        q = self.q[token].float().numpy().reshape(self.w.shape[1], self.d)
        scores = index_scores(q, self.w[token].numpy(), keys, scales, self.hadamard, self.format)
        return best(scores, self.topk), scores


def make_case(
    lengths: list[int],
    heads: int = 4,
    d: int = 32,
    topk: int = 32,
    block_size: int = 5,
    hadamard: bool = False,
    seed: int = 0,
    format: str = "fp8",
) -> Case:
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    key = index_key_bytes(format, d)
    pages, table, slots = pages_for(lengths, block_size, key, torch.Generator().manual_seed(seed))
    case = Case(
        q=torch.randn(tokens, heads * d, generator=g).bfloat16(),
        w=torch.randn(tokens, heads, generator=g),
        k=torch.randn(tokens, d, generator=g).bfloat16(),
        ln_w=torch.rand(d, generator=g) + 0.5,
        ln_b=torch.randn(d, generator=g) * 0.1,
        hadamard=hadamard,
        pages=pages,
        block_table=table,
        slot_mapping=slots,
        block_size=block_size,
        cu=torch.tensor([0, *lengths]).cumsum(0).int(),
        positions=torch.cat([torch.arange(n) for n in lengths]).int(),
        topk=topk,
        format=format,
    )
    case.store()
    return case
