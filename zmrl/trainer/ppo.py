"""verl's synchronous trainer with a proof at every step: compare, then take the optimizer step.

`ZmrlTrainer` overrides hooks of verl's `PPOTrainerSync`; the loop is verl's. It is put behind verl's own mode name
`sync`, which verl compares with in many places.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import compress
from pathlib import Path
from typing import Any

import ray
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from zmrl.rollout.verl_replica import adapter_version
from zmrl.startup import mark
from zmrl.trainer.alive import Watch
from zmrl.trainer.checker import Identity, StepVerdict, compare, void_before_sampling
from zmrl.trainer.checkpoints import RunCheckpoints, TrainerCheckpointError
from zmrl.trainer.engine import UpdateMismatchError
from zmrl.trainer.evidence import read_samples
from zmrl.trainer.logs import RunFiles, best_validation, cpu, versions, worst_exit_code
from zmrl.trainer.samples import GradedSample, first_of_each, read_first, read_graded
from zmrl.trainer.scores import joined
from zmrl.trainer.sides import Held, Sides
from zmrl.trainer.tracking import step_metrics, validation_metrics
from zmrl.trainer.validation import validation_lines
from zmrl.trainer.verdicts import DIFFERENT, EQUAL
from zmrl.trainer.worker import ZmrlActorRolloutRefWorker


def rank_order(count: int, size: int, ranks: int) -> list[int]:
    """The order of `count` samples, in mini-batches of `size`, in which verl's even chunks, one for each rank, hold the
    rank's part of one mini-batch after the other: a mini-batch then has the same samples as on one rank, in order.
    """
    part = size // ranks
    starts = (first + rank * part for rank in range(ranks) for first in range(0, count, size))
    return [index for start in starts for index in range(start, start + part)]


class StepMismatchError(RuntimeError):
    """A step that is not EQUAL, with `on_mismatch: abort`; raised before its optimizer step."""

    def __init__(self, step: int, verdict: StepVerdict) -> None:
        super().__init__(f"step {step}: {verdict.summary()}")
        self.verdict = verdict


class ZmrlTrainer(PPOTrainerSync):
    """One training run. `exit_code` is that of the worst verdict so far (it matters with `on_mismatch: warn`)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.recipe = config.zmrl
        self.files = RunFiles(self.recipe.output_dir)
        self.checkpoints = RunCheckpoints(self.recipe.output_dir)
        self.exit_code = worst_exit_code(self.files.folder)
        self.samples_expected = self.recipe.rollout.prompts_per_step * self.recipe.rollout.n
        self._one_update = config.actor_rollout_ref.actor.zmrl.updates_per_step == 1
        """Whether the forward that is compared is that of the step's only update (see `ZmrlEngine`)."""
        self._version = 0
        """Version of the adapter that was synced last."""
        self._verdict: StepVerdict | None = None
        self._fields: dict[str, Any] = {}
        """Fields of this step's line that are not the verdict's."""
        self._samples: list[GradedSample] = []
        """Some of this step's samples, for samples.jsonl."""
        self._validated: list[GradedSample] = []
        """All samples of the validation in progress."""
        self._seconds: dict[str, float] = {}
        self._began = 0.0
        self._watch: Watch | None = None
        self._asked: tuple[list[Any], list[Any]] = ([], [])
        """References to what trainer and rollout hold before the first sample; then, of the rollout, after the last."""

    # Set-up

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(ZmrlActorRolloutRefWorker)

    def on_init_end(self) -> None:
        """First sync; then both sides must hold the same thing, before anything is sampled."""
        super().on_init_end()
        mark("task runner", "all processes up, adapter synced")
        self._version = adapter_version(self.global_steps)
        held = self._held(*self._ask_both())
        self._write_run(held.trainer)
        void = void_before_sampling(self.samples_expected, *held)
        if void is not None:
            self._report(void)

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop, from the moment on at which all processes are there."""
        self._watch = Watch()
        self.replay_buffer.on_poll = self._watch.poll
        mark("task runner", "both sides compared")
        super().fit(agent_loop_manager)

    # A step

    def on_step_begin(self) -> None:
        """Start the clocks, flip a bit if the recipe says so, and ask both sides what they hold."""
        self._began = time.perf_counter()
        self._seconds = dict.fromkeys(("rollout", "check", "train", "sync"), 0.0)
        self._fields = {"reward_mean": None, "reward_std": None, "response_tokens": 0, "grad_norm": None}
        self._fields["entropy"] = None
        self._samples = []
        self._verdict = None
        with self._clock("check"):
            self._inject_fault()
            self._asked = self._ask_both()

    def on_sample_begin(self) -> None:
        """Compare what both sides hold. The prompts are on their way; the servers digest before they sample."""
        super().on_sample_begin()
        with self._clock("check"):
            held = self._held(*self._asked)
            self._keep_digests(held)
            void = void_before_sampling(self.samples_expected, *held)
        if void is not None:
            self._report(void)

    def on_sample_end(self) -> None:
        """Ask the servers what they hold after the last sample, while the trainer begins its work."""
        super().on_sample_end()
        self._seconds["rollout"] = time.perf_counter() - self._began - self._seconds["check"]
        with self._clock("check"):
            self._asked = [], self._sides.ask_rollout()

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        """Pad only: verl orders by length here, which would let lengths decide the order of sums."""
        if not batch.keys:
            held = self._held(*self._ask_both())
            problems = [*held.problems, *self.replay_buffer.problems]
            self._report(compare([], self.samples_expected, *held._replace(problems=problems)), always=True)
        info = self.actor_rollout_wg._dispatch_info
        if "actor" not in info:
            info["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        multiple = self._get_required_batch_multiple(max(info["actor"]) + 1)
        return upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """With several updates: a forward pass of the trainer, compared with the rollout's before the first of them."""
        if self._one_update:
            return batch
        with self._clock("check"):
            batch = super()._compute_old_log_prob(batch, metrics)
        self._compare(batch, metrics)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """With one update: forward and backward, the comparison of that very forward, then the optimizer step."""
        self._seconds["train"] = sum(self.timing_raw.get(name, 0.0) for name in ("ref", "adv"))
        trainer = self.recipe.trainer
        order = rank_order(len(batch.keys), self.samples_expected // trainer.mini_batches, trainer.data_parallel)
        try:
            with self._clock("train"):
                batch.reorder(order)
                batch = super()._update_actor(batch, metrics)
                batch.reorder(sorted(range(len(order)), key=order.__getitem__))
        except UpdateMismatchError as error:
            verdict = self._verdict
            assert verdict is not None
            verdict.verdict, verdict.reasons = DIFFERENT, [str(getattr(error, "cause", error))]
            self._report(verdict, always=True)
        if self._one_update:
            self._compare(batch, metrics)
            with self._clock("train"):
                applied = self.actor_rollout_wg.zmrl_apply_update()[0]
            metrics.update({f"actor/{name}": value for name, value in applied.items()})
        self._fields["grad_norm"] = float(metrics["actor/grad_norm"])
        return batch

    def _compare(self, batch: KVBatchMeta, metrics: dict) -> None:
        """The trainer's scores of the batch against the rollout's; does not return if the verdict stops the run.

        The trainer's ranks answer with what they hold and with the scores of the compared forward; meanwhile the
        rollout's samples are read from TransferQueue.
        """
        with self._clock("check"):
            asked = self._sides.ask_trainer()
            self._require_alive()
            samples = read_samples(batch)
            held = self._held(asked, self._asked[1])
            parts = [answer["scores"] for answer in ray.get(asked)]
            scores = joined(part for part in parts if part is not None)
            problems = [*held.problems, *self.replay_buffer.problems]
            sides = samples.beside(scores, self._version)
            verdict = compare(sides, self.samples_expected, *held._replace(problems=problems))
        self._keep_digests(held)
        self._fields["response_tokens"] = verdict.tokens_compared
        self._fields["entropy"] = metrics["actor/entropy"] = samples.mean_entropy(scores)
        self._samples = read_first(batch)
        if len(samples.rewards):
            self._fields["reward_mean"] = float(samples.rewards.mean())
            self._fields["reward_std"] = float(samples.rewards.std(correction=0))
        metrics.update({f"mismatch/{k}": v for k, v in verdict.step_fields().items() if k != "verdict"})
        self._report(verdict)

    def on_step_end(self) -> None:
        """Sync the adapter, write the step's line, then the checkpoint that says that the step is done."""
        super().on_step_end()
        self._version = adapter_version(self.global_steps)
        self._seconds["sync"] = self.timing_raw["update_weights"]
        self._write_step()
        every = self.recipe.trainer.save_every
        if every and (self.global_steps % every == 0 or self.global_steps == self.recipe.steps):
            self.checkpoints.write(
                self.global_steps, self._fill_checkpoint, {"best": best_validation(self.files.folder)}
            )

    def _fill_checkpoint(self, folder: Path) -> None:
        """What verl's own checkpoints hold, in verl's layout, which it loads; it would write them in place."""
        self.actor_rollout_wg.save_checkpoint(str(folder / "actor"), None, self.global_steps)
        torch.save(self.train_dataloader.state_dict(), folder / "data.pt")

    # Evidence

    @cached_property
    def _sides(self) -> Sides:
        return Sides(self.actor_rollout_wg, self.llm_server_manager.server_handles)

    def _ask_both(self) -> tuple[list[Any], list[Any]]:
        """References to the answers of all ranks and of all servers, for `_held`."""
        self._require_alive()
        return self._sides.ask_trainer(), self._sides.ask_rollout()

    def _held(self, trainers: list[Any], rollouts: list[Any]) -> Held:
        """What both sides held when they were asked."""
        identities = [answer["identity"] for answer in ray.get(trainers)]
        return self._sides.held(identities, ray.get(rollouts), self._version)

    def _require_alive(self) -> None:
        if self._watch is not None:
            self._watch.require()

    def require_processes(self) -> None:
        """Raises an error for which `alive.is_death` holds if a process of the run is gone."""
        self._require_alive()
        ray.get(self._sides.ask_rollout())

    def _inject_fault(self) -> None:
        fault = self.recipe.debug.fault
        if fault is not None and fault.step == self.global_steps:
            adapter = self._version if fault.tensor.startswith("base_model.") else None  # PEFT's prefix
            self._sides.flip_bit(fault.side, (fault.what, fault.tensor, fault.element, fault.bit), adapter)

    # Output

    @contextmanager
    def _clock(self, phase: str) -> Iterator[None]:
        """Add the time inside to the step's seconds of `phase`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[phase] += time.perf_counter() - start

    def _report(self, verdict: StepVerdict, always: bool = False) -> None:
        """Take note of a verdict; stop the run if it is not EQUAL and the recipe (or `always`) says so."""
        self._verdict = verdict
        if verdict.verdict == EQUAL:
            return
        self.exit_code = max(self.exit_code, verdict.exit_code)
        self.files.mismatch({"step": self.global_steps} | verdict.report())
        print(f"step {self.global_steps}: {verdict.summary()}", flush=True)
        if always or self.recipe.on_mismatch == "abort":
            if self._fields:
                self._write_step()
            raise StepMismatchError(self.global_steps, verdict)

    def _write_step(self) -> None:
        assert self._verdict is not None
        seconds = self._seconds | {"total": time.perf_counter() - self._began}
        fields = {"step": self.global_steps} | self._verdict.step_fields() | self._fields | {"seconds": seconds}
        self._write_samples(self._samples, "train")
        self.files.step(fields)
        self.logger.log(data=step_metrics(fields), step=self.global_steps)

    def _write_samples(self, samples: list[GradedSample], phase: str) -> None:
        self.files.samples([sample.line(self.global_steps, phase, self.tokenizer.decode) for sample in samples])

    def _keep_digests(self, held: Held) -> None:
        self._fields["adapter_digest_rollout"] = held.rollout.adapter_digest
        self._fields["adapter_digest_trainer"] = held.trainer.adapter_digest

    def _write_run(self, identity: Identity) -> None:
        from omegaconf import OmegaConf

        from zmrl.batch_invariant.native import isa

        before = self.files.read_run()
        now = {
            "model_digest": identity.model_digest,
            "kernel_id": identity.kernel_id,
            "function_config": json.loads(identity.function_config),
        }
        if before and self.global_steps:
            for key, value in now.items():
                if before.get(key) != value:
                    raise TrainerCheckpointError(
                        f"resume: {key} was {before.get(key)!r} in this run and is {value!r}: later steps would follow "
                        "another function; use the model and the kernels of that run, or start afresh"
                    )
        self.files.run(
            {
                "recipe": OmegaConf.to_container(self.recipe, resolve=True),
                "versions": versions(),
                "cpu": cpu() | {"threads": torch.get_num_threads()},
                "isa": isa(),
                "resumed_after": [*(before or {}).get("resumed_after", []), *([self.global_steps] if before else [])],
            }
            | now
        )

    # Validation

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        self._validated = []
        self.replay_buffer.on_validation_batch = self._keep_validated

    def _keep_validated(self, keys: list[str]) -> None:
        if self.replay_buffer.problems:
            self.require_processes()  # the cause may be a server that died
            count, first = len(self.replay_buffer.problems), self.replay_buffer.problems[0]
            raise RuntimeError(f"validation after step {self.global_steps}: {count} samples failed; the first: {first}")
        self._validated += read_graded(keys, "val")

    def _val_metrics_update(
        self,
        data_sources: list,
        sample_uids: list,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """verl's metrics of the drawn samples, and a line of val.jsonl per data set."""
        n, samples = self.recipe.validation.n, self._validated
        right = [float(accuracy or 0.0) >= 1.0 for accuracy in reward_extra_infos_dict["acc"]]
        problems = Counter(source for source, _ in expected_acc_counts or {})
        lines = validation_lines(self.global_steps, samples, right, problems, n, self.recipe.validation.greedy)
        self._write_samples(first_of_each(samples), "validation")
        for line in lines:
            self.files.validation(line)
        drawn = [sample.number < n for sample in samples]
        metrics = super()._val_metrics_update(
            list(compress(data_sources, drawn)),
            list(compress(sample_uids, drawn)),
            {name: list(compress(values, drawn)) for name, values in reward_extra_infos_dict.items()},
            list(compress(sample_turns, drawn)),
            dict.fromkeys(expected_acc_counts or {}, n),
        )
        for line in lines:
            metrics |= validation_metrics(line)
        return metrics
