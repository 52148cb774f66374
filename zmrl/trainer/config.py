"""What verl's actor and engine configuration holds for the Megatron host. Selected by `model_engine: zmrl`."""

from __future__ import annotations

from dataclasses import dataclass, field

from verl.workers.config import ActorConfig, EngineConfig

STRATEGY = "zmrl"
"""Name under which the engine is registered with verl's EngineRegistry."""


@dataclass
class ZmrlEngineConfig(EngineConfig):
    """verl's engine configuration plus what `MegatronHost` needs."""

    strategy: str = STRATEGY
    host: str = "zmrl.trainer.megatron.host:MegatronHost"
    """`package.module:class` of the host; tests put a small one here."""
    adam_eps: float = 1e-8
    """AdamW's epsilon (verl's optimizer configuration has no field for it)."""
    latent_format: str = "bf16"
    index_format: str = "fp8"
    """Formats of the rollout's cache, which the host's forward goes through too (`zmrl.model.cache_format`)."""
    data_parallel: int = 1
    tensor_parallel: int = 1
    expert_parallel: int = 1
    """Layout of the trainer's ranks."""
    updates_per_step: int = 1
    """Optimizer steps per training step: mini-batches x epochs. The schedule counts optimizer steps. With 1, the
    update's own forward is the one that is compared with the rollout's, before the optimizer step."""


@dataclass
class ZmrlActorConfig(ActorConfig):
    """verl's actor configuration with its engine."""

    strategy: str = STRATEGY
    zmrl: ZmrlEngineConfig = field(default_factory=ZmrlEngineConfig)
    grad_clip: float = 1.0
    use_remove_padding: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.zmrl
