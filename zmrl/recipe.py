"""The recipe: what a training run is, in one YAML file. Typed, checked before anything starts or is written.

`load_recipe` reads a file and `key=value` overrides. Everything that is wrong with a recipe is a `RecipeError` of one
line that names the key and says what to change. Needs neither torch nor verl.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a lower temperature to this value, which would change the distribution on one side only."""

LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has slots for (config/lora.py) and that the kernels' panels of 16 rows hold."""


class RecipeError(ValueError):
    """A recipe that cannot be run: the message names the key and the remedy. Exit code 2."""


@dataclass
class LoraRecipe:
    """The adapter that is trained: one rank and one alpha, used by trainer and rollout alike."""

    rank: int = 32
    """Rank r of A [r, in] and B [out, r]; a multiple of 16, see LORA_RANKS."""
    alpha: int = 32
    """The adapter's output is scaled by alpha / rank."""


@dataclass
class DataRecipe:
    """What is trained on and what is validated on."""

    train: str = "builtin"
    """`builtin` (generated problems), a local .jsonl or .parquet file, or a data set's name on the hub."""
    val: list[str] = field(default_factory=lambda: ["builtin"])
    """Validation sets, each as `train`; `builtin` is the held-out split."""
    train_size: int = 8192
    """Number of built-in training problems to generate."""
    val_size: int = 64
    """Number of built-in validation problems to generate."""
    shuffle: bool = False
    """Shuffle the training problems by the run's seed; otherwise data-set order."""


@dataclass
class RolloutRecipe:
    """Sampling, and the size of the rollout server."""

    n: int = 8
    """Samples per problem: one GRPO group."""
    prompts_per_step: int = 16
    """Problems per training step."""
    temperature: float = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    max_tokens: int = 48
    """Longest response."""
    max_model_len: int = 1024
    """Longest prompt plus response, in tokens."""
    max_num_seqs: int = 64
    """Requests that are decoded at the same time."""
    max_num_batched_tokens: int = 2048
    """Tokens per engine step; a longer prefill is cut into chunks."""
    enable_prefix_caching: bool = True
    """Reuse cached blocks of equal prefixes (keyed by adapter version)."""
    kv_cache_bytes: int = 256 << 20
    """Size of the paged cache in bytes."""
    long_prefill_token_threshold: int = 0
    """Largest chunk of a prefill in tokens; 0 leaves it to max_num_batched_tokens."""
    top_p: float = 1.0
    """Only 1: truncation changes the distribution, and the trainer does not apply it."""
    top_k: int = -1
    """Only -1 (off), for the same reason."""
    min_p: float = 0.0
    """Only 0 (off), for the same reason."""
    repetition_penalty: float = 1.0
    """Only 1 (off), for the same reason."""
    presence_penalty: float = 0.0
    """Only 0 (off), for the same reason."""
    frequency_penalty: float = 0.0
    """Only 0 (off), for the same reason."""
    lora_rank: int | None = None
    """Leave it out. There is one rank, `lora.rank`; another value here is refused."""
    lora_alpha: int | None = None
    """Leave it out. There is one alpha, `lora.alpha`; another value here is refused."""


@dataclass
class TrainerRecipe:
    """Loss and optimizer."""

    lr: float = 1e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 5
    """Optimizer steps of linear warm-up."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's betas."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """AdamW's weight decay."""
    clip_grad: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    mini_batches: int = 1
    """Optimizer steps per pass over a step's samples."""
    epochs: int = 1
    """Passes over a step's samples."""
    clip: float = 0.2
    """PPO's clip range of the probability ratio, below 1."""
    clip_high: float = 0.2
    """PPO's clip range of the probability ratio, above 1."""
    kl_coef: float = 0.0
    """Weight of the KL loss to the base model (adapter off); 0 leaves the reference pass out."""
    micro_batch_samples: int = 16
    """Samples per forward and backward pass; changes memory and time, never a bit."""
    save_every: int = 0
    """Save a checkpoint every so many steps, and at the last; 0 saves none."""
    lora_rank: int | None = None
    """Leave it out. There is one rank, `lora.rank`; another value here is refused."""
    lora_alpha: int | None = None
    """Leave it out. There is one alpha, `lora.alpha`; another value here is refused."""


@dataclass
class ValidationRecipe:
    """When and how to validate: mean@n of graded samples."""

    every: int = 25
    """Validate every so many steps, and after the last; 0 never validates."""
    n: int = 4
    """Samples per problem."""
    temperature: float = 1.0
    """Sampling temperature of validation."""
    before_training: bool = True
    """Validate the base model first."""


@dataclass
class RewardRecipe:
    """How a response is graded."""

    function: str = "zmrl.trainer.rewards:aime_reward"
    """`package.module:function`, called as f(response: str, answer: str) -> float; must be finite."""


@dataclass
class FaultRecipe:
    """One flipped bit, to see that the checker notices: a parameter must end VOID, cache or logits DIFFERENT."""

    step: int = 1
    """Training step in which the bit is flipped, counted from 1."""
    side: str = "rollout"
    """`rollout` or `trainer`."""
    what: str = "parameter"
    """`parameter`, `cache` or `logits`."""
    tensor: str = ""
    """Name of the parameter, or of the cache; may be empty for `logits`."""
    element: int = 0
    """Flat index of the element."""
    bit: int = 0
    """Bit of the element, 0 = least significant."""


@dataclass
class DebugRecipe:
    """For tests and for looking inside."""

    fault: FaultRecipe | None = None
    """Flip one bit; none by default."""
    verbose: bool = False
    """Show the log lines of all processes, not only one line a step."""


@dataclass
class Recipe:
    """A training run."""

    model: str = "???"
    """Directory of the base checkpoint, or the name of an embedded one (`nano`); with --dry-run also of a preset."""
    steps: int = 100
    """Training steps."""
    seed: int = 1
    """Seed of the run: every sample's seed is derived from it."""
    output_dir: str = "???"
    """Folder for the run's files; must be empty or absent."""
    resume: str = "never"
    """`never`: start from the base checkpoint. (Resuming is not implemented yet.)"""
    on_mismatch: str = "abort"
    """`abort`: stop before the update of a step that is not EQUAL. `warn`: report and go on; the exit code tells."""
    threads: int = 0
    """Threads per process; 0 takes one per core. Never changes a bit."""
    wandb: bool = True
    """Log to Weights & Biases; offline when there is no key."""
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    rollout: RolloutRecipe = field(default_factory=RolloutRecipe)
    trainer: TrainerRecipe = field(default_factory=TrainerRecipe)
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    reward: RewardRecipe = field(default_factory=RewardRecipe)
    debug: DebugRecipe = field(default_factory=DebugRecipe)

    @property
    def samples_per_step(self) -> int:
        """Real samples that a step must compare: problems x samples."""
        return self.rollout.prompts_per_step * self.rollout.n

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole response."""
        return self.rollout.max_model_len - self.rollout.max_tokens

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe, ready for JSON."""
        out = OmegaConf.to_container(OmegaConf.structured(self))
        assert isinstance(out, dict)
        return {str(key): value for key, value in out.items()}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe file at `path`, apply `key=value` overrides, check every value.

    Raises RecipeError for an unreadable file, an unknown key, a wrong type or a value that cannot be trained with.
    Looks at no other file: see `check_output_dir` and `zmrl.train`.
    """
    for override in overrides:
        if "=" not in override:
            raise RecipeError(f"override {override!r} is not key=value; write for example steps=10")
    try:
        content = OmegaConf.load(path)
        if not isinstance(content, DictConfig):
            raise RecipeError(f"recipe {path}: expected keys and values at the top level; see recipes/aime_lora.yaml")
        content = OmegaConf.merge(content, OmegaConf.from_dotlist(list(overrides)))
        val = OmegaConf.select(content, "data.val")
        if isinstance(val, str):  # one data set may be written without brackets
            OmegaConf.update(content, "data.val", [val])
        merged = OmegaConf.merge(OmegaConf.structured(Recipe), content)
        recipe = OmegaConf.to_object(merged)
    except OSError as error:
        raise RecipeError(f"recipe {path}: {error.strerror or error}; give the path of a recipe file") from None
    except YAMLError as error:
        raise RecipeError(f"recipe {path} is not YAML: {' '.join(str(error).split())}; correct the file") from None
    except OmegaConfBaseException as error:
        raise RecipeError(_explain(path, error)) from None
    assert isinstance(recipe, Recipe)
    _check_values(recipe)
    return recipe


def check_output_dir(recipe: Recipe) -> None:
    """Refuse a used output folder: a fresh run would mix with, or train on, what an older run left there."""
    folder = Path(recipe.output_dir)
    if folder.exists() and not folder.is_dir():
        raise RecipeError(f"output_dir: {folder} is a file; choose another folder")
    if folder.exists() and any(folder.iterdir()):
        raise RecipeError(f"output_dir: {folder} is not empty; choose another folder or remove it")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise RecipeError(f"output_dir: {folder} cannot be made, {parent} is not a writable folder; choose another")


def _explain(path: str | Path, error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    key = getattr(error, "full_key", None)
    if "not in" in first and key:
        return f"recipe {path}: unknown key {key}; remove it or correct its spelling"
    if "Missing mandatory value" in first or "MISSING" in type(error).__name__.upper():
        return f"recipe {path}: {key} has no value; set it, for example {key}=..."
    return f"recipe {path}: {f'{key}: ' if key else ''}{first}; give a value of the right type"


def _check_values(recipe: Recipe) -> None:
    _check_run(recipe)
    _check_lora(recipe)
    _check_rollout(recipe.rollout)
    _check_trainer(recipe)
    _check_fault(recipe)
    if recipe.validation.every < 0 or recipe.validation.n < 1:
        raise RecipeError("validation: every must be 0 or more and n at least 1; correct the two numbers")
    _check_temperature("validation.temperature", recipe.validation.temperature)
    module, colon, function = recipe.reward.function.partition(":")
    if not (module and colon and function):
        raise RecipeError(f"reward.function: {recipe.reward.function!r} is not package.module:function; correct it")


def _check_run(recipe: Recipe) -> None:
    for key, value in (("model", recipe.model), ("output_dir", recipe.output_dir)):
        if value == "???":
            raise RecipeError(f"{key} has no value; set it in the recipe or as {key}=...")
    if recipe.steps < 1:
        raise RecipeError(f"steps: {recipe.steps} is not positive; train at least one step")
    if not 0 <= recipe.seed < 2**63:
        raise RecipeError(f"seed: {recipe.seed} is outside 0..2^63-1; choose another seed")
    if recipe.resume != "never":
        raise RecipeError(f"resume: {recipe.resume!r} is not implemented yet; set resume=never and a fresh output_dir")
    if recipe.on_mismatch not in ("abort", "warn"):
        raise RecipeError(f"on_mismatch: {recipe.on_mismatch!r} is unknown; set abort or warn")
    if recipe.threads < 0:
        raise RecipeError(f"threads: {recipe.threads} is negative; set 0 for one thread per core")
    if not recipe.data.val and recipe.validation.every:
        raise RecipeError("data.val: the list is empty; name a data set or set validation.every=0")
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


def _check_trainer(recipe: Recipe) -> None:
    trainer = recipe.trainer
    for key in ("lr", "eps", "clip", "clip_high"):
        if not getattr(trainer, key) > 0:
            raise RecipeError(f"trainer.{key}: {getattr(trainer, key)} is not positive; set a positive number")
    for key in ("warmup_steps", "weight_decay", "clip_grad", "kl_coef", "save_every"):
        if not getattr(trainer, key) >= 0:
            raise RecipeError(f"trainer.{key}: {getattr(trainer, key)} is negative; set 0 to switch it off")
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
