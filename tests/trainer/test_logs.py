"""The output contract: exact fields, whole files, the first mismatch kept."""

import json

import pytest

from zmrl.trainer.logs import SECONDS, STEP_FIELDS, RunFiles, step_line, validation_line, versions


def step_fields(**changes):
    fields = dict.fromkeys(STEP_FIELDS, 0) | {
        "step": 1, "verdict": "EQUAL", "tokens_compared": 1234, "kl_k1": 0.0, "kl_k3": 0.0, "reward_mean": 0.25,
        "reward_std": 0.1, "grad_norm": None, "seconds": dict.fromkeys(SECONDS, 1.0),
    }  # fmt: skip
    return fields | changes


def test_steps_are_appended_line_by_line(tmp_path):
    files = RunFiles(tmp_path)
    files.step(step_fields())
    files.step(step_fields(step=2, kl_k3=float("nan")))
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert set(lines[0]) == set(STEP_FIELDS)
    assert lines[1]["kl_k3"] == "nan"


def test_a_missing_or_unknown_field_is_an_error(tmp_path):
    files = RunFiles(tmp_path)
    with pytest.raises(ValueError, match="verdict"):
        files.step({name: value for name, value in step_fields().items() if name != "verdict"})
    with pytest.raises(ValueError, match="extra"):
        files.validation({"step": 0, "dataset": "a", "n_problems": 1, "k": 1, "mean_at_k": 0.5, "extra": 1})
    assert not list(tmp_path.iterdir())


def test_first_mismatch_is_kept_and_no_temporary_file_stays(tmp_path):
    files = RunFiles(tmp_path)
    files.mismatch({"verdict": "DIFFERENT", "first": {"token": 3}})
    files.mismatch({"verdict": "VOID"})
    files.run({"versions": versions()})
    files.outcome("finished", 0)
    assert json.loads((tmp_path / "mismatch.json").read_text())["first"]["token"] == 3
    assert files.read_outcome() == {"status": "finished", "exit_code": 0, "message": ""}
    assert sorted(f.name for f in tmp_path.iterdir()) == ["mismatch.json", "outcome.json", "run.json"]


def test_lines_for_a_person():
    assert "EQUAL 1234/1234  KL 0.0" in step_line(step_fields(), steps=30)
    assert step_line(step_fields(), steps=30).startswith("step 1/30  reward 0.250")
    assert "DIFFERENT 1233/1234" in step_line(step_fields(verdict="DIFFERENT", rows_different=1), steps=30)
    line = validation_line({"step": 0, "dataset": "builtin", "n_problems": 64, "k": 4, "mean_at_k": 0.4})
    assert "mean@4 0.400" in line
