"""What every writer of files needs. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Put a file, or a folder's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
