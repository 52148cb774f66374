"""Reads the files of an offline Weights & Biases run; wandb 0.31 has no reader of its own that Python can call."""

import json
import struct
from pathlib import Path

from wandb.proto import wandb_internal_pb2


def records(data: bytes) -> list[bytes]:
    """The records of a .wandb file: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    assert data[:4] == b":W&B"
    found, place, parts = [], 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:  # too short for a header: padding
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += 7 + length
        parts += data[place - length : place]
        if kind in (1, 4):  # whole, or the last part
            found.append(parts)
            parts = b""
    return found


def history(folder: Path) -> list[dict]:
    """The history rows of the only offline run under `folder`."""
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows = []
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows
