"""Adapters as PEFT directories: `adapter_config.json` and `adapter_model.safetensors`.

Tensor names and shapes are those of `zmrl.model.names.LoraSpec`; each fault of a directory is one `AdapterError` that
names the tensor or key and the remedy. Only safetensors is read: a pickle runs code. Written to a temporary directory,
synced and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zmrl.files import share, sync
from zmrl.model.config import K3Config
from zmrl.model.names import LoraSpec
from zmrl.model.tensors import TensorSlice

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_PLAIN = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "fan_in_fan_out": False,
}
"""Settings whose other values change what an adapter computes; absent ones count as these."""


class AdapterError(ValueError):
    """An adapter that cannot be read or written as asked; the message names what is wrong and the remedy."""


class Adapter(NamedTuple):
    """A checked adapter."""

    rank: int
    alpha: float
    tensors: dict[str, Tensor]
    """PEFT name -> tensor as stored (BF16, FP16 or FP32)."""


def write_adapter(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    config: K3Config,
    rank: int,
    alpha: float,
    base_model: str,
) -> None:
    """Write a PEFT directory at `path`, replacing one that is there.

    tensors: PEFT name -> BF16 or FP32. base_model: path or name that PEFT records. AdapterError if a tensor is missing,
    extra, of another shape, or not finite.
    """
    target = Path(path)
    spec = LoraSpec(rank)
    _check_tensors(f"adapter for {target}", tensors, config, spec)
    settings = {
        **_PLAIN,
        "base_model_name_or_path": base_model,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "r": rank,
        "target_modules": spec.target_modules(config),
        "task_type": None,  # with "CAUSAL_LM" peft asks the base model for `prepare_inputs_for_generation`
    }
    temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
    previous = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        weights = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n")
        share(temporary / WEIGHTS_FILE)
        for item in (*temporary.iterdir(), temporary):
            sync(item)
        if target.exists():
            target.rename(previous)
        temporary.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(previous, ignore_errors=True)


def read_adapter(path: str | Path, config: K3Config, rank: int | None = None, alpha: float | None = None) -> Adapter:
    """Read and check a PEFT directory. rank, alpha: what they must be; None: what the directory says.

    AdapterError for an adapter of another kind, rank, alpha or model, for a missing, extra, misshapen or non-finite
    tensor, and for weights that are not safetensors.
    """
    root = Path(path)
    what = f"adapter {root}"
    settings = _read_settings(root, what)
    found_rank, found_alpha = settings["r"], settings["lora_alpha"]
    for name, found, expected in (("rank", found_rank, rank), ("alpha", found_alpha, alpha)):
        if expected is not None and found != expected:
            raise AdapterError(f"{what}: {name} {found}, but the run has lora.{name} = {expected}; make them equal")
    spec = LoraSpec(found_rank)
    missing = set(spec.target_modules(config)) ^ set(settings["target_modules"])
    if missing:
        raise AdapterError(
            f"{what}: target_modules and the modules that zmrl adapts differ in {', '.join(sorted(missing))}; "
            "export an adapter of all attention projections and experts"
        )
    weights = root / WEIGHTS_FILE
    if not weights.is_file():
        raise AdapterError(f"{what}: {WEIGHTS_FILE} is missing; only safetensors is read, convert other formats")
    try:
        with safe_open(weights, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise AdapterError(f"{what}: {WEIGHTS_FILE} cannot be read ({error}); copy it again") from None
    _check_tensors(what, tensors, config, spec)
    return Adapter(found_rank, float(found_alpha), tensors)


def fill(slices: Iterable[TensorSlice], tensors: Mapping[str, Tensor]) -> int:
    """Write PEFT-named tensors into buffers (`KimiK31.lora_slices`), rounding to the buffers' type; returns how many.

    AdapterError unless tensors and slices have exactly the same names. Call with checked tensors (`read_adapter`).
    """
    places = {item.name: item for item in slices}
    if places.keys() != tensors.keys():
        odd = min(places.keys() ^ tensors.keys())
        raise AdapterError(f"tensor {odd} is only on one side; the adapter belongs to another model or rank")
    for name, item in places.items():
        item.write(tensors[name])
    return len(places)


def _read_settings(root: Path, what: str) -> dict:
    file = root / CONFIG_FILE
    try:
        settings = json.loads(file.read_text())
    except FileNotFoundError:
        raise AdapterError(f"{what}: {CONFIG_FILE} is missing; give the directory of a PEFT adapter") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise AdapterError(f"{what}: {CONFIG_FILE} is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise AdapterError(f"{what}: {CONFIG_FILE} does not hold an object")
    rank, alpha, targets = (settings.get(key) for key in ("r", "lora_alpha", "target_modules"))
    if type(rank) is not int or rank <= 0:
        raise AdapterError(f"{what}: r is {rank!r}, expected a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not alpha > 0:
        raise AdapterError(f"{what}: lora_alpha is {alpha!r}, expected a positive number; was the export broken?")
    if not isinstance(targets, list):
        raise AdapterError(f"{what}: target_modules is {targets!r}, expected a list of module names")
    for key, only in _PLAIN.items():
        value = settings.get(key, only)
        if value != only and (value or only):  # None, [] and {} are all "nothing"
            raise AdapterError(f"{what}: {key} = {value!r} is not supported, only {only!r} is")
    return settings


def _check_tensors(what: str, tensors: Mapping[str, Tensor], config: K3Config, spec: LoraSpec) -> None:
    expected = {name: shape for name, shape, _ in spec.tensor_specs(config)}
    for kind, names in (("missing", expected.keys() - tensors.keys()), ("unknown", tensors.keys() - expected.keys())):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise AdapterError(f"{what}: tensor {min(names)}{more} is {kind}; use an adapter of this model")
    for name, shape in expected.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != shape:
            raise AdapterError(
                f"{what}: tensor {name} is {list(tensor.shape)}, expected {list(shape)}; use an adapter of this model "
                f"and of rank {spec.rank}"
            )
        if not tensor.is_floating_point():
            raise AdapterError(f"{what}: tensor {name} is {tensor.dtype}, expected a floating-point type")
        if not bool(torch.isfinite(tensor).all()):
            raise AdapterError(f"{what}: tensor {name} holds NaN or infinity; export a sound adapter")
