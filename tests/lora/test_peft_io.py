"""The PEFT directory format: round trips in bits, and one clear error for each kind of fault."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from zmrl.lora import peft_io
from zmrl.lora.initialise import initial_lora_a
from zmrl.model.config import PRESETS, K3Config
from zmrl.model.names import LoraSpec

RANK, ALPHA = 16, 32
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def config() -> K3Config:
    return dataclasses.replace(PRESETS["nano"], num_experts=8, num_experts_per_token=2)


@pytest.fixture
def tensors(config: K3Config) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape, _ in LoraSpec(RANK, ALPHA).tensor_specs(config)
    }


@pytest.fixture
def directory(tmp_path: Path, config: K3Config, tensors: dict[str, Tensor]) -> Path:
    peft_io.write_adapter(tmp_path / "adapter", tensors, config, RANK, ALPHA, "nano")
    return tmp_path / "adapter"


def test_a_written_adapter_is_read_with_the_same_bits(directory, config, tensors):
    adapter = peft_io.read_adapter(directory, config, RANK, ALPHA)
    assert (adapter.rank, adapter.alpha) == (RANK, ALPHA)
    assert adapter.tensors.keys() == tensors.keys()
    assert all(torch.equal(adapter.tensors[n].view(torch.int16), t.view(torch.int16)) for n, t in tensors.items())


def test_fp32_masters_keep_their_bits(tmp_path, config, tensors):
    masters = {name: tensor.float() + 2.0**-20 for name, tensor in tensors.items()}
    peft_io.write_adapter(tmp_path / "a", masters, config, RANK, ALPHA, "nano")
    loaded = peft_io.read_adapter(tmp_path / "a", config).tensors
    assert all(torch.equal(loaded[n].view(torch.int32), t.view(torch.int32)) for n, t in masters.items())


def test_the_config_says_what_was_trained(directory, config):
    settings = json.loads((directory / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (RANK, ALPHA, "LORA")
    suffixes = {
        name.removesuffix(".lora_A.weight").rsplit(".", 1)[1]
        for name in load_file(directory / peft_io.WEIGHTS_FILE)
        if "lora_A" in name
    }
    assert suffixes == set(settings["target_modules"])


def test_writing_replaces_the_directory_as_a_whole(directory, config, tensors):
    (directory / "stale").write_text("from an earlier export")
    peft_io.write_adapter(directory, {n: -t for n, t in tensors.items()}, config, RANK, ALPHA, "nano")
    assert sorted(os.listdir(directory)) == [peft_io.CONFIG_FILE, peft_io.WEIGHTS_FILE]
    assert sorted(os.listdir(directory.parent)) == [directory.name]


def test_files_are_as_readable_as_their_folder(directory):
    modes = {file: (directory / file).stat().st_mode & 0o777 for file in os.listdir(directory)}
    assert modes == dict.fromkeys(modes, directory.stat().st_mode & 0o666)


def test_a_failed_write_leaves_what_was_there(directory, config, tensors, monkeypatch):
    before = {file: (directory / file).read_bytes() for file in os.listdir(directory)}

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(peft_io, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        peft_io.write_adapter(directory, tensors, config, RANK, ALPHA, "nano")
    assert {file: (directory / file).read_bytes() for file in os.listdir(directory)} == before
    assert sorted(os.listdir(directory.parent)) == [directory.name]


def _change_tensors(change: Callable[[dict[str, Tensor]], None]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / peft_io.WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, path / peft_io.WEIGHTS_FILE)

    return apply


def _change_settings(**changes: object) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        file = path / peft_io.CONFIG_FILE
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return apply


def _truncate(path: Path) -> None:
    file = path / peft_io.WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-100])


def _pickle_instead(path: Path) -> None:
    torch.save(load_file(path / peft_io.WEIGHTS_FILE), path / "adapter_model.bin")
    (path / peft_io.WEIGHTS_FILE).unlink()


FAULTS = {
    "missing tensor": (_change_tensors(lambda t: t.pop(Q_A)), f"tensor {Q_A} is missing"),
    "extra tensor": (_change_tensors(lambda t: t.update(extra=t[Q_A].clone())), "tensor extra is unknown"),
    "wrong shape": (_change_tensors(lambda t: t.update({Q_A: t[Q_A][:, 1:].contiguous()})), rf"{Q_A} is \[16, 127\]"),
    "integers": (_change_tensors(lambda t: t.update({Q_A: t[Q_A].int()})), f"{Q_A} is torch.int32"),
    "nan": (_change_tensors(lambda t: t[Q_A].view(-1)[5:6].fill_(float("nan"))), f"{Q_A} holds NaN"),
    "rank": (_change_settings(r=32), "rank 32, but the run has lora.rank = 16"),
    "alpha": (_change_settings(lora_alpha=16), "alpha 16, but the run has lora.alpha = 32"),
    "alpha 0": (_change_settings(lora_alpha=0), "lora_alpha is 0"),
    "targets": (_change_settings(target_modules=["q_proj"]), "target_modules"),
    "rslora": (_change_settings(use_rslora=True), "use_rslora = True is not supported"),
    "rank pattern": (_change_settings(rank_pattern={"q_proj": 8}), "rank_pattern"),
    "truncated": (_truncate, "cannot be read"),
    "pickle": (_pickle_instead, "only safetensors is read"),
    "no config": (lambda path: (path / peft_io.CONFIG_FILE).unlink(), "adapter_config.json is missing"),
    "broken config": (lambda path: (path / peft_io.CONFIG_FILE).write_text("{"), "is not JSON"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_adapter_is_refused_by_name(fault, directory, config):
    damage, message = FAULTS[fault]
    damage(directory)
    with pytest.raises(peft_io.AdapterError, match=message):
        peft_io.read_adapter(directory, config, RANK, ALPHA)


def test_an_adapter_of_another_rank_is_refused_without_an_expectation(directory, config):
    _change_settings(r=8)(directory)
    with pytest.raises(peft_io.AdapterError, match=r"expected \[8, 128\].*of rank 8"):
        peft_io.read_adapter(directory, config)


def test_a_faulty_adapter_is_not_written(tmp_path, config, tensors):
    tensors[Q_A][0, 0] = float("inf")
    with pytest.raises(peft_io.AdapterError, match="holds NaN or infinity"):
        peft_io.write_adapter(tmp_path / "a", tensors, config, RANK, ALPHA, "nano")
    assert os.listdir(tmp_path) == []


def test_initial_values_depend_on_seed_and_name_only():
    first = initial_lora_a(Q_A, 16, 64, seed=1)
    initial_lora_a("another", 16, 64, seed=1)
    assert torch.equal(initial_lora_a(Q_A, 16, 64, seed=1), first)
    assert not torch.equal(initial_lora_a(Q_A, 16, 64, seed=2), first)
    assert not torch.equal(initial_lora_a("another", 16, 64, seed=1), first)
    # PEFT: kaiming_uniform_(a=sqrt(5)), i.e. uniform in +-1/sqrt(in_features)
    assert 0.12 < float(first.abs().max()) <= 0.125
    assert abs(float(first.std()) - 0.125 / 3**0.5) < 0.005
