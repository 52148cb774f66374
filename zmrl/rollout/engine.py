"""The settings of an engine, in one place: tests, `zmrl.parity` and the verl replica start from these."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.parallel.layout import HEADS

TELEMETRY_OFF = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


OWN_GROUP = "own_process_group"
"""`additional_config` key: the engine's processes leave the process group of the terminal."""
TORCH_LINEAR = "torch_linear"
"""`additional_config` key: a rollout that is not the policy (`zmrl.rollout.torch_linear`)."""
LATENT_FORMAT, INDEX_FORMAT = "latent_format", "index_format"
"""`additional_config` keys: the formats of the cache (`zmrl.model.cache_format`)."""
PREFILL = "prefill"
"""`additional_config` key: how ranks share out a prefill, one of `zmrl.parallel.layout.PREFILLS`."""


def quiet_environment() -> None:
    """Turns off what vLLM and the hub would send. Call it before vLLM is imported; it overrides nothing."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def engine_args(
    model: str | Path,
    *,
    lora_rank: int | None = None,
    lora_alpha: float | None = None,
    cache_format: CacheFormat = DEFAULT_CACHE_FORMAT,
    prefill: str = HEADS,
    **overrides: Any,
) -> dict[str, Any]:
    """Keyword arguments for `vllm.LLM` or `EngineArgs`. `lora_rank` turns adapters on; alpha is the rank if not given.

    The block size is chosen by `zmrl.rollout.settings`, as are worker, scheduler and worker extension.
    """
    extra: dict[str, Any] = {LATENT_FORMAT: cache_format.latent, INDEX_FORMAT: cache_format.index, PREFILL: prefill}
    args: dict[str, Any] = {
        "model": str(model),
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 512 << 20,
        "enable_prefix_caching": True,
        "prefix_cache_retention_interval": None,  # keep KDA states wherever a step ends with a block (docs/cache.md)
        "enable_chunked_prefill": True,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "seed": 0,
        "generation_config": "vllm",
    }
    if lora_rank is not None:
        args |= {"enable_lora": True, "max_lora_rank": lora_rank, "max_loras": 1, "max_cpu_loras": 2}
        extra["lora_alpha"] = float(lora_rank if lora_alpha is None else lora_alpha)
    return args | {"additional_config": extra} | overrides
