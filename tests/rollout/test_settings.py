"""What an engine refuses to start with, the layout it chooses, and the small parts that need no engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from zmrl.model.config import PRESETS
from zmrl.rollout.digests import DigestStore
from zmrl.rollout.engine import engine_args

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"dtype": "float16"}, "bfloat16 only"),
        ({"tensor_parallel_size": 2}, "parallel sizes above 1"),
        ({"lora_rank": 8}, "multiple of 16"),
        ({"kv_cache_dtype": "fp8"}, "BF16 latents"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
            "speculative",
        ),
    ],
)
def test_settings_that_cannot_be_exact_are_refused(
    checkpoint: Path, overrides: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from zmrl.rollout.plugin import register

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    register()
    with pytest.raises(ValueError, match=message):
        EngineArgs(**engine_args(checkpoint, **overrides)).create_engine_config()


def test_settings_choose_worker_scheduler_and_block_size(checkpoint: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    from zmrl.rollout.plugin import register

    register()
    config = EngineArgs(model=str(checkpoint)).create_engine_config()
    assert config.cache_config.block_size == config.cache_config.mamba_block_size == 48
    assert config.parallel_config.worker_cls == "zmrl.rollout.runner.ZmrlWorker"
    assert config.scheduler_config.scheduler_cls == "zmrl.rollout.scheduler.ZmrlScheduler"
    assert config.cache_config.mamba_cache_mode == "align" and config.cache_config.enable_prefix_caching


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named(checkpoint: Path, tmp_path: Path) -> None:
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from zmrl.rollout.plugin import register

    register()
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    tensors = load_file(damaged / "model.safetensors")
    name = "language_model.model.layers.2.block_sparse_moe.experts.7.w3.weight_scale"
    for change in ("missing", "shape", "extra"):
        changed = dict(tensors)
        if change == "missing":
            del changed[name]
        elif change == "shape":
            changed[name] = changed[name][:, :1].contiguous()
        else:
            changed[name + "_2"] = changed[name].clone()
        save_file(changed, damaged / "model.safetensors")
        with pytest.raises(ValueError, match=r"experts\.7\.w3\.weight_scale"):
            LLM(**engine_args(damaged))
        cleanup_dist_env_and_memory()


def test_vllms_own_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from zmrl.rollout.plugin import register

    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(RuntimeError, match="Unset VLLM_BATCH_INVARIANT"):
        register()


def test_a_block_row_holds_whole_states() -> None:
    from zmrl.rollout.cache import default_block_size

    assert default_block_size(PRESETS["nano"]) == 48
    for name in ("nano", "nano-b", "tiny-s", "tiny", "k31-pro"):
        config = PRESETS[name]
        linear = config.linear_attn_config
        token = len(linear.full_attn_layers) * (2 * (config.kv_lora_rank + config.qk_rope_head_dim))
        token += len(linear.full_attn_layers) * (config.index_head_dim + 4)
        state = 4 * linear.num_heads * linear.head_dim**2 + 18 * linear.projection_size
        row = token * default_block_size(config)
        assert row >= state and row % state <= 0.05 * row


def test_a_changed_vllm_is_refused() -> None:
    from zmrl.rollout.patches_vllm import PatchError, check_source

    with pytest.raises(PatchError, match="has changed"):
        check_source(engine_args, "0123456789abcdef")


def test_digests_are_bounded_ordered_and_taken_once() -> None:
    store = DigestStore(capacity=2)
    for tag in ("a", "b", "c"):
        store.begin(tag)
        for position in range(3):
            store.add(tag, position, 10 * position)
    store.add("b", 5, 1)  # a gap: the list stays short
    store.add("c", 1, 99)  # sampled again
    store.add("unknown", 0, 1)
    assert store.take(["a", "b", "c", "d"]) == {"b": [0, 10, 20], "c": [0, 99]}
    assert store.take(["b", "c"]) == {}
