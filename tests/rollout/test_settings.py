"""What an engine refuses to start with, the layout it chooses, and the small parts that need no engine."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.model.cache_layout import CacheLayout, plan
from zmrl.model.config import PRESETS, K3Config
from zmrl.rollout.digests import DigestStore
from zmrl.rollout.engine import engine_args

DCP2 = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"dtype": "float16"}, "bfloat16 only"),
        ({"pipeline_parallel_size": 2}, "use tensor parallelism"),
        ({"tensor_parallel_size": 3}, "tensor parallel size 3: .* use 1, 2, 4 or 8"),
        ({"tensor_parallel_size": 8}, "8: 4 MLA heads do not divide evenly; use 1, 2 or 4"),
        (DCP2 | {"cp_kv_cache_interleave_size": 16}, "interleave 16: .* use 1"),
        ({"prefill": "tokens"}, "prefill by tokens: one rank .* use heads, or more tensor ranks"),
        ({"tensor_parallel_size": 2, "additional_config": {"torch_linear": True}}, "torch_linear runs on one rank"),
        ({"lora_rank": 8}, "multiple of 16"),
        ({"kv_cache_dtype": "fp8"}, "latent_format"),
        ({"block_size": 48}, "block size 48 is no power of two; use 32 or 64"),
        (
            {"prefix_cache_retention_interval": 96},
            "interval 96 is no positive multiple of the block size 64 .* use 64, or 0",
        ),
        ({"cache_format": CacheFormat("fp4")}, "latent format 'fp4' is unknown; choose bf16, fp8, nvfp4"),
        ({"kv_cache_memory_bytes": 1 << 20}, r"has 41 rows of 25088 bytes .* one request of 32768 tokens needs 519"),
        ({"num_gpu_blocks_override": 20}, "has 20 rows"),
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
    assert config.cache_config.block_size == config.cache_config.mamba_block_size == 64
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


def vllm_groups(layout: CacheLayout) -> tuple[list[int], int]:
    """(KDA layers of each group of states, bytes of a row) by vLLM's planner, from specs as our caches give them."""
    from vllm.v1.core.kv_cache_utils import _get_kv_cache_bytes_per_block, _get_packed_kv_cache_groups
    from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    config, formats = layout.config, layout.cache_format
    width = config.linear_attn_config.projection_size // layout.tensor_parallel
    shapes = ((3, 3 * width), (width, config.linear_attn_config.head_dim))
    specs: dict[str, Any] = {}
    for layer in range(config.num_hidden_layers):
        if config.is_full_attention(layer):
            for kind, size in (("latent", formats.latent_bytes(config)), ("index", formats.index_bytes(config))):
                if size:
                    specs[f"layers.{layer}.{kind}"] = MLAAttentionSpec(
                        block_size=layout.block_size, num_kv_heads=1, head_size=size, dtype=torch.uint8
                    )
        else:
            specs[f"layers.{layer}.state"] = MambaSpec(
                shapes=shapes, dtypes=(torch.bfloat16, torch.float32), block_size=layout.block_size
            )
    cache = SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC)
    groups = _get_packed_kv_cache_groups(SimpleNamespace(cache_config=cache, speculative_config=None), specs)
    assert groups is not None
    states = [len(group.layer_names) for group in groups if group.layer_names[0].endswith("state")]
    return states, _get_kv_cache_bytes_per_block(groups, KVCacheLayout.BLHNC)


NO_INDEXER = PRESETS["k3"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "config", [PRESETS[name] for name in ("nano", "nano-b", "tiny")] + [NO_INDEXER], ids=lambda c: str(c.hidden_size)
)
def test_block_rows_are_those_that_vllm_packs(config: K3Config, ranks: int) -> None:
    for formats in CACHE_FORMATS:
        chosen = plan(config, formats, ranks)
        for size in {16, 64, 256, 2048, chosen.block_size}:
            layout = CacheLayout(config, formats, size, ranks)
            groups, row = vllm_groups(layout)
            assert sorted(groups) == sorted(layout.groups), (formats, size)
            assert row == layout.row_bytes


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
