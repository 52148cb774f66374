"""Which quantities of runs are plotted: one chart per quantity with a curve per run, and seconds per phase per run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zmrl.report.plot import Curve, Points, area_plot, line_plot
from zmrl.report.read import Run, number

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES = ("", "6 3", "2 3", "8 3 2 3")

PHASES = {"rollout": "#0072b2", "check": "#009e73", "train": "#d55e00", "sync": "#cc79a7", "other": "#999999"}

Value = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Chart:
    """A plot with what stands around it."""

    name: str
    """Its id on the page."""
    title: str
    legend: list[Curve]
    """Curves with at least one point."""
    svg: str
    """Empty: nothing was measured."""


def _field(name: str) -> Value:
    return lambda fields: number(fields.get(name))


def _ratio(above: str, below: str) -> Value:
    return lambda fields: fields[above] / fields[below] if fields[below] else None


STEP_CHARTS: tuple[tuple[str, str, Value], ...] = (
    ("reward", "Reward: mean of a step's samples", _field("reward_mean")),
    ("kl", "KL between rollout and trainer (k3 in float64), nats per token", _field("kl_k3")),
    ("different", "Share of compared tokens whose log-prob bits differ", _ratio("tokens_different", "tokens_compared")),
    ("entropy", "Entropy of the policy, nats per token", _field("entropy")),
    ("length", "Response length, tokens", _ratio("response_tokens", "samples")),
    ("gradient", "Gradient norm before clipping", _field("grad_norm")),
)

VALIDATION_CHARTS: tuple[tuple[str, str, Value], ...] = (
    ("mean", "Validation: mean@k", _field("mean_at_k")),
    ("greedy", "Validation: greedy accuracy", _field("greedy_accuracy")),
    ("work", "Validation: accuracy of answers that show work", _field("accuracy_given_work")),
    ("terse", "Validation: share of terse answers", _field("terse_share")),
)


def charts(runs: Sequence[Run]) -> list[Chart]:
    """All charts, in the order of the page."""
    steps = [_chart(name, title, _step_curves(runs, value), "step") for name, title, value in STEP_CHARTS]
    validations = [
        _chart(name, title, _validation_curves(runs, value), "step") for name, title, value in VALIDATION_CHARTS
    ]
    seconds = [_seconds(run, place, len(runs)) for place, run in enumerate(runs, 1)]
    return [steps[0], *validations, *steps[1:], *seconds]


def _chart(name: str, title: str, curves: Sequence[Curve], x_label: str) -> Chart:
    shown = [curve for curve in curves if curve.drawn]
    return Chart(name, title, shown, line_plot(shown, x_label) if shown else "")


def _step_curves(runs: Sequence[Run], value: Value) -> list[Curve]:
    return [
        Curve(run.name, COLOURS[i % len(COLOURS)], [(fields["step"], value(fields)) for fields in run.steps])
        for i, run in enumerate(runs)
    ]


def _validation_curves(runs: Sequence[Run], value: Value) -> list[Curve]:
    """A curve for each run and data set: the colour says which run, the dashes which data set."""
    datasets = list(dict.fromkeys(fields["dataset"] for run in runs for fields in run.validations))
    curves = []
    for i, run in enumerate(runs):
        for j, dataset in enumerate(datasets):
            points: Points = [(f["step"], value(f)) for f in run.validations if f["dataset"] == dataset]
            label = f"{run.name}, {dataset}" if len(datasets) > 1 else run.name
            curves.append(Curve(label, COLOURS[i % len(COLOURS)], points, DASHES[j % len(DASHES)]))
    return curves


def _seconds(run: Run, place: int, runs: int) -> Chart:
    curves = [Curve(phase, colour, _phase_points(run, phase)) for phase, colour in PHASES.items()]
    title = "Seconds per phase of a step" + (f": {run.name}" if runs > 1 else "")
    return (
        Chart(f"seconds-{place}", title, curves, area_plot(curves, "step"))
        if run.steps
        else Chart(f"seconds-{place}", title, [], "")
    )


def _phase_points(run: Run, phase: str) -> Points:
    return [(fields["step"], _phase_seconds(fields["seconds"], phase)) for fields in run.steps]


def _phase_seconds(seconds: dict[str, Any], phase: str) -> float | None:
    if phase != "other":
        return number(seconds[phase])
    named = sum(number(seconds[name]) or 0.0 for name in PHASES if name != "other")
    return max(0.0, (number(seconds["total"]) or 0.0) - named)
