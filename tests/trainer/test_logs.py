"""The output contract: exact fields, whole files, the first mismatch kept."""

import json

import pytest

from zmrl.trainer.logs import (
    SAMPLE_FIELDS,
    SECONDS,
    STEP_FIELDS,
    VAL_FIELDS,
    RunFiles,
    step_line,
    validation_line,
    versions,
)


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
        files.validation(dict.fromkeys(VAL_FIELDS, 0) | {"extra": 1})
    with pytest.raises(ValueError, match="prompt"):
        files.samples([{name: 0 for name in SAMPLE_FIELDS if name != "prompt"}])
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


def test_sample_answers_are_cut_with_their_step_and_their_validation(tmp_path):
    files = RunFiles(tmp_path)
    places = [(0, "validation"), (1, "train"), (2, "train"), (2, "validation"), (3, "train")]
    for keep, left in ((True, places[:4]), (False, places[:3])):
        (tmp_path / "samples.jsonl").unlink(missing_ok=True)
        for step, phase in places:
            files.samples([dict.fromkeys(SAMPLE_FIELDS, "") | {"step": step, "phase": phase}])
        files.cut(2, keep_validation=keep)
        lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
        assert [(line["step"], line["phase"]) for line in lines] == left


def test_lines_for_a_person():
    assert "EQUAL 1234/1234  KL 0.0" in step_line(step_fields(), steps=30)
    assert step_line(step_fields(), steps=30).startswith("step 1/30  reward 0.250")
    assert "DIFFERENT 1233/1234" in step_line(step_fields(verdict="DIFFERENT", rows_different=1), steps=30)
    seconds = {"rollout": 4.0, "check": 0.25, "train": 5.0, "sync": 0.5, "total": 10.0}
    assert step_line(step_fields(seconds=seconds), steps=30).endswith("total 10.0  check 2.5 %")
    fields = dict(zip(VAL_FIELDS, (0, "builtin", 64, 4, 0.4, 0.3, 0.7, 0.5), strict=True))
    line = validation_line(fields)
    assert "builtin  mean@4 0.400  greedy 0.500  terse 0.300  right given work 0.700  (64 problems)" in line
    assert "greedy" not in validation_line(fields | {"greedy_accuracy": None})
