"""`MegatronHost`: what a trainer asks of the model, on Megatron-Core. verl's engine calls it.

One adapter, one or several ranks with a process each. A mini-batch is one call of `forward_backward` on every rank; its
gradient is that of the sum of the micro-batches' losses, added up in the order that `gradients` describes. Of several
data-parallel ranks each is given its part of the samples, of equal size, in rank order; the ranks of a tensor group are
given the same. All ranks make all calls together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from zmrl.batch_invariant.build import kernel_id
from zmrl.batch_invariant.native import isa
from zmrl.lora import peft_io
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.shards import RankBuffers, ranks_digests
from zmrl.model.transformer import KimiK31, function_config
from zmrl.parallel.layout import Layout
from zmrl.trainer.megatron import checkpoint, parallel, shim
from zmrl.trainer.megatron.faults import Faults
from zmrl.trainer.megatron.gradients import MicroBatch, in_lockstep, micro_batches
from zmrl.trainer.megatron.model import KimiK31Megatron
from zmrl.trainer.megatron.optimizer import AdapterOptimizer, OptimizerSettings
from zmrl.trainer.megatron.scoring import MIN_TEMPERATURE, ScoredSample, check_samples, pack, score

ONE_RANK_LAYOUT = Layout()

LossFunction = Callable[[list[Tensor], list[Tensor], list[int]], tuple[Tensor, dict[str, Any]]]
"""(log_probs FP32 [n], entropy FP32 [n]) of each sample of a micro-batch, and which samples of the mini-batch they are
-> (scalar loss, metrics). Losses of micro-batches are added up: a mean divides by the count of the whole mini-batch.
Treat each sample by itself: torch's CPU `exp` and `pow` round the tail of a tensor differently from its body, so the
gradient of a token could otherwise depend on what lies beside it."""


class MegatronHost:
    """The model with one adapter, as the trainer holds it."""

    def __init__(
        self,
        model_path: str | Path,
        lora_rank: int,
        lora_alpha: float,
        optimizer: OptimizerSettings | None,
        seed: int,
        cache_format: CacheFormat = DEFAULT_CACHE_FORMAT,
        layout: Layout = ONE_RANK_LAYOUT,
    ) -> None:
        """Loads the checkpoint at `model_path`; the adapter starts at PEFT's initial values, drawn from `seed`.

        optimizer None: scores only. cache_format: the rollout's; the forward goes through the same formats. layout: of
        the trainer's ranks; LayoutError if the model cannot be cut so. Patches megatron-core for the CPU (`shim`) and
        joins or makes the process group.
        """
        shim.install()
        self.ranks = parallel.initialise(layout)
        self.model_path = str(model_path)
        model = KimiK31.from_checkpoint(model_path, cache_format, self.ranks.model)
        self.config = model.config
        self.module = KimiK31Megatron(model, lora_rank, lora_alpha, seed, self.ranks)
        self.optimizer = None if optimizer is None else AdapterOptimizer(self.module, optimizer)
        self.module.config.finalize_model_grads_func = self._finalise_gradients
        self._faults = Faults(model)
        self._gradients_ready = False

    @property
    def model(self) -> KimiK31:
        """The bare model: base parameters and live adapter buffers."""
        return self.module.model

    # Scoring

    def forward(
        self,
        batch: Sequence[Tensor],
        response_starts: Sequence[int],
        temperature: float,
        adapter: bool = True,
        micro_batch_samples: int = 8,
    ) -> list[ScoredSample]:
        """Score responses. batch: int64 [prompt + response] each; response_starts: where each response begins.

        adapter False: the base model (the reference policy). How samples are packed changes no bit. SampleError names
        a sample that cannot be scored or yields NaN.
        """
        check_samples(batch, response_starts, self.config)
        count, size = len(batch), _positive(micro_batch_samples)
        plan = [MicroBatch(0, range(i, min(i + size, count))) for i in range(0, count, size)]
        with torch.no_grad():
            return self._run(plan, batch, response_starts, temperature, adapter, None)[1]

    def forward_backward(
        self,
        batch: Sequence[Tensor],
        response_starts: Sequence[int],
        temperature: float,
        loss_function: LossFunction,
        micro_batch_samples: int,
    ) -> tuple[list[dict[str, Any]], list[ScoredSample]]:
        """Gradient of a whole mini-batch; `optimizer_step` applies it.

        Returns the metrics of each micro-batch, and the scores of this very forward. A micro-batch holds at most
        `micro_batch_samples` samples and never crosses one of the 8 sample shards; its size changes no bit of the
        gradient. ValueError if a loss is not finite.
        """
        optimizer = self._optimizer()
        if self._gradients_ready:
            raise RuntimeError("the gradients of the mini-batch before were not used: call optimizer_step or zero_grad")
        check_samples(batch, response_starts, self.config)
        if not batch:
            raise ValueError("an empty mini-batch has no gradient")
        self.zero_grad()
        plan = micro_batches(len(batch), _positive(micro_batch_samples), optimizer.mini_batch.shards)
        with torch.enable_grad():
            metrics, scored = self._run(plan, batch, response_starts, temperature, True, loss_function)
        assert optimizer.mini_batch.complete
        self._gradients_ready = True
        return metrics, scored

    def _run(
        self,
        plan: list[MicroBatch],
        batch: Sequence[Tensor],
        response_starts: Sequence[int],
        temperature: float,
        adapter: bool,
        loss_function: LossFunction | None,
    ) -> tuple[list[dict[str, Any]], list[ScoredSample]]:
        """All micro-batches through Megatron's schedule: forward only, unless there is a loss."""
        if not temperature >= MIN_TEMPERATURE:
            raise ValueError(f"temperature {temperature} is below {MIN_TEMPERATURE}, the least that can be trained at")
        module = self.module if self.optimizer is None else self.optimizer.ddp
        scored: list[ScoredSample] = []

        def forward_step(data: Iterator[tuple[MicroBatch, list[int]]], module: Any) -> tuple[Tensor, Callable]:
            micro, shards = next(data)
            if loss_function is not None:
                self._optimizer().mini_batch.enter(shards)
            packed = pack(batch, response_starts, micro.samples)
            scores = score(module, self.model, packed, temperature, adapter, self._faults)
            scored.extend(scores.split(packed.counts))

            def loss(_: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                # The schedule adds up the middle value, a token count to divide by; 0 leaves the gradients alone.
                uncounted = torch.zeros((), dtype=torch.int)
                if loss_function is None:
                    return torch.zeros(()), uncounted, {}
                if not micro.samples:
                    return scores.log_probs.sum(), uncounted, {}
                log_probs, entropy = (list(t.split(packed.counts)) for t in (scores.log_probs, scores.entropy))
                value, metrics = loss_function(log_probs, entropy, list(micro.samples))
                if not bool(torch.isfinite(value.detach())):
                    raise ValueError(
                        f"the loss of samples {micro.samples.start} to {micro.samples.stop - 1} is {float(value)}; "
                        "look for NaN or infinite rewards and advantages"
                    )
                if self.ranks.model.copies > 1 and not value.requires_grad:
                    value = value + 0.0 * scores.log_probs.sum()  # a backward that changes nothing: others wait for it
                return value, uncounted, metrics

            return scores.log_probs, loss

        steps = in_lockstep(self.ranks.lockstep, plan)
        if not steps:
            return [], []
        schedule: Any = get_forward_backward_func()
        metrics = schedule(
            forward_step_func=forward_step,
            data_iterator=iter(steps),
            model=[module],
            num_microbatches=len(steps),
            seq_length=0,  # unused without pipeline stages, as is the next
            micro_batch_size=1,
            forward_only=loss_function is None,
        )
        return [found for found, (micro, _) in zip(metrics, steps, strict=True) if micro.samples], scored

    def _finalise_gradients(self, model: list[Any], num_tokens: Tensor | None, **kwargs: Any) -> None:
        """The schedule calls this after the last backward."""
        self._optimizer().mini_batch.finish()

    # The update

    def optimizer_step(self) -> float:
        """Update the adapter with the gradients of the last mini-batch; returns their norm before clipping."""
        optimizer = self._optimizer()
        if not self._gradients_ready:
            raise RuntimeError("there are no gradients: call forward_backward first")
        norm = optimizer.step()
        self._gradients_ready = False
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients, also those of a mini-batch that failed half-way."""
        self._optimizer().zero_grad()
        self._gradients_ready = False

    def learning_rate(self) -> float:
        """Learning rate of the latest update."""
        return self._optimizer().learning_rate

    # The adapter

    def adapter_tensors(self) -> dict[str, Tensor]:
        """Copies of the live adapter: PEFT name -> BF16 tensor, as in an adapter file."""
        return {item.name: item.read() for item in self._shape.lora_slices(self.adapter_buffers())}

    def adapter_buffers(self) -> dict[str, Tensor]:
        """The live adapter itself, in the kernels' layout: key of `KimiK31.lora_buffers` -> BF16, slot 0.

        Whole, as a single rank has it.
        """
        return dict(self._adapter.whole())

    def load_adapter(self, path: str | Path) -> None:
        """Set masters and live buffers from a PEFT directory. AdapterError if it does not fit (rank and alpha too)."""
        adapter = peft_io.read_adapter(path, self.config, self.module.rank, self.module.alpha)
        with torch.no_grad():
            peft_io.fill(self.module.master_slices(), adapter.tensors)
        self.module.refresh()

    def save_adapter(self, path: str | Path) -> None:
        """Write the live adapter as a PEFT directory: the first rank does."""
        module, tensors = self.module, self.adapter_tensors()
        if dist.get_rank() == 0:
            peft_io.write_adapter(path, tensors, self.config, module.rank, module.alpha, self.model_path)

    # Identity and faults

    def identity(self) -> dict[str, Any]:
        """What this side computes with, from the live buffers; both sides of a comparison must agree."""
        return {
            "model_digest": self._base.digest(),
            "adapter_digest": self._adapter.digest(),
            "kernel_id": kernel_id(),
            "function_config": function_config(self.model),
            "isa": isa(),
        }

    def tensor_digests(self, adapter: bool) -> dict[str, int]:
        """Digest of each live tensor: of the adapter under PEFT names, or of the base under checkpoint names."""
        slices = self.module.live_slices() if adapter else self.model.tensor_slices()
        return ranks_digests(slices, self.ranks.model)

    def flip_bit(self, what: str, tensor: str, element: int, bit: int) -> None:
        """Fault injection, see `Faults.flip`."""
        self._faults.flip(what, tensor, element, bit)

    # Checkpoints

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any] | None = None) -> None:
        """Adapter masters, optimizer, schedule, random state and `extra` (JSON), replacing what is at `path`."""
        checkpoint.save(path, self._optimizer(), self._run_identity(), extra or {})

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Continue as if the run had never stopped; returns `extra`. TrainerCheckpointError if it does not fit."""
        extra = checkpoint.load(path, self._optimizer(), self._run_identity())
        self.zero_grad()
        return extra

    def _run_identity(self) -> dict[str, Any]:
        return {
            "model_digest": self._base.digest(),
            "tensor_parallel": self.ranks.model.tensor.size,
            "expert_parallel": self.ranks.model.expert.size,
            "lora_rank": self.module.rank,
            "lora_alpha": self.module.alpha,
            "cache_format": str(self.model.cache_format),
            "optimizer": self._optimizer().fixed_settings(),
        }

    @cached_property
    def _base(self) -> RankBuffers:
        return RankBuffers(self.model.base_buffers(), self.model.tensor_slices(), self.ranks.model)

    @cached_property
    def _adapter(self) -> RankBuffers:
        own = self.model.adapter_buffers(0)
        return RankBuffers(own, self.model.lora_slices(own), self.ranks.model)

    @cached_property
    def _shape(self) -> KimiK31:
        """The whole model without values: says which tensor of an adapter lies where."""
        with torch.device("meta"):
            shape = KimiK31(self.config, self.model.cache_format)
            shape.create_lora(1, self.module.rank, self.module.alpha)
        return shape

    def _optimizer(self) -> AdapterOptimizer:
        if self.optimizer is None:
            raise RuntimeError("this host was made without an optimizer: it only scores")
        return self.optimizer


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError(f"micro_batch_samples must be at least 1, not {value}")
    return value
