"""The Hugging Face layout: what is written is what is read, and each fault gives one clear error."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from zmrl.model.checkpoint import (
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    export_tensors,
    iter_module_tensors,
    iter_tensors,
    load_reference,
    model_sha256,
    read_config,
    write_checkpoint,
)
from zmrl.model.initialise import initial_tensors
from zmrl.model.mxfp4 import dequantise, round_to_mxfp4
from zmrl.model.names import PREFIX, is_indexer_tensor, tensor_specs

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1"
A_LOG = "language_model.model.layers.0.self_attn.A_log"


@pytest.fixture
def tensors(small_config):
    return dict(export_tensors(small_config, initial_tensors(small_config, seed=1)))


@pytest.fixture
def checkpoint(tmp_path, small_config, tensors):
    write_checkpoint(tmp_path / "model", tensors.items(), small_config)
    return tmp_path / "model"


def rewrite(checkpoint, **changes):
    """Store the tensors of `checkpoint` with some replaced (by name, dots as they are) or, if None, removed."""
    stored = load_file(checkpoint / SINGLE_FILE) | changes
    save_file({n: t for n, t in stored.items() if t is not None}, checkpoint / SINGLE_FILE)


def test_what_is_written_is_what_is_read(checkpoint, small_config, tensors):
    read = dict(iter_tensors(checkpoint))
    assert list(read) == [s.name for s in tensor_specs(small_config)]
    assert all(torch.equal(read[n].view(torch.uint8), t.view(torch.uint8)) for n, t in tensors.items())
    assert read_config(checkpoint) == small_config


def test_experts_are_read_as_the_rounded_weights(checkpoint, small_config):
    read = dict(iter_module_tensors(checkpoint))
    for name, tensor in initial_tensors(small_config, seed=1):
        if ".experts." in name:
            assert torch.equal(read[name], round_to_mxfp4(tensor).bfloat16()), name


def test_loaded_reference_holds_every_tensor(checkpoint):
    model = load_reference(checkpoint, torch.float64)
    parameters = dict(model.named_parameters())
    for name, tensor in iter_module_tensors(checkpoint, torch.float64):
        assert torch.equal(parameters.pop(name), tensor), name
    assert not parameters
    experts = model.model.layers[1].block_sparse_moe.experts
    assert experts.w13.data_ptr() == experts[0].w1.weight.data_ptr()
    assert torch.equal(experts.w2[5], experts[5].w2.weight)


def test_sharded_layout_holds_the_same_model(tmp_path, checkpoint, small_config, tensors):
    sharded = tmp_path / "sharded"
    write_checkpoint(sharded, tensors.items(), small_config, max_shard_bytes=200_000)
    assert (sharded / INDEX_FILE).exists() and len(list(sharded.glob("*.safetensors"))) > 2
    assert model_sha256(sharded) == model_sha256(checkpoint)
    assert [n for n, _ in iter_tensors(sharded)] == [n for n, _ in iter_tensors(checkpoint)]


def test_digest_sees_a_single_bit(checkpoint):
    before = model_sha256(checkpoint)
    packed = load_file(checkpoint / SINGLE_FILE)[f"{EXPERT}.weight_packed"]
    packed[0, 0] ^= 1
    rewrite(checkpoint, **{f"{EXPERT}.weight_packed": packed})
    assert model_sha256(checkpoint) != before


def test_k3_without_indexers_is_accepted(checkpoint):
    rewrite(checkpoint, **{n: None for n, _ in iter_tensors(checkpoint) if is_indexer_tensor(n)})
    assert not read_config(checkpoint).has_indexer
    model = load_reference(checkpoint)
    assert not any("indexer" in n for n, _ in model.named_parameters())
    assert torch.isfinite(model(torch.arange(20).unsqueeze(0))).all()


def test_unquantised_experts_are_accepted(checkpoint):
    stored = load_file(checkpoint / SINGLE_FILE)
    weight = dequantise(stored[f"{EXPERT}.weight_packed"], stored[f"{EXPERT}.weight_scale"])
    before = dict(iter_module_tensors(checkpoint))
    changes = {f"{EXPERT}.weight_packed": None, f"{EXPERT}.weight_scale": None, f"{EXPERT}.weight": weight}
    rewrite(checkpoint, **changes)
    after = dict(iter_module_tensors(checkpoint))
    assert all(torch.equal(before[n], after[n]) for n in before) and before.keys() == after.keys()


def test_old_shape_of_a_log_is_accepted(checkpoint):
    before = dict(iter_tensors(checkpoint))[A_LOG]
    rewrite(checkpoint, **{A_LOG: before.reshape(1, 1, 4, 1).clone()})
    assert torch.equal(dict(iter_tensors(checkpoint))[A_LOG], before)


def test_missing_tensor_is_named(checkpoint):
    rewrite(checkpoint, **{f"{EXPERT}.weight_scale": None})
    with pytest.raises(CheckpointError, match=rf"{EXPERT}\.weight_scale .*missing"):
        next(iter_tensors(checkpoint))


def test_a_partly_missing_indexer_is_named(checkpoint):
    name = "language_model.model.layers.3.self_attn.indexer.wk.weight"
    rewrite(checkpoint, **{name: None})
    with pytest.raises(CheckpointError, match=name):
        next(iter_tensors(checkpoint))


def test_extra_tensor_is_named(checkpoint):
    rewrite(checkpoint, **{"language_model.model.layers.9.extra": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"layers\.9\.extra .*not part"):
        next(iter_tensors(checkpoint))


@pytest.mark.parametrize("tensor", [torch.zeros(3, 128, dtype=torch.bfloat16), torch.zeros(288, 128)])
def test_wrong_shape_or_dtype_is_named(checkpoint, tensor):
    rewrite(checkpoint, **{"language_model.lm_head.weight": tensor})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is .* implies BF16 \[288, 128\]"):
        next(iter_tensors(checkpoint))


def test_truncated_file_names_the_first_lost_tensor(checkpoint):
    file = checkpoint / SINGLE_FILE
    data = file.read_bytes()
    file.write_bytes(data[: len(data) - 1000])
    with pytest.raises(CheckpointError, match=r"tensor language_model\..* truncated; fetch it again"):
        next(iter_tensors(checkpoint))
    for length in (0, 4, 100):
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"truncated|damaged"):
            next(iter_tensors(checkpoint))


def test_missing_files_are_named(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        read_config(tmp_path / "absent")
    (checkpoint / SINGLE_FILE).unlink()
    with pytest.raises(CheckpointError, match=SINGLE_FILE):
        next(iter_tensors(checkpoint))
    (checkpoint / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json"):
        next(iter_tensors(checkpoint))


def test_missing_shard_is_named(tmp_path, small_config, tensors):
    write_checkpoint(tmp_path / "m", tensors.items(), small_config, max_shard_bytes=200_000)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        next(iter_tensors(tmp_path / "m"))


def test_a_config_for_another_size_is_refused(checkpoint, small_config):
    values = dataclasses.replace(small_config, kv_lora_rank=32).to_dict()
    (checkpoint / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match="kv_a_proj_with_mqa"):
        next(iter_tensors(checkpoint))


def test_an_incomplete_model_is_not_written(tmp_path, small_config, tensors):
    del tensors[f"{PREFIX}lm_head.weight"]
    with pytest.raises(CheckpointError, match="lm_head"):
        write_checkpoint(tmp_path / "m", tensors.items(), small_config)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_checkpoint_is_not_overwritten_unasked(checkpoint, small_config, tensors):
    before = model_sha256(checkpoint)
    with pytest.raises(CheckpointError, match="already exists"):
        write_checkpoint(checkpoint, tensors.items(), small_config)
    changed = dict(tensors) | {A_LOG: tensors[A_LOG] + 1}
    del changed[f"{PREFIX}lm_head.weight"]
    with pytest.raises(CheckpointError, match="lm_head"):
        write_checkpoint(checkpoint, changed.items(), small_config, overwrite=True)
    assert model_sha256(checkpoint) == before and len(list(checkpoint.parent.iterdir())) == 1
