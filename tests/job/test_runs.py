"""Runs of the real stack against each other: what must not matter, kills, and a rollout that is not the policy."""

import json

import pytest

from tests.job.test_main_job import RECIPE, SMALL, train
from tests.trainer.killing import ROOT, without_seconds
from zmrl.trainer.logs import RUN, STEPS, VAL

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

MOVING = ["steps=4", "trainer.lr=0.02", "trainer.warmup_steps=0", "trainer.save_every=1", "validation={every: 2, n: 2}"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    result, steps, _ = train(folder, *MOVING)
    assert result.returncode == 0, result.stdout + result.stderr
    moved = {step["adapter_digest_trainer"] for step in steps}
    assert len(moved) >= 3, "the adapter did not move"  # a step in which all groups agree has no gradient
    return folder


def assert_same_run(folder, unbroken):
    for name in (STEPS, VAL):
        assert without_seconds(folder / name) == without_seconds(unbroken / name), name


def test_threads_batches_and_micro_batches_change_nothing(unbroken, tmp_path):
    """Requests are admitted five at a time and in chunks, so they finish in another order; one thread; three samples at
    a time in the trainer."""
    other = ["threads=1", "trainer.micro_batch_samples=3", "rollout.max_num_seqs=5"]
    other += ["rollout.long_prefill_token_threshold=16", "rollout.enable_prefix_caching=false"]
    result, _, _ = train(tmp_path / "run", *MOVING, *other)
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_run(tmp_path / "run", unbroken)


def test_kills_of_the_real_processes_change_nothing(start, unbroken, tmp_path):
    """vLLM's engine in mid-step, which the run survives by itself; then the command, which is started again."""
    run = start("zmrl.train", ROOT / RECIPE, tmp_path / "run", *SMALL, *MOVING)
    run.wait_for_step(1)
    run.kill("VLLM::EngineCore")
    run.wait_for_step(3)
    run.kill_driver()
    assert "starting again from the last checkpoint (restart 1 of 3)" in run.log.read_text()
    again = start("zmrl.train", ROOT / RECIPE, tmp_path / "run", *SMALL, *MOVING, "resume=auto")
    assert again.wait() == 0, again.log.read_text()
    first, second = json.loads((tmp_path / "run" / RUN).read_text())["resumed_after"]
    assert first >= 1 and second >= 2
    assert_same_run(tmp_path / "run", unbroken)


def test_a_rollout_of_torchs_products_differs_at_every_step(tmp_path):
    control = ["steps=2", "debug.torch_linear_in_rollout=true", "on_mismatch=warn", "validation.every=0"]
    result, steps, mismatch = train(tmp_path / "run", *control)
    assert result.returncode == 3, result.stdout + result.stderr
    assert [step["verdict"] for step in steps] == ["DIFFERENT", "DIFFERENT"]
    assert all(0 < step["tokens_different"] <= step["tokens_compared"] for step in steps)
    assert all(step["grad_norm"] is not None for step in steps), "warn must train on"
    assert mismatch["step"] == 1
