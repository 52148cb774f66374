"""What an engine that serves our model must be configured like, whoever starts it (LLM, `vllm serve`, verl).

vLLM calls `KimiK31Settings` while it builds its configuration (config/vllm.py:2629), before its CPU platform fills in
defaults of its own.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.models.config import VerifyAndUpdateConfig

from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import CacheLayout, plan
from zmrl.rollout.engine import INDEX_FORMAT, LATENT_FORMAT, OWN_GROUP, TORCH_LINEAR
from zmrl.rollout.ranks import layout_of, prepare_environment

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER = "zmrl.rollout.runner.ZmrlWorker"
WORKER_EXTENSION = "zmrl.rollout.worker.ZmrlWorkerMethods"
SCHEDULER = "zmrl.rollout.scheduler.ZmrlScheduler"
TOKENIZER_MODE = "zmrl"
"""What vLLM calls our way from messages to token ids (`zmrl.serving.chat_renderer`)."""


def leave_group(vllm_config: VllmConfig) -> None:
    """Called in the engine's processes. Ctrl-C goes to a whole process group: the front end gets it, and lets running
    requests end, for which the engine must live."""
    if vllm_config.additional_config.get(OWN_GROUP):
        os.setpgid(0, 0)


class KimiK31Settings(VerifyAndUpdateConfig):
    """Installs our worker and scheduler and refuses what would change bits or cannot work."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """ValueError names the setting and the remedy."""
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
        if model.dtype != torch.bfloat16:
            raise ValueError(f"dtype {model.dtype}: the model computes in bfloat16 only; pass dtype='bfloat16'")
        if model.quantization is not None:
            raise ValueError(f"quantization={model.quantization!r}: the checkpoint says itself what is MXFP4; drop it")
        if parallel.pipeline_parallel_size > 1:
            raise ValueError("pipeline parallel sizes above 1 are not implemented; use tensor parallelism")
        if parallel.tensor_parallel_size > 1 and vllm_config.additional_config.get(TORCH_LINEAR):
            raise ValueError(f"{TORCH_LINEAR} runs on one rank only; set tensor_parallel_size to 1")
        if vllm_config.speculative_config is not None:
            raise ValueError("speculative decoding is not implemented for this model yet; drop speculative_config")
        if cache.cache_dtype not in ("auto", "bfloat16"):
            raise ValueError(
                f"kv_cache_dtype={cache.cache_dtype!r}: the cache has two formats, chosen by additional_config "
                f"{LATENT_FORMAT!r} and {INDEX_FORMAT!r}; leave it at 'auto'"
            )
        if vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "kv_transfer_config: blocks of another engine may have another format; not implemented, drop it"
            )
        if model.tokenizer_mode not in ("auto", TOKENIZER_MODE):
            raise ValueError(
                f"tokenizer_mode={model.tokenizer_mode!r}: chat would be rendered as text, without control tokens; "
                "leave it at 'auto'"
            )
        model.tokenizer_mode = TOKENIZER_MODE
        lora = vllm_config.lora_config
        if lora is not None:
            if lora.target_modules is not None:
                raise ValueError("lora target_modules: an adapter always covers all adapted modules; drop the setting")
            if lora.max_lora_rank % 16:
                raise ValueError(f"max_lora_rank={lora.max_lora_rank}: adapters need a rank that is a multiple of 16")
        model.enforce_eager = True
        layout = cls._layout(vllm_config)
        if parallel.decode_context_parallel_size > 1:
            # vLLM wants fewer KV heads than tensor ranks, which share their positions. Latents are one head for all.
            model.model_arch_config.total_num_kv_heads = 1
        prepare_environment(parallel)
        cache.block_size = layout.block_size
        cache.user_specified_block_size = True  # else vLLM's CPU platform sets 128 (platforms/cpu.py:262)
        layout.check_retention(cache.prefix_cache_retention_interval)
        pool = cache.kv_cache_memory_bytes
        if cache.num_gpu_blocks_override is not None:
            pool = cache.num_gpu_blocks_override * layout.row_bytes
        if pool is not None:
            layout.check_pool(pool, model.max_model_len, bool(cache.enable_prefix_caching))
        if parallel.worker_cls == "auto":
            parallel.worker_cls = WORKER
        if not parallel.worker_extension_cls:
            parallel.worker_extension_cls = WORKER_EXTENSION
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SCHEDULER

    @staticmethod
    def _layout(vllm_config: VllmConfig) -> CacheLayout:
        """With the block size that was asked for, or the planner's. An error of layout, cache or format says what
        cannot be."""
        cache, formats = vllm_config.cache_config, cache_format(vllm_config)
        config = vllm_config.model_config.hf_config.to_k3_config()
        parallel = vllm_config.parallel_config
        layout_of(vllm_config).check(config)
        ranks = parallel.tensor_parallel_size, parallel.decode_context_parallel_size
        if cache.user_specified_block_size:
            return CacheLayout(config, formats, cache.block_size, *ranks)
        return plan(config, formats, *ranks)


def cache_format(vllm_config: VllmConfig) -> CacheFormat:
    """The formats of this engine's cache: additional_config["latent_format"] and ["index_format"], or the defaults."""
    extra: Any = vllm_config.additional_config
    given = {"latent": extra.get(LATENT_FORMAT), "index": extra.get(INDEX_FORMAT)}
    return CacheFormat(**{kind: name for kind, name in given.items() if name is not None})


def lora_alpha(vllm_config: VllmConfig) -> float:
    """alpha of every adapter of this engine: additional_config["lora_alpha"], or the rank (scale 1)."""
    extra: Any = vllm_config.additional_config
    assert vllm_config.lora_config is not None
    return float(extra.get("lora_alpha", vllm_config.lora_config.max_lora_rank))
