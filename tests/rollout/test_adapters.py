"""Adapters on their way into the slots: every tensor arrives, errors are told and survived, no stale cache is hit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.rollout.harness import RANK, PlainModel, Prompt, Rollout, assert_equal, proved, random_adapter, text
from zmrl.lora.peft_io import AdapterError, write_adapter
from zmrl.model.names import LoraSpec
from zmrl.model.tensors import combined_digest

pytestmark = pytest.mark.slow
PROMPTS = [Prompt(text(80 + 20 * i, i), seed=i) for i in range(4)]
O_PROJ = "base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"
EXPERT = "base_model.model.model.layers.2.block_sparse_moe.experts.63.w2.lora_A.weight"


@pytest.fixture(scope="module")
def plain(few_experts: Path) -> PlainModel:
    model = PlainModel(few_experts)
    model.model.create_lora(1, RANK, RANK)
    return model


@pytest.fixture(scope="module")
def rollout(few_experts: Path) -> Iterator[Rollout]:
    engine = Rollout(few_experts, max_loras=1, max_cpu_loras=3)
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(rollout: Rollout) -> None:
    rollout.runner.lora_manager.remove_all_adapters()
    rollout.forget()  # nothing in the prefix cache was computed with an adapter whose id may come back


def named(plain: PlainModel, buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Packed buffers under PEFT names."""
    return {item.name: item.read() for item in plain.model.lora_slices(buffers)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, plain: PlainModel) -> list[Path]:
    """Adapters 1 and 2 as PEFT directories."""
    root = tmp_path_factory.mktemp("adapters")
    for version in (1, 2):
        tensors = named(plain, random_adapter(plain.model, version))
        write_adapter(root / str(version), tensors, plain.model.config, RANK, RANK, "nano")
    return [root / "1", root / "2"]


def put(plain: PlainModel, buffers: dict[str, Tensor]) -> None:
    for key, tensor in buffers.items():
        plain.model.lora_buffers()[key][0].copy_(tensor)


def ask(rollout: Rollout, request: Any, prompts: list[Prompt] = PROMPTS) -> list[Any]:
    from vllm import SamplingParams

    settings = [SamplingParams(temperature=1, seed=p.seed, max_tokens=24, ignore_eos=True) for p in prompts]
    ids = [{"prompt_token_ids": list(p.ids)} for p in prompts]
    return rollout.llm.generate(ids, settings, lora_request=request, use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_all_ways_in_give_the_same_adapter(rollout: Rollout, plain: PlainModel, directories: list[Path]) -> None:
    from vllm.lora.request import LoRARequest

    buffers = random_adapter(plain.model, 1)
    put(plain, buffers)
    expected = combined_digest(plain.model.adapter_buffers(0))
    scratch = {key: tensor.clone().unsqueeze(0) for key, tensor in buffers.items()}
    assert rollout.rpc("zmrl_load_adapter", 1, scratch, RANK, RANK) == expected
    for tensor in scratch.values():  # verl#6688: the transfer buffer is used again
        tensor.fill_(float("nan"))
    assert rollout.rpc("zmrl_load_adapter", 2, named(plain, buffers), RANK, float(RANK)) == expected
    request = LoRARequest("from-disk", 3, str(directories[0]))
    by_path = tokens_of(ask(rollout, request))
    identity = rollout.rpc("zmrl_identity")
    assert identity["adapter_digests"] == {"from-disk": expected}
    found = [rollout.generate([replace(p, adapter=version) for p in PROMPTS]) for version in (1, 2)]
    assert [s.bits() for s in found[0]] == [s.bits() for s in found[1]] and by_path == [s.tokens for s in found[0]]
    assert_equal(found[0], [plain.score(s, 0) for s in found[0]])
    assert rollout.rpc("zmrl_tensor_digests", 1).keys() == {
        s.name for s in LoraSpec(RANK).tensor_specs(plain.model.config)
    }


def test_a_zero_adapter_changes_no_value(rollout: Rollout, plain: PlainModel) -> None:
    zero = {key: torch.zeros_like(buffer[0]) for key, buffer in plain.model.lora_buffers().items()}
    rollout.rpc("zmrl_load_adapter", 1, zero, RANK, RANK)
    base = rollout.generate(PROMPTS)
    adapted = rollout.generate([replace(p, adapter=1) for p in PROMPTS])
    assert [s.bits() for s in base] == [s.bits() for s in adapted]
    proved(all(s.cached == 0 for s in adapted), "the adapter's requests used the base model's cache")


def test_a_new_version_never_hits_blocks_of_the_old(rollout: Rollout, plain: PlainModel) -> None:
    """prime-rl#1650: keys and values of the old weights were used after an update."""
    for version in (1, 2):
        buffers = random_adapter(plain.model, version)
        rollout.rpc("zmrl_load_adapter", version, buffers, RANK, RANK)
        put(plain, buffers)
        prompts = [replace(p, adapter=version) for p in PROMPTS]
        cold, warm = rollout.generate(prompts), rollout.generate(prompts)
        proved(all(s.cached == 0 for s in cold) and all(s.cached > 0 for s in warm), "the cache was not used as meant")
        expected = [plain.score(s, 0) for s in cold]
        assert_equal(cold, expected)
        assert_equal(warm, expected)


def test_a_reload_under_the_same_name_never_hits_stale_blocks(rollout: Rollout, directories: list[Path]) -> None:
    """vllm#42125. In place from another path, and in place from the same path with other contents."""
    from vllm.lora.request import LoRARequest

    fresh = tokens_of(ask(rollout, LoRARequest("fresh", 9, str(directories[1]))))
    first = LoRARequest("x", 7, str(directories[0]))
    old = tokens_of(ask(rollout, first))
    assert old != fresh
    proved(all(o.num_cached_tokens > 0 for o in ask(rollout, first)), "the first adapter left no blocks")
    engine = rollout.llm.llm_engine
    second = LoRARequest("x", 7, str(directories[1]))
    assert [o.outputs[0].finish_reason for o in ask(rollout, second)] == ["error"] * 4  # id 7 is another adapter
    assert engine.add_lora(LoRARequest("x", 7, str(directories[1]), load_inplace=True))
    assert tokens_of(ask(rollout, second)) == fresh
    link = directories[0].parent / "link"
    link.symlink_to(directories[0])
    linked = LoRARequest("y", 8, str(link))
    assert tokens_of(ask(rollout, linked)) == old
    link.unlink()
    link.symlink_to(directories[1])
    assert engine.add_lora(LoRARequest("y", 8, str(link), load_inplace=True))
    assert tokens_of(ask(rollout, linked)) == fresh
    link.unlink()


def test_adapters_take_turns_in_one_slot(rollout: Rollout, plain: PlainModel) -> None:
    from zmrl.rollout.lora import adapter_request

    for version in (1, 2, 3):
        rollout.rpc("zmrl_load_adapter", version, random_adapter(plain.model, version), RANK, RANK)
    found = rollout.generate([replace(PROMPTS[i % 4], adapter=1 + i % 3) for i in range(12)])
    for version in (1, 2, 3):
        put(plain, random_adapter(plain.model, version))
        mine = [s for s in found if s.prompt.adapter == version]
        assert_equal(mine, [plain.score(s, 0) for s in mine])
    rollout.rpc("zmrl_load_adapter", 4, random_adapter(plain.model, 4), RANK, RANK)  # the first is evicted
    with_first = ask(rollout, adapter_request(1))
    assert with_first[0].outputs[0].finish_reason == "error" and "evicted" in with_first[0].outputs[0].stop_reason


def test_a_version_is_loaded_once(rollout: Rollout, plain: PlainModel) -> None:
    buffers = random_adapter(plain.model, 1)
    assert rollout.rpc("zmrl_load_adapter", 1, buffers, RANK, RANK) == rollout.rpc(
        "zmrl_load_adapter", 1, buffers, RANK, RANK
    )
    with pytest.raises(ValueError, match="new version"):
        rollout.rpc("zmrl_load_adapter", 1, random_adapter(plain.model, 2), RANK, RANK)
    for rank, alpha in ((16, 32), (32, 64)):
        with pytest.raises(ValueError, match=f"rank {rank} and alpha {alpha}"):
            rollout.rpc("zmrl_load_adapter", 2, buffers, rank, alpha)


def test_a_freed_version_cannot_come_back_with_other_weights(rollout: Rollout, plain: PlainModel) -> None:
    """Its blocks are still in the prefix cache."""
    rollout.rpc("zmrl_load_adapter", 1, random_adapter(plain.model, 1), RANK, RANK)
    rollout.rpc("zmrl_drop_adapters", [])
    with pytest.raises(AdapterError, match="not what was loaded before"):
        rollout.rpc("zmrl_load_adapter", 1, random_adapter(plain.model, 77), RANK, RANK)
    rollout.rpc("zmrl_load_adapter", 1, random_adapter(plain.model, 1), RANK, RANK)


def test_bad_tensors_are_named(rollout: Rollout, plain: PlainModel) -> None:
    buffers = random_adapter(plain.model, 1)
    tensors = named(plain, buffers)
    key = "layers.3.self_attn.kv_b_proj.b"
    bad = {
        key: {k: v for k, v in buffers.items() if k != key},
        "layers.9.x": buffers | {"layers.9.x": torch.zeros(1)},
        "layers.0.self_attn.in_proj.a": buffers | {"layers.0.self_attn.in_proj.a": torch.zeros(2, 3)},
        EXPERT: {k: v for k, v in tensors.items() if k != EXPERT},
        O_PROJ: tensors | {O_PROJ: torch.full_like(tensors[O_PROJ], float("nan"))},
        O_PROJ + ".more": tensors | {O_PROJ + ".more": tensors[O_PROJ]},
        "lora_B.weight": tensors | {O_PROJ: tensors[O_PROJ][:5]},
    }
    for name, wrong in bad.items():
        with pytest.raises(ValueError, match=name.split(".")[-1]):
            rollout.rpc("zmrl_load_adapter", 5, wrong, RANK, RANK)
    assert rollout.rpc("zmrl_identity")["adapter_digests"] == {}
    rollout.generate(PROMPTS)


@pytest.mark.parametrize("fault", ["directory", "tensor", "rank", "nan", "shape", "pickle"])
def test_a_bad_directory_fails_its_requests_only(
    rollout: Rollout, directories: list[Path], tmp_path: Path, fault: str
) -> None:
    from vllm.lora.request import LoRARequest

    path = tmp_path / "adapter"
    if fault != "directory":
        shutil.copytree(directories[0], path)
        weights = path / "adapter_model.safetensors"
        tensors = load_file(weights)
        if fault == "tensor":
            del tensors[EXPERT]
        elif fault == "nan":
            tensors[EXPERT][0, 0] = float("nan")
        elif fault == "shape":
            tensors[EXPERT] = tensors[EXPERT][:, :-1].contiguous()
        elif fault == "rank":
            config = json.loads((path / "adapter_config.json").read_text())
            (path / "adapter_config.json").write_text(json.dumps(config | {"r": 16}))
        save_file(tensors, weights)
        if fault == "pickle":
            weights.rename(path / "adapter_model.bin")
    good = rollout.generate(PROMPTS)
    request = LoRARequest("bad", 6, str(path))
    outputs = ask(rollout, [None, request, None, request])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "error"]
    word = {"directory": "adapter_config", "rank": "rank 16", "pickle": "safetensors"}.get(fault, "experts.63.w2")
    assert word in outputs[1].outputs[0].stop_reason
    assert tokens_of(outputs)[::2] == [s.tokens for s in good][::2]
    with pytest.raises(ValueError, match=word):
        rollout.llm.llm_engine.add_lora(request)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(directories[0], path)  # mended: no block of the failed requests may be hit
    mended = ask(rollout, request)
    assert all(o.num_cached_tokens == 0 for o in mended)
    assert tokens_of(mended) == tokens_of(ask(rollout, LoRARequest("good", 11, str(directories[0]))))


def test_a_finite_adapter_that_overflows_fails_its_requests_only(rollout: Rollout, plain: PlainModel) -> None:
    huge = {key: tensor * 1e30 for key, tensor in random_adapter(plain.model, 1).items()}
    rollout.rpc("zmrl_load_adapter", 1, huge, RANK, RANK)
    good = rollout.generate(PROMPTS)
    from zmrl.rollout.lora import adapter_request

    outputs = ask(rollout, [None, adapter_request(1), None, adapter_request(1)])
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length", "error"]
    assert "NaN" in outputs[1].outputs[0].stop_reason
    assert tokens_of(outputs)[::2] == [s.tokens for s in good][::2]


def test_a_flipped_parameter_is_named(rollout: Rollout, plain: PlainModel) -> None:
    rollout.rpc("zmrl_load_adapter", 1, random_adapter(plain.model, 1), RANK, RANK)
    base = "language_model.model.layers.2.block_sparse_moe.experts.17.w3.weight_packed"
    for name, adapter in ((base, None), (O_PROJ, "zmrl-v1"), (EXPERT, 1)):
        before, identity = rollout.rpc("zmrl_tensor_digests", adapter), rollout.rpc("zmrl_identity")
        rollout.rpc("zmrl_flip_bit", "parameter", name, 3, 1, adapter)
        after = rollout.rpc("zmrl_tensor_digests", adapter)
        assert [n for n in before if before[n] != after[n]] == [name] and before.keys() == after.keys()
        assert rollout.rpc("zmrl_identity") != identity
        rollout.rpc("zmrl_flip_bit", "parameter", name, 3, 1, adapter)
        assert rollout.rpc("zmrl_tensor_digests", adapter) == before and rollout.rpc("zmrl_identity") == identity
    with pytest.raises(KeyError, match="no live tensor"):
        rollout.rpc("zmrl_flip_bit", "parameter", "nothing", 0, 0)
    with pytest.raises(ValueError, match="no cache is called"):
        rollout.rpc("zmrl_flip_bit", "cache", "nothing", 0, 0)
