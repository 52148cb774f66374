"""What `--dry-run` prints: shapes, parameter counts and memory of a run, by arithmetic alone. Needs no torch."""

from __future__ import annotations

import math

from omegaconf import DictConfig

from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import CacheLayout, plan
from zmrl.model.config import K3Config, get_config
from zmrl.model.names import LoraSpec, tensor_specs
from zmrl.recipe import Recipe

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}

LIVE_BYTES = 2
"""A live adapter parameter is BF16, on each side."""

TRAINED_BYTES = 4 + 4 + 4 + 4
"""Per adapter parameter on the trainer: FP32 master, gradient, and Adam's two moments."""


def summary(recipe: Recipe, config: DictConfig) -> str:
    """Lines for a person. `config` is verl's configuration, composed from the recipe."""
    model = get_config(recipe.model)
    lora = LoraSpec(recipe.lora.rank, recipe.lora.alpha)
    base_bytes = tensors = 0
    for _, shape, dtype in tensor_specs(model):
        base_bytes += math.prod(shape) * _BYTES[dtype]
        tensors += 1
    adapter = lora.parameters(model)
    rollout, layout = recipe.rollout, cache_layout(recipe, model)
    rows = layout.request_rows(rollout.max_model_len, rollout.enable_prefix_caching)
    cached = rollout.max_num_seqs * rows * layout.row_bytes
    actor = config.actor_rollout_ref.actor
    lines = [
        f"model     {recipe.model}: {model.num_hidden_layers} layers "
        f"({len(model.linear_attn_config.kda_layers)} KDA, {len(model.linear_attn_config.full_attn_layers)} MLA), "
        f"hidden {model.hidden_size}, {model.num_experts} experts of which {model.num_experts_per_token} active, "
        f"vocabulary {model.vocab_size}",
        f"base      {_count(model.total_parameters())} parameters, {_count(model.active_parameters())} active, "
        f"{tensors:,} tensors, {_size(base_bytes)} (experts {model.expert_format.upper()})",
        f"LoRA      {_count(adapter)} parameters, rank {lora.rank}, alpha {lora.alpha}, "
        f"{sum(1 for _ in lora.tensor_specs(model)):,} tensors",
        *_shapes(model, lora),
        f"step      {rollout.prompts_per_step} problems x {rollout.n} samples = {recipe.samples_per_step} samples, "
        f"{actor.ppo_epochs * recipe.trainer.mini_batches} updates of {actor.ppo_mini_batch_size * rollout.n} samples, "
        f"{recipe.trainer.micro_batch_samples} samples a micro-batch",
        f"context   {rollout.max_model_len} tokens: prompt up to {recipe.max_prompt_tokens}, response up to "
        f"{rollout.max_tokens}",
        f"memory    trainer: base {_size(base_bytes)}, adapter and its optimizer "
        f"{_size(adapter * (LIVE_BYTES + TRAINED_BYTES))}",
        f"          rollout: base {_size(base_bytes)}, adapter {_size(2 * adapter * LIVE_BYTES)} (slot and copy), "
        f"cache {_size(rollout.kv_cache_bytes)}",
        f"          cache: {layout.token_bytes:,} bytes a token ({layout.cache_format}), "
        f"{sum(layout.groups) * layout.state_bytes:,} bytes of states a sequence; blocks of {layout.block_size} tokens",
        f"          in rows of {layout.row_bytes:,} bytes; {rollout.max_num_seqs} sequences of {rollout.max_model_len} "
        f"tokens need {_size(cached)}"
        + ("" if cached <= rollout.kv_cache_bytes else ": rollout.kv_cache_bytes is less, requests will wait"),
        f"          sync: {_size(adapter * LIVE_BYTES)} a step",
    ]
    return "\n".join(lines)


def cache_layout(recipe: Recipe, model: K3Config) -> CacheLayout:
    """The block rows of a rollout rank. FormatError if the model's sizes do not allow the recipe's formats."""
    ranks = recipe.rollout.tensor_parallel, recipe.rollout.context_parallel
    return plan(model, CacheFormat(recipe.cache.latent_format, recipe.cache.index_format), *ranks)


def _shapes(model: K3Config, lora: LoraSpec) -> list[str]:
    """One line per kind of tensor and kind of layer: the shape of a stacked expert stands for all of them."""
    from zmrl.model.names import expert_projections, kda_projections, mla_projections

    linear = model.linear_attn_config
    kinds = (
        (f"KDA x {len(linear.kda_layers)}", kda_projections(model)),
        (f"MLA x {len(linear.full_attn_layers)}", mla_projections(model)),
        (f"expert x {model.num_experts}", expert_projections(model)),
    )
    lines = []
    for kind, projections in kinds:
        shapes = ", ".join(f"{name} [{out}, {width}]" for name, (out, width) in projections.items())
        lines.append(f"          {kind}: {shapes}")
    lines.append(f"          each with A [{lora.rank}, in] and B [out, {lora.rank}]")
    return lines


def _count(value: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if value >= unit:
            return f"{value:,} ({value / unit:.2f}{name})"
    return f"{value:,}"


def _size(value: float) -> str:
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB")):
        if value >= unit:
            return f"{value / unit:.2f} {name}"
    return f"{value / 1e3:.1f} kB"
