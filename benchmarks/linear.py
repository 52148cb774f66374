"""Linear layers against torch's: `python -m benchmarks.linear [--threads N] [--isa ISA]`.

`kernel`: time of the C function (no Python) against a call of `F.linear` with FP32 or BF16 weights, whichever is
faster; above 1 we are faster. `op`: both called through Python. `dispatch`: what a call of ours costs in Python.
Medians of paired runs. `of floor`: the best kernel time as a share of what the machine allows (`benchmarks.machine`).
Torch's results are not exact in the sense of the contract: they depend on M and on the threads.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch.nn.functional import linear as torch_linear

from benchmarks.machine import KernelCall, add_options, floor, paired, python_timer, ratio, run_with
from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.panels import pack_panels

ROWS, SIZES = (1, 8, 64, 512), (256, 1024, 4096)


def measure(m: int, n: int, k: int) -> str:
    """One line: y [m, n] = x [m, k] w [n, k]^T."""
    x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
    panels, splits, x_wide, w_wide = pack_panels(w), [n], x.float(), w.float()
    kernel = KernelCall(lambda: linear(x, panels, splits))
    ours, op, fp32, bf16 = paired(
        [
            kernel.seconds,
            python_timer(lambda: linear(x, panels, splits)),
            python_timer(lambda: torch_linear(x_wide, w_wide)),
            python_timer(lambda: torch_linear(x, w)),
        ]
    )
    name, best = min((("FP32", fp32), ("BF16", bf16)), key=lambda pair: statistics.median(pair[1]))
    least, what = floor(2.0 * m * n * k, 2.0 * (n * k + m * k + m * n))
    dispatch = (statistics.median(op) - statistics.median(ours)) * 1e6
    return (
        f"{m:4} x {n:4} x {k:4}  kernel {ratio(ours, best):5.2f}  op {ratio(op, best):5.2f}  of torch {name}"
        f"  {statistics.median(ours) * 1e6:9.1f} us  dispatch {dispatch:5.1f} us"
        f"  {least / min(ours):5.0%} of floor ({what})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of K and N")
    arguments = parser.parse_args()
    with run_with(arguments):
        for m in arguments.rows:
            for n in arguments.sizes:
                for k in arguments.sizes:
                    print(measure(m, n, k), flush=True)


if __name__ == "__main__":
    main()
