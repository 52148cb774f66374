"""AIME problem sets: a local file or a hub data set, into the same row type as the built-in problems."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zmrl.data.problems import MAX_ANSWER, Problem
from zmrl.data.prompts import prompt_ids

logger = logging.getLogger(__name__)

_QUESTION_COLUMNS = ("problem", "question")
_ANSWER_COLUMNS = ("answer",)
_ID_COLUMNS = ("id", "url")


class DataError(ValueError):
    """A data set that cannot be used as asked; the message names the row and the remedy."""


def load_aime(
    source: str | Path, max_prompt_tokens: int | None = None, too_long: str = "refuse", split: str = "train"
) -> list[Problem]:
    """Load AIME problems from a local `.jsonl`, `.json` or `.parquet` file, or a hub name such as `owner/aime_2024`.

    Columns are found by name, in any case: `problem` or `question`, `answer`, and optionally `id`. Answers are integers
    0..999, leading zeros allowed ("016" is 16). `split` names the hub split.

    A prompt of more than `max_prompt_tokens` ids (None: no limit) is refused; with `too_long="skip"` it is left out and
    a warning names it. Raises DataError for a missing data set, a row without question or integer answer, an
    over-long prompt, or when nothing is left.
    """
    if too_long not in ("refuse", "skip"):
        raise DataError(f"too_long={too_long!r} is unknown; choose 'refuse' or 'skip'")
    rows = _rows(source, split)
    if not len(rows):
        raise DataError(f"data set {source} holds no row; choose another data set")
    problems = []
    for number, row in enumerate(rows, 1):
        problem = _problem(row, f"{source} row {number}")
        length = len(prompt_ids(problem.question))
        if max_prompt_tokens is not None and length > max_prompt_tokens:
            message = f"{source}: problem {problem.key} has {length} prompt tokens, the limit is {max_prompt_tokens}"
            if too_long == "refuse":
                raise DataError(f"{message}; raise the prompt limit, or skip such problems (data.too_long=skip)")
            logger.warning("%s: skipped", message)
            continue
        problems.append(problem)
    if not problems:
        raise DataError(f"{source}: no problem is left; raise the prompt limit or choose another data set")
    return problems


def _rows(source: str | Path, split: str) -> Sequence[dict[str, Any]]:
    path = Path(source)
    kind = path.suffix[1:]
    if kind in ("jsonl", "json"):
        try:
            text = path.read_text()
        except OSError as error:
            reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
            raise DataError(f"data set {source} {reason}; correct the path or give a hub name") from None
        except UnicodeDecodeError as error:
            raise DataError(f"data set {source} is not UTF-8 text ({error}); convert it") from None
        try:
            rows = json.loads(text) if kind == "json" else _json_lines(text)
        except json.JSONDecodeError as error:
            raise DataError(f"data set {source} is not valid {kind} ({error}); correct the file") from None
        if not isinstance(rows, list):
            raise DataError(f"data set {source} is no list of rows; write one object a problem")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise DataError(f"data set {source}: row {number} is no JSON object; write one object a problem")
        return rows
    if path.is_dir():
        raise DataError(f"data set {source} is a folder; give a .jsonl, .json or .parquet file, or a hub name")
    if kind != "parquet" and path.is_file():
        raise DataError(f"data set {source}: a local file must be .jsonl, .json or .parquet; convert or rename it")
    return _load_dataset(str(source), split)


def _json_lines(text: str) -> list[Any]:
    """One value a line. A line ends at "\\n" only: JSON text may hold other line separators. Errors name the line."""
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise json.JSONDecodeError(f"line {number}: {error.msg}", line, error.pos) from None
    return values


def _load_dataset(source: str, split: str) -> Sequence[dict[str, Any]]:
    """A parquet file or a hub data set, by `datasets`, whose retries and warnings are not shown: one line tells all."""
    import datasets

    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub", "urllib3")]
    levels = [found.level for found in loggers]
    for found in loggers:
        found.setLevel(logging.CRITICAL)
    try:
        if source.endswith(".parquet"):
            return datasets.load_dataset("parquet", data_files=source, split=split)
        return datasets.load_dataset(source, split=split)
    except Exception as error:  # `datasets` raises a dozen kinds: absent, offline, no such split, damaged
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"data set {source} (split {split}) cannot be loaded: {reason}"
        raise DataError(f"{message}; correct the name, or give the path of a local .jsonl file") from error
    finally:
        for found, level in zip(loggers, levels, strict=True):
            found.setLevel(level)


def _problem(row: dict[str, Any], where: str) -> Problem:
    columns = {name.lower(): value for name, value in row.items()}
    question = next((columns[c] for c in _QUESTION_COLUMNS if c in columns), None)
    answer = next((columns[c] for c in _ANSWER_COLUMNS if c in columns), None)
    key = str(next((columns[c] for c in _ID_COLUMNS if c in columns), where))
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: no text in a column {' or '.join(_QUESTION_COLUMNS)}; it has {sorted(row)}")
    named = "" if key == where else f" of {key}"
    if answer is None:
        raise DataError(f"{where}{named}: nothing in a column {' or '.join(_ANSWER_COLUMNS)}; it has {sorted(row)}")
    text = str(answer).strip()
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise DataError(f"{where}: the answer {answer!r}{named} is no integer; AIME answers are 0..999")
    value = int(text)
    if not 0 <= value <= MAX_ANSWER:
        raise DataError(f"{where}: the answer {value}{named} is outside 0..999; is this an AIME set?")
    return Problem(source="aime", question=question, answer=value, key=key)
