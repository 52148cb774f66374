"""Recipe -> verl's configuration. Reads YAML only: imports neither verl nor Ray, so that --dry-run is quick."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from zmrl.model.config import get_config
from zmrl.recipe import Recipe
from zmrl.rollout.engine import INDEX_FORMAT, LATENT_FORMAT, PREFILL
from zmrl.trainer.resume import ResumePoint

CONF = Path(__file__).parent / "conf"


def compose_config(recipe: Recipe, resume: ResumePoint | None = None) -> DictConfig:
    """verl's complete configuration for `recipe`, with the recipe itself under the key `zmrl`.

    resume: where the run goes on; None: from the base checkpoint.
    """
    GlobalHydra.instance().clear()
    overrides = [f"hydra.searchpath=[file://{_verl_conf()}]"]
    with initialize_config_dir(str(CONF), version_base=None):
        config = compose("zmrl_trainer", overrides=overrides)
    OmegaConf.set_struct(config, False)
    merged = OmegaConf.merge(config, _settings(recipe), _resume(resume) if resume else {})
    assert isinstance(merged, DictConfig)
    OmegaConf.set_struct(merged, True)
    return merged


def worker_environment(recipe: Recipe) -> dict[str, str]:
    """Environment variables of every process of a run, in place of the user's: a run depends on them."""
    threads = str(recipe.threads or max(1, len(os.sched_getaffinity(0)) // recipe.trainer_ranks))
    return {
        "VERL_USE_EXTERNAL_MODULES": "zmrl.trainer.verl_plugin",
        "VERL_PLATFORM": "cpu",
        # Ray would set one thread per process; trainer and rollout take turns, so the ranks of each may use all cores
        # together, and idle threads must not spin.
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Else vLLM's CPU platform makes "mp" of the executor "uni" (platforms/cpu.py:333), to set OMP variables that
        # are set here. The engine of a server is a process of its own all the same.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Loopback only. The first makes ray.util.get_node_ip_address() answer 127.0.0.1 (ray/_private/services.py:815):
        # verl and TransferQueue, which unpickles what it receives, bind to that. Ray's own gRPC ports stay open.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
        # No telemetry and no look-ups.
        "DO_NOT_TRACK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "WANDB_ERROR_REPORTING": "false",
    }


def _verl_conf() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError("verl is not installed; run `make setup`")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


def _settings(recipe: Recipe) -> dict[str, Any]:
    output_dir = str(Path(recipe.output_dir).absolute())
    zmrl = recipe.to_dict() | {"output_dir": output_dir}
    return {
        "zmrl": zmrl,
        "actor_rollout_ref": {
            "model": _model(recipe),
            "actor": _actor(recipe),
            "ref": {"log_prob_micro_batch_size_per_gpu": recipe.trainer.micro_batch_samples},
            "rollout": _rollout(recipe),
        },
        "data": _data(recipe),
        "trainer": {
            "total_training_steps": recipe.steps,
            "test_freq": recipe.validation.every or -1,
            "val_before_train": recipe.validation.before_training and recipe.validation.every > 0,
            "save_freq": -1,  # `ZmrlTrainer` saves, whole or not at all, after the step's line is written
            "n_gpus_per_node": recipe.trainer_ranks,  # logical GPUs, see platform_cpu.py
            "logger": ["wandb"] if recipe.wandb else [],
            "experiment_name": Path(output_dir).name,
        },
        "ray_kwargs": {
            "ray_init": {
                "num_gpus": recipe.trainer_ranks,
                "log_to_driver": recipe.debug.verbose,
                "runtime_env": {"env_vars": worker_environment(recipe)},
            },
        },
    }


def _resume(resume: ResumePoint) -> dict[str, Any]:
    settings: dict[str, Any] = {"val_before_train": resume.validate}
    if resume.checkpoint is not None:
        settings |= {"resume_mode": "resume_path", "resume_from_path": str(resume.checkpoint.absolute())}
    return {"trainer": settings}


def _model(recipe: Recipe) -> dict[str, Any]:
    path = str(Path(recipe.model).absolute()) if Path(recipe.model).exists() else recipe.model
    return {
        "path": path,
        "tokenizer_path": path,
        "lora_rank": recipe.lora.rank,
        "lora_alpha": recipe.lora.alpha,
        "target_modules": "all-linear",  # the host knows its modules; verl only hands this on
    }


def _actor(recipe: Recipe) -> dict[str, Any]:
    trainer = recipe.trainer
    return {
        "ppo_mini_batch_size": recipe.rollout.prompts_per_step // trainer.mini_batches,
        "ppo_micro_batch_size_per_gpu": trainer.micro_batch_samples,
        "ppo_epochs": trainer.epochs,
        "data_loader_seed": recipe.seed % 2**31,
        "clip_ratio": trainer.clip,
        "clip_ratio_low": trainer.clip,
        "clip_ratio_high": trainer.clip_high,
        "use_kl_loss": trainer.kl_coef > 0,
        "kl_loss_coef": trainer.kl_coef,
        "optim": {
            "lr": trainer.lr,
            "betas": list(trainer.betas),
            "weight_decay": trainer.weight_decay,
            "clip_grad": trainer.clip_grad,
            "lr_warmup_steps": trainer.warmup_steps,
        },
        "zmrl": {
            "adam_eps": trainer.eps,
            "seed": recipe.seed % 2**31,
            "latent_format": recipe.cache.latent_format,
            "index_format": recipe.cache.index_format,
            "updates_per_step": trainer.mini_batches * trainer.epochs,
            "data_parallel": trainer.data_parallel,
            "tensor_parallel": trainer.tensor_parallel,
            "expert_parallel": trainer.expert_parallel,
        },
    }


def _rollout(recipe: Recipe) -> dict[str, Any]:
    rollout = recipe.rollout
    vllm: dict[str, Any] = {
        # One rank computes in the engine's own process: one process less to start.
        "distributed_executor_backend": "uni" if rollout.tensor_parallel == 1 else "mp",
        "kv_cache_memory_bytes": rollout.kv_cache_bytes,
        "additional_config": {
            "lora_alpha": recipe.lora.alpha,
            "torch_linear": recipe.debug.torch_linear_in_rollout,
            LATENT_FORMAT: recipe.cache.latent_format,
            INDEX_FORMAT: recipe.cache.index_format,
            PREFILL: rollout.prefill,
        },
        "max_cpu_loras": 2,
        "decode_context_parallel_size": rollout.context_parallel,
        # As text: verl leaves None out, and vLLM's own default is 0 (vllm_rollout/utils.py:499).
        "prefix_cache_retention_interval": str(recipe.cache.prefix_cache_retention_interval),
    }
    if rollout.long_prefill_token_threshold:
        vllm["long_prefill_token_threshold"] = rollout.long_prefill_token_threshold
    return {
        "n": rollout.n,
        "temperature": rollout.temperature,
        "top_p": 1.0,
        "top_k": -1,
        "seed": recipe.seed % 2**31,
        "tensor_model_parallel_size": rollout.tensor_parallel,
        "max_model_len": rollout.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "log_prob_micro_batch_size_per_gpu": recipe.trainer.micro_batch_samples,
        "val_kwargs": {
            "n": recipe.validation.n + recipe.validation.greedy,  # the last one is greedy, see agent_loop.py
            "temperature": recipe.validation.temperature,
        },
        "engine_kwargs": {"vllm": vllm},
        "checkpoint_engine": {"update_weights_bucket_megabytes": _bucket_megabytes(recipe)},
    }


def _bucket_megabytes(recipe: Recipe) -> int:
    """Size of verl's transfer buffer: shared memory must hold the largest tensor, one projection of all experts."""
    config = get_config(recipe.model)
    widest = max(config.expert_hidden_size, config.moe_intermediate_size)
    largest = 2 * config.num_experts * recipe.lora.rank * widest
    return max(16, -(-largest // 2**20))


def _data(recipe: Recipe) -> dict[str, Any]:
    return {
        "train_files": [f"train:{recipe.data.train}"],
        "val_files": [f"val:{name}" for name in recipe.data.val] or ["val:builtin"],
        "train_batch_size": recipe.rollout.prompts_per_step,
        "max_prompt_length": recipe.max_prompt_tokens,
        "max_response_length": recipe.rollout.max_tokens,
        "shuffle": recipe.data.shuffle,
        "seed": recipe.seed % 2**31,
        "zmrl": {
            "train_size": recipe.data.train_size,
            "val_size": recipe.data.val_size,
            "too_long": recipe.data.too_long,
            "seed": recipe.seed,
        },
    }
