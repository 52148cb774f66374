"""verl's synchronous trainer with a proof at every step: compare, then update.

`ZmrlTrainer` overrides hooks of verl's `PPOTrainerSync`; the loop is verl's. It is put behind verl's own mode name
`sync`, which verl compares with in many places.
"""

from __future__ import annotations

import json
import time
from typing import Any

import ray
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from zmrl.rollout.verl_replica import adapter_version
from zmrl.trainer.checker import (
    DIFFERENT,
    EQUAL,
    EXIT_CODES,
    Identity,
    StepVerdict,
    compare,
    tensor_differences,
    void_before_sampling,
)
from zmrl.trainer.engine import UpdateMismatchError
from zmrl.trainer.evidence import read_samples
from zmrl.trainer.logs import RunFiles, cpu, versions
from zmrl.trainer.worker import ZmrlActorRolloutRefWorker


class StepMismatchError(RuntimeError):
    """A step that is not EQUAL, with `on_mismatch: abort`; raised before its update."""

    def __init__(self, step: int, verdict: StepVerdict) -> None:
        super().__init__(f"step {step}: {verdict.summary()}")
        self.verdict = verdict


class ZmrlTrainer(PPOTrainerSync):
    """One training run. `exit_code` is that of the worst verdict so far (it matters with `on_mismatch: warn`)."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.recipe = config.zmrl
        self.files = RunFiles(self.recipe.output_dir)
        self.exit_code = EXIT_CODES[EQUAL]
        self.samples_expected = self.recipe.rollout.prompts_per_step * self.recipe.rollout.n
        self._version = 0
        """Version of the adapter that was synced last."""
        self._verdict: StepVerdict | None = None
        self._fields: dict[str, Any] = {}
        """Fields of this step's line that are not the verdict's."""
        self._seconds: dict[str, float] = {}
        self._began = 0.0

    # Set-up

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(ZmrlActorRolloutRefWorker)

    def on_init_end(self) -> None:
        """First sync; then both sides must hold the same thing, before anything is sampled."""
        super().on_init_end()
        self._version = adapter_version(self.global_steps)
        rollout, trainer, problems, tensors = self._exchange()
        self._write_run(trainer)
        void = void_before_sampling(self.samples_expected, rollout, trainer, problems, tensors)
        if void is not None:
            self._report(void)

    # A step

    def on_step_begin(self) -> None:
        """Start the clocks, flip a bit if the recipe says so, and compare what both sides hold."""
        self._began = time.perf_counter()
        self._seconds = dict.fromkeys(("rollout", "check", "train", "sync"), 0.0)
        self._fields = {"reward_mean": None, "reward_std": None, "response_tokens": 0, "grad_norm": None}
        self._verdict = None
        self._inject_fault()
        rollout, trainer, problems, tensors = self._exchange()
        self._keep_digests(rollout, trainer)
        void = void_before_sampling(self.samples_expected, rollout, trainer, problems, tensors)
        self._seconds["check"] = time.perf_counter() - self._began
        if void is not None:
            self._report(void)

    def on_sample_end(self) -> None:
        super().on_sample_end()
        self._seconds["rollout"] = time.perf_counter() - self._began - self._seconds["check"]

    def _balance_batch(
        self, batch: KVBatchMeta, metrics: dict, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
    ) -> KVBatchMeta:
        """Pad only: verl orders by length here, which would let lengths decide the order of sums."""
        if not batch.keys:
            rollout, trainer, problems, tensors = self._exchange()
            problems = [*problems, *self.replay_buffer.problems]
            self._report(compare([], self.samples_expected, rollout, trainer, problems, tensors), always=True)
        info = self.actor_rollout_wg._dispatch_info
        if "actor" not in info:
            info["actor"] = self.actor_rollout_wg._query_dispatch_info("actor")
        multiple = self._get_required_batch_multiple(max(info["actor"]) + 1)
        return upsample_batch_to_divisible_size(batch, multiple, self.tokenizer.eos_token_id)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        """The trainer's own forward pass, and the comparison with the rollout's."""
        start = time.perf_counter()
        batch = super()._compute_old_log_prob(batch, metrics)
        samples, rewards = read_samples(batch, self._version)
        rollout, trainer, problems, tensors = self._exchange()
        problems = [*problems, *self.replay_buffer.problems]
        verdict = compare(samples, self.samples_expected, rollout, trainer, problems, tensors)
        self._keep_digests(rollout, trainer)
        self._fields["response_tokens"] = verdict.tokens_compared
        if len(rewards):
            self._fields["reward_mean"] = float(rewards.mean())
            self._fields["reward_std"] = float(rewards.std(correction=0))
        metrics.update({f"mismatch/{k}": v for k, v in verdict.step_fields().items() if k != "verdict"})
        self._seconds["check"] += time.perf_counter() - start
        self._report(verdict)
        return batch

    def _update_actor(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        try:
            batch = super()._update_actor(batch, metrics)
        except UpdateMismatchError as error:
            verdict = self._verdict
            assert verdict is not None
            verdict.verdict, verdict.reasons = DIFFERENT, [str(getattr(error, "cause", error))]
            self._report(verdict, always=True)
        self._fields["grad_norm"] = float(metrics["actor/grad_norm"])
        return batch

    def on_step_end(self) -> None:
        """Sync the adapter, then write the step's line."""
        super().on_step_end()
        self._version = adapter_version(self.global_steps)
        self._seconds["train"] = sum(self.timing_raw.get(name, 0.0) for name in ("ref", "adv", "update_actor"))
        self._seconds["sync"] = self.timing_raw["update_weights"]
        self._write_step()

    # Evidence

    def _exchange(self) -> tuple[Identity, Identity, list[str], list[dict[str, Any]]]:
        """What both sides hold now: (rollout, trainer, problems, differing parameters).

        With several servers, or several trainer ranks, the first that differs is the one reported.
        """
        trainers = self.actor_rollout_wg.zmrl_identity()
        servers = self.llm_server_manager.server_handles
        rollouts = ray.get([server.zmrl_identity.remote() for server in servers])
        trainer = Identity.from_host(trainers[0], self._version)
        problems = [
            f"trainer rank {rank}: {'; '.join(Identity.from_host(other, self._version).disagreements(trainer))}"
            for rank, other in enumerate(trainers[1:], 1)
            if Identity.from_host(other, self._version) != trainer
        ]
        chosen, tensors = 0, list[dict[str, Any]]()
        for number, reported in enumerate(rollouts):
            arrived = reported.get("arrived_digest")
            if arrived != trainers[0]["sent_digest"]:
                problems.append(f"server {number}: the adapter that arrived ({arrived}) is not the one that was sent")
            if not tensors and Identity.from_host(reported, self._version) != trainer:
                chosen, tensors = number, self._differing_tensors(number)
        return Identity.from_host(rollouts[chosen], self._version), trainer, problems, tensors

    def _differing_tensors(self, server: int) -> list[dict[str, Any]]:
        handle = self.llm_server_manager.server_handles[server]
        calls = [handle.zmrl_rpc.remote("zmrl_tensor_digests", adapter) for adapter in (None, self._version)]
        base, adapter = ray.get(calls)
        return tensor_differences(base | adapter, self.actor_rollout_wg.zmrl_tensor_digests()[0])

    def _inject_fault(self) -> None:
        fault = self.recipe.debug.fault
        if fault is None or fault.step != self.global_steps:
            return
        arguments = (fault.what, fault.tensor, fault.element, fault.bit)
        if fault.side == "trainer":
            self.actor_rollout_wg.zmrl_flip_bit(*arguments)
        else:
            server = self.llm_server_manager.server_handles[0]
            adapter = self._version if fault.tensor.startswith("base_model.") else None  # PEFT's prefix
            ray.get(server.zmrl_rpc.remote("zmrl_flip_bit", *arguments, adapter))

    # Output

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
        self.files.step(fields)

    def _keep_digests(self, rollout: Identity, trainer: Identity) -> None:
        self._fields["adapter_digest_rollout"] = rollout.adapter_digest
        self._fields["adapter_digest_trainer"] = trainer.adapter_digest

    def _write_run(self, identity: Identity) -> None:
        from omegaconf import OmegaConf

        from zmrl.batch_invariant.native import isa

        self.files.run(
            {
                "recipe": OmegaConf.to_container(self.recipe, resolve=True),
                "versions": versions(),
                "cpu": cpu() | {"threads": torch.get_num_threads()},
                "isa": isa(),
                "function_config": json.loads(identity.function_config),
                "kernel_id": identity.kernel_id,
                "model_digest": identity.model_digest,
            }
        )

    # Validation

    def _val_metrics_update(
        self,
        data_sources: list,
        sample_uids: list,
        reward_extra_infos_dict: dict[str, list],
        sample_turns: list,
        expected_acc_counts: dict[tuple[str, str], int] | None = None,
    ) -> dict[str, float]:
        """verl's metrics, and a line of val.jsonl per data set. A sample that is missing counts as wrong."""
        right: dict[str, float] = {}
        for source, accuracy in zip(data_sources, reward_extra_infos_dict["acc"], strict=True):
            right[str(source)] = right.get(str(source), 0.0) + float(accuracy or 0.0)
        counts: dict[str, list[int]] = {}
        for (source, _), k in (expected_acc_counts or {}).items():
            counts.setdefault(source, []).append(k)
        for source, ks in sorted(counts.items()):
            mean = right.get(source, 0.0) / sum(ks)
            line = {
                "step": self.global_steps,
                "dataset": source,
                "n_problems": len(ks),
                "k": max(ks),
                "mean_at_k": mean,
            }
            self.files.validation(line)
        return super()._val_metrics_update(
            data_sources, sample_uids, reward_extra_infos_dict, sample_turns, expected_acc_counts
        )
