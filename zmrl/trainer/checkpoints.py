"""Checkpoints of a run: folders `checkpoints/global_step_N`, each there whole or not at all, the latest two kept.

`manifest.json` in each says how large every file is and what its SHA-256 is, so that damage is noticed before anything
is started. What the files mean is the trainer's business. Needs no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zmrl.files import sync

KEEP = 2
"""Complete checkpoints that are kept: the latest, and one to fall back on."""

MANIFEST = "manifest.json"
_NAME = re.compile(r"global_step_(\d+)")


class TrainerCheckpointError(ValueError):
    """A checkpoint that cannot be resumed from; the message names what is wrong and the remedy."""


class CheckpointWriteError(RuntimeError):
    """A checkpoint that could not be written; what was there before still is."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: state after `step` steps; `state` is what `write` was given."""

    step: int
    folder: Path
    state: dict[str, Any]


class RunCheckpoints:
    """The checkpoints in one run's output folder."""

    def __init__(self, run_folder: str | Path) -> None:
        self.folder = Path(run_folder) / "checkpoints"

    def write(self, step: int, fill: Callable[[Path], None], state: dict[str, Any]) -> None:
        """Let `fill` put files into a folder, then make it the checkpoint of `step` in one rename; drop older ones.

        Raises CheckpointWriteError if a file cannot be written; what `fill` raises passes through. Either way nothing
        of the new checkpoint remains, and the older ones are untouched.
        """
        target = self.folder / f"global_step_{step}"
        temporary = self.folder / f".global_step_{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            fill(temporary)
            manifest = {
                "step": step,
                "state": state,
                "files": {name: _describe(temporary / name) for name in _files(temporary)},
            }
            (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
            _replace(temporary, target)
            sync(self.folder)
        except OSError as error:
            raise CheckpointWriteError(
                f"checkpoint {target} could not be written ({error.strerror or error}); see to space and permissions"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in self._steps()[KEEP:]:
            shutil.rmtree(self.folder / f"global_step_{old}")

    def latest(self, report: Callable[[str], None]) -> Checkpoint | None:
        """The newest complete checkpoint, or None if none was ever written.

        One that is damaged is named to `report` and set aside (its name gets `.damaged`). Raises TrainerCheckpointError
        if no other is left. Remains of one that was being written are removed.
        """
        for unfinished in self.folder.glob(".global_step_*.tmp"):
            shutil.rmtree(unfinished)
        damaged = []
        for step in self._steps():
            folder = self.folder / f"global_step_{step}"
            problem, manifest = _verify(folder, step)
            if problem is None:
                return Checkpoint(step, folder, manifest["state"])
            report(f"checkpoint {folder} is damaged ({problem}); using the one before it")
            _replace(folder, folder.with_name(f"{folder.name}.damaged"))
            damaged.append(folder.name)
        if damaged:
            raise TrainerCheckpointError(
                f"{self.folder}: no checkpoint is whole ({', '.join(damaged)} are damaged); restore one, or start "
                "afresh in another output_dir"
            )
        return None

    def _steps(self) -> list[int]:
        """Steps that have a checkpoint, newest first."""
        names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted((int(found[1]) for found in map(_NAME.fullmatch, names) if found), reverse=True)


def _replace(source: Path, target: Path) -> None:
    """Rename a folder; one that is in the way goes first."""
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)


def _files(folder: Path) -> Iterator[str]:
    return (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file())


def _describe(file: Path) -> list[Any]:
    with file.open("rb") as stream:
        return [file.stat().st_size, hashlib.file_digest(stream, "sha256").hexdigest()]


def _verify(folder: Path, step: int) -> tuple[str | None, dict[str, Any]]:
    """What is wrong with a checkpoint (None: nothing), and its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        expected = manifest["files"]
        if manifest["step"] != step:
            return f"{MANIFEST} is that of step {manifest['step']}", {}
        found = [name for name in _files(folder) if name != MANIFEST]
        for name in sorted({*expected, *found}):
            if name not in found:
                return f"{name} is missing", {}
            if name not in expected:
                return f"{name} does not belong to it", {}
            if _describe(folder / name) != expected[name]:
                return f"{name} has changed since it was written", {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST}: {type(error).__name__}: {error}", {}
    return None, manifest
