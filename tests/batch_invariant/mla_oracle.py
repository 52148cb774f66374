"""Independent oracles of MLA: numpy code of the documented orders, to be equal bit for bit, and a float64 explicit (not
absorbed) MLA for accuracy. Knows nothing about how the kernels share work.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.batch_invariant import chains
from tests.batch_invariant.chains import bf16, fma
from tests.batch_invariant.exactness import dot_lanes, elementary
from zmrl.batch_invariant.ops.latents import BF16_LATENTS, LatentFormat, latent_format_code, latent_store, latent_values
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.mla import HEAD_SLICES, MlaDims, mla_attention
from zmrl.batch_invariant.ops.panels import pack_panels

NANO = MlaDims(heads=4, nope=32, pe=16, rank=64, v=32)
ODD = MlaDims(heads=5, nope=48, pe=5, rank=80, v=16)
FULL = MlaDims(heads=96, nope=128, pe=64, rank=512, v=128)


def chain(w: np.ndarray, x: np.ndarray, start: np.ndarray | None = None) -> np.ndarray:
    """Rule 1: w [N, K], x [K] -> [N]."""
    return chains.chain(x[None], w.T, None if start is None else start[None])[0]


def strided_tree(x: list) -> np.ndarray:
    """Rule 6."""
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A batch of requests with their latents in permuted pages; every token selects some of its positions.

    kv: what the pages give back.
    """

    dims: MlaDims
    q: Tensor
    kv: Tensor
    weight: Tensor
    lora_a: Tensor
    lora_b: Tensor
    slots: Tensor
    cu: Tensor
    positions: Tensor
    selected: Tensor | None
    """None: dense attention."""
    pages: Tensor
    block_table: Tensor
    block_size: int
    scale: float = 0.75
    latents: LatentFormat = BF16_LATENTS

    @property
    def kv_b(self) -> Tensor:
        return pack_panels(self.weight)

    def lora(self, gradients: bool = False) -> LoraBuffers:
        a, b = pack_panels(self.lora_a), pack_panels(self.lora_b)
        grads = (torch.zeros(HEAD_SLICES, *a.shape[1:]), torch.zeros(b.shape[1:])) if gradients else (None, None)
        return LoraBuffers(a, b, self.scale, *grads)

    def attend(
        self,
        q: Tensor,
        kv: Tensor | None = None,
        lora: LoraBuffers | None = None,
        rows: slice = slice(None),
        cu: Tensor | None = None,
        table: Tensor | None = None,
    ) -> Tensor:
        """The operator for the tokens `rows`; q and kv are theirs. Without cu: all sequences, or one sequence."""
        if cu is None:
            cu = self.cu if rows == slice(None) else torch.tensor([0, rows.stop - rows.start]).int()
        table = self.block_table if table is None else table
        selected = None if self.selected is None else self.selected[rows]
        return mla_attention(
            q, kv, self.pages, table[: len(cu) - 1], cu, self.positions[rows], selected, self.block_size,
            self.kv_b, self.dims, lora, self.slots[rows], self.latents,
        )  # fmt: skip

    def forward(self, adapters: bool = True, rows: slice = slice(None)) -> Tensor:
        """Without gradients: all tokens, or the tokens `rows` of the first sequence."""
        return self.attend(self.q[rows], lora=self.lora() if adapters else None, rows=rows)


def select(length: int, topk: int, generator: torch.Generator) -> Tensor:
    """int32 [length, topk]: random ascending positions of every prefix, the token's own among them."""
    noise = torch.rand(length, length, generator=generator) + torch.eye(length)
    noise = noise.masked_fill(torch.ones(length, length).triu(1).bool(), -1.0)
    best = torch.topk(noise, min(topk, length), 1)
    chosen = torch.where(best.values >= 0, best.indices, length).sort(1).values
    out = torch.full((length, topk), -1, dtype=torch.int32)
    out[:, : chosen.shape[1]] = torch.where(chosen < length, chosen, -1)
    return out


def pages_for(lengths: list[int], block_size: int, token_bytes: int, generator: torch.Generator, pad: int = 6):
    """Empty pages in random order with unused bytes between them, the block table, the slots of all tokens."""
    columns = max(-(-n // block_size) for n in lengths)
    blocks = torch.randperm(columns * len(lengths) + 3, generator=generator)
    table = blocks[: columns * len(lengths)].reshape(len(lengths), columns).int()
    pages = torch.full((len(blocks), block_size * token_bytes + pad), 255, dtype=torch.uint8)[
        :, : block_size * token_bytes
    ]
    slots = [
        table[r, torch.arange(n) // block_size].long() * block_size + torch.arange(n) % block_size
        for r, n in enumerate(lengths)
    ]
    return pages, table, torch.cat(slots)


def make_case(
    dims: MlaDims,
    lengths: list[int],
    topk: int,
    block_size: int = 5,
    seed: int = 0,
    slot_count: int = 3,
    latents: LatentFormat = BF16_LATENTS,
) -> Case:
    g = torch.Generator().manual_seed(seed)
    tokens, rank = sum(lengths), 16

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=g) * scale).bfloat16()

    width, rows = dims.rank + dims.pe, dims.heads * (dims.nope + dims.v)
    kv = normal(tokens, width)
    row = latent_format_code(*latents, dims.rank, dims.pe)[1]
    pages, table, slot_mapping = pages_for(lengths, block_size, row, torch.Generator().manual_seed(seed))
    latent_store(kv, pages, slot_mapping, block_size, dims.rank, latents)
    return Case(
        dims=dims,
        q=normal(tokens, dims.heads * (dims.nope + dims.pe)),
        kv=latent_values(kv, dims.rank, latents),
        weight=normal(rows, dims.rank, scale=1.5 * dims.rank**-0.5),
        lora_a=normal(slot_count, rank, dims.rank, scale=dims.rank**-0.5),
        lora_b=normal(slot_count, rows, rank, scale=0.3),
        slots=torch.randint(-1, slot_count, (tokens,), generator=g).int(),
        cu=torch.tensor([0, *lengths]).cumsum(0).int(),
        positions=torch.cat([torch.arange(n) for n in lengths]).int(),
        selected=torch.cat([select(n, topk, g) for n in lengths]),
        pages=pages,
        block_table=table,
        block_size=block_size,
        latents=latents,
    )


# ---- MLA -------------------------------------------------------------------------------------------------------------


class Head:
    """What the forward computes for one token and head, FP32; the parts of the weights that it uses."""

    def __init__(self, case: Case, token: int, h: int) -> None:
        d, slot = case.dims, int(case.slots[token])
        request = int(torch.searchsorted(case.cu, token, right=True)) - 1
        self.chosen = [int(s) for s in case.selected[token] if s >= 0]
        self.rows = [int(case.cu[request]) + s for s in self.chosen]
        self.latents = case.kv[self.rows].float().numpy()
        self.q_nope, q_pe = np.split(case.q[token].float().numpy().reshape(d.heads, -1)[h], [d.nope])
        weight = case.weight.float().numpy().reshape(d.heads, -1, d.rank)[h]
        self.w_uk, self.w_uv = weight[: d.nope], weight[d.nope :]
        self.adapted, self.scale = slot >= 0, np.float32(case.scale)
        q_lat = chain(self.w_uk.T, self.q_nope)
        if self.adapted:
            self.a = case.lora_a[slot].float().numpy()
            b = case.lora_b[slot].float().numpy().reshape(d.heads, d.nope + d.v, -1)[h]
            self.b_k, self.b_v = b[: d.nope], b[d.nope :]
            self.t = bf16(chain(self.b_k.T, self.q_nope))
            q_lat = fma(self.scale, chain(self.a.T, self.t), q_lat)
        self.q_cat = np.concatenate([bf16(q_lat), q_pe])
        self.score_scale = np.float32((d.nope + d.pe) ** -0.5)
        score = dot_lanes(self.q_cat, self.latents) * self.score_scale
        self.p = elementary("exp", score - score.max())
        sums = [np.float32(0)] * 8
        for position, p in zip(self.chosen, self.p, strict=True):
            sums[position % 8] = sums[position % 8] + p
        self.sum = strided_tree(sums)
        self.o = self.weighted(self.p, d.rank) / self.sum
        self.o_lat = bf16(self.o)

    def weighted(self, weights: np.ndarray, width: int) -> np.ndarray:
        """Rule 6: the sum of weights * rows."""
        accs = [np.zeros(width, np.float32)] * 8
        for position, weight, row in zip(self.chosen, weights, self.latents, strict=True):
            accs[position % 8] = fma(weight, row[:width], accs[position % 8])
        return strided_tree(accs)

    def output(self) -> np.ndarray:
        o = chain(self.w_uv, self.o_lat)
        if self.adapted:
            self.u = bf16(chain(self.a, self.o_lat))
            o = fma(self.scale, chain(self.b_v, self.u), o)
        return bf16(o)


def exact_attention(case: Case, token: int) -> np.ndarray:
    """Row `token` of the output by the documented order, FP32 values of its BF16, [heads*value]."""
    return np.concatenate([Head(case, token, h).output() for h in range(case.dims.heads)])


def slice_tree(x: np.ndarray) -> np.ndarray:
    """Rule 2."""
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]))


def exact_gradients(case: Case, grad: Tensor) -> list[np.ndarray]:
    """dq, dkv (values of BF16), dA [r, R], dB [H*(N+V), r] by the documented order; one adapter slot."""
    d, tokens, r = case.dims, len(case.q), case.lora_a.shape[1]
    dq, dkv_slices = [], np.zeros((8, tokens, d.rank + d.pe), np.float32)
    grad_a_slices, grad_b = np.zeros((8, r, d.rank), np.float32), np.zeros((d.heads, d.nope + d.v, r), np.float32)
    slice_of = {h: s for s in range(8) for h in range(s * d.heads // 8, (s + 1) * d.heads // 8)}
    for token in range(tokens):
        for h in range(d.heads):
            dkv, grad_a = dkv_slices[slice_of[h]], grad_a_slices[slice_of[h]]
            head = Head(case, token, h)
            head.output()
            do = grad[token].float().numpy().reshape(d.heads, -1)[h]
            do_lat = chain(head.w_uv.T, do)
            if head.adapted:
                du = head.scale * chain(head.b_v.T, do)
                do_lat = chain(head.a.T, du, do_lat)
            p = head.p / head.sum
            dp = dot_lanes(do_lat, head.latents[:, : d.rank])
            ds = (p * (dp - dot_lanes(do_lat, head.o))) * head.score_scale
            dq_cat = head.weighted(ds, d.rank + d.pe)
            dq_lat = dq_cat[: d.rank]
            dq_nope = chain(head.w_uk, dq_lat)
            if head.adapted:
                dt = head.scale * chain(head.a, dq_lat)
                dq_nope = chain(head.b_k, dt, dq_nope)
                grad_a[:] = fma(head.t[:, None], head.scale * dq_lat, grad_a)
                grad_a[:] = fma(du[:, None], head.o_lat, grad_a)
                grad_b[h, : d.nope] = fma(head.q_nope[:, None], dt, grad_b[h, : d.nope])
                grad_b[h, d.nope :] = fma((head.scale * do)[:, None], head.u, grad_b[h, d.nope :])
            dq.append(np.concatenate([dq_nope, dq_cat[d.rank :]]))
            for i, row in enumerate(head.rows):
                dkv[row, : d.rank] = fma(p[i], do_lat, dkv[row, : d.rank])
                dkv[row] = fma(ds[i], head.q_cat, dkv[row])
    dkv, grad_a = bf16(slice_tree(dkv_slices)), slice_tree(grad_a_slices)
    return [bf16(np.concatenate(dq).reshape(tokens, -1)), dkv, grad_a, grad_b.reshape(-1, r)]


def explicit_attention(
    case: Case, q: Tensor, kv: Tensor, a: Tensor, b: Tensor, tokens: range, heads: int | None = None
) -> Tensor:
    """Float64 MLA with keys and values of every position written out; a, b: the adapters of all slots."""
    d = case.dims
    n = heads or d.heads
    q = q.view(-1, d.heads, d.nope + d.pe)[:, :n]
    base = case.weight.double().view(d.heads, d.nope + d.v, d.rank)[:n]
    b = b.view(len(b), d.heads, d.nope + d.v, -1)[:, :n]
    weights = {-1: base, **{s: base + case.scale * b[s] @ a[s] for s in range(len(b))}}
    rows = []
    for t in tokens:
        request = int(torch.searchsorted(case.cu, t, right=True)) - 1
        latents = kv[int(case.cu[request]) + case.selected[t][case.selected[t] >= 0].long()]
        keys, values = (latents[:, : d.rank] @ weights[int(case.slots[t])].mT).split([d.nope, d.v], -1)
        score = (keys @ q[t, :, : d.nope, None]).squeeze(-1) + q[t, :, d.nope :] @ latents[:, d.rank :].T
        p = (score * (d.nope + d.pe) ** -0.5).softmax(-1)
        rows.append((p.unsqueeze(1) @ values).flatten())
    return torch.stack(rows)
