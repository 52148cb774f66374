"""verl's training engine over the Megatron host: verl's batches become token lists, log-probs take verl's layout.

verl keeps the loss (`ppo_loss`), the loop over mini-batches and the checkpoint schedule; the host keeps model, forward,
backward and optimizer. Importing this module registers the engine; the host is imported when a worker initialises it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.py_functional import append_to_dict
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry

from zmrl.model.cache_format import CacheFormat
from zmrl.parallel.layout import Layout
from zmrl.startup import mark
from zmrl.trainer.columns import sample_ids
from zmrl.trainer.config import STRATEGY, ZmrlEngineConfig
from zmrl.trainer.scores import PackedScores


class UpdateMismatchError(RuntimeError):
    """The first update's own forward did not give the bits that a separate pass gave: what was checked is not what is
    trained."""


@EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=["cpu", "cuda"])
class ZmrlEngine(BaseEngine):
    """One rank. Model, optimizer and adapter live in `self.host`.

    `compared_scores` are those that the rollout's are compared with. With one update a step its own forward gives them:
    `train_batch` stops before the optimizer step, and `apply_update` takes it.
    """

    def __init__(
        self,
        model_config: Any,
        engine_config: ZmrlEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any,
        **_: Any,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.checkpoint_config = checkpoint_config
        self.mode: str | None = None
        self.host: Any = None
        self._adapter = True
        self._one_update = engine_config.updates_per_step == 1
        self._scored: dict[str, Any] = {}
        """Scores to be compared, by sample: of the latest forward with the adapter, until an optimizer step."""
        self._gradients_wait = False
        """Whether there are gradients for `apply_update`."""
        self._updates_since_check = 0
        """Of the separate pass, which there is with several updates a step."""

    # Life cycle

    def initialize(self) -> None:
        """Build the host from the base checkpoint."""
        mark("trainer", "modules imported")
        name, _, class_name = self.engine_config.host.partition(":")
        module = importlib.import_module(name)
        optimizer = self.optimizer_config
        updates = self.engine_config.updates_per_step
        self.host = getattr(module, class_name)(
            self.model_config.local_path,
            self.model_config.lora_rank,
            self.model_config.lora_alpha,
            module.OptimizerSettings(
                lr=optimizer.lr,
                betas=tuple(optimizer.betas),
                eps=self.engine_config.adam_eps,
                weight_decay=optimizer.weight_decay,
                clip_grad=optimizer.clip_grad,
                warmup_steps=max(optimizer.lr_warmup_steps or 0, 0),
                total_steps=max(optimizer.total_training_steps, 1) * updates,
            ),
            self.engine_config.seed,
            CacheFormat(self.engine_config.latent_format, self.engine_config.index_format),
            Layout(
                tensor=self.engine_config.tensor_parallel,
                expert=self.engine_config.expert_parallel,
                data=self.engine_config.data_parallel,
            ),
        )
        mark("trainer", "model and optimizer built")

    @property
    def is_param_offload_enabled(self) -> bool:
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        return False

    def train_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **kwargs)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:  # type: ignore[override]
        """The reference policy: the base model, adapter off."""
        self._adapter = False
        try:
            yield
        finally:
            self._adapter = True

    # Data parallel layout

    def get_data_parallel_rank(self) -> int:
        """verl asks before there is a host, whose groups are laid out alike (`megatron.parallel`)."""
        return dist.get_rank() // self.engine_config.tensor_parallel

    def get_data_parallel_size(self) -> int:
        return self.engine_config.data_parallel

    def get_data_parallel_group(self) -> Any:
        return self.host.ranks.data_group

    def is_mp_src_rank_with_outputs(self) -> bool:
        """The ranks of a tensor group have the same outputs; the first one's are taken."""
        return dist.get_rank() % self.engine_config.tensor_parallel == 0

    # Compute

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Score `data`, and with a loss also accumulate gradients.

        data: jagged `input_ids` (prompt and response), `prompts`, `responses`, `loss_mask`, and what the loss reads.
        Returns {"model_output", "loss", "metrics"}; the model output (forward only) holds jagged `log_probs` and
        `entropy` over prompt and response, where entry t belongs to token t+1 and prompt entries are 0.
        """
        sequences, starts = _sequences(data)
        temperature = float(tu.get_non_tensor_data(data, "temperature", 1.0))
        size = int(data["micro_batch_size_per_gpu"])
        if forward_only:
            if loss_function is not None:
                raise NotImplementedError("a loss without an update has no use here")
            scored = self.host.forward(sequences, starts, temperature, self._adapter, size)
            if self._adapter:
                self._keep(data, scored)
                self._updates_since_check = 0
            return {"model_output": _model_output(scored, sequences, starts), "loss": [0.0], "metrics": {}}

        if loss_function is None:
            raise ValueError("an update needs a loss")
        self._announce_totals(data)
        parts = _one_by_one(data)
        losses: list[float] = []
        metrics: dict[str, Any] = {}
        group = self.get_data_parallel_group()

        def loss_of(log_probs: Sequence[Tensor], entropies: Sequence[Tensor], samples: Sequence[int]) -> Any:
            # One sample at a time: torch rounds exp() differently in the tail of a tensor than in its body, so the
            # gradient of a packed micro-batch would depend on how samples are packed.
            total = torch.zeros(())
            for log_prob, entropy, sample in zip(log_probs, entropies, samples, strict=True):
                part = parts[sample]
                if self._one_update:  # the policy before the only update is the one at hand
                    part["old_log_probs"] = _nested(log_prob.detach())
                elif self._updates_since_check == 0:
                    _require_checked_bits(log_prob, part, sample)
                loss, found = _masked_loss(loss_function, log_prob, entropy, part, sample, group)
                total = total + loss
                append_to_dict(metrics, found)
            losses.append(float(total.detach()))
            return total, {}

        _, scored = self.host.forward_backward(sequences, starts, temperature, loss_of, size)
        if self._one_update:
            self._keep(data, scored)
            self._gradients_wait = True
        return {"model_output": {}, "loss": losses, "metrics": metrics}

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> dict[str, Any]:
        """verl's, but with one update a step it ends before the optimizer step: nothing has changed but gradients."""
        if not self._one_update:
            return super().train_batch(data, loss_function)
        self.optimizer_zero_grad()
        return self.forward_backward_batch(data, loss_function)

    def apply_update(self) -> dict[str, float]:
        """Take the optimizer step that `train_batch` left; returns verl's metrics of it, `grad_norm` and `lr`.

        RuntimeError if no gradients wait. Gradients that must not be applied are dropped by the next `train_batch`.
        """
        if not self._gradients_wait:
            raise RuntimeError("no gradients wait to be applied: call train_batch first")
        return {"grad_norm": self.optimizer_step(), "lr": self.lr_scheduler_step()}

    def compared_scores(self) -> PackedScores | None:
        """Scores of this step's samples, without a forward for them; None on a rank whose samples another one has too.

        Empty if nothing was scored since the last optimizer step.
        """
        return PackedScores.of(self._scored) if self.is_mp_src_rank_with_outputs() else None

    def _keep(self, data: TensorDict, scored: Sequence[Any]) -> None:
        names = sample_ids(data)
        self._scored = dict(zip(names, scored, strict=True))
        if len(self._scored) != len(names):
            raise ValueError(f"{len(names)} samples of a step have {len(self._scored)} names: one is there twice")

    def optimizer_zero_grad(self) -> None:
        self._gradients_wait = False
        if self._one_update:  # a forward that fails must leave no scores of the one before
            self._scored = {}
        self.host.zero_grad()

    def optimizer_step(self) -> float:
        """One AdamW step, and one step of the schedule; returns the gradient norm before clipping."""
        self._scored, self._gradients_wait = {}, False
        self._updates_since_check += 1
        return float(self.host.optimizer_step())

    def lr_scheduler_step(self) -> float:
        """The learning rate now. The host's schedule moves with its optimizer steps, not with verl's calls."""
        return float(self.host.learning_rate())

    # Adapter and identity

    def get_per_tensor_param(self, layered_summon: bool = False, base_sync_done: bool = False, **_: Any) -> Any:
        """The live adapter in the kernels' layout as (key, tensor) pairs, and its PEFT configuration.

        The base never moves. Packed buffers are some dozen tensors; by PEFT names they would be tens of thousands.
        """
        if not base_sync_done:
            raise RuntimeError("the base model is loaded from disk on both sides; set rollout.load_format to auto")
        return iter(self.host.adapter_buffers().items()), self._peft_config()

    def _peft_config(self) -> dict[str, Any]:
        from zmrl.model.config import get_config
        from zmrl.model.names import LoraSpec

        rank, alpha = self.model_config.lora_rank, self.model_config.lora_alpha
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": LoraSpec(rank, alpha).target_modules(get_config(self.model_config.local_path)),
            "lora_dropout": 0.0,
            "bias": "none",
        }

    # Checkpoints

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Adapter, optimizer and schedule at `local_path`, and the adapter as a PEFT directory beside it."""
        target = Path(local_path)
        target.parent.mkdir(parents=True, exist_ok=True)
        self.host.save_checkpoint(target, {"global_step": global_step})
        self.host.save_adapter(target.with_name("adapter"))

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = True, **_: Any
    ) -> None:
        """The counterpart of `save_checkpoint`. Deletes nothing."""
        self.host.load_checkpoint(local_path)

    def _announce_totals(self, data: TensorDict) -> None:
        """Put the mini-batch's totals where verl's loss looks for them, so that micro-batches add up to it.

        Without one active token the sum is 0 / max(0, 1): finite, and its verdict is VOID anyway.
        """
        tokens = data["loss_mask"].sum()
        dist.all_reduce(tokens, group=self.get_data_parallel_group())
        # dp_size 1: verl's loss would make up for gradients that are averaged over ranks; these are added up.
        tu.assign_non_tensor(data, batch_num_tokens=max(int(tokens), 1), dp_size=1, sp_size=1)


def _sequences(data: TensorDict) -> tuple[list[Tensor], list[int]]:
    """Token ids of each sample, int64 [P + R], and the index P of its first response token."""
    sequences = list(data["input_ids"].unbind())
    starts = [prompt.numel() for prompt in data["prompts"].unbind()]
    for sequence, start, response in zip(sequences, starts, data["responses"].unbind(), strict=True):
        if start < 1 or sequence.numel() != start + response.numel():
            raise ValueError(
                f"{sequence.numel()} tokens are not {start} of a prompt and {response.numel()} of a response"
            )
    return sequences, starts


_LOSS_COLUMNS = (
    "input_ids", "prompts", "responses", "response_mask", "loss_mask", "old_log_probs", "ref_log_prob", "advantages",
)  # fmt: skip


def _one_by_one(data: TensorDict) -> list[TensorDict]:
    """The batch as batches of one, with what a loss reads: jagged columns, and scalars that concern the whole batch.

    verl's `index_select_tensor_dict` unbinds every column anew for every sample: 0.4 of an update of 128 samples.
    """
    constants = {name: value for name, value in data.items() if isinstance(value, NonTensorData)}
    shared = {name: value[:1] if value.shape else value for name, value in constants.items()}
    columns = {name: data[name].unbind() for name in _LOSS_COLUMNS if name in data}
    return [
        TensorDict(shared | {name: _nested(rows[sample]) for name, rows in columns.items()}, batch_size=1)
        for sample in range(data.shape[0])
    ]


def _nested(row: Tensor) -> Tensor:
    """A jagged column of one row."""
    return torch.nested.as_nested_tensor([row], layout=torch.jagged)


def _spread(values: Tensor, length: int, start: int) -> Tensor:
    """Values of R response tokens in verl's layout [length]: the value of token t stands at t - 1, zeros elsewhere."""
    return torch.nn.functional.pad(values, (start - 1, length - values.numel() - start + 1))


def _jagged(values: Sequence[Tensor], sequences: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    spread = [_spread(v, s.numel(), p) for v, s, p in zip(values, sequences, starts, strict=True)]
    return torch.nested.as_nested_tensor(spread, layout=torch.jagged)


def _model_output(scored: Sequence[Any], sequences: Sequence[Tensor], starts: Sequence[int]) -> dict[str, Tensor]:
    return {
        "log_probs": _jagged([s.log_probs for s in scored], sequences, starts),
        "entropy": _jagged([s.entropy for s in scored], sequences, starts),
    }


def _masked_loss(
    loss_function: Callable[..., Any], log_probs: Tensor, entropy: Tensor, part: TensorDict, sample: int, group: Any
) -> tuple[Tensor, dict[str, Any]]:
    """verl's loss of one sample, with everything at masked positions replaced by 0 first.

    verl's masked sums drop a NaN in the forward pass, but 0 * NaN in the backward pass is NaN again. At an active
    position a value that is not finite is an error here, not a step with a NaN gradient.
    """
    mask = part["response_mask"].unbind()[0].bool()
    sequences, starts = _sequences(part)
    output = {
        "log_probs": _jagged([_clean("log_prob", log_probs, mask, sample)], sequences, starts),
        "entropy": _jagged([_clean("entropy", entropy, mask, sample)], sequences, starts),
    }
    for name in ("old_log_probs", "ref_log_prob", "advantages"):
        if part.get(name, None) is not None:
            values = _clean(name, part[name].unbind()[0], mask, sample)
            part[name] = _nested(values)
    return loss_function(model_output=output, data=part, dp_group=group)


def _clean(name: str, values: Tensor, mask: Tensor, sample: int) -> Tensor:
    wrong = (~torch.isfinite(values.detach()) & mask).nonzero()
    if len(wrong):
        raise FloatingPointError(f"{name} of sample {sample} of the mini-batch is not finite at token {int(wrong[0])}")
    return torch.where(mask, values, 0.0)


def _require_checked_bits(log_probs: Tensor, part: TensorDict, sample: int) -> None:
    """The first of several updates must start from the very log-probs that were compared with the rollout."""
    checked, mask = part["old_log_probs"].unbind()[0], part["response_mask"].unbind()[0].bool()
    now = log_probs.detach()
    wrong = ((now.view(torch.int32) != checked.view(torch.int32)) & mask).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise UpdateMismatchError(
            f"sample {sample} of the mini-batch, token {token}: the update's forward gives {float(now[token])!r}, the "
            f"compared forward gave {float(checked[token])!r}"
        )
