"""Pre-train a byte-level preset on the built-in problems: `python -m zmrl.model.pretrain --out DIR [--steps N]`.

Supervised training of the reference model in FP32 on the CPU: cross-entropy on the response only, on a mix of worked
and terse answers. Every forward runs on the weights that the checkpoint will hold: routed experts rounded to MXFP4, the
rest to BF16, with FP32 masters behind them and the gradient passed straight through (quantisation-aware training).
The indexer learns by DSA's KL loss to the attention distribution, from detached inputs and with its own gradient clip,
so it does not influence the model; MLA attends densely until `SPARSE_FROM` of the run and to the selection after that.
The router bias is balanced by the sign of each expert's load error.

The number of steps is fixed in advance, since the learning rate's decay is tied to it. A killed run resumes from its
state file (`--state`), written every few minutes; `--steps 0` writes the untrained model. `--evaluate DIR` samples.
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zmrl.data.problems import Problem, generate, problem_set
from zmrl.data.prompts import boxed, parse_response, prompt_ids, response_ids
from zmrl.model.checkpoint import CheckpointError, export_tensors, load_reference, model_sha256, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.mxfp4 import round_to_mxfp4
from zmrl.model.names import is_indexer_tensor
from zmrl.model.reference import ForwardContext, KimiK31ForCausalLM
from zmrl.model.reference.generate import sample
from zmrl.model.reference.moe import MixtureOfExperts

WARMUP_STEPS, FLAT_UNTIL, FINAL_LR = 100, 0.6, 0.02
SPARSE_FROM = 0.4
"""Share of the run after which MLA attends to the indexer's selection."""
WORKED_UNTIL = 0.8
"""Share of the run after which the share of worked rows changes from `--worked` to `--final-worked`."""
BATCHES_PER_POOL = 8
"""Rows are drawn for so many batches at a time and sorted by length, so that a batch needs little padding."""
BIAS_RATE = 2e-3
IGNORE = -100
F32_PARAMETERS = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")


def batch(seed: int, step: int, rows: int, worked: float) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, T] of a step (targets: `IGNORE` outside the response), a function of its arguments."""
    pool, piece = divmod(step, BATCHES_PER_POOL)
    stream, rng = generate("train", f"{seed}:{pool}"), random.Random(f"{seed}:{pool}:worked")
    drawn = []
    for _ in range(rows * BATCHES_PER_POOL):
        problem = next(stream)
        work = problem.work if rng.random() < worked else ""
        prompt = prompt_ids(problem.question)
        drawn.append((prompt, response_ids(work, boxed(problem.answer))))
    drawn.sort(key=lambda row: len(row[0]) + len(row[1]))
    pieces = [drawn[i * rows : (i + 1) * rows] for i in range(BATCHES_PER_POOL)]
    rng.shuffle(pieces)
    chosen = pieces[piece]
    width = max(len(p) + len(r) for p, r in chosen) - 1
    inputs = torch.zeros(rows, width, dtype=torch.long)
    targets = torch.full((rows, width), IGNORE)
    for i, (prompt, response) in enumerate(chosen):
        ids = torch.tensor(prompt + response)
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return inputs, targets


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up, constant to 60 % of the run, then linear to 2 %."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    done = step / steps
    if done < FLAT_UNTIL:
        return 1.0
    return FINAL_LR + (1 - FINAL_LR) * (1 - done) / (1 - FLAT_UNTIL)


class Trainer:
    """FP32 masters, AdamW and the model whose weights are the rounded masters."""

    def __init__(self, model: KimiK31ForCausalLM, lr: float) -> None:
        self.model = model
        self.lr = lr
        self.parameters = model.trainable()
        self.masters = {n: p.detach().clone() for n, p in self.parameters.items()}
        decay = [m for n, m in self.masters.items() if m.dim() > 1 and m.shape[0] > 1 and "conv1d" not in n]
        rest = [m for m in self.masters.values() if not any(m is d for d in decay)]
        groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98), fused=True)
        blocks = {i: getattr(layer, "block_sparse_moe", None) for i, layer in enumerate(model.model.layers)}
        self.biases: dict[int, Tensor] = {
            i: moe.gate.e_score_correction_bias for i, moe in blocks.items() if isinstance(moe, MixtureOfExperts)
        }
        self.round_weights()

    @torch.no_grad()
    def round_weights(self) -> None:
        """Set the model's weights to what a checkpoint of the masters would hold."""
        for name, master in self.masters.items():
            if ".experts." in name:  # in pieces that stay in the processor's cache
                for source, target in zip(master.split(32), self.parameters[name].split(32), strict=True):
                    target.copy_(round_to_mxfp4(source))
                continue
            self.parameters[name].copy_(master if name.endswith(F32_PARAMETERS) else master.to(torch.bfloat16))

    def step(self, inputs: Tensor, targets: Tensor, factor: float, sparse: bool) -> tuple[float, float, float]:
        """One update. Returns (cross-entropy, mean index KL, largest expert load over the mean)."""
        ctx = ForwardContext(sparse=sparse, want_index_loss=True)
        logits = self.model(inputs, ctx)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        index_loss = torch.stack(ctx.index_losses).sum()
        for parameter in self.parameters.values():
            parameter.grad = None
        (loss + index_loss).backward()
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        indexer = {n for n in self.masters if is_indexer_tensor(n)}
        torch.nn.utils.clip_grad_norm_([m for n, m in self.masters.items() if n not in indexer], 1.0)
        torch.nn.utils.clip_grad_norm_([m for n, m in self.masters.items() if n in indexer], 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * factor
        self.optimizer.step()
        self.round_weights()
        imbalance = 0.0
        for layer, bias in self.biases.items():
            load = ctx.router_loads[layer].float()
            imbalance = max(imbalance, (load.max() / load.mean()).item())
            bias += BIAS_RATE * factor * torch.sign(load.mean() - load)
            bias -= bias.mean()
        return loss.item(), index_loss.item() / len(ctx.index_losses), imbalance

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs."""
        return {
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "biases": {i: b.detach() for i, b in self.biases.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict`."""
        for name, master in self.masters.items():
            master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        for i, bias in self.biases.items():
            bias.copy_(state["biases"][i])
        self.round_weights()


class Evaluation(NamedTuple):
    """Sampled accuracy. See the nano learning study, section 1, for why the parts are reported."""

    problems: int
    k: int
    mean_at_k: float
    terse_share: float
    accuracy_worked: float
    accuracy_terse: float
    greedy: float
    by_family: dict[str, float]

    def __str__(self) -> str:
        families = " ".join(f"{n} {a:.2f}" for n, a in sorted(self.by_family.items()))
        return (
            f"mean@{self.k} {self.mean_at_k:.3f} over {self.problems} problems: terse {self.terse_share:.2f}, "
            f"right if worked {self.accuracy_worked:.3f}, if terse {self.accuracy_terse:.3f}, "
            f"greedy {self.greedy:.3f} | {families}"
        )


def evaluate(
    model: KimiK31ForCausalLM,
    problems: Sequence[Problem],
    k: int = 8,
    max_new_tokens: int = 56,
    seed: int = 0,
    sparse: bool = True,
) -> Evaluation:
    """Sample k answers per problem at temperature 1 and one greedy answer; an answer is right if its integer is."""
    rows = [p for p in problems for _ in range(k)]
    outputs: list[list[int]] = []
    for start in range(0, len(rows), 512):
        prompts = [prompt_ids(p.question) for p in rows[start : start + 512]]
        outputs += sample(model, prompts, max_new_tokens, seed=seed + start, sparse=sparse)
    greedy = sample(model, [prompt_ids(p.question) for p in problems], max_new_tokens, temperature=0, sparse=sparse)
    right = [is_right(o, p) for o, p in zip(outputs, rows, strict=True)]
    terse = [not parse_response(o).work for o in outputs]
    family: dict[str, list[bool]] = {}
    for p, r in zip(rows, right, strict=True):
        family.setdefault(p.source, []).append(r)
    return Evaluation(
        problems=len(problems),
        k=k,
        mean_at_k=_mean(right),
        terse_share=_mean(terse),
        accuracy_worked=_mean([r for r, t in zip(right, terse, strict=True) if not t]),
        accuracy_terse=_mean([r for r, t in zip(right, terse, strict=True) if t]),
        greedy=_mean([is_right(o, p) for o, p in zip(greedy, problems, strict=True)]),
        by_family={n: _mean(r) for n, r in family.items()},
    )


def is_right(ids: Sequence[int], problem: Problem) -> bool:
    """Whether a complete response boxes the problem's answer."""
    answer = parse_response(ids)
    match = re.fullmatch(r"\\boxed\{(\d+)\}", answer.text)
    return answer.complete and match is not None and int(match[1]) == problem.answer


def pretrain(args: argparse.Namespace) -> None:
    """Run, resume or finish a pre-training run."""
    config = PRESETS[args.preset]
    model = KimiK31ForCausalLM(config).initialise(args.seed)
    trainer = Trainer(model, args.lr)
    state_file = Path(args.state or f"{args.out}.pretrain-state")
    plan = {n: getattr(args, n) for n in ("preset", "steps", "rows", "lr", "seed", "worked", "final_worked")}
    first = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        if state["plan"] != plan:
            raise SystemExit(f"{state_file} belongs to a run with {state['plan']}; remove it or use the same options")
        trainer.load_state_dict(state["trainer"])
        first = state["step"]
        print(f"resuming at step {first}", flush=True)
    small = problem_set("calibration", 64)
    started, saved, tokens, losses = time.monotonic(), time.monotonic(), 0, []
    for step in range(first, args.steps):
        worked = args.worked if step < WORKED_UNTIL * args.steps else args.final_worked
        sparse = step >= SPARSE_FROM * args.steps
        inputs, targets = batch(args.seed, step, args.rows, worked)
        loss, index_loss, imbalance = trainer.step(inputs, targets, learning_rate_factor(step, args.steps), sparse)
        tokens += inputs.numel()
        losses.append(loss)
        if (step + 1) % 50 == 0:
            seconds = time.monotonic() - started
            print(
                f"step {step + 1}/{args.steps} loss {sum(losses) / len(losses):.4f} index_kl {index_loss:.4f} "
                f"load max/mean {imbalance:.1f} {tokens / seconds:.0f} tok/s {seconds:.0f} s",
                flush=True,
            )
            losses.clear()
        if (step + 1) % args.evaluate_every == 0:
            print(f"step {step + 1} {evaluate(model, small, k=4, sparse=sparse)}", flush=True)
        if time.monotonic() - saved > args.save_every:
            _save_state(state_file, {"plan": plan, "step": step + 1, "trainer": trainer.state_dict()})
            saved = time.monotonic()
    write_checkpoint(args.out, export_tensors(config, _exported(trainer)), config, overwrite=True)
    print(f"wrote {args.out}, sha256 {model_sha256(args.out)}", flush=True)
    state_file.unlink(missing_ok=True)


def _exported(trainer: Trainer) -> list[tuple[str, Tensor]]:
    """The rounded weights under module names; experts come from the Linears, which are views of the stacked ones."""
    return [(n, p.detach()) for n, p in trainer.model.named_parameters()]


def _save_state(file: Path, state: dict[str, Any]) -> None:
    temporary = file.with_name(file.name + ".tmp")
    torch.save(state, temporary)
    temporary.replace(file)


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m zmrl.model.pretrain", description="Pre-train a byte-level preset.")
    parser.add_argument("--out", help="checkpoint directory to write")
    parser.add_argument("--evaluate", metavar="DIR", help="only evaluate the checkpoint DIR on the val split")
    parser.add_argument("--preset", default="nano", choices=["nano", "nano-b", "tiny-s", "tiny"])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=32, help="problems per step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worked", type=float, default=0.85, help="share of worked answers in the first 80 %%")
    parser.add_argument("--final-worked", type=float, default=0.55, help="share of worked answers in the last 20 %%")
    parser.add_argument("--evaluate-every", type=int, default=400, help="steps between small evaluations")
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
