"""The real stack on two ranks a side against the real stack on one: every step EQUAL, the adapter's bits the same."""

import json

import pytest

from tests.job.test_main_job import ROOT, SMALL, train
from tests.trainer.killing import without_seconds
from zmrl.trainer.logs import STEPS

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

MOVING = ["steps=3", "trainer.lr=0.02", "trainer.warmup_steps=0", "trainer.save_every=0", "validation={every: 3, n: 2}"]
LAYOUTS = ["aime_lora_tp2", "aime_lora_mixed"]


def run(tmp_path_factory, name, *overrides):
    """Lines of steps.jsonl without times, and of val.jsonl."""
    folder = tmp_path_factory.mktemp(name) / "run"
    result, steps, mismatch = train(folder, *MOVING, *overrides, recipe=f"recipes/{name}.yaml", timeout=1700)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not mismatch and [step["verdict"] for step in steps] == ["EQUAL"] * 3
    assert all(step["tokens_compared"] > 0 and step["samples"] == 16 for step in steps)
    for step in steps:
        del step["seconds"]
    return steps, [json.loads(line) for line in (folder / "val.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    steps, validation = run(tmp_path_factory, "aime_lora")
    assert len({step["adapter_digest_trainer"] for step in steps if step["grad_norm"] > 0}) >= 2, "nothing moved"
    return steps, validation


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_on_two_ranks_is_the_run_on_one(tmp_path_factory, one_rank, name):
    assert run(tmp_path_factory, name) == one_rank


def test_a_run_with_the_experts_shared_out_among_two_copies_is_the_run_on_one(tmp_path_factory, one_rank):
    assert run(tmp_path_factory, "aime_lora", "trainer.data_parallel=2", "trainer.expert_parallel=2") == one_rank


def test_two_servers_and_mini_batches_of_two_ranks_are_those_of_one(tmp_path_factory):
    """Each trainer rank has a server beside it, and a part of both mini-batches."""
    both = [run(tmp_path_factory, "aime_lora", "trainer.mini_batches=2", f"trainer.data_parallel={n}") for n in (1, 2)]
    assert both[0] == both[1]


def test_the_death_of_one_of_two_trainer_ranks_changes_nothing(start, tmp_path, one_rank):
    """The other waits for it in an exchange; the run goes on from its checkpoint."""
    recipe = ROOT / "recipes" / "aime_lora_mixed.yaml"
    run = start("zmrl.train", recipe, tmp_path / "run", *SMALL, *MOVING, "trainer.save_every=1")
    run.wait_for_step(2)
    first, second = run.processes("ray::WorkerDict")
    second.kill()
    assert run.wait() == 0, run.log.read_text()
    assert "starting again from the last checkpoint (restart 1 of 3)" in run.log.read_text()
    assert not first.is_running()
    steps = [json.loads(line) for line in without_seconds(tmp_path / "run" / STEPS)]
    assert steps == one_rank[0]
