"""Steps of verl's trainer around the small model: what is computed, in which order, and what a verdict prevents."""

from __future__ import annotations

import json

import pytest
import torch

from tests.trainer import engines
from tests.trainer.one_process import make_trainer, sample, train


@pytest.fixture(scope="module", autouse=True)
def group():
    engines.verl_environment()
    with engines.process_group():
        yield


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    def make(*overrides: str, name: str = "run"):
        (tmp_path / name).mkdir()
        return make_trainer(tmp_path / name, monkeypatch, *overrides)

    return make


def lines(trainer) -> list[dict]:
    file = trainer.files.folder / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def without_time(fields: dict) -> dict:
    return {name: value for name, value in fields.items() if name != "seconds" and "perf/" not in name}


@pytest.mark.parametrize("overrides", [[], ["trainer.kl_coef=0.01"]], ids=["", "with a reference"])
def test_one_update_has_the_bits_of_one_after_a_separate_pass(trainer, overrides):
    """Three steps each; the separate pass, which one update does not have, is forced on the second trainer."""
    runs = []
    for name in ("folded", "separate"):
        made = trainer(*overrides, name=name)
        if name == "separate":
            made._one_update = made.engine._one_update = False
        metrics = []
        for _ in range(3):
            sample(made)
            metrics.append(train(made))
        runs.append((made, metrics))
    (folded, ours), (separate, theirs) = runs
    reference = ["forward adapter=False"] if overrides else []
    assert folded.host.calls == 3 * [*reference, "forward_backward 4"]
    assert separate.host.calls == 3 * ["forward adapter=True", *reference, "forward_backward 4"]
    assert [without_time(line) for line in lines(folded)] == [without_time(line) for line in lines(separate)]
    of_the_pass = "training/rollout_"  # verl's own comparison, of probabilities, belongs to a separate pass
    theirs = [{name: value for name, value in m.items() if not name.startswith(of_the_pass)} for m in theirs]
    assert [without_time(m) for m in ours] == [without_time(m) for m in theirs]
    assert all(m["actor/entropy"] > 0 for m in ours)
    assert torch.equal(folded.host.adapter.view(torch.int32), separate.host.adapter.view(torch.int32))
    for line in lines(folded):
        assert (line["verdict"], line["samples"], line["tokens_different"]) == ("EQUAL", 4, 0)
        assert line["tokens_compared"] > 0 and line["grad_norm"] > 0 and line["entropy"] > 0
        assert line["seconds"]["train"] > 0 and line["seconds"]["check"] > 0
    assert len({line["adapter_digest_trainer"] for line in lines(folded)}) == 3
    files = [(made.files.folder / "samples.jsonl").read_text() for made, _ in runs]
    assert files[0] == files[1] and len(files[0].splitlines()) == 6


FAULT = "debug.fault={step: 2, side: trainer, what: logits}"


@pytest.mark.parametrize(
    "overrides, lost, verdict, code",
    [
        ([FAULT], False, "DIFFERENT", 3),
        ([FAULT, "trainer.kl_coef=0.01"], False, "DIFFERENT", 3),
        ([FAULT, engines.SEVERAL], False, "DIFFERENT", 3),
        ([], True, "VOID", 4),
        ([engines.SEVERAL], True, "VOID", 4),
    ],
)
def test_a_step_that_is_not_equal_never_reaches_the_optimizer(trainer, overrides, lost, verdict, code):
    from zmrl.trainer.ppo import StepMismatchError

    made = trainer(*overrides)
    sample(made)
    train(made)
    steps, before = made.host.steps, made.host.identity()
    sample(made)
    if lost:
        del made.store.rows["uid1_0_0"]
    with pytest.raises(StepMismatchError) as raised:
        train(made)
    assert (made.host.steps, made.host.identity()) == (steps, before)
    assert raised.value.verdict.exit_code == made.exit_code == code
    first, second = lines(made)
    assert (first["verdict"], second["verdict"], second["grad_norm"]) == ("EQUAL", verdict, None)
    assert second["samples"] == (3 if lost else 4) and second["tokens_compared"] > 0
    report = json.loads((made.files.folder / "mismatch.json").read_text())
    assert (report["step"], report["verdict"]) == (2, verdict)


@pytest.mark.parametrize("side", ["trainer", "rollout"])
@pytest.mark.parametrize("tensor", ["base", "adapter"])
@pytest.mark.parametrize("when", ["before", "while"])
def test_a_parameter_that_changes_before_or_while_sampling_is_void_and_named(trainer, monkeypatch, side, tensor, when):
    from zmrl.trainer.ppo import StepMismatchError

    made = trainer()
    sample(made)
    model = made.host.model if side == "trainer" else made.server.model
    hand_out, handed_out = made.replay_buffer.sample, []

    def samples(**options):
        if when == "while":
            model.flip_bit("parameter", tensor, 0, 3)
        handed_out.append(True)
        return hand_out(**options)

    monkeypatch.setattr(made.replay_buffer, "sample", samples)
    if when == "before":
        model.flip_bit("parameter", tensor, 0, 3)
    with pytest.raises(StepMismatchError) as raised:
        train(made)
    verdict = raised.value.verdict
    assert (verdict.verdict, [item["name"] for item in verdict.tensors], made.host.steps) == ("VOID", [tensor], 0)
    assert f"parameter {tensor} differs" in verdict.reasons[0]
    assert len(handed_out) == (when == "while"), "the first comparison waits for no sample"
    while_sampling = [reason for reason in verdict.reasons if "held something else while sampling" in reason]
    assert len(while_sampling) == (4 if side == "rollout" and when == "while" else 0)


def test_a_sample_without_scores_is_void(trainer, monkeypatch):
    from zmrl.trainer.ppo import StepMismatchError

    made = trainer()
    sample(made)
    compared_scores = made.engine.compared_scores

    def lose_one():
        names, counts, *columns = scores = compared_scores()
        lost = sum(counts[:1])
        return type(scores)(names[1:], counts[1:], *(column[lost:] for column in columns))

    monkeypatch.setattr(made.engine, "compared_scores", lose_one)
    with pytest.raises(StepMismatchError, match="VOID: builtin problem 0 sample 0: the trainer did not score it"):
        train(made)
    assert made.host.steps == 0


def test_the_rollouts_log_probs_never_enter_the_loss(trainer):
    """A control run: every step is DIFFERENT, and `warn` trains on with the trainer's own log-probs."""
    runs = []
    for name, options in (("equal", []), ("control", ["on_mismatch=warn"])):
        made = trainer(*options, name=name)
        sample(made)
        for row in made.store.rows.values() if name == "control" else ():
            row["rollout_log_probs"] = row["rollout_log_probs"] - 0.5
        metrics = train(made)
        runs.append((made, metrics))
    (equal, _), (control, metrics) = runs
    (line,) = lines(control)
    assert (line["verdict"], control.exit_code) == ("DIFFERENT", 3)
    assert line["tokens_different"] == line["tokens_compared"] > 0 and line["kl_k1"] == pytest.approx(-0.5)
    assert line["grad_norm"] == lines(equal)[0]["grad_norm"] > 0 and metrics["actor/ppo_kl"] == 0.0
    assert control.host.steps == 1
    assert torch.equal(control.host.adapter.view(torch.int32), equal.host.adapter.view(torch.int32))


def test_several_updates_must_start_from_the_bits_that_were_compared(trainer):
    from zmrl.trainer.ppo import StepMismatchError

    made = trainer("trainer.mini_batches=2")
    sample(made)
    train(made)
    assert made.host.calls == ["forward adapter=True", "forward_backward 2", "forward_backward 2"]
    assert (made.host.steps, lines(made)[0]["verdict"]) == (2, "EQUAL")
    made.host.perturb_update = 1e-6
    sample(made)
    with pytest.raises(StepMismatchError, match="DIFFERENT: sample 0 of the mini-batch, token 0"):
        train(made)
    assert made.host.steps == 2


def test_every_rank_has_its_part_of_every_mini_batch():
    from zmrl.trainer.ppo import rank_order

    assert rank_order(12, 12, 1) == rank_order(12, 6, 1) == rank_order(12, 12, 2) == list(range(12))
    assert rank_order(12, 6, 2) == [0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]
    assert rank_order(16, 8, 4) == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
