"""What a recipe may say: every value is looked at, and a wrong one is one line that names the key and the remedy."""

from __future__ import annotations

from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS
from zmrl.recipe.schema import Recipe, RecipeError, RolloutRecipe

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this value, which would change the distribution on one side only."""

LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots for (config/lora.py) and that the kernels' panels of 16 rows hold."""


def check_values(recipe: Recipe) -> None:
    """Raises RecipeError for the first value that cannot be trained with. Looks at no file."""
    _check_run(recipe)
    _check_lora(recipe)
    _check_rollout(recipe.rollout)
    _check_cache(recipe)
    _check_trainer(recipe)
    _check_ranks(recipe)
    _check_fault(recipe)
    if recipe.validation.every < 0 or recipe.validation.n < 1:
        raise RecipeError("validation: every must be 0 or more and n at least 1; correct the two numbers")
    _check_temperature("validation.temperature", recipe.validation.temperature)
    if not 0 < recipe.reward.timeout_seconds < float("inf"):
        raise RecipeError(f"reward.timeout_seconds: {recipe.reward.timeout_seconds} is not a positive number; set one")
    module, colon, function = recipe.reward.function.partition(":")
    if not (module and colon and function):
        raise RecipeError(f"reward.function: {recipe.reward.function!r} is not package.module:function; correct it")


def _check_run(recipe: Recipe) -> None:
    for key, value in (("model", recipe.model), ("output_dir", recipe.output_dir)):
        if value in ("???", ""):
            raise RecipeError(f"{key} has no value; set it in the recipe or as {key}=...")
    if recipe.steps < 1:
        raise RecipeError(f"steps: {recipe.steps} is not positive; train at least one step")
    if not 0 <= recipe.seed < 2**63:
        raise RecipeError(f"seed: {recipe.seed} is outside 0..2^63-1; choose another seed")
    if recipe.resume not in ("never", "auto"):
        raise RecipeError(f"resume: {recipe.resume!r} is unknown; set never or auto")
    if recipe.restarts < 0:
        raise RecipeError(f"restarts: {recipe.restarts} is negative; set 0 to stop when a process dies")
    if recipe.on_mismatch not in ("abort", "warn"):
        raise RecipeError(f"on_mismatch: {recipe.on_mismatch!r} is unknown; set abort or warn")
    if recipe.threads < 0:
        raise RecipeError(f"threads: {recipe.threads} is negative; set 0 for one thread per core")
    if not recipe.data.val and recipe.validation.every:
        raise RecipeError("data.val: the list is empty; name a data set or set validation.every=0")
    if recipe.data.too_long not in ("refuse", "skip"):
        raise RecipeError(f"data.too_long: {recipe.data.too_long!r} is unknown; set refuse or skip")
    for key in ("train_size", "val_size"):
        if getattr(recipe.data, key) < 1:
            raise RecipeError(f"data.{key}: {getattr(recipe.data, key)} is not positive; generate at least one problem")


def _check_lora(recipe: Recipe) -> None:
    lora = recipe.lora
    for section in ("rollout", "trainer"):
        for name in ("rank", "alpha"):
            other = getattr(getattr(recipe, section), f"lora_{name}")
            here = getattr(lora, name)
            if other is not None and other != here:
                raise RecipeError(
                    f"{section}.lora_{name}={other} differs from lora.{name}={here}: both sides must compute the same "
                    f"adapter; remove {section}.lora_{name}"
                )
    if lora.rank not in LORA_RANKS:
        ranks = ", ".join(map(str, LORA_RANKS))
        raise RecipeError(f"lora.rank: {lora.rank} is not a multiple of 16 that vLLM has slots for; set one of {ranks}")
    if lora.alpha < 1:
        raise RecipeError(f"lora.alpha: {lora.alpha} is not positive: the adapter would do nothing; set it to the rank")


def _check_temperature(key: str, value: float) -> None:
    if not MIN_TEMPERATURE <= value < float("inf"):
        raise RecipeError(
            f"{key}: {value} is not a number from {MIN_TEMPERATURE} up: greedy and near-greedy samples have no "
            f"log-prob to train on, and vLLM would silently use {MIN_TEMPERATURE}; set a temperature such as 1.0"
        )


_NO_TRUNCATION = {
    "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}  # fmt: skip


def _check_rollout(rollout: RolloutRecipe) -> None:
    _check_temperature("rollout.temperature", rollout.temperature)
    for key, off in _NO_TRUNCATION.items():
        value = getattr(rollout, key)
        if value != off:
            raise RecipeError(
                f"rollout.{key}: {value} changes the distribution that samples come from, and the trainer does not "
                f"apply it, so log-probs would differ; remove the key (off is {off})"
            )
    if rollout.n < 2:
        raise RecipeError(f"rollout.n: {rollout.n} gives a group nothing to compare with; set at least 2")
    for key in ("prompts_per_step", "max_tokens", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
        if getattr(rollout, key) <= 0:
            raise RecipeError(f"rollout.{key}: {getattr(rollout, key)} is not positive; set a positive number")
    if rollout.long_prefill_token_threshold < 0:
        raise RecipeError("rollout.long_prefill_token_threshold is negative; set 0 for no limit")
    if rollout.max_model_len <= rollout.max_tokens:
        raise RecipeError(
            f"rollout.max_model_len: {rollout.max_model_len} leaves no room for a prompt beside rollout.max_tokens="
            f"{rollout.max_tokens}; raise max_model_len"
        )
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        raise RecipeError(
            f"rollout.max_num_batched_tokens: {rollout.max_num_batched_tokens} is below rollout.max_num_seqs="
            f"{rollout.max_num_seqs}; raise it, or use long_prefill_token_threshold for small chunks"
        )


def _check_cache(recipe: Recipe) -> None:
    for key, known in (("latent_format", LATENT_FORMATS), ("index_format", INDEX_FORMATS)):
        if getattr(recipe.cache, key) not in known:
            value = getattr(recipe.cache, key)
            raise RecipeError(f"cache.{key}: {value!r} is unknown; set one of {', '.join(known)}")
    if (recipe.cache.prefix_cache_retention_interval or 0) < 0:
        interval = recipe.cache.prefix_cache_retention_interval
        raise RecipeError(f"cache.prefix_cache_retention_interval: {interval} is negative; set 0, a number or null")


def _check_trainer(recipe: Recipe) -> None:
    trainer = recipe.trainer
    for key in ("lr", "eps", "clip", "clip_high"):
        if not 0 < getattr(trainer, key) < float("inf"):
            raise RecipeError(f"trainer.{key}: {getattr(trainer, key)} is no positive number; set one")
    for key in ("warmup_steps", "weight_decay", "clip_grad", "kl_coef", "save_every"):
        if not 0 <= getattr(trainer, key) < float("inf"):
            raise RecipeError(f"trainer.{key}: {getattr(trainer, key)} is no number from 0 up; 0 switches it off")
    for key in ("mini_batches", "epochs", "micro_batch_samples"):
        if getattr(trainer, key) < 1:
            raise RecipeError(f"trainer.{key}: {getattr(trainer, key)} is not positive; set at least 1")
    if len(trainer.betas) != 2 or not all(0 <= beta < 1 for beta in trainer.betas):
        raise RecipeError(f"trainer.betas: {list(trainer.betas)} are not two numbers in [0, 1); set [0.9, 0.95]")
    if recipe.rollout.prompts_per_step % trainer.mini_batches:
        raise RecipeError(
            f"trainer.mini_batches: {trainer.mini_batches} does not divide rollout.prompts_per_step="
            f"{recipe.rollout.prompts_per_step}: a group would be cut; choose a divisor"
        )


def _check_ranks(recipe: Recipe) -> None:
    """What does not depend on the model; `Layout.check` has the rest."""
    trainer, rollout = recipe.trainer, recipe.rollout
    for key, size in (
        ("trainer.data_parallel", trainer.data_parallel),
        ("trainer.tensor_parallel", trainer.tensor_parallel),
        ("rollout.tensor_parallel", rollout.tensor_parallel),
        ("rollout.context_parallel", rollout.context_parallel),
    ):
        if size not in (1, 2, 4, 8):
            raise RecipeError(f"{key}: {size} does not divide the 8 slices of sums; set 1, 2, 4 or 8")
    sizes = sorted({1, trainer.tensor_parallel, recipe.trainer_ranks})
    if trainer.expert_parallel not in sizes:
        *fewer, most = map(str, sizes)
        raise RecipeError(
            f"trainer.expert_parallel: {trainer.expert_parallel} is not the number of ranks of a copy of the model "
            f"(trainer.tensor_parallel={trainer.tensor_parallel}), nor of all copies (trainer.data_parallel="
            f"{trainer.data_parallel} of them); set {', '.join(fewer)}{' or ' if fewer else ''}{most}"
        )
    if recipe.trainer_ranks % rollout.tensor_parallel:
        raise RecipeError(
            f"rollout.tensor_parallel: verl places the {rollout.tensor_parallel} ranks of a server beside as many of "
            f"the trainer, which has {recipe.trainer_ranks}; set a divisor of that, or give the trainer more ranks"
        )
    if rollout.tensor_parallel > 1 and recipe.debug.torch_linear_in_rollout:
        raise RecipeError(
            "debug.torch_linear_in_rollout: it runs on one rank only; set rollout.tensor_parallel="
            f"{rollout.tensor_parallel} to 1"
        )
    samples = recipe.samples_per_step // trainer.mini_batches
    if samples % trainer.data_parallel:
        raise RecipeError(
            f"trainer.data_parallel: {samples} samples of a mini-batch do not divide among {trainer.data_parallel} "
            "ranks; change rollout.prompts_per_step or rollout.n"
        )


def _check_fault(recipe: Recipe) -> None:
    fault = recipe.debug.fault
    if fault is None:
        return
    if fault.side not in ("rollout", "trainer"):
        raise RecipeError(f"debug.fault.side: {fault.side!r} is unknown; set rollout or trainer")
    if fault.what not in ("parameter", "cache", "logits"):
        raise RecipeError(f"debug.fault.what: {fault.what!r} is unknown; set parameter, cache or logits")
    if not 1 <= fault.step <= recipe.steps:
        raise RecipeError(
            f"debug.fault.step: {fault.step} is not among the steps 1..{recipe.steps}; choose one of them"
        )
    if fault.what == "parameter" and not fault.tensor:
        raise RecipeError("debug.fault.tensor is empty; name the parameter whose bit is to be flipped")
    if fault.element < 0 or not 0 <= fault.bit < 64:
        raise RecipeError("debug.fault: element must be 0 or more and bit within 0..63; correct the two numbers")
