"""Whole runs of verl's trainer, in its real processes, around a small model: outputs, verdicts and exit codes."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.stub_host import VOCABULARY
from tests.trainer.wandb_files import history
from zmrl.trainer.logs import SAMPLE_FIELDS, SECONDS, STEP_FIELDS, VAL_FIELDS

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {model}
output_dir: {out}
steps: 3
wandb: false
rollout: {{prompts_per_step: 4, n: 4, max_tokens: 12, max_model_len: 128, max_num_seqs: 16}}
trainer: {{lr: 0.5}}
data: {{train_size: 64, val_size: 6}}
validation: {{every: 0, n: 2}}
reward: {{function: "tests.trainer.stub_reward:varied"}}
"""

WITH_REFERENCE = ["trainer.kl_coef=0.01"]
SEVERAL = [*WITH_REFERENCE, "trainer.mini_batches=2", "trainer.epochs=2"]
"""Two updates a pass and two passes, so that the trainer scores the samples in a pass of its own."""

pytestmark = pytest.mark.soak


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from zmrl.model.checkpoint import write_random_checkpoint

    path = tmp_path_factory.mktemp("model") / "nano"
    write_random_checkpoint("nano", path)
    return path


@pytest.fixture
def run(checkpoint, tmp_path):
    def start(*overrides: str, name: str = "out", **environment: str):
        out = tmp_path / name
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(RECIPE.format(model=checkpoint, out=out))
        command = [sys.executable, "-m", "tests.trainer.stub_run", str(recipe), *overrides]
        env = os.environ | environment
        result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=840)
        return result, out

    return start


def lines(file: Path):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fields_of_run(out: Path):
    return json.loads((out / "run.json").read_text())


@pytest.mark.parametrize("updates", [WITH_REFERENCE, SEVERAL], ids=["one update", "several"])
def test_every_step_is_equal_and_two_runs_are_the_same(run, updates):
    options = [*updates, "trainer.save_every=3", "validation.every=2"]
    result, out = run(*options, "wandb=true", WANDB_MODE="offline")
    assert result.returncode == 0, result.stderr
    steps = lines(out / "steps.jsonl")
    assert [s["step"] for s in steps] == [1, 2, 3]
    for step in steps:
        assert set(step) == set(STEP_FIELDS)
        assert set(step["seconds"]) == set(SECONDS)
        assert (step["verdict"], step["samples"], step["tokens_different"]) == ("EQUAL", 16, 0)
        assert step["tokens_compared"] == step["response_tokens"] > 0
        assert step["adapter_digest_trainer"] == step["adapter_digest_rollout"]
        assert step["grad_norm"] > 0
        assert 0 < step["entropy"] < math.log(VOCABULARY)
    assert len({s["adapter_digest_trainer"] for s in steps}) == 3
    assert 0 < steps[0]["reward_mean"] < 1
    validation = lines(out / "val.jsonl")
    assert [v["step"] for v in validation] == [0, 2, 3]
    assert all(set(v) == set(VAL_FIELDS) and (v["n_problems"], v["k"]) == (6, 2) for v in validation)
    for line in validation:
        assert 0 <= line["terse_share"] < 1 and 0 <= line["accuracy_given_work"] <= 1
        assert line["greedy_accuracy"] * 6 == round(line["greedy_accuracy"] * 6)
    samples = lines(out / "samples.jsonl")
    assert all(set(s) == set(SAMPLE_FIELDS) and s["sample"] == 0 for s in samples)
    places = [(s["step"], s["phase"]) for s in samples]
    assert places[::4] == [
        (0, "validation"),
        (1, "train"),
        (2, "train"),
        (2, "validation"),
        (3, "train"),
        (3, "validation"),
    ]
    assert len(samples) == 4 * len(places[::4]) == len({(s["step"], s["phase"], s["key"]) for s in samples})
    report = (out / "report.html").read_text()
    assert report.count("<svg") == 11 and fields_of_run(out)["model_digest"] in report
    rows = {row["_step"]: row for row in history(out)}
    for step in steps:
        row = rows[step["step"]]
        for name in ("step", "verdict", "reward_mean", "kl_k3", "tokens_compared", "tokens_different", "entropy"):
            assert row[f"zmrl/{name}"] == step[name]
        assert row["zmrl/verdict_EQUAL"] == 1 and row["actor/grad_norm"] == step["grad_norm"]
    for line in validation:
        assert rows[line["step"]]["zmrl/val/builtin/greedy_accuracy"] == line["greedy_accuracy"]
        assert rows[line["step"]]["val-core/builtin/acc/mean@2"] == pytest.approx(line["mean_at_k"])
    fields = fields_of_run(out)
    assert {"recipe", "versions", "cpu", "isa", "function_config", "kernel_id", "model_digest"} <= set(fields)
    assert fields["recipe"]["rollout"]["n"] == 4
    assert not (out / "mismatch.json").exists()
    assert (out / "checkpoints" / "global_step_3" / "actor").exists()
    assert [line for line in result.stdout.splitlines() if line.startswith("step 2/3")]

    again, second = run(*options, name="again")
    assert again.returncode == 0
    same = [{k: v for k, v in s.items() if k != "seconds"} for s in steps]
    assert same == [{k: v for k, v in s.items() if k != "seconds"} for s in lines(second / "steps.jsonl")]
    assert (validation, samples) == (lines(second / "val.jsonl"), lines(second / "samples.jsonl"))


@pytest.mark.parametrize(
    "overrides, environment, step, verdict, code, words",
    [
        (["debug.fault={step: 2, side: trainer, what: logits}"], {}, 2, "DIFFERENT", 3, "log-probs"),
        ([*WITH_REFERENCE, "debug.fault={step: 2, side: trainer, what: logits}"], {}, 2, "DIFFERENT", 3, "log-probs"),
        ([*SEVERAL, "debug.fault={step: 2, side: trainer, what: logits}"], {}, 2, "DIFFERENT", 3, "log-probs"),
        (["debug.fault={step: 2, side: rollout, what: logits}"], {}, 2, "DIFFERENT", 3, "log-probs"),
        (["debug.fault={step: 2, side: rollout, what: parameter, tensor: base}"], {}, 2, "VOID", 4, "parameter base"),
        (["debug.fault={step: 1, side: trainer, what: parameter, tensor: base}"], {}, 1, "VOID", 4, "parameter base"),
        ([], {"ZMRL_TEST_STALE": "1"}, 2, "VOID", 4, "adapter_digest"),
        ([], {"ZMRL_TEST_LOSE_TAG": "train/2/builtin/5/3"}, 2, "VOID", 4, "15 samples instead of 16"),
    ],
)
def test_a_step_that_is_not_equal_stops_before_its_update(run, overrides, environment, step, verdict, code, words):
    result, out = run(*overrides, **environment)
    assert result.returncode == code, result.stderr
    steps = lines(out / "steps.jsonl")
    assert [s["verdict"] for s in steps] == ["EQUAL"] * (step - 1) + [verdict]
    assert steps[-1]["grad_norm"] is None
    report = json.loads((out / "mismatch.json").read_text())
    assert (report["step"], report["verdict"]) == (step, verdict)
    assert words in " ".join(report["reasons"])
    assert words in result.stderr


@pytest.mark.parametrize("function, words", [("not_a_number_later", "is nan"), ("raising_later", "KeyError")])
def test_a_reward_that_fails_stops_the_run_and_names_the_sample(run, function, words):
    result, out = run(f"reward.function=tests.trainer.stub_reward:{function}")
    assert result.returncode == 2
    assert "builtin problem" in result.stderr
    assert words in result.stderr
    assert not lines(out / "steps.jsonl")


def test_a_reward_that_hangs_stops_the_run(run):
    result, _ = run("reward.function=tests.trainer.stub_reward:hanging_later", "reward.timeout_seconds=2")
    assert result.returncode == 2
    assert "took longer than 2 s" in result.stderr and "16 rewards failed" in result.stderr


def test_a_full_disk_is_one_error_and_nothing_is_lost(run):
    """A checkpoint that cannot be written, not only a kill: the run says so, stops, and goes on from the one before."""
    result, out = run("trainer.save_every=1", ZMRL_TEST_DISK_FULL="2")
    assert result.returncode == 1
    (error,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "global_step_2 could not be written" in error and "No space left" in error
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["global_step_1"]
    again, _ = run("trainer.save_every=1", "resume=auto")
    assert again.returncode == 0, again.stderr
    assert [s["step"] for s in lines(out / "steps.jsonl")] == [1, 2, 3]


def test_warn_goes_on_and_the_exit_code_tells(run):
    result, out = run("debug.fault={step: 1, side: trainer, what: logits}", "on_mismatch=warn")
    assert result.returncode == 3
    assert [s["verdict"] for s in lines(out / "steps.jsonl")] == ["DIFFERENT", "EQUAL", "EQUAL"]
    assert json.loads((out / "mismatch.json").read_text())["step"] == 1
