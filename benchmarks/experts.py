"""Routed experts with adapters against torch: `python -m benchmarks.experts [--threads N] [--isa ISA] [--full]`.

Forward, input gradient and adapter gradients of one MoE layer. Torch's side is the fastest of several forms, timed
first: padded to the largest expert and batched (one product for each matrix, or those with one input fused), and
sorted segments (`grouped_mm`), in FP32, and in BF16 unless that is many times slower; weights are dequantised
beforehand. Ours reads MXFP4 and computes what the contract says. Medians of paired runs; above 1 we are faster. The
floor counts the FLOP that no form can avoid (forward, input gradient and adapter gradients: nothing is computed twice)
and one pass over the buffers.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.machine import add_options, floor, paired, python_seconds, python_timer, ratio, run_with
from benchmarks.torch_products import TorchExperts
from zmrl.batch_invariant.ops.experts import ExpertWeights, experts
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.panels import pack_mxfp4, pack_panels


@dataclass
class Case:
    """count experts from `latent` to `width` and back, adapters of rank `rank`; every token has `topk` of them."""

    count: int
    latent: int
    width: int
    topk: int
    rank: int
    tokens: int

    def flop(self, backward: bool) -> float:
        base, adapter = 3 * self.latent * self.width, 3 * self.rank * (self.latent + self.width)
        times = base + adapter + (base + 2 * adapter if backward else 0)
        return 2.0 * self.tokens * self.topk * times

    def bytes(self, backward: bool) -> float:
        base, adapter = 3 * self.latent * self.width, 3 * self.rank * (self.latent + self.width)
        passes = 2 if backward else 1  # gradients are read and written in FP32
        return self.count * (passes * (base * 17 / 32 + adapter * 2) + (adapter * 8 if backward else 0))


def torch_experts(case: Case, dtype: torch.dtype, form: str) -> TorchExperts:
    """With random weights, and adapters to be trained."""
    e, l, i, r = case.count, case.latent, case.width, case.rank
    w = [(torch.randn(e, k, n) / k**0.5).to(dtype) for k, n in ((l, i), (l, i), (i, l))]
    a = [(torch.randn(e, k, r) / k**0.5).to(dtype).requires_grad_() for k in (l, l, i)]
    b = [torch.zeros(e, r, n, dtype=dtype, requires_grad=True) for n in (i, i, l)]
    return TorchExperts(w, a, b, form)


def our_buffers(case: Case) -> tuple[ExpertWeights, ExpertLoraBuffers]:
    buffers = []
    for n, k in ((case.width, case.latent), (case.width, case.latent), (case.latent, case.width)):
        packed = torch.randint(0, 256, (case.count, n, k // 2), dtype=torch.uint8)
        buffers += pack_mxfp4(packed, torch.full((case.count, n, k // 32), 120, dtype=torch.uint8))
    l, i, r = case.latent, case.width, case.rank
    shapes = [(r, l), (i, r), (r, l), (i, r), (r, i), (l, r)]
    adapters = [pack_panels(torch.randn(1, case.count, n, k).div(k**0.5).bfloat16()) for n, k in shapes]
    gradients = tuple(torch.zeros(t.shape[1:]) for t in adapters)
    return ExpertWeights(*buffers), ExpertLoraBuffers(*adapters, scale=1.0, gradients=gradients)


def torch_dtypes() -> list[torch.dtype]:
    """FP32, and BF16 if a product in it is not several times slower: then minutes of waiting would only confirm it."""
    times = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(256, 512).to(dtype), torch.randn(512, 512).to(dtype)
        times[dtype] = min(python_seconds(lambda a=a, b=b: torch.mm(a, b)) for _ in range(5))
    if times[torch.bfloat16] > 4 * times[torch.float32]:
        print(f"torch's BF16 product takes {times[torch.bfloat16] / times[torch.float32]:.0f} times its FP32: left out")
        return [torch.float32]
    return [torch.float32, torch.bfloat16]


def measure(case: Case, pairs: int) -> None:
    """Prints forward alone, and with the gradients."""
    weights, lora = our_buffers(case)
    z, du = torch.randn(case.tokens, case.latent).bfloat16(), torch.randn(case.tokens, case.latent).bfloat16()
    ids = torch.rand(case.tokens, case.count).argsort(1)[:, : case.topk].sort(1)[0].int()
    p, slots = torch.rand(case.tokens, case.topk), torch.zeros(case.tokens, dtype=torch.int32)

    def ours(backward: bool) -> None:
        with torch.set_grad_enabled(backward):
            out = experts(z.detach().requires_grad_(), ids, p, weights, lora=lora, slots=slots)
        if backward:
            out.backward(du)

    def theirs(model: TorchExperts, backward: bool) -> None:
        x = z.to(model.w[0].dtype).detach().requires_grad_()
        with torch.set_grad_enabled(backward):
            out = model(x, ids, p)
        if backward:
            out.backward(du.to(model.w[0].dtype))

    models = [torch_experts(case, d, f) for d in torch_dtypes() for f in ("plain", "fused", "segments")]
    for backward, what in ((False, "forward"), (True, "forward and gradients")):
        calls = [partial(theirs, model, backward) for model in models]
        first = [python_seconds(call) for call in calls]  # with what happens only once; the slow are not run again
        again = [t < 4 * min(first) for t in first]
        times = [
            min(t, python_seconds(call)) if repeat else t for t, call, repeat in zip(first, calls, again, strict=True)
        ]
        names = [f"{model.form} {str(model.w[0].dtype).removeprefix('torch.')}" for model in models]
        print(f"    {what}, torch: {', '.join(f'{n} {t * 1e3:.0f} ms' for n, t in zip(names, times, strict=True))}")
        best = times.index(min(times))
        mine, other = paired([python_timer(partial(ours, backward)), python_timer(calls[best])], pairs)
        least, bound = floor(case.flop(backward), case.bytes(backward))
        print(
            f"{what:22} {ratio(mine, other):5.2f} of torch ({names[best]})"
            f"  {statistics.median(mine) * 1e3:8.1f} ms   {least / min(mine):4.0%} of floor ({bound})",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 4096])
    parser.add_argument("--full", action="store_true", help="one full-size layer: 16 experts resident, 73 rows each")
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    with run_with(arguments):
        if arguments.full:
            cases = [Case(16, 3584, 3072, 2, 32, 584)]
        else:
            cases = [Case(896, 64, 32, 16, 32, tokens) for tokens in arguments.tokens]
        for case in cases:
            print(case)
            measure(case, arguments.pairs)


if __name__ == "__main__":
    main()
