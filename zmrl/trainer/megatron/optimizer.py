"""Megatron's DDP, optimizer and learning-rate schedule around the adapter masters, and the update itself."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from zmrl.trainer.megatron.accumulation import MiniBatchGradients
from zmrl.trainer.megatron.gradients import gradient_norm
from zmrl.trainer.megatron.model import KimiK31Megatron


@dataclass(frozen=True)
class OptimizerSettings:
    """Adam with decoupled weight decay, clipping by the global norm, and a learning-rate schedule."""

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Largest gradient norm; 0: no clipping."""
    warmup_steps: int = 0
    """Update k of these runs at lr * k / warmup_steps."""
    total_steps: int = 1
    """Updates of the whole run; the length of the decay."""
    decay: str = "constant"
    """After the warm-up: "constant", or "cosine" to 0 at `total_steps`."""

    def __post_init__(self) -> None:
        if self.decay not in ("constant", "cosine"):
            raise ValueError(f"decay {self.decay!r} is neither 'constant' nor 'cosine'")
        if self.lr <= 0 or self.total_steps <= 0 or self.warmup_steps < 0 or self.clip_grad < 0:
            raise ValueError(f"lr and total_steps must be positive, warmup_steps and clip_grad not negative: {self}")


class AdapterOptimizer:
    """Owns gradients and updates of the masters of a `KimiK31Megatron`.

    Of several data-parallel ranks each has all gradients of its part of the model, and makes the same update of it.
    """

    def __init__(self, module: KimiK31Megatron, settings: OptimizerSettings) -> None:
        self.module, self.settings = module, settings
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
        self.ddp = DistributedDataParallel(module.config, ddp_config, module)
        (buffer,) = self.ddp.buffers
        self.total = buffer.grad_data
        """FP32 [n]: DDP's buffer."""
        places = {key: (buffer.param_index_map[m][0], m.shape) for key, m in module.masters.items()}
        self.gradients = {
            key: self.total[start:][: shape.numel()].view(shape) for key, (start, shape) in places.items()
        }
        """The masters' `main_grad` by key: views of it."""
        experts = sum(module.masters[key].numel() for key in module.expert_keys)
        if any((start < experts) != (key in module.expert_keys) for key, (start, _) in places.items()):
            raise RuntimeError("megatron-core does not fill its gradient buffer from the last parameter on any more")
        data, copies = module.ranks.data, module.ranks.model.copies
        self.mini_batch = MiniBatchGradients(module.gradients, self.total, places, experts, data, copies)
        # clip_grad 0: Megatron's own norm depends on the parallel layout, so the clipping is done here.
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=settings.lr,
                min_lr=0.0,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                clip_grad=0.0,
                params_dtype=torch.float32,
            ),
            [self.ddp],
        )
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=0.0,
            lr_warmup_steps=settings.warmup_steps,
            lr_decay_steps=max(settings.total_steps, settings.warmup_steps + 1),
            lr_decay_style=settings.decay,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=settings.total_steps,
            wd_incr_style="constant",
        )
        self._initialise_state()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.ddp.zero_grad_buffer()
        self.megatron.zero_grad()
        self.mini_batch.reset()

    @torch.no_grad()
    def step(self) -> float:
        """One update from the gradients in DDP's buffer; returns their norm before clipping.

        ValueError names the tensor if a gradient is not finite; nothing is changed then.
        """
        norm = gradient_norm(self.module.gradient_slices(self.gradients), self.module.model.ranks)
        limit = self.settings.clip_grad
        if 0 < limit < norm:
            self.total.mul_(limit / norm)
        self.scheduler.step(1)
        self.megatron.prepare_grads()
        self.megatron.step_with_ready_grads()
        self.module.refresh()
        return norm

    @property
    def learning_rate(self) -> float:
        """Learning rate of the latest update."""
        return float(self.megatron.param_groups[0]["lr"])

    @property
    def updates(self) -> int:
        """Updates made so far, over the whole run."""
        return int(self.scheduler.num_steps)

    # State

    def _initialise_state(self) -> None:
        """Adam's state as torch makes it at the first update, so that it can be saved and loaded at any time."""
        for parameter in self.megatron.optimizer.param_groups[0]["params"]:
            self.megatron.optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def load_state(self, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """Take over a loaded state."""
        optimizer["state"].setdefault("common_step", torch.tensor(0.0))  # Megatron does not store a step of 0
        self.megatron.load_state_dict(optimizer)
        self.scheduler.num_steps = 0  # load_state_dict counts on from where it stands
        self.scheduler.load_state_dict(scheduler)

    def fixed_settings(self) -> dict[str, Any]:
        """Settings that a resumed run must share; the length of a constant schedule may change."""
        settings = asdict(self.settings)
        settings["betas"] = list(settings["betas"])
        if self.settings.decay == "constant":
            del settings["total_steps"]
        return settings
