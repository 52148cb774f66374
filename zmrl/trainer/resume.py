"""Going on with a run that was stopped: from which checkpoint, with which lines, and whether the recipe still fits.

After `prepare_resume` the output folder holds what an unbroken run would hold after the checkpoint's step. Needs no
torch.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmrl.recipe import Recipe, RecipeError
from zmrl.trainer.checkpoints import Checkpoint, RunCheckpoints, TrainerCheckpointError
from zmrl.trainer.logs import RUN, STEPS, VAL, RunFiles, read_lines

LOGS = "logs"
"""Folder of a run's logs, made before anything else of it."""

_OUR_LOCKS = (".driver.lock", ".trainer.lock")

LOCK_SECONDS = 60
"""How long to wait for the processes of a run that was killed to be gone."""

_FREE = (
    "steps", "output_dir", "resume", "restarts", "on_mismatch", "threads", "wandb", "debug.fault", "debug.verbose",
    "validation", "data.val", "data.val_size", "trainer.micro_batch_samples", "trainer.data_parallel",
    "trainer.save_every",
    "rollout.max_num_seqs", "rollout.max_num_batched_tokens", "rollout.enable_prefix_caching", "rollout.kv_cache_bytes",
    "rollout.long_prefill_token_threshold", "rollout.tensor_parallel", "rollout.context_parallel",
    "rollout.prefill",
    "cache.prefix_cache_retention_interval", "reward.timeout_seconds",
)  # fmt: skip
"""Recipe keys that may differ from those of the run that is resumed: they change no bit of what is trained."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a run goes on."""

    step: int
    """Steps that are done; 0: from the base checkpoint."""
    checkpoint: Path | None
    validate: bool
    """The validation after `step` is due and not in val.jsonl."""


@contextmanager
def run_lock(folder: Path, holder: str, seconds: float = 0.0) -> Iterator[None]:
    """Hold the run folder's lock as `holder`. Raises RecipeError if another process still does after `seconds`."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{holder}.lock").open("w") as stream:
        end = time.monotonic() + seconds
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= end:
                    message = f"output_dir: {folder} is in use by another run; wait for its end, or end its processes"
                    raise RecipeError(message) from None
                time.sleep(0.2)
        yield


def prepare_resume(recipe: Recipe, report: Callable[[str], None]) -> ResumePoint:
    """Find the checkpoint to go on from and cut the run's files back to its step.

    `report` gets a line for every damaged checkpoint and for steps that are done again. Raises RecipeError if the
    folder is no run's, is in use, belongs to another recipe, has lost lines or checkpoints, or would lose finished
    steps of a run that saved none.
    """
    folder = Path(recipe.output_dir)
    if not folder.exists() or all(path.name in _OUR_LOCKS for path in folder.iterdir()):
        return ResumePoint(0, None, _due(recipe, 0))
    if not (folder / RUN).exists() and not (folder / LOGS).is_dir():
        raise RecipeError(f"resume: {folder} is not the folder of a run; choose another output_dir")
    with run_lock(folder, "trainer", LOCK_SECONDS):
        files = RunFiles(folder)
        _require_same_recipe(recipe, folder)
        try:
            found = RunCheckpoints(folder).latest(report)
        except TrainerCheckpointError as error:
            raise RecipeError(f"resume: {error}") from None
        step = found.step if found else 0
        done = [line["step"] for line in _lines(folder / STEPS)]
        if found is None and done and not recipe.trainer.save_every:
            raise RecipeError(
                f"resume: {folder} holds {len(done)} steps and no checkpoint, since trainer.save_every is 0: all would "
                "be done again; choose another output_dir"
            )
        if len(done) > step:
            report(f"steps {step + 1} to {len(done)} were done after the last checkpoint and are done again")
        if step > recipe.steps:
            raise RecipeError(f"resume: {folder} is at step {step}, steps={recipe.steps} is less; raise steps")
        _require_lines(folder, found)
        validated = [line for line in _lines(folder / VAL) if line["step"] == step]
        validate = _due(recipe, step) and len(validated) != len(recipe.data.val)
        files.cut(step, keep_validation=not validate)
    return ResumePoint(step, found.folder if found else None, validate)


def _due(recipe: Recipe, step: int) -> bool:
    validation = recipe.validation
    if not validation.every:
        return False
    return validation.before_training if step == 0 else step % validation.every == 0 or step == recipe.steps


def _lines(file: Path) -> list[dict[str, Any]]:
    try:
        return read_lines(file)
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"resume: {file} cannot be read ({error}); restore it, or choose another output_dir"
        ) from None


def _require_lines(folder: Path, checkpoint: Checkpoint | None) -> None:
    step = checkpoint.step if checkpoint else 0
    steps = [line["step"] for line in _lines(folder / STEPS)][:step]
    if steps != list(range(1, step + 1)):
        raise RecipeError(
            f"resume: {folder / STEPS} does not hold steps 1 to {step}, where the checkpoint is; restore the file, or "
            "start afresh in another output_dir"
        )


def _require_same_recipe(recipe: Recipe, folder: Path) -> None:
    file = folder / RUN
    if not file.exists():
        return
    try:
        defaults = Recipe().to_dict()  # a run of an older version may lack a key
        before = _flat(defaults) | _flat(json.loads(file.read_text())["recipe"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"resume: {file} cannot be read ({error}); choose another output_dir") from None
    now = _flat(recipe.to_dict())
    for key in sorted(before.keys() | now.keys()):
        if key.startswith(tuple(f"{free}." for free in _FREE)) or key in _FREE:
            continue
        if before.get(key) != now.get(key):
            raise RecipeError(
                f"resume: {key} was {before.get(key)!r} in this run and is {now.get(key)!r}; resume with the "
                "former, or start afresh in another output_dir"
            )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
