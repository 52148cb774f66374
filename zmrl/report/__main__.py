"""`python -m zmrl.report RUN_DIR [RUN_DIR ...] [--out FILE]`: exit code 0, or 2 if a run cannot be read."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zmrl.report import REPORT
from zmrl.report.page import write_report
from zmrl.report.read import ReportError

BAD_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zmrl.report", description="Write report.html of one or more runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", type=Path, help="output folder of a run")
    parser.add_argument("--out", type=Path, help=f"file to write; for one run the default is RUN_DIR/{REPORT}")
    arguments = parser.parse_args(argv)
    if arguments.out is None and len(arguments.runs) > 1:
        print("error: several runs need --out FILE", file=sys.stderr)
        return BAD_INPUT
    out = arguments.out or arguments.runs[0] / REPORT
    try:
        write_report(arguments.runs, out)
    except ReportError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except OSError as error:
        print(f"error: {out} cannot be written ({error.strerror or error}); choose another --out", file=sys.stderr)
        return BAD_INPUT
    print(f"zmrl: report in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
