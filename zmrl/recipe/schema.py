"""The recipe's keys, with their defaults: what a training run is. Needs neither torch nor verl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf


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
    """`builtin` (generated problems), a local .jsonl, .json or .parquet file, or a data set's name on the hub."""
    val: list[str] = field(default_factory=lambda: ["builtin"])
    """Validation sets, each as `train`; `builtin` is the held-out split."""
    train_size: int = 8192
    """Number of built-in training problems to generate."""
    val_size: int = 64
    """Number of built-in validation problems to generate."""
    too_long: str = "refuse"
    """A problem whose prompt leaves no room for a response: `refuse` the data set, or `skip` it with a warning."""
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
    tensor_parallel: int = 1
    """Ranks that share out the model in vLLM: 1, 2, 4 or 8. As the next, never changes a bit."""
    context_parallel: int = 1
    """Of them, ranks that share out the tokens of a request (decode context parallelism)."""
    prefill: str = "heads"
    """What the ranks share of a prefill: `heads`, or `tokens` for prompts longer than the model's index_topk."""
    lora_rank: int | None = None
    """Leave it out. There is one rank, `lora.rank`; another value here is refused."""
    lora_alpha: int | None = None
    """Leave it out. There is one alpha, `lora.alpha`; another value here is refused."""


@dataclass
class CacheRecipe:
    """How the rollout's cache holds its state. The formats are part of the function: the trainer's forward quantises
    alike."""

    latent_format: str = "bf16"
    """Format of MLA latents: bf16, fp8 or nvfp4."""
    index_format: str = "fp8"
    """Format of the indexer's keys: fp8 or mxfp4."""
    prefix_cache_retention_interval: int | None = 0
    """Which KDA states the prefix cache keeps. 0: that of each prompt's last block boundary, and of the boundary where
    two prompts part. n, a multiple of the block size: one every n tokens as well. null: at every boundary that a step
    ends with. Changes memory and time, never a bit."""


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
    """Optimizer steps per pass over a step's samples. More than one, or more than one pass, costs another forward pass:
    what the rollout is compared with before the first; one alone is compared by its own forward."""
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
    data_parallel: int = 1
    """Copies of the model, each with its part of the samples: 1, 2, 4 or 8. As the next two, never changes a bit."""
    tensor_parallel: int = 1
    """Ranks that share out one copy: 1, 2, 4 or 8. The trainer has data_parallel x tensor_parallel processes."""
    expert_parallel: int = 1
    """Ranks that share out the routed experts: 1, those of a copy, or those of all copies."""
    save_every: int = 0
    """Save a checkpoint every so many steps, and at the last; the latest two are kept. 0 saves none."""
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
    greedy: bool = True
    """Answer each problem once more at temperature 0, for the greedy accuracy."""
    before_training: bool = True
    """Validate the base model first."""


@dataclass
class RewardRecipe:
    """How a response is graded."""

    function: str = "zmrl.trainer.rewards:aime_reward"
    """`package.module:function`, called as f(response: str, answer: str) -> float; must be finite."""
    timeout_seconds: float = 60.0
    """A call that takes longer stops the run."""


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
    torch_linear_in_rollout: bool = False
    """A deliberate mismatch, for a control run with `on_mismatch: warn`: the rollout's linear projections are torch's
    own, with the same weights and rounding points and another order of summation."""
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
    """Folder for the run's files; must be empty or absent, unless the run is resumed."""
    resume: str = "never"
    """`never`: start from the base checkpoint, in an empty folder. `auto`: go on from the folder's last complete
    checkpoint (trainer.save_every), from the base checkpoint if it has none."""
    restarts: int = 3
    """How many times a run goes on by itself, from its last checkpoint, after one of its processes has died."""
    on_mismatch: str = "abort"
    """`abort`: a step that is not EQUAL stops the run before its optimizer step. `warn`: report and go on; the exit
    code tells."""
    threads: int = 0
    """Threads per process; 0 takes one per core. Never changes a bit."""
    wandb: bool = True
    """Log to Weights & Biases; offline when there is no key."""
    lora: LoraRecipe = field(default_factory=LoraRecipe)
    data: DataRecipe = field(default_factory=DataRecipe)
    rollout: RolloutRecipe = field(default_factory=RolloutRecipe)
    cache: CacheRecipe = field(default_factory=CacheRecipe)
    trainer: TrainerRecipe = field(default_factory=TrainerRecipe)
    validation: ValidationRecipe = field(default_factory=ValidationRecipe)
    reward: RewardRecipe = field(default_factory=RewardRecipe)
    debug: DebugRecipe = field(default_factory=DebugRecipe)

    @property
    def samples_per_step(self) -> int:
        """Real samples that a step must compare: problems x samples."""
        return self.rollout.prompts_per_step * self.rollout.n

    @property
    def trainer_ranks(self) -> int:
        """Processes of the trainer."""
        return self.trainer.data_parallel * self.trainer.tensor_parallel

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt that leaves room for a whole response."""
        return self.rollout.max_model_len - self.rollout.max_tokens

    def to_dict(self) -> dict[str, Any]:
        """The resolved recipe, ready for JSON."""
        out = OmegaConf.to_container(OmegaConf.structured(self))
        assert isinstance(out, dict)
        return {str(key): value for key, value in out.items()}
