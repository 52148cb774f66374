"""The runs whose files are kept in docs/runs show what README.md and docs/training.md say of them."""

import json
from pathlib import Path

import pytest

RUNS = Path(__file__).parents[2] / "docs" / "runs"


def lines(run: str, name: str) -> list[dict]:
    return [json.loads(line) for line in (RUNS / run / name).read_text().splitlines()]


@pytest.mark.parametrize("run", ["aime_lora", "control"])
def test_a_hundred_steps_each_once(run):
    steps = lines(run, "steps.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 101))
    assert all(step["samples"] == step["samples_expected"] == 128 for step in steps)
    assert [row["step"] for row in lines(run, "val.jsonl")] == [0, 25, 50, 75, 100]
    assert all(row["n_problems"] == 224 and row["k"] == 8 for row in lines(run, "val.jsonl"))


def test_the_learning_curve():
    first, *_, last = lines("aime_lora", "val.jsonl")
    assert 0.40 <= first["mean_at_k"] <= 0.50
    assert last["mean_at_k"] >= 0.66


def test_every_step_of_the_run_was_equal():
    steps = lines("aime_lora", "steps.jsonl")
    for step in steps:
        assert step["verdict"] == "EQUAL" and step["tokens_compared"] == step["response_tokens"] > 0
        assert (step["tokens_different"], step["rows_different"]) == (0, 0)
        assert (step["kl_k1"], step["kl_k3"]) == (0.0, 0.0)
        assert step["adapter_digest_rollout"] == step["adapter_digest_trainer"]
    assert len({step["adapter_digest_trainer"] for step in steps}) == 100


def test_no_step_of_the_control_was():
    for step in lines("control", "steps.jsonl"):
        assert step["verdict"] == "DIFFERENT" and step["tokens_different"] > 0


def test_both_runs_are_the_same_recipe_but_for_the_switch():
    recipes = [json.loads((RUNS / run / "run.json").read_text())["recipe"] for run in ("aime_lora", "control")]
    control = recipes[1]
    assert control["debug"].pop("torch_linear_in_rollout") and not recipes[0]["debug"].pop("torch_linear_in_rollout")
    assert (recipes[0].pop("on_mismatch"), control.pop("on_mismatch")) == ("abort", "warn")
    assert recipes[0].pop("output_dir") != control.pop("output_dir")
    assert recipes[0] == control
