"""What experiment trackers (Weights & Biases) get beside verl's own metrics: the lines of steps.jsonl and val.jsonl.

verl's KL metrics are no evidence (FP32 rounds a one-bit difference to 0.0), so these have a prefix of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zmrl.trainer.logs import check_share
from zmrl.trainer.verdicts import EXIT_CODES

PREFIX = "zmrl"


def step_metrics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A line of steps.jsonl as metrics. Each verdict is a curve of 0 and 1, whose sum counts its steps; `check_share`
    is the part of the step's time that the check took."""
    verdicts = {f"{PREFIX}/verdict_{name}": int(fields["verdict"] == name) for name in EXIT_CODES}
    return _flat(fields, PREFIX) | verdicts | {f"{PREFIX}/check_share": check_share(fields["seconds"])}


def validation_metrics(fields: Mapping[str, Any]) -> dict[str, Any]:
    """A line of val.jsonl as metrics."""
    values = {name: value for name, value in fields.items() if name != "dataset"}
    return _flat(values, f"{PREFIX}/val/{fields['dataset']}")


def _flat(fields: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Names joined by slashes; null stays out, which a tracker shows as a gap."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}/{name}")
        elif value is not None:
            found[f"{prefix}/{name}"] = value
    return found
