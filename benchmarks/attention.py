"""KDA, sparse MLA, indexer with top-k, and log-probs against plain torch: `python -m benchmarks.attention [--isa ISA]`.

Each at the head sizes of nano and of the full model, for a few heads or tokens so that a run stays short; contexts of
32,768 positions at full size. `kernel`: the C function against the torch form's call, in FP32 or BF16 weights and
caches, whichever is faster (torch gets its caches decoded beforehand; ours decodes pages). Medians of paired runs.
`of floor`: FLOP that the definition has, at the FMA peak, or bytes that must be read and written. Every torch form is
compared with ours first, loosely, so that both compute the same thing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus

from benchmarks.machine import KernelCall, add_options, floor, paired, python_timer, ratio, run_with
from zmrl.batch_invariant.formats import index_key_bytes
from zmrl.batch_invariant.ops.head import log_probs
from zmrl.batch_invariant.ops.indexer import index_select, index_store
from zmrl.batch_invariant.ops.kda import kda
from zmrl.batch_invariant.ops.latents import latent_store
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.batch_invariant.ops.panels import pack_panels
from zmrl.model.reference.kda import chunked_kda, recurrent_kda

BLOCK = 64
Form = Callable[[], Tensor]


def report(
    name: str, kernel: KernelCall, ours: Tensor, forms: dict[str, Form], flop: float, size: float, pairs: int = 9
) -> None:
    """One line; ours: the result, which every form of torch must come close to."""
    for form in forms.values():
        if not difference(form(), ours) < 0.1:
            raise RuntimeError(f"{name}: torch's form computes something else")
    mine, *others = paired([kernel.seconds, *map(python_timer, forms.values())], pairs)
    which, best = min(zip(forms, others, strict=True), key=lambda pair: statistics.median(pair[1]))
    least, bound = floor(flop, size)
    print(
        f"{name:62} {ratio(mine, best):6.2f} of torch {which:14} {statistics.median(mine) * 1e3:9.3f} ms"
        f"  {least / min(mine):4.0%} of floor ({bound})",
        flush=True,
    )


def difference(a: Tensor, b: Tensor) -> float:
    """Of values: norm of the difference over the norm. Of selections: the share of positions that are not in both."""
    if a.dtype == torch.int32:
        return 1 - sum(int(torch.isin(x, y).sum()) for x, y in zip(a, b, strict=True)) / a.numel()
    return float((a.float() - b.float()).norm() / b.float().norm())


def record(operator: Form) -> tuple[KernelCall, Tensor]:
    call = KernelCall(operator)
    assert isinstance(call.result, Tensor)
    return call, call.result


@torch.no_grad()
def measure_kda(heads: int, dim: int, requests: int, length: int, bound: float | None = -5.0) -> None:
    """`requests` sequences of `length` tokens; of one token each, they continue a state."""
    total, width = requests * length, heads * dim
    q, k, v, f = (torch.randn(total, width).bfloat16() for _ in range(4))
    b, a_log, dt_bias = torch.randn(total, heads).bfloat16(), torch.randn(heads) * 0.1, torch.randn(width) * 0.1
    cu = torch.arange(0, total + 1, length, dtype=torch.int32)
    state, slots = torch.randn(requests, heads, dim, dim) * 0.01, torch.arange(requests, dtype=torch.int32)
    start = state.clone() if length == 1 else None
    place = slots if length == 1 else torch.full_like(slots, -1)
    call, out = record(
        lambda: kda(q, k, v, f, b, a_log, dt_bias, bound, cu, state, place, slots),
    )

    def split(x: Tensor) -> Tensor:
        return x.float().view(requests, length, heads, -1)

    def plain() -> Tensor:
        x, y = split(q), split(k)
        x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5
        y = y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)
        gate = split(f) + dt_bias.view(heads, dim)
        rate = a_log.exp().view(heads, 1)
        decay = -rate * softplus(gate) if bound is None else bound * torch.sigmoid(rate * gate)
        form = recurrent_kda if length == 1 else chunked_kda
        o, _ = form(x, y, split(v), decay, torch.sigmoid(split(b).squeeze(-1)), start)
        return o.reshape(total, width).bfloat16()

    what = "recurrent FP32" if length == 1 else "chunked FP32"
    size = requests * heads * dim * dim * 4 * (2 if length == 1 else 1) + total * width * 2 * 5
    flop = 7.0 * total * heads * dim * dim  # three FMA and the decay of each element of the state
    report(f"KDA {heads} heads x {dim}, {requests} x {length} tokens", call, out, {what: plain}, flop, size)


def pages_of(context: int, row: int) -> tuple[Tensor, Tensor, Tensor]:
    """Empty pages of `row` bytes a position, the block table of one request, and the places of its positions."""
    blocks = context // BLOCK
    table = torch.arange(blocks, dtype=torch.int32).unsqueeze(0)
    return torch.zeros(blocks, BLOCK * row, dtype=torch.uint8), table, torch.arange(context)


@torch.no_grad()
def measure_mla(dims: MlaDims, context: int, topk: int, tokens: int) -> None:
    """`tokens` last tokens of one request, each with its own `topk` positions."""
    heads, nope, pe, rank, value = dims
    kv = torch.randn(context, rank + pe).bfloat16()
    pages, table, places = pages_of(context, (rank + pe) * 2)
    latent_store(kv, pages, places, BLOCK, rank)
    q = (torch.randn(tokens, heads * (nope + pe)) * 0.3).bfloat16()
    w = (torch.randn(heads * (nope + value), rank) / rank**0.5).bfloat16()
    positions = torch.arange(context - tokens, context, dtype=torch.int32)
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    selected = torch.stack([torch.randperm(context - tokens)[:topk].sort()[0] for _ in range(tokens)]).int()
    panels = pack_panels(w)
    call, out = record(
        lambda: mla_attention(q, None, pages, table, cu, positions, selected, BLOCK, panels, dims),
    )
    forms: dict[str, Form] = {}
    for dtype in (torch.float32, torch.bfloat16):
        cache, wide = kv.to(dtype), w.to(dtype).view(heads, nope + value, rank)
        w_k, w_v = wide[:, :nope].contiguous(), wide[:, nope:].transpose(1, 2).contiguous()

        def form(cache: Tensor = cache, w_k: Tensor = w_k, w_v: Tensor = w_v) -> Tensor:
            x = q.to(cache.dtype).view(tokens, heads, nope + pe)
            absorbed = torch.bmm(x[..., :nope].transpose(0, 1), w_k).transpose(0, 1)
            rows = cache.index_select(0, selected.flatten()).view(tokens, topk, -1)
            scores = torch.bmm(torch.cat([absorbed, x[..., nope:]], -1), rows.transpose(1, 2))
            p = torch.softmax(scores.float() * (nope + pe) ** -0.5, -1).to(cache.dtype)
            mixed = torch.bmm(p, rows[..., :rank]).transpose(0, 1)
            return torch.bmm(mixed, w_v).transpose(0, 1).reshape(tokens, -1).bfloat16()

        forms[str(dtype).removeprefix("torch.")] = form
    flop = 2.0 * tokens * heads * (topk * (2 * rank + pe) + (nope + value) * rank)
    size = 2.0 * (tokens * topk * (rank + pe) + w.numel())
    name = f"MLA {heads} heads, {rank}+{pe}, top {topk} of {context}, {tokens} tokens"
    report(name, call, out, forms, flop, size)


@torch.no_grad()
def measure_indexer(heads: int, dim: int, context: int, topk: int, tokens: int) -> None:
    """`tokens` last tokens of one request choose among all positions."""
    row = index_key_bytes("fp8", dim)
    pages, table, places = pages_of(context, row)
    key = torch.randn(context, dim).bfloat16()
    index_store(key, torch.ones(dim), torch.zeros(dim), 1e-6, False, pages, places, BLOCK)
    q, w = torch.randn(tokens, heads * dim).bfloat16(), torch.rand(tokens, heads)
    positions = torch.full((tokens,), context - 1, dtype=torch.int32)
    cu = torch.tensor([0, tokens], dtype=torch.int32)
    call, out = record(
        lambda: index_select(q, w, False, pages, table, cu, positions, topk, BLOCK),
    )
    codes = pages[:, : BLOCK * dim].reshape(-1, dim).view(torch.float8_e4m3fn).float()
    scales = pages[:, BLOCK * dim :].contiguous().view(torch.float32).reshape(-1, 1)
    decoded = codes * scales
    folded = w * dim**-0.5 * heads**-0.5
    forms: dict[str, Form] = {}
    for dtype in (torch.float32, torch.bfloat16):
        keys = decoded.to(dtype).T.contiguous()

        def form(keys: Tensor = keys) -> Tensor:
            dots = torch.relu(q.view(tokens * heads, dim).to(keys.dtype) @ keys).view(tokens, heads, context)
            scores = torch.bmm(folded.to(keys.dtype).unsqueeze(1), dots).squeeze(1)
            return scores.bfloat16().topk(topk, sorted=False)[1].sort()[0].int()

        forms[str(dtype).removeprefix("torch.")] = form
    flop = 2.0 * tokens * heads * context * dim
    name = f"indexer {heads} heads x {dim}, top {topk} of {context}, {tokens} tokens"
    report(name, call, out, forms, flop, context * row)


@torch.no_grad()
def measure_log_probs(rows: int, vocab: int) -> None:
    """Ours gives digest and entropy as well."""
    logits, targets = torch.randn(rows, vocab) * 3, torch.randint(vocab, (rows,))
    temperature = torch.full((rows,), 0.7)
    call = KernelCall(lambda: log_probs(logits, targets, temperature))
    assert isinstance(call.result, tuple)

    def plain() -> Tensor:
        return torch.log_softmax(logits / temperature[:, None], 1).gather(1, targets[:, None]).squeeze(1)

    def with_entropy() -> Tensor:
        z = torch.log_softmax(logits / temperature[:, None], 1)
        _ = -(z.exp() * z).sum(1)
        return z.gather(1, targets[:, None]).squeeze(1)

    for form in (plain, with_entropy):
        report(f"log-probs of {rows} x {vocab}", call, call.result[0], {form.__name__: form}, 0.0, rows * vocab * 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    arguments = parser.parse_args()
    with run_with(arguments):
        measure_kda(4, 32, 4, 512)
        measure_kda(4, 32, 8, 1)
        measure_kda(8, 128, 1, 1024)
        measure_kda(8, 128, 8, 1)
        measure_mla(MlaDims(4, 32, 16, 64, 32), 8192, 32, 64)
        measure_mla(MlaDims(16, 128, 64, 512, 128), 32768, 2048, 8)
        measure_indexer(4, 32, 8192, 32, 64)
        measure_indexer(32, 128, 32768, 2048, 8)
        for context in (8192, 32768, 131072):  # hardly any product: the selection is linear in the context
            measure_indexer(1, 16, context, 2048, 8)
        measure_log_probs(64, 163_840)


if __name__ == "__main__":
    main()
