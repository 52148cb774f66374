"""Starting a run and killing its processes: only ones that the run itself has started, found as its descendants."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from zmrl.trainer.logs import STEPS, read_lines

ROOT = Path(__file__).parents[2]
SECONDS = 1200
"""Longest wait for anything."""


class Run:
    """A run in `folder`. Its output is in `log`, which grows over several starts."""

    def __init__(self, module: str, recipe: Path, folder: Path, *overrides: str, **environment: str) -> None:
        self.folder, self.log = folder, folder.with_suffix(".log")
        command = [sys.executable, "-m", module, str(recipe), f"output_dir={folder}", *overrides]
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
            )

    def steps(self) -> list[dict]:
        """The lines of steps.jsonl that are complete."""
        return read_lines(self.folder / STEPS)

    def wait_for_step(self, step: int) -> None:
        """Until the line of `step` is there. Fails if the run ends before."""
        end = time.monotonic() + SECONDS
        while step not in [line["step"] for line in self.steps()]:
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.log.read_text()}"
            assert time.monotonic() < end, f"no step {step} after {SECONDS} s"
            time.sleep(0.05)

    def wait_for_a_line(self) -> None:
        """Until this start has written a step's line (it may have cut some before), or has ended."""
        fewest = len(self.steps())
        while self.process.poll() is None and len(self.steps()) <= fewest:
            fewest = min(fewest, len(self.steps()))
            time.sleep(0.05)

    def sleep(self, seconds: float) -> None:
        """At most so long: not beyond the end of the run."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.05)

    def processes(self, title: str) -> list[psutil.Process]:
        """Descendants whose command line begins with `title`; Ray titles its workers ray::CLASS."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            try:
                if " ".join(process.cmdline()).startswith(title):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def kill(self, title: str) -> None:
        """Kill -9 the one descendant with this title."""
        found = self.processes(title)
        assert len(found) == 1, f"{title}: {found}"
        found[0].kill()

    def kill_driver(self) -> None:
        """Kill -9 the command itself."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """Whatever still runs."""
        if self.process.poll() is None:
            self.kill_driver()

    def wait(self) -> int:
        """The exit code."""
        return self.process.wait(SECONDS)


def without_seconds(file: Path) -> list[str]:
    """The lines of a file, compared as text, apart from the seconds."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [json.dumps({k: v for k, v in line.items() if k != "seconds"}) for line in lines]
