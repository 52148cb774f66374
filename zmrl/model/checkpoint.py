"""Reader and writer of the Hugging Face layout of the family's checkpoints.

A directory with config.json, generation_config.json, tokenizer files and `model.safetensors`, or shards beside
`model.safetensors.index.json`. Tensors and their names: `zmrl.model.names`. The reader checks everything against the
configuration before it hands out the first tensor; each fault is one `CheckpointError` that names the tensor and the
remedy. The writer writes to a temporary directory, syncs it and renames it: a checkpoint is there whole or not at all.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from zmrl.files import share, sync
from zmrl.model import mxfp4
from zmrl.model.config import ConfigError, K3Config, get_config, without_indexer
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import PREFIX, checkpoint_name, is_indexer_tensor, tensor_specs

if TYPE_CHECKING:
    from zmrl.model.reference import KimiK31ForCausalLM

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TORCH_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "U8": torch.uint8}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written as asked; the message names the tensor or file and the remedy."""


class _Entry(NamedTuple):
    """Where a stored tensor lies, and what its file calls it."""

    file: Path
    stored: str
    shape: tuple[int, ...]
    dtype: str


# Reading

EMBEDDED = Path(__file__).parents[2] / "checkpoints"
"""Checkpoints that come with the repository."""


def resolve_model(name_or_path: str | Path) -> Path:
    """A checkpoint directory, or an embedded checkpoint by name (`nano`)."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    if (EMBEDDED / name_or_path).is_dir():
        return EMBEDDED / name_or_path
    embedded = ", ".join(sorted(path.name for path in EMBEDDED.glob("*/"))) or "none"
    message = f"{str(name_or_path)!r} is no directory and no embedded checkpoint ({embedded})"
    raise CheckpointError(f"{message}; give the path of one")


def read_config(path: str | Path) -> K3Config:
    """The configuration of the checkpoint at `path`, as its tensors show it: without an indexer if it holds none (K3),
    with experts in BF16 if none is packed."""
    root = Path(path)
    return _open(root)[0]


def iter_tensors(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (checkpoint name, tensor) of every tensor, in `tensor_specs` order, after checking all of them.

    Experts come as stored: U8 `weight_packed` and `weight_scale`, or one `weight` where the checkpoint is not quantised
    (decided per tensor). Absent indexers (K3) are accepted, as are names without prefix (Kimi-Linear), and BF16 where
    F32 is due. `A_log` is handed out as [slots], also where it is stored in the old shape [1, 1, heads, 1].

    Raises CheckpointError for a missing, extra, truncated or wrongly shaped or typed tensor.
    """
    root = Path(path)
    config, entries = _open(root)
    plan = _check(config, entries, root)
    handles = {file: safe_open(file, framework="pt") for file in {e.file for e in entries.values()}}
    for name in plan:
        tensor = handles[entries[name].file].get_tensor(entries[name].stored)
        if name.endswith(".A_log") and tensor.dim() == 4:
            slots = config.linear_attn_config.a_log_slots
            tensor = torch.nn.functional.pad(tensor.flatten(), (0, slots - tensor.numel()))
        yield name, tensor


def iter_module_tensors(path: str | Path, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Like `iter_tensors`, under module names and with MXFP4 pairs dequantised to one BF16 `weight` [out, in] (exact).

    `dtype` casts every tensor; None keeps BF16 and F32 as stored.
    """
    packed = torch.empty(0)
    for name, tensor in iter_tensors(path):
        name = name.removeprefix(PREFIX)
        if name.endswith(".weight_packed"):
            packed = tensor
            continue
        if name.endswith(".weight_scale"):
            try:
                tensor = mxfp4.dequantise(packed, tensor)
            except ValueError as error:
                raise CheckpointError(f"checkpoint {path}: tensor {name}: {error}") from None
            name = name.removesuffix("_scale")
        yield name, tensor if dtype is None else tensor.to(dtype)


def load_reference(path: str | Path, dtype: torch.dtype = torch.float32) -> KimiK31ForCausalLM:
    """The reference model with the weights of the checkpoint at `path`, all in `dtype`."""
    from zmrl.model.reference import KimiK31ForCausalLM

    model = KimiK31ForCausalLM(read_config(path), dtype=dtype)
    model.load_tensors(iter_module_tensors(path, dtype))
    return model


def model_sha256(path: str | Path) -> str:
    """Hex SHA-256 over the stored tensors in name order: name, dtype, shape and bytes. Shards do not matter."""
    digest = hashlib.sha256()
    entries = _read_headers(Path(path))
    handles = {file: safe_open(file, framework="pt") for file in {e.file for e in entries.values()}}
    for name in sorted(entries):
        entry = entries[name]
        digest.update(f"{name}\0{entry.dtype}\0{list(entry.shape)}\0".encode())
        tensor = handles[entry.file].get_tensor(name).contiguous()
        digest.update(tensor.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _open(root: Path) -> tuple[K3Config, dict[str, _Entry]]:
    """The effective configuration, and the stored tensors under their checkpoint names."""
    config, stored = _load_config(root), _read_headers(root)
    try:
        config = _effective_config(config, stored)
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {root}: its tensors do not fit config.json: {error}") from None
    entries = {checkpoint_name(config, name): entry for name, entry in stored.items()}
    if len(entries) < len(stored):
        twice = next(n for n, e in stored.items() if entries[checkpoint_name(config, n)].stored != n)
        raise CheckpointError(f"checkpoint {root}: tensor {twice} is there under two names; remove one of them")
    return config, entries


def _load_config(root: Path) -> K3Config:
    if not root.is_dir():
        raise CheckpointError(f"checkpoint {root} is not a directory; give the directory that holds config.json")
    try:
        return K3Config.from_json(root)
    except ConfigError as error:
        raise CheckpointError(f"checkpoint {root}: {error}") from None


def _read_headers(root: Path) -> dict[str, _Entry]:
    """Entries of all files, with each file's size checked against its header."""
    index, single = root / INDEX_FILE, root / SINGLE_FILE
    if index.exists():
        try:
            weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise CheckpointError(f"checkpoint {root}: {INDEX_FILE} is damaged ({error!r}); fetch it again") from None
        entries: dict[str, _Entry] = {}
        for file in sorted(set(weight_map.values())):
            if not (root / file).exists():
                first = min(n for n, f in weight_map.items() if f == file)
                message = f"checkpoint {root}: shard {file} (tensor {first} and others) is missing; fetch it again"
                raise CheckpointError(message)
            entries.update(_read_header(root / file))
        for name in weight_map.keys() - entries.keys():
            raise CheckpointError(f"checkpoint {root}: tensor {name} is in {INDEX_FILE} but not in {weight_map[name]}")
        return entries
    if single.exists():
        return _read_header(single)
    raise CheckpointError(f"checkpoint {root}: neither {SINGLE_FILE} nor {INDEX_FILE} is there; fetch the weights")


def _read_header(file: Path) -> dict[str, _Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise CheckpointError(f"checkpoint {file} is truncated inside its header; fetch the file again")
        try:
            header = json.loads(stream.read(length))
        except ValueError:
            raise CheckpointError(f"checkpoint {file} has a damaged header; fetch the file again") from None
    header.pop("__metadata__", None)
    entries = {}
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        end = 8 + length + info["data_offsets"][1]
        if end > size:
            message = f"tensor {name} ends at byte {end} but the file has {size}: it is truncated; fetch it again"
            raise CheckpointError(f"checkpoint {file}: {message}")
        entries[name] = _Entry(file, name, tuple(info["shape"]), info["dtype"])
    return entries


def _effective_config(config: K3Config, names: Collection[str]) -> K3Config:
    if config.has_indexer and not any(is_indexer_tensor(name) for name in names):
        config = without_indexer(config)
    packed = any(name.endswith(".weight_packed") for name in names)
    return dataclasses.replace(config, expert_format="mxfp4" if packed else "bf16")


def _check(config: K3Config, entries: Mapping[str, _Entry], root: Path) -> list[str]:
    """Compare the stored tensors with the configuration; the names to read, in order."""
    plan: list[str] = []
    for name, shape, dtype in tensor_specs(config):
        if name.endswith((".weight_packed", ".weight_scale")):
            plain = name.rsplit("_", 1)[0]
            if plain in entries:  # an expert that is not quantised
                if name.endswith("_scale"):
                    continue
                name, shape, dtype = plain, (*shape[:-1], 2 * shape[-1]), "BF16"
        if name not in entries:
            message = f"tensor {name} {list(shape)} is missing; fetch the weights again or correct config.json"
            raise CheckpointError(f"checkpoint {root}: {message}")
        entry = entries[name]
        old_a_log = name.endswith(".A_log") and entry.shape == (1, 1, config.linear_attn_config.num_heads, 1)
        widened = dtype == "F32" and entry.dtype == "BF16"
        if (entry.shape != shape and not old_a_log) or (entry.dtype != dtype and not widened):
            message = f"tensor {name} is {entry.dtype} {list(entry.shape)}, config.json implies {dtype} {list(shape)}"
            raise CheckpointError(f"checkpoint {root}: {message}; use the config.json that belongs to these weights")
        plan.append(name)
    extra = entries.keys() - set(plan)
    if extra:
        more = f" (and {len(extra) - 1} more)" if len(extra) > 1 else ""
        message = f"tensor {min(extra)}{more} is not part of the model that config.json describes; remove it or correct"
        raise CheckpointError(f"checkpoint {root}: {message} config.json")
    return plan


# Writing


def export_tensors(config: K3Config, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """(module name, float tensor) -> (checkpoint name, stored tensor): BF16 or F32, routed experts as MXFP4."""
    dtypes = {name: dtype for name, _, dtype in tensor_specs(config)}
    for name, tensor in tensors:
        name = PREFIX + name
        if f"{name}_packed" in dtypes:
            packed, scale = mxfp4.quantise(tensor)
            yield f"{name}_packed", packed
            yield f"{name}_scale", scale
        elif name in dtypes:
            yield name, tensor.detach().to(TORCH_DTYPES[dtypes[name]])
        else:
            raise CheckpointError(f"tensor {name} is not part of the model that the configuration describes")


def write_checkpoint(
    path: str | Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: K3Config,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a complete checkpoint at `path` from (checkpoint name, stored tensor) pairs; see `export_tensors`.

    Checks names, shapes and dtypes as the reader does. Byte-vocabulary models get their tokenizer's files. Raises
    CheckpointError if `path` exists and `overwrite` is false.
    """
    target = Path(path)
    if target.exists() and not overwrite:
        raise CheckpointError(f"checkpoint {target} already exists; choose another directory or remove it")
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _write_tensors(temporary, tensors, max_shard_bytes)
        _write_json(temporary / "config.json", config.to_dict())
        _write_json(
            temporary / "generation_config.json",
            {
                "bos_token_id": config.bos_token_id,
                "eos_token_id": config.eos_token_id,
                "pad_token_id": config.pad_token_id,
                "do_sample": True,
                "temperature": 1.0,
            },
        )
        _write_tokenizer(temporary, config)
        _check(config, _read_headers(temporary), target)
        for file in temporary.iterdir():
            share(file)
            sync(file)
        sync(temporary)
        previous = target.with_name(f".{target.name}.old-{os.getpid()}")
        if target.exists():
            target.rename(previous)
        temporary.rename(target)
        shutil.rmtree(previous, ignore_errors=True)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_random_checkpoint(preset: str, path: str | Path, seed: int = 0, overwrite: bool = False) -> None:
    """Write a randomly initialised checkpoint of a preset (for tests)."""
    config = get_config(preset)
    write_checkpoint(path, export_tensors(config, initial_tensors(config, seed)), config, overwrite=overwrite)


def _write_tensors(root: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    size = 0

    def flush() -> None:
        save_file(shard, root / f"shard-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    total = 0
    for name, tensor in tensors:
        tensor = tensor.contiguous()
        if shard and size + tensor.nbytes > max_shard_bytes:
            flush()
            size = 0
        shard[name] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (root / "shard-0").rename(root / SINGLE_FILE)
        return
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        (root / f"shard-{i}").rename(root / file)
        weight_map.update(dict.fromkeys(names, file))
    _write_json(root / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_tokenizer(root: Path, config: K3Config) -> None:
    from zmrl.model.tokenizer import END_OF_MSG_ID, ByteTokenizer

    if config.eos_token_id == END_OF_MSG_ID:
        ByteTokenizer(vocab_size=config.vocab_size, model_max_length=config.max_position_embeddings).save_pretrained(
            root
        )


def _write_json(file: Path, value: object) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
