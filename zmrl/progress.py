"""What a person sees of a run: a line a step, above a progress bar on a terminal, plain lines elsewhere.

The trainer is another process; what it appends to steps.jsonl and val.jsonl is followed, so that nothing is shown that
is not on disk.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.text import Text

from zmrl.recipe import Recipe
from zmrl.trainer.logs import STEPS, VAL, read_lines, step_line, validation_line
from zmrl.trainer.verdicts import EQUAL

POLL_SECONDS = 0.2

WINDOW = 10
"""Steps whose mean duration tells the time left; validations are not in it."""


class Display(Protocol):
    """Shows the lines of a run."""

    def step(self, fields: dict[str, Any], left: float) -> None:
        """A line of steps.jsonl; left: estimated seconds until the last step's end."""

    def validation(self, fields: dict[str, Any]) -> None:
        """A line of val.jsonl."""


@contextlib.contextmanager
def progress(recipe: Recipe, out: TextIO, at_validation: Callable[[], None]) -> Iterator[None]:
    """Show on `out` what the run appends to its files in the meantime; `at_validation` is called after validations."""
    folder = Path(recipe.output_dir)
    follower = Follower(folder, recipe.steps)
    console = Console(file=out, highlight=False)
    done = threading.Event()

    def follow(display: Display) -> None:
        last = False
        while not last:
            last = done.wait(POLL_SECONDS)
            if follower.show(display):
                at_validation()

    with contextlib.ExitStack() as stack:
        display: Display
        # With debug.verbose libraries print to the terminal as well, and would tear the bar.
        if console.is_terminal and not console.is_dumb_terminal and not recipe.debug.verbose:
            display = stack.enter_context(BarDisplay(console, recipe.steps, follower.finished))
        else:
            display = PlainDisplay(out, recipe.steps)
        thread = threading.Thread(target=follow, args=(display,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


class Follower:
    """Reads what is new in a run's files. Lines that are there at the start are not shown again."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps = folder, steps
        self._seen = {name: len(read_lines(folder / name)) for name in (STEPS, VAL)}
        self._sizes = dict.fromkeys(self._seen, -1)
        self._durations: deque[float] = deque(maxlen=WINDOW)

    @property
    def finished(self) -> int:
        """Steps that are done."""
        return self._seen[STEPS]

    def show(self, display: Display) -> bool:
        """Show new lines in the order of their steps; True if a validation is among them."""
        new = [(fields["step"], name == VAL, fields) for name in self._seen for fields in self._new(name)]
        for _, is_validation, fields in sorted(new, key=lambda item: item[:2]):
            if is_validation:
                display.validation(fields)
            else:
                self._durations.append(fields["seconds"]["total"])
                display.step(fields, time_left(list(self._durations), self.steps - fields["step"]))
        return any(is_validation for _, is_validation, _ in new)

    def _new(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name
        size = file.stat().st_size if file.exists() else 0
        if size == self._sizes[name]:
            return []
        self._sizes[name] = size
        text = file.read_text() if size else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half written
        new, self._seen[name] = lines[self._seen[name] :], len(lines)
        return [json.loads(line) for line in new]


class PlainDisplay:
    """Lines for a file or a pipe."""

    def __init__(self, out: TextIO, steps: int) -> None:
        self._out, self._steps = out, steps

    def step(self, fields: dict[str, Any], left: float) -> None:
        line = f"{step_line(fields, self._steps)}  {tokens_per_second(fields):.0f} tokens/s  {clock(left)} left"
        print(line, file=self._out, flush=True)

    def validation(self, fields: dict[str, Any]) -> None:
        print(validation_line(fields), file=self._out, flush=True)


class BarDisplay:
    """Shorter lines above a progress bar."""

    def __init__(self, console: Console, steps: int, finished: int) -> None:
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"), BarColumn(bar_width=None), TaskProgressColumn(),
            TextColumn("{task.fields[measured]}"), TextColumn("{task.fields[left]}"),
        )  # fmt: skip
        self._progress = Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False)
        self._steps = steps
        self._task = self._progress.add_task("", total=steps, completed=finished, measured="", left="starting")

    def __enter__(self) -> BarDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, fields: dict[str, Any], left: float) -> None:
        self._print(terminal_line(fields, self._steps, left))
        self._progress.update(self._task, completed=fields["step"], left=f"{clock(left)} left")

    def validation(self, fields: dict[str, Any]) -> None:
        self._print(Text(validation_line(fields), style="bold"))
        measured = f"mean@{fields['k']} {fields['mean_at_k']:.3f} after step {fields['step']}"
        self._progress.update(self._task, measured=measured)

    def _print(self, line: Text) -> None:
        self._progress.console.print(line, soft_wrap=True)


def terminal_line(fields: dict[str, Any], steps: int, left: float) -> Text:
    """A step in one line that fits a terminal; its seconds by phase are in steps.jsonl and in the report."""
    tokens, different = fields["tokens_compared"], fields["tokens_different"] or fields["rows_different"]
    reward = fields["reward_mean"]
    colour = "green" if fields["verdict"] == EQUAL else "bold red"
    return Text.assemble(
        f"step {fields['step']}/{steps}  reward {'-' if reward is None else f'{reward:.3f}'}  ",
        (f"{fields['verdict']} {tokens - different}/{tokens}", colour),
        f"  KL {fields['kl_k3']}  {tokens_per_second(fields):.0f} tokens/s  {clock(left)} left",
    )


def tokens_per_second(fields: dict[str, Any]) -> float:
    """Response tokens of a step over its whole duration: sampled, compared and trained on."""
    total = fields["seconds"]["total"]
    return fields["response_tokens"] / total if total else 0.0


def time_left(durations: list[float], steps: int) -> float:
    """Seconds that `steps` further steps take, from the durations of the last ones."""
    return steps * sum(durations) / len(durations)


def clock(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
