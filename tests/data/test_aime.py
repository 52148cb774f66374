"""Loading AIME sets."""

import importlib
import json
import logging

import pytest

from zmrl.data.aime import DataError, load_aime
from zmrl.data.problems import Problem


@pytest.fixture
def jsonl(tmp_path):
    def write(*rows):
        file = tmp_path / "aime.jsonl"
        file.write_text("".join(json.dumps(r) + "\n" for r in rows))
        return file

    return write


ROW = {"id": "aime24-60", "problem": "What is $4^2$?", "answer": "016"}


def test_leading_zeros_are_integers(jsonl):
    (problem,) = load_aime(jsonl(ROW))
    assert problem == Problem(source="aime", question="What is $4^2$?", answer=16, key="aime24-60")


def test_columns_are_found_in_any_case(jsonl):
    (problem,) = load_aime(jsonl({"ID": "x", "Question": "q", "Answer": 7}))
    assert problem.answer == 7 and problem.key == "x"


def test_a_long_prompt_is_refused_by_name(jsonl):
    file = jsonl(ROW, ROW | {"id": "long", "problem": "x" * 200})
    with pytest.raises(DataError, match=r"long has 204 prompt tokens, the limit is 128"):
        load_aime(file, max_prompt_tokens=128)


def test_a_long_prompt_can_be_skipped_with_a_warning(jsonl, caplog):
    file = jsonl(ROW, ROW | {"id": "long", "problem": "x" * 200})
    with caplog.at_level(logging.WARNING):
        assert [p.key for p in load_aime(file, max_prompt_tokens=128, too_long="skip")] == ["aime24-60"]
    assert "long" in caplog.text
    with pytest.raises(DataError, match="no problem is left"):
        load_aime(file, max_prompt_tokens=4, too_long="skip")


@pytest.mark.parametrize("answer", ["1000", "-1", "1/2", None, ""])
def test_answers_that_aime_does_not_have_are_refused(jsonl, answer):
    with pytest.raises(DataError, match="aime24-60"):
        load_aime(jsonl(ROW | {"answer": answer}))


def test_a_row_without_a_question_is_refused(jsonl):
    with pytest.raises(DataError, match="row 1"):
        load_aime(jsonl({"answer": "1"}))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_aime(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("a.jsonl", b"", "holds no row"),
        ("a.json", b"{}", "no list of rows"),
        ("a.jsonl", b"3\n", "no JSON object"),
        ("a.jsonl", b'{"problem": "q", "answer": 1}\n{\n', "not valid jsonl .line 2"),
        ("a.jsonl", b'{"problem": "q"}\n', "nothing in a column answer; it has"),
        ("a.jsonl", b'{"problem": " ", "answer": 1}\n', "no text in a column"),
        ("a.jsonl", b'{"problem": "q", "answer": "1_0"}\n', "is no integer"),
        ("a.jsonl", b"\xff\n", "not UTF-8"),
        ("a.csv", b"problem,answer\n", r"must be \.jsonl, \.json or \.parquet"),
        ("a.parquet", b"PAR0", "cannot be loaded"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, name, text, words):
    (tmp_path / name).write_bytes(text)
    with pytest.raises(DataError, match=words):
        load_aime(tmp_path / name)


def test_other_line_separators_are_text(jsonl, tmp_path):
    file = tmp_path / "aime.jsonl"
    file.write_text(json.dumps(ROW | {"problem": "one\u2028two"}, ensure_ascii=False) + "\n")
    assert load_aime(file)[0].question == "one\u2028two"


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="is a folder"):
        load_aime(tmp_path)


def test_a_parquet_file_is_read(tmp_path):
    datasets = importlib.import_module("datasets")
    datasets.Dataset.from_list([ROW]).to_parquet(tmp_path / "set.parquet")
    assert load_aime(tmp_path / "set.parquet")[0].answer == 16


def test_a_hub_name_goes_through_datasets(monkeypatch):
    datasets = importlib.import_module("datasets")
    asked = []

    def load(name, split):
        asked.append((name, split))
        return [{"Problem": "q", "Answer": "033"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert load_aime("owner/aime_2024")[0].answer == 33 and asked == [("owner/aime_2024", "train")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(DataError, match=r"owner/aime_2024 .*cannot be loaded"):
        load_aime("owner/aime_2024")
