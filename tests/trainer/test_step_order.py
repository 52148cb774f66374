"""What a step does before and after its verdict: nothing but EQUAL (or `on_mismatch: warn`) reaches the optimizer."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from tests.trainer.engines import verl_environment
from tests.trainer.test_checker import IDENTITY, flip, make_sample
from zmrl.recipe import Recipe


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """A trainer in the middle of step 3, around stand-ins that write down what they are asked for.

    `trainer.compared` are the samples of the comparison, `trainer.order` what happened.
    """
    verl_environment()
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from zmrl.trainer import ppo
    from zmrl.trainer.logs import RunFiles

    order: list[str] = []

    def scores(self, batch, metrics):
        order.append("scores")
        return batch

    def gradients(self, batch, metrics):
        order.append("update")
        if not self._one_update:
            metrics["actor/grad_norm"] = 0.5
        if self.update_error:
            raise self.update_error
        return batch

    def apply():
        order.append("optimizer step")
        return [{"grad_norm": 0.25, "lr": 0.125}]

    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", scores)
    monkeypatch.setattr(PPOTrainerSync, "_update_actor", gradients)
    monkeypatch.setattr(ppo, "mean_entropy", lambda batch: 1.5)
    monkeypatch.setattr(ppo, "read_first", lambda batch: [])

    def make(updates: int = 1, on_mismatch: str = "abort"):
        trainer = ppo.ZmrlTrainer.__new__(ppo.ZmrlTrainer)
        trainer.recipe = Recipe(model="nano", output_dir=str(tmp_path), on_mismatch=on_mismatch)
        trainer.files = RunFiles(tmp_path)
        trainer._one_update = updates == 1
        trainer.exit_code, trainer.samples_expected, trainer.global_steps, trainer._version = 0, 2, 3, 3
        trainer.compared = [make_sample(seed=i) for i in range(2)]
        trainer.order, trainer.update_error = order, None
        trainer.timing_raw = {"ref": 10.0, "adv": 20.0}
        trainer.logger = SimpleNamespace(log=lambda data, step: None)
        trainer.replay_buffer = SimpleNamespace(problems=[])
        trainer.actor_rollout_wg = SimpleNamespace(zmrl_apply_update=apply)
        trainer._watch = None
        monkeypatch.setattr(trainer, "_exchange", lambda: (IDENTITY, IDENTITY, [], []))
        monkeypatch.setattr(trainer, "_inject_fault", lambda: None)
        rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
        monkeypatch.setattr(ppo, "read_samples", lambda batch, version: (trainer.compared, rewards))
        trainer.on_step_begin()
        return trainer

    return make


def take(trainer) -> dict:
    """The part of verl's step between sampling and the sync; returns verl's metrics."""
    metrics: dict = {}
    trainer._update_actor(trainer._compute_old_log_prob("batch", metrics), metrics)
    return metrics


def lines(trainer) -> list[dict]:
    file = trainer.files.folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def different(sample):
    return dataclasses.replace(sample, trainer_digests=flip(sample.trainer_digests, 2, 5))


def test_one_update_is_applied_after_its_own_forward_was_compared(make_trainer):
    trainer = make_trainer()
    metrics = take(trainer)
    assert trainer.order == ["update", "scores", "optimizer step"]
    assert trainer._verdict.verdict == "EQUAL" and trainer._verdict.tokens_compared == 10
    assert (metrics["actor/grad_norm"], metrics["actor/lr"]) == (0.25, 0.125)
    assert trainer._fields["grad_norm"] == 0.25 and trainer._fields["entropy"] == 1.5
    assert (trainer._fields["reward_mean"], trainer._fields["response_tokens"]) == (0.5, 10)
    assert 30 < trainer._seconds["train"] < 40 and 0 < trainer._seconds["check"] < 10
    assert not lines(trainer), "the step's line follows the sync"


@pytest.mark.parametrize("verdict, code", [("DIFFERENT", 3), ("VOID", 4)])
def test_an_update_that_is_not_equal_is_not_applied(make_trainer, verdict, code):
    from zmrl.trainer.ppo import StepMismatchError

    trainer = make_trainer()
    trainer.compared[1:] = [different(trainer.compared[1])] if verdict == "DIFFERENT" else []
    with pytest.raises(StepMismatchError) as raised:
        take(trainer)
    assert trainer.order == ["update", "scores"]
    assert raised.value.verdict.exit_code == trainer.exit_code == code
    (line,) = lines(trainer)
    assert (line["step"], line["verdict"], line["grad_norm"]) == (3, verdict, None)
    assert line["seconds"]["train"] > 30 and line["seconds"]["check"] > 0
    report = json.loads((trainer.files.folder / "mismatch.json").read_text())
    assert (report["step"], report["verdict"]) == (3, verdict)


def test_warn_applies_the_update_and_the_exit_code_tells(make_trainer):
    trainer = make_trainer(on_mismatch="warn")
    trainer.compared[1] = different(trainer.compared[1])
    metrics = take(trainer)
    assert trainer.order == ["update", "scores", "optimizer step"]
    assert (trainer.exit_code, metrics["actor/grad_norm"]) == (3, 0.25)


def test_several_updates_follow_a_pass_that_was_compared(make_trainer):
    from zmrl.trainer.engine import UpdateMismatchError
    from zmrl.trainer.ppo import StepMismatchError

    trainer = make_trainer(updates=4)
    assert take(trainer)["actor/grad_norm"] == 0.5
    assert trainer.order == ["scores", "update"]
    trainer.update_error = UpdateMismatchError("sample 1 of the mini-batch, token 2")
    with pytest.raises(StepMismatchError, match="DIFFERENT: sample 1 of the mini-batch"):
        take(trainer)
    trainer.compared[0] = different(trainer.compared[0])
    trainer.order.clear()
    with pytest.raises(StepMismatchError):
        take(trainer)
    assert trainer.order == ["scores"]
