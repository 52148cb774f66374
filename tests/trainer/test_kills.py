"""Runs that are killed -9 go on to the very bits of a run that was not. verl's real processes around a small model.

The same lines mean the same next prompts: a resumed run does not start its data again (prime-rl#3332).
"""

import json
import random
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests.trainer.killing import ROOT, Run, without_seconds
from zmrl.trainer.logs import RUN, STEPS, VAL

RECIPE = """
model: {model}
output_dir: unused
steps: 8
wandb: false
rollout: {{prompts_per_step: 4, n: 4, max_tokens: 12, max_model_len: 128, max_num_seqs: 16}}
trainer: {{lr: 0.5, save_every: 2}}
data: {{train_size: 64, val_size: 6}}
validation: {{every: 3, n: 2}}
reward: {{function: "tests.trainer.stub_reward:varied"}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    file.write_text(RECIPE.format(model=ROOT / "checkpoints" / "nano"))
    return file


@pytest.fixture(scope="module")
def unbroken(recipe, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run = Run("tests.trainer.stub_run", recipe, folder)
    assert run.wait() == 0, run.log.read_text()
    return folder


def assert_same_run(folder: Path, unbroken: Path) -> None:
    for name in (STEPS, VAL):
        assert without_seconds(folder / name) == without_seconds(unbroken / name), name
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["global_step_6", "global_step_8"]


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_a_kill_changes_nothing(start, recipe, tmp_path):
    """The rollout server, after the step that follows a checkpoint. More kills: below."""
    folders = tmp_path / "unbroken", tmp_path / "killed"
    for folder in folders:
        run = start("tests.trainer.stub_run", recipe, folder, "steps=4", "validation.every=0")
        if folder.name == "killed":
            run.wait_for_step(3)
            run.kill("ray::StubServer")
        assert run.wait() == 0, run.log.read_text()
    assert "starting again from the last checkpoint (restart 1 of 3)" in run.log.read_text()
    unbroken, killed = (without_seconds(folder / STEPS) for folder in folders)
    assert len(unbroken) == 4 and killed == unbroken


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_three_kills_change_nothing(start, recipe, unbroken, tmp_path):
    """The rollout server in mid-step, the command itself, and the trainer while it writes a checkpoint."""
    folder = tmp_path / "run"
    run = start("tests.trainer.stub_run", recipe, folder)
    run.wait_for_step(3)
    run.kill("ray::StubServer")
    run.wait_for_step(5)  # it went on by itself
    run.kill_driver()
    assert "starting again from the last checkpoint (restart 1 of 3)" in run.log.read_text()

    died = tmp_path / "died"
    again = start("tests.trainer.stub_run", recipe, folder, "resume=auto", ZMRL_TEST_DIE_SAVING=f"6:{died}")
    assert again.wait() == 0, again.log.read_text()
    assert died.exists(), "the trainer was not killed while it wrote a checkpoint"
    assert json.loads((folder / RUN).read_text())["resumed_after"] == [2, 4, 4]
    assert_same_run(folder, unbroken)

    finished = start("tests.trainer.stub_run", recipe, folder, "resume=auto")
    assert finished.wait() == 0
    assert "all 8 steps" in finished.log.read_text()
    assert_same_run(folder, unbroken)


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_thirty_kills_at_random_change_nothing(start, recipe, unbroken, tmp_path):
    """Every process that matters: half of the time at any moment of the start, half of the time at one of the steps."""
    draw = random.Random(5)
    folder, kills = tmp_path / "run", Counter[str]()
    victims = ("driver", "ray::StubServer", "ray::TaskRunner", "ray::WorkerDict", "ray::ZmrlAgentLoopWorker")
    while kills.total() < 30:
        run = start("tests.trainer.stub_run", recipe, folder, "resume=auto", "restarts=0")
        if draw.random() < 0.5:
            run.sleep(draw.uniform(0, 20))
        else:
            run.wait_for_a_line()
            run.sleep(draw.uniform(0, 4))
        if run.process.poll() is None:
            victim = draw.choice([name for name in victims if name == "driver" or run.processes(name)])
            kills[victim if run.steps() else "at the start"] += 1
            print(f"kill {kills.total()}: {victim} after step {len(run.steps())}", flush=True)
            if victim == "driver":
                run.kill_driver()
                continue
            for process in run.processes(victim):
                process.kill()
        code = run.wait()
        if code == 0:  # done before the kill: what a run of any number of kills wrote must be right, then begin anew
            assert_same_run(folder, unbroken)
            folder = folder.with_name(f"{folder.name}-next")
        else:
            assert code == 1, run.log.read_text()
    last = start("tests.trainer.stub_run", recipe, folder, "resume=auto")
    assert last.wait() == 0, last.log.read_text()
    assert_same_run(folder, unbroken)
    assert len(kills) > 3 and kills["at the start"] < 20, f"VOID: {kills}"


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_leaves_nothing_behind(start, recipe, tmp_path, number):
    run = start("tests.trainer.stub_run", recipe, tmp_path / "run")
    run.wait_for_step(2)
    left = psutil.Process(run.process.pid).children(recursive=True)
    run.process.send_signal(number)
    assert run.wait() == 130
    output = run.log.read_text()
    assert output.splitlines()[-1] == "zmrl: interrupted; resume=auto goes on from the last checkpoint"
    assert "Traceback" not in output
    psutil.wait_procs(left, timeout=30)
    assert not [process for process in left if process.is_running()]
    assert [line["step"] for line in run.steps()] == list(range(1, len(run.steps()) + 1))
