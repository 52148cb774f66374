"""Whole runs of verl's trainer, in its real processes, around a small model: outputs, verdicts and exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zmrl.trainer.logs import SECONDS, STEP_FIELDS, VAL_FIELDS

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


def test_every_step_is_equal_and_two_runs_are_the_same(run):
    options = ["trainer.kl_coef=0.01", "trainer.mini_batches=2", "trainer.epochs=2", "trainer.save_every=3"]
    options += ["validation.every=2"]
    result, out = run(*options)
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
    assert len({s["adapter_digest_trainer"] for s in steps}) == 3
    assert 0 < steps[0]["reward_mean"] < 1
    validation = lines(out / "val.jsonl")
    assert [v["step"] for v in validation] == [0, 2, 3]
    assert all(set(v) == set(VAL_FIELDS) and v["n_problems"] == 6 for v in validation)
    fields = json.loads((out / "run.json").read_text())
    assert {"recipe", "versions", "cpu", "isa", "function_config", "kernel_id", "model_digest"} <= set(fields)
    assert fields["recipe"]["rollout"]["n"] == 4
    assert not (out / "mismatch.json").exists()
    assert (out / "checkpoints" / "global_step_3" / "actor").exists()
    assert [line for line in result.stdout.splitlines() if line.startswith("step 2/3")]

    again, second = run(*options, name="again")
    assert again.returncode == 0
    same = [{k: v for k, v in s.items() if k != "seconds"} for s in steps]
    assert same == [{k: v for k, v in s.items() if k != "seconds"} for s in lines(second / "steps.jsonl")]


@pytest.mark.parametrize(
    "overrides, environment, step, verdict, code, words",
    [
        (["debug.fault={step: 2, side: trainer, what: logits}"], {}, 2, "DIFFERENT", 3, "log-probs"),
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


def test_warn_goes_on_and_the_exit_code_tells(run):
    result, out = run("debug.fault={step: 1, side: trainer, what: logits}", "on_mismatch=warn")
    assert result.returncode == 3
    assert [s["verdict"] for s in lines(out / "steps.jsonl")] == ["DIFFERENT", "EQUAL", "EQUAL"]
    assert json.loads((out / "mismatch.json").read_text())["step"] == 1
