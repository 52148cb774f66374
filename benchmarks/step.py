"""The recipe's step against an ordinary pipeline: `python -m benchmarks.step [--repeats N] [--steps N]`.

Ordinary (`benchmarks.plain_run`): the same verl, vLLM and Megatron with torch's own linear layers and experts on both
sides, and verl's separate pass for old log-probs. Both run in turns; the first step of a run, which warms caches, is
left out. A line gives the median seconds of a phase of both; the last, the ratio of whole steps (below 1: the exact
pipeline is faster) and the share of the check. The two sample other tokens after a while, so the runs are kept short,
and seconds are also given per response token.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).parents[1] / "recipes" / "aime_lora.yaml"
MODULES = {"exact": "zmrl.train", "ordinary": "benchmarks.plain_run"}


def run(module: str, folder: Path, steps: int) -> list[dict[str, Any]]:
    """The lines of steps.jsonl, without the first."""
    settings = [f"steps={steps}", f"output_dir={folder}", "validation.every=0", "on_mismatch=warn", "wandb=false"]
    done = subprocess.run(
        [sys.executable, "-m", module, str(RECIPE), *settings, "trainer.save_every=0"], capture_output=True, text=True
    )
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    if len(lines) != steps:
        raise SystemExit(f"{module} ended after {len(lines)} steps:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return lines[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2, help="runs of each")
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    arguments = parser.parse_args()
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in MODULES}
    with tempfile.TemporaryDirectory(prefix="zmrl-step-") as scratch:
        for repeat in range(arguments.repeats):
            for name, module in MODULES.items():
                lines[name] += run(module, Path(scratch) / f"{name}-{repeat}", arguments.steps)
    verdicts = {name: {line["verdict"] for line in found} for name, found in lines.items()}
    if verdicts["exact"] != {"EQUAL"}:
        raise SystemExit(f"VOID: the exact pipeline says {verdicts['exact']}")
    phases = {name: {p: statistics.median(x["seconds"][p] for x in found) for p in found[0]["seconds"]}
              for name, found in lines.items()}  # fmt: skip
    for phase in phases["exact"]:
        print(f"{phase:8}" + "".join(f"  {name} {phases[name][phase]:6.2f} s" for name in MODULES))
    tokens = {
        name: statistics.median(x["seconds"]["total"] / x["response_tokens"] for x in found)
        for name, found in lines.items()
    }
    exact, ordinary = phases["exact"], phases["ordinary"]
    found = ", ".join(sorted(verdicts["ordinary"]))
    print(
        f"a step: {exact['total'] / ordinary['total']:.2f} of the ordinary one, "
        f"{tokens['exact'] / tokens['ordinary']:.2f} per response token; "
        f"the check is {exact['check'] / exact['total']:.1%} of it (the other's verdicts: {found})"
    )


if __name__ == "__main__":
    main()
