"""Linear layers and routed experts against torch, as ratios: `python -m benchmarks.linear [--threads N] [--isa ISA]`.

Every pair runs alternately in one process, so that a slow moment of a shared machine hits both; a line gives the median
of the paired ratios (torch's time / ours: above 1 we are faster) and their quartiles. Both sides are called through
their Python API. Torch's results are not exact in the sense of the contract (they depend on M and threads).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from zmrl.batch_invariant import native
from zmrl.batch_invariant.ops.experts import ExpertWeights, experts
from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers, LoraBuffers
from zmrl.batch_invariant.ops.panels import pack_mxfp4, pack_panels


def ratio(ours: Callable[[], object], theirs: Callable[[], object], pairs: int = 15, seconds: float = 0.01) -> str:
    """Median (quartiles) of theirs / ours over `pairs` pairs of about `seconds` each."""
    counts = []
    for call in (ours, theirs):
        call()
        start = time.perf_counter()
        call()
        counts.append(max(1, round(seconds / max(time.perf_counter() - start, 1e-6))))
    ratios = []
    for _ in range(pairs):
        each = []
        for call, count in zip((ours, theirs), counts, strict=True):
            start = time.perf_counter()
            for _ in range(count):
                call()
            each.append((time.perf_counter() - start) / count)
        ratios.append(each[1] / each[0])
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:6.2f}  ({low:.2f} to {high:.2f})"


def linear_lines(n: int, k: int) -> None:
    w = torch.randn(n, k).bfloat16()
    panels, wide = pack_panels(w), w.float()
    a, b = torch.randn(32, k).bfloat16(), torch.randn(n, 32).bfloat16()
    lora = LoraBuffers(pack_panels(a)[None], pack_panels(b)[None], 1.0)
    for m in (1, 8, 64, 512):
        linear_line(torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16(), w, wide, panels, a, b, lora)


def linear_line(
    x: Tensor, dy: Tensor, w: Tensor, wide: Tensor, panels: Tensor, a: Tensor, b: Tensor, lora: LoraBuffers
) -> None:
    splits, x_wide, slots = [w.shape[0]], x.float(), torch.zeros(len(x), dtype=torch.int32)
    pairs = {
        "linear / torch FP32": (lambda: linear(x, panels, splits), lambda: F.linear(x_wide, wide)),
        "linear / torch BF16": (lambda: linear(x, panels, splits), lambda: F.linear(x, w)),
        "dx / torch BF16": (lambda: torch.ops.zmrl.linear_backward(dy, panels, splits), lambda: dy @ w),
        "with adapter / torch BF16": (
            lambda: linear(x, panels, splits, lora=lora, slots=slots),
            lambda: F.linear(x, w) + F.linear(F.linear(x, a), b),
        ),
    }
    for name, (ours, theirs) in pairs.items():
        print(f"{len(x):4} x {w.shape[0]} x {w.shape[1]}  {name:26} {ratio(ours, theirs)}")


class PaddedExperts:
    """The usual torch form: sort by expert, pad to the largest, three batched products in FP32 (dequantised)."""

    def __init__(self, count: int, latent: int, width: int, rank: int) -> None:
        self.w = [torch.randn(count, k, n) / k**0.5 for n, k in ((width, latent), (width, latent), (latent, width))]
        self.a = [torch.randn(count, k, rank) / k**0.5 for k in (latent, latent, width)]
        self.b = [torch.zeros(count, rank, n) for n in (width, width, latent)]
        self.count, self.adapted = count, rank > 0
        for m in self.a + self.b if rank else ():
            m.requires_grad_()

    def project(self, i: int, x: Tensor) -> Tensor:
        y = torch.bmm(x, self.w[i])
        return torch.baddbmm(y, torch.bmm(x, self.a[i]), self.b[i]) if self.adapted else y

    def __call__(self, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        topk = ids.shape[1]
        flat, order = ids.flatten().long().sort(stable=True)
        counts = torch.bincount(flat, minlength=self.count)
        place = torch.arange(len(flat)) - (counts.cumsum(0) - counts)[flat]
        x = z.new_zeros(self.count, int(counts.max()), z.shape[1])
        x[flat, place] = z[order // topk]
        g, u = self.project(0, x), self.project(1, x)
        h = 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25)
        r = self.project(2, h)[flat, place] * weights.flatten()[order, None]
        return torch.zeros_like(z).index_add_(0, order // topk, r)


def expert_lines(count: int, latent: int, width: int, topk: int, rank: int) -> None:
    buffers, g = [], torch.Generator().manual_seed(0)
    for n, k in ((width, latent), (width, latent), (latent, width)):
        packed = torch.randint(0, 256, (count, n, k // 2), generator=g, dtype=torch.uint8)
        buffers += pack_mxfp4(packed, torch.full((count, n, k // 32), 124, dtype=torch.uint8))
    weights = ExpertWeights(*buffers)
    shapes = [(rank, latent), (width, rank), (rank, latent), (width, rank), (rank, width), (latent, rank)]
    adapters = [pack_panels(torch.randn(1, count, n, k).div(k**0.5).bfloat16()) for n, k in shapes]
    gradients = tuple(torch.zeros(t.shape[1:]) for t in adapters)
    lora = ExpertLoraBuffers(*adapters, scale=1.0, gradients=gradients)
    for tokens in (1, 64, 512, 4096):
        z, du = torch.randn(tokens, latent).bfloat16(), torch.randn(tokens, latent).bfloat16()
        ids = torch.rand(tokens, count).argsort(1)[:, :topk].sort(1)[0].int()
        p = torch.rand(tokens, topk)
        shape = f"{tokens:4} tokens, {count} experts {latent}/{width}, top {topk}"
        expert_line(shape, z, ids, p, du, weights, None, PaddedExperts(count, latent, width, 0))
        expert_line(f"{shape}, r {rank}", z, ids, p, du, weights, lora, PaddedExperts(count, latent, width, rank))


def expert_line(
    name: str,
    z: Tensor,
    ids: Tensor,
    p: Tensor,
    du: Tensor,
    weights: ExpertWeights,
    lora: ExpertLoraBuffers | None,
    padded: PaddedExperts,
) -> None:
    slots, wide, wide_du = torch.zeros(len(z), dtype=torch.int32), z.float(), du.float()

    def ours() -> None:
        with torch.no_grad():
            experts(z, ids, p, weights, lora=lora, slots=slots)

    def both() -> None:
        experts(z.detach().requires_grad_(), ids, p, weights, lora=lora, slots=slots).backward(du)

    def theirs() -> None:
        with torch.no_grad():
            padded(wide, ids, p)

    def their_both() -> None:
        padded(wide.detach().requires_grad_(), ids, p).backward(wide_du)

    print(f"{name:44} forward / torch padded bmm FP32 {ratio(ours, theirs, 9, 0.03)}")
    print(f"{name:44} with backward / torch           {ratio(both, their_both, 9, 0.03)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--isa", choices=native.available_isas(), default=native.isa())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with native.use_isa(arguments.isa):
        print(f"{arguments.isa}, {arguments.threads} threads; torch's time / ours, median and quartiles of pairs")
        linear_lines(2048, 2048)
        linear_lines(512, 128)
        expert_lines(896, 64, 32, 16, 32)
