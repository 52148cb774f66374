"""Command line: `python -m zmrl.model.pretrain --out DIR [--steps N]`, `--evaluate DIR`.

The number of steps is fixed in advance, since the learning rate's decay is tied to it. A killed run resumes from its
state file (`--state`), written every few minutes; `--steps 0` writes the untrained model. `--evaluate DIR` samples.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zmrl.data.problems import Problem, problem_set
from zmrl.model.checkpoint import CheckpointError, export_tensors, load_reference, model_sha256, write_checkpoint
from zmrl.model.config import PRESETS, K3Config
from zmrl.model.pretrain.batches import batch, learning_rate_factor
from zmrl.model.pretrain.evaluation import Evaluation, evaluate
from zmrl.model.pretrain.trainer import Trainer
from zmrl.model.pretrain.upcycle import dense_model, upcycle
from zmrl.model.reference import KimiK31ForCausalLM

SPARSE_FROM = 0.4
"""Share of the run after which MLA attends to the indexer's selection."""
UPCYCLE_AT = 0.75
"""Share of the run after which all experts train."""
CALIBRATE_AT = (0.8, 0.9, 0.95)
"""Shares of the run at which the share of worked rows is set anew, so that mean@k comes out at `--target`."""
CORRECTIONS, CORRECTION_STEPS, TOLERANCE = 4, 150, 0.02
"""After the last step: so many steps at the final learning rate, at most so many times, until mean@k is so close."""
MOST = 0.95
"""Largest share of worked rows that a calibration sets; 1 - MOST is the smallest."""


class Run:
    """A pre-training run: what `step` changes, what a state file holds."""

    def __init__(self, config: K3Config, steps: int, lr: float, seed: int, worked: float) -> None:
        self.config, self.steps, self.lr, self.seed = config, steps, lr, seed
        self.upcycle_at = math.ceil(UPCYCLE_AT * steps)
        self.calibrate_at = [math.ceil(share * steps) for share in CALIBRATE_AT]
        self.worked = worked
        self.next_step = 0
        self.trainer = Trainer(dense_model(config, seed), lr)

    def step(self, rows: int) -> tuple[int, float, float, float]:
        """One update. Returns (tokens, cross-entropy, mean index KL, largest expert load over the mean)."""
        if self.next_step == self.upcycle_at:
            self._upcycle()
        inputs, targets = batch(self.seed, self.next_step, rows, self.worked)
        factor = learning_rate_factor(self.next_step, self.steps, self.upcycle_at)
        figures = self.trainer.step(inputs, targets, factor, self.sparse)
        self.next_step += 1
        return inputs.numel(), *figures

    @property
    def sparse(self) -> bool:
        """Whether MLA attends to the selection now."""
        return self.next_step >= SPARSE_FROM * self.steps

    def _upcycle(self) -> None:
        dense = self.trainer.unrounded_tensors()
        model = KimiK31ForCausalLM(self.config)
        model.load_tensors(upcycle(dense, self.config, self.seed))
        self.trainer = Trainer(model, self.lr)

    def calibrate(self, measured: Evaluation, target: float) -> None:
        """Set the share of worked rows so that mean@k at the measured accuracies would be `target`."""
        gain = measured.accuracy_worked - measured.accuracy_terse
        if gain > 0:  # False for NaN: no sample of one kind
            self.worked = min(MOST, max(1 - MOST, (target - measured.accuracy_terse) / gain))

    def correct(self, measured: Evaluation, target: float) -> None:
        """As `calibrate`, but shifted by how far the share of worked answers is from that of the rows."""
        asked = self.worked
        self.calibrate(measured, target)
        shifted = _logit(asked) + _logit(self.worked) - _logit(1 - measured.terse_share)
        self.worked = 1 / (1 + math.exp(-shifted))

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {"next_step": self.next_step, "worked": self.worked, "trainer": self.trainer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        if state["next_step"] > self.upcycle_at:
            self.trainer = Trainer(KimiK31ForCausalLM(self.config).initialise(self.seed), self.lr)
        self.next_step, self.worked = state["next_step"], state["worked"]
        self.trainer.load_state_dict(state["trainer"])

    def exported(self) -> list[tuple[str, Tensor]]:
        """The rounded weights of the whole model under module names."""
        if self.next_step <= self.upcycle_at:
            self._upcycle()
        return [(n, p.detach()) for n, p in self.trainer.model.named_parameters()]


def pretrain(args: argparse.Namespace) -> None:
    """Run, resume or finish a pre-training run."""
    run = Run(PRESETS[args.preset], args.steps, args.lr, args.seed, args.worked)
    state_file = Path(args.state or f"{args.out}.pretrain-state")
    plan = {n: getattr(args, n) for n in ("preset", "steps", "rows", "lr", "seed", "worked", "target")}
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["plan"] != plan:
            raise SystemExit(f"{state_file} belongs to a run with {state['plan']}; remove it or use the same options")
        run.load_state_dict(state["run"])
        print(f"resuming at step {run.next_step}", flush=True)
    problems = problem_set("calibration", 128)
    started, saved, tokens, losses = time.monotonic(), time.monotonic(), 0, []
    while run.next_step < args.steps:
        step_tokens, loss, index_loss, imbalance = run.step(args.rows)
        tokens += step_tokens
        losses.append(loss)
        if run.next_step % 100 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {run.next_step}/{args.steps} loss {sum(losses) / len(losses):.4f} index_kl {index_loss:.4f} "
                f"load max/mean {imbalance:.1f} {tokens / seconds:.0f} tok/s {seconds:.0f} s",
                flush=True,
            )
            losses.clear()
        calibrate = run.next_step in run.calibrate_at
        if calibrate or (run.next_step % args.evaluate_every == 0 and run.next_step < args.steps):
            measured = evaluate(run.trainer.model, problems, k=4, sparse=run.sparse)
            print(f"step {run.next_step} {measured}", flush=True)
            if calibrate:
                run.calibrate(measured, args.target)
                print(f"step {run.next_step} worked rows: {run.worked:.3f} from here", flush=True)
        if time.monotonic() - saved > args.save_every:
            _save_state(state_file, {"plan": plan, "run": run.state_dict()})
            saved = time.monotonic()
    if args.steps:
        _correct(run, problems, args)
    write_checkpoint(args.out, export_tensors(run.config, run.exported()), run.config, overwrite=True)
    print(f"wrote {args.out}, sha256 {model_sha256(args.out)}", flush=True)
    state_file.unlink(missing_ok=True)


def _correct(run: Run, problems: list[Problem], args: argparse.Namespace) -> None:
    """Bring mean@k to the target. Saves no state: a killed run does this part again, to the same bits."""
    for left in reversed(range(CORRECTIONS + 1)):
        measured = evaluate(run.trainer.model, problems, k=4, sparse=run.sparse)
        print(f"step {run.next_step} {measured}", flush=True)
        if not left or abs(measured.mean_at_k - args.target) <= TOLERANCE:
            return
        run.correct(measured, args.target)
        print(f"step {run.next_step} worked rows: {run.worked:.3f} for {CORRECTION_STEPS} more steps", flush=True)
        for _ in range(CORRECTION_STEPS):
            run.step(args.rows)


def _logit(share: float) -> float:
    share = min(MOST, max(1 - MOST, share))
    return math.log(share / (1 - share))


def _save_state(file: Path, state: dict[str, Any]) -> None:
    temporary = file.with_name(file.name + ".tmp")
    torch.save(state, temporary)
    temporary.replace(file)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m zmrl.model.pretrain", description="Pre-train a byte-level preset.")
    parser.add_argument("--out", help="checkpoint directory to write")
    parser.add_argument("--evaluate", metavar="DIR", help="only evaluate the checkpoint DIR on the val split")
    parser.add_argument("--preset", default="nano", choices=["nano", "nano-b", "tiny-s", "tiny"])
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--rows", type=int, default=16, help="problems per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worked", type=float, default=0.85, help="share of worked answers until it is calibrated")
    parser.add_argument("--target", type=float, default=0.44, help="mean@8 to aim at, by the share of worked answers")
    parser.add_argument("--evaluate-every", type=int, default=1000, help="steps between small evaluations")
    parser.add_argument("--save-every", type=float, default=240, help="seconds between state files")
    parser.add_argument("--state", help="state file for resuming (default: OUT.pretrain-state)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.evaluate:
        try:
            model = load_reference(args.evaluate)
        except CheckpointError as error:
            parser.error(str(error))
        print(evaluate(model, problem_set("val", 224)))
    elif args.out:
        pretrain(args)
    else:
        parser.error("give --out DIR or --evaluate DIR")


if __name__ == "__main__":
    main()
