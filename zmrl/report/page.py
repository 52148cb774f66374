"""Runs -> one HTML page without scripts, fonts or addresses. Answers are hostile text: everything is escaped."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from zmrl.report.charts import charts
from zmrl.report.read import Run, number, read_runs
from zmrl.trainer.verdicts import EXIT_CODES

SHOWN = 10
"""Training steps whose sample answers are shown: the first, the last, and others at equal distances between."""


def write_report(folders: Sequence[str | Path], out: str | Path) -> None:
    """Write the report of the runs in `folders` to `out`, whole or not at all. Raises ReportError or OSError."""
    page, out = render(read_runs([Path(folder) for folder in folders])), Path(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(out)


def render(runs: Sequence[Run]) -> str:
    """The page."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["svg"] = Markup  # made by ElementTree, which escapes
    environment.filters["score"] = _score
    shown = charts(runs)
    return environment.get_template("page.html.jinja").render(runs=[_view(run) for run in runs], charts=shown)


def _view(run: Run) -> dict[str, Any]:
    settings = run.settings
    recipe = {name: value for name, value in (settings.get("recipe") or {}).items() if name != "output_dir"}
    if isinstance(recipe.get("model"), str):
        recipe["model"] = Path(recipe["model"]).name  # a report is passed on; where its machine kept things is not
    verdicts = Counter(fields["verdict"] for fields in run.steps)
    facts = {
        "model digest": settings.get("model_digest", "-"),
        "kernel id": settings.get("kernel_id", "-"),
        "kernels run with": settings.get("isa", "-"),
        "CPU": settings.get("cpu", "-"),
        "versions": settings.get("versions", "-"),
        "function config": settings.get("function_config", "-"),
        "resumed after steps": settings.get("resumed_after") or "never",
    }
    return {
        "name": run.name,
        "state": run.outcome["status"] if run.outcome and "status" in run.outcome else "in progress, or killed",
        "steps": len(run.steps),
        "planned": recipe.get("steps", "?"),
        "verdicts": {name: verdicts[name] for name in EXIT_CODES},
        "compared": sum(fields["tokens_compared"] for fields in run.steps),
        "different": sum(fields["tokens_different"] for fields in run.steps),
        "rows_different": sum(fields["rows_different"] for fields in run.steps),
        "mismatch": _first_mismatch(run),
        "facts": {name: _words(value) for name, value in facts.items()},
        "recipe": json.dumps(recipe, indent=2),
        "validations": run.validations,
        "samples": {phase: _spread(run.samples, phase) for phase in ("validation", "train")},
    }


def _first_mismatch(run: Run) -> str:
    if run.mismatch is None:
        return ""
    reasons = run.mismatch.get("reasons") or ["-"]
    return f"step {run.mismatch.get('step', '?')}: {run.mismatch.get('verdict', '?')}: {'; '.join(map(str, reasons))}"


def _spread(samples: Sequence[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    """Sample answers of the first, the last and evenly spread steps between, with their grades in words."""
    chosen = [sample for sample in samples if sample["phase"] == phase]
    steps = sorted({sample["step"] for sample in chosen})
    if len(steps) > SHOWN:
        steps = [steps[round(i * (len(steps) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
    return [
        sample | {"right": (number(sample["reward"]) or 0.0) >= 1.0} for sample in chosen if sample["step"] in steps
    ]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return str(value)


def _score(value: Any) -> str:
    found = number(value)
    return "-" if found is None else f"{found:.3f}"
