"""Where the time from the command to the first sampled token goes: `--startup` prints it, process by process.

Processes note how far they are in one file, a JSON line each; appending so little is atomic. Not asked, they note
nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import psutil

FILE = "ZMRL_STARTUP_FILE"
"""Environment variable: where to note; the processes of a run inherit it."""

FIRST_TOKEN = "first token sampled"
"""The mark that ends a start-up."""

_noted: set[str] = set()


def mark(process: str, what: str) -> None:
    """Note, the first time only, that this process, called so, has done `what`."""
    path = os.environ.get(FILE)
    if path is None or what in _noted:
        return
    _noted.add(what)
    me = psutil.Process()
    line = {"pid": me.pid, "process": process, "created": me.create_time(), "what": what, "at": time.time()}
    # A run does not end because its start-up cannot be noted.
    with contextlib.suppress(OSError), open(path, "a") as file:
        file.write(json.dumps(line | {"cpu": time.process_time()}) + "\n")


def watch(file: Path, out: TextIO) -> threading.Thread:
    """Print the breakdown as soon as the first token is sampled."""

    def follow() -> None:
        while FIRST_TOKEN not in file.read_text():
            time.sleep(0.2)
        print(breakdown([json.loads(line) for line in file.read_text().splitlines()]), file=out, flush=True)

    file.write_text("")
    os.environ[FILE] = str(file)
    thread = threading.Thread(target=follow, name="startup", daemon=True)
    thread.start()
    return thread


def breakdown(marks: list[dict[str, Any]]) -> str:
    """A block of lines for each process, in the order of their starts; seconds since the first of them started."""
    begin = min(mark["created"] for mark in marks)
    lines = ["start-up: seconds since the command (CPU seconds of the process) and what was done by then"]
    for pid in sorted({mark["pid"]: mark["created"] for mark in marks}.items(), key=lambda item: item[1]):
        own = [mark for mark in marks if mark["pid"] == pid[0]]
        lines.append(f"{own[0]['created'] - begin:6.1f}         {own[-1]['process']}")
        lines += [f"{mark['at'] - begin:6.1f} ({mark['cpu']:5.1f})   {mark['what']}" for mark in own]
    return "\n".join(lines)
