"""Independent oracle of the indexer: numpy code of the documented order, equal in bits, with e4m3 from ml_dtypes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from tests.batch_invariant.chains import bf16, fma
from tests.batch_invariant.exactness import dot_lanes, sum_lanes
from tests.batch_invariant.mla_oracle import pages_for
from zmrl.batch_invariant.ops.indexer import index_select, index_store


def quantise(x: np.ndarray, hadamard: bool) -> tuple[np.ndarray, np.ndarray]:
    """FP32 [.., D] -> (values of the e4m3 codes, scales [..]) through ml_dtypes."""
    d = x.shape[-1]
    if hadamard:
        half = 1
        while half < d:
            pairs = x.reshape(*x.shape[:-1], d // (2 * half), 2, half)
            x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(
                x.shape
            )
            half *= 2
        x = x * np.float32(d**-0.5)
    amax = np.maximum(np.nanmax(np.abs(x), -1), np.float32(1e-4))
    scale = np.exp2(np.ceil(np.log2((amax / np.float32(448.0)).astype(np.float64)))).astype(np.float32)
    return np.clip(x / scale[..., None], -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32), scale


def layer_norm(k: np.ndarray, w: np.ndarray, b: np.ndarray, eps: float) -> np.ndarray:
    n = np.float32(k.shape[-1])
    centred = k - (sum_lanes(k) / n)[..., None]
    root = np.sqrt(dot_lanes(centred, centred) / n + np.float32(eps))
    return fma(centred / root[..., None], w, b)


def index_scores(q: np.ndarray, w: np.ndarray, k8: np.ndarray, scales: np.ndarray, hadamard: bool) -> np.ndarray:
    """BF16 scores (as FP32, -0 already +0) of one token over all keys: q [HI, D], w [HI], k8 [S, D], scales [S]."""
    heads, d = q.shape
    q8, q_scale = quantise(q, hadamard)
    folded = ((w * q_scale) * np.float32(d**-0.5)) * np.float32(heads**-0.5)
    total = np.zeros(len(k8), np.float32)
    for h in range(heads):
        dot = sum_lanes(q8[h] * k8)  # products of codes are exact
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

    @property
    def d(self) -> int:
        return self.k.shape[1]

    def store(self) -> None:
        index_store(self.k, self.ln_w, self.ln_b, 1e-6, self.hadamard, self.pages, self.slot_mapping, self.block_size)

    def stored(self) -> tuple[np.ndarray, np.ndarray]:
        """Values of the codes [tokens, D] and scales [tokens], read from the pages."""
        blocks, size = self.pages.shape[0], self.block_size
        codes = self.pages[:, : size * self.d].reshape(blocks * size, self.d)[self.slot_mapping]
        scales = self.pages[:, size * self.d : size * (self.d + 4)].contiguous().view(torch.float32).reshape(-1)
        return codes.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float32), scales[self.slot_mapping].numpy()

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
        )

    def alone(self, token: int, flags: Tensor | None = None) -> Tensor:
        """A decode step of a single request."""
        return self.select(slice(token, token + 1), torch.tensor([0, 1]).int(), flags)

    def expected(self, token: int) -> tuple[list[int], np.ndarray]:
        """The selection and the scores by the oracle."""
        request = int(torch.searchsorted(self.cu, token, right=True)) - 1
        first = int(self.cu[request])
        k8, scales = (x[first : first + int(self.positions[token]) + 1] for x in self.stored())
        q = self.q[token].float().numpy().reshape(self.w.shape[1], self.d)
        scores = index_scores(q, self.w[token].numpy(), k8, scales, self.hadamard)
        return best(scores, self.topk), scores


def make_case(
    lengths: list[int],
    heads: int = 4,
    d: int = 32,
    topk: int = 32,
    block_size: int = 5,
    hadamard: bool = False,
    seed: int = 0,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    pages, table, slots = pages_for(lengths, block_size, d + 4, torch.Generator().manual_seed(seed))
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
    )
    case.store()
    return case
