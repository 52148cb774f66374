"""A run's folder, read and checked: what a report needs is there and of the right type, or one error names the line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmrl.trainer.logs import FINISHED, MISMATCH, OUTCOME, RUN, SAMPLES, SECONDS, STEPS, VAL
from zmrl.trainer.verdicts import EXIT_CODES

_STEP = {
    "tokens_compared": int, "tokens_different": int, "rows_different": int, "samples": int, "response_tokens": int,
    "kl_k3": float, "reward_mean": float, "grad_norm": float,
}  # fmt: skip
_VAL = {"n_problems": int, "k": int, "mean_at_k": float}
_SAMPLE = {"phase": str, "dataset": str, "key": str, "prompt": str, "response": str, "answer": str, "reward": float}


class ReportError(ValueError):
    """A folder that cannot be reported: the message names the file, and the line if there is one. Exit code 2."""


@dataclass
class Run:
    """What a run's folder holds so far."""

    name: str
    """Shown in legends; differs between the runs of a report."""
    settings: dict[str, Any]
    """run.json"""
    steps: list[dict[str, Any]] = field(default_factory=list)
    validations: list[dict[str, Any]] = field(default_factory=list)
    samples: list[dict[str, Any]] = field(default_factory=list)
    mismatch: dict[str, Any] | None = None
    outcome: dict[str, Any] | None = None
    """None while the run is in progress, or if it was killed."""


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in `folders`, named after them. Raises ReportError for the first that is missing or damaged."""
    return [_read(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]


def number(value: Any) -> float | None:
    """A number as `RunFiles` writes it: null is None, and so is what is not finite."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ReportError(f"{folder} is no folder; give the output_dir of a run")
    settings = _json(folder / RUN)
    if settings is None:
        raise ReportError(f"{folder / RUN} is missing: no run, or one that has not started yet; give another folder")
    run = Run(name, settings, mismatch=_json(folder / MISMATCH), outcome=_json(folder / OUTCOME))
    finished = run.outcome is not None and run.outcome.get("status") == FINISHED
    run.steps = _lines(folder / STEPS, _check_step, finished)
    validates = bool((settings.get("recipe") or {}).get("validation", {}).get("every"))
    run.validations = _lines(folder / VAL, _check_validation, finished and validates)
    run.samples = _lines(folder / SAMPLES, _check_sample, False)
    return run


def _names(folders: Sequence[Path]) -> list[str]:
    paths = [folder.absolute() for folder in folders]
    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.name}" for path in paths]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return names


def _json(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ReportError(f"{file} is damaged ({error}); restore it") from None
    if not isinstance(found, dict):
        raise ReportError(f"{file} is damaged (no JSON object); restore it")
    return found


def _lines(file: Path, check: Callable[[dict[str, Any]], None], required: bool) -> list[dict[str, Any]]:
    """The lines of a .jsonl file in order; one that a run in progress has not written to its end is left out."""
    if not file.exists():
        if required:
            raise ReportError(f"{file} is missing, but the run has finished; restore it")
        return []
    return list(_checked(file, check))


def _checked(file: Path, check: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        raise ReportError(f"{file} is damaged ({error}); restore it") from None
    last = 0
    for place, line in enumerate(text[: text.rfind("\n") + 1].split("\n")[:-1], 1):
        try:
            fields = json.loads(line)
            _require(fields, {"step": int})
            if fields["step"] < last or (file.name == STEPS and fields["step"] != last + 1):
                raise ValueError(f"step {fields['step']} follows step {last}")
            check(fields)
        except ValueError as error:
            raise ReportError(f"{file}, line {place}, is damaged ({error}); restore it") from None
        last = fields["step"]
        yield fields


def _check_step(fields: dict[str, Any]) -> None:
    _require(fields, _STEP | {"verdict": str, "seconds": dict})
    _require(fields["seconds"], dict.fromkeys(SECONDS, float))
    if fields["verdict"] not in EXIT_CODES:
        raise ValueError(f"verdict {fields['verdict']!r} is unknown")


def _check_validation(fields: dict[str, Any]) -> None:
    _require(fields, _VAL | {"dataset": str})


def _check_sample(fields: dict[str, Any]) -> None:
    _require(fields, _SAMPLE)


def _require(fields: Any, types: dict[str, type]) -> None:
    """Raises ValueError unless each field is there with its type; a float may be null, "nan" or "inf"."""
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    for name, kind in types.items():
        if name not in fields:
            raise ValueError(f"{name} is missing")
        value = fields[name]
        if kind is float:
            fits = value in (None, "nan", "inf", "-inf") or isinstance(value, int | float)
        else:
            fits = isinstance(value, kind)
        if not fits:
            raise ValueError(f"{name} is {value!r}")
