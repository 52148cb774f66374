"""Grading: AIME's integer rules by math-verify, and the guard around any reward function.

math-verify limits time by `signal.alarm`, which exists on the main thread only; graders run in threads, where it would
turn every reward into 0 without a word. Here its time limits are off and the input is short by construction: only
the content of the last balanced box is parsed, and only if it can be an integer.
"""

from __future__ import annotations

import importlib
import logging
import math
import re
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

RewardFunction = Callable[[str, str], float]

MAX_ANSWER = 999
"""AIME answers are integers 0..999."""

_INTEGER = re.compile(r"[+]?[0-9]{1,12}")
_SPACING = re.compile(r"\\[,;:! ]|\\q?quad|~|\s|\$")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boldsymbol)\{([^{}]*)\}")


class RewardError(RuntimeError):
    """A reward function that failed, or returned no finite number: the message names the sample. Stops the run."""


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance; None if there is none.

    `\{` and `\}` are not braces. `\fbox{` counts as well.
    """
    found = None
    for start in re.finditer(r"\\(?:boxed|fbox)\s*\{", text):
        depth, position = 1, start.end()
        while position < len(text) and depth:
            character = text[position]
            if character == "\\":
                position += 2
                continue
            depth += {"{": 1, "}": -1}.get(character, 0)
            position += 1
        if depth == 0:
            found = text[start.end() : position - 1]
    return found


def aime_integer(text: str) -> int | None:
    """The integer 0..999 that `text` (a box's content or a data set's answer) denotes; None if it denotes none.

    "016", "16", "16.", "$16$" and "\\text{16}" are 16. An expression, a fraction or a number above 999 is no answer.
    """
    text = _SPACING.sub("", text)
    while _WRAPPER.search(text):
        text = _WRAPPER.sub(r"\1", text)
    text = text.rstrip(".").replace("{,}", "").removeprefix("{").removesuffix("}")
    if not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if value <= MAX_ANSWER else None


def aime_reward(response: str, answer: str) -> float:
    """1.0 if the last balanced box of `response` holds the integer `answer`, else 0.0.

    Raises ValueError if `answer` itself is no AIME answer: that is an error of the data set, not of the response.
    """
    gold = aime_integer(answer)
    if gold is None:
        raise ValueError(f"the data set's answer {answer!r} is not an integer from 0 to {MAX_ANSWER}")
    content = last_boxed(response)
    given = None if content is None else aime_integer(content)
    return 1.0 if given is not None and _verify(gold, given) else 0.0


def load_reward(name: str) -> RewardFunction:
    """Import `package.module:function`. Raises ValueError naming it if there is no such function."""
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"reward.function: {name!r} cannot be imported ({error}); correct the name") from None
    if not callable(found):
        raise ValueError(f"reward.function: {name!r} is not a function; correct the name")
    return found


def graded(
    function: RewardFunction, response: str, answer: str, sample: str, timeout_seconds: float = math.inf
) -> float:
    """`function(response, answer)`, checked.

    Raises RewardError naming `sample` if it raises, is not finite or takes longer than `timeout_seconds`. A call that
    hangs cannot be ended: its thread is left behind, and does not keep the process.
    """
    outcome: list[float | BaseException] = []

    def call() -> None:
        try:
            outcome.append(float(function(response, answer)))
        except (Exception, SystemExit) as error:  # any failure of foreign code must be visible, with its sample
            outcome.append(error)

    if timeout_seconds == math.inf:
        call()
    else:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(timeout_seconds)
        if not outcome:
            raise RewardError(
                f"reward of {sample} took longer than {timeout_seconds:g} s; correct reward.function, or raise "
                "reward.timeout_seconds"
            )
    (reward,) = outcome
    if isinstance(reward, BaseException):
        reason = f"{type(reward).__name__}: {reward}"
        raise RewardError(f"reward of {sample} failed: {reason}; correct reward.function")
    if not math.isfinite(reward):
        raise RewardError(f"reward of {sample} is {reward}; correct reward.function to return a finite number")
    return reward


def compute_score(
    response: str, answer: str, sample: str, function: str, timeout_seconds: float = math.inf
) -> dict[str, float]:
    """verl's two numbers of a sample: `score`, and `acc` (1.0 for a full reward), its validation metric.

    function: `package.module:function`. Raises RewardError, see `graded`.
    """
    reward = graded(load_reward(function), response, answer, sample, timeout_seconds)
    return {"score": reward, "acc": float(reward >= 1.0)}


def _verify(gold: int, given: int) -> bool:
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(given), timeout_seconds=None, raise_on_error=True))


@lru_cache(maxsize=MAX_ANSWER + 1)
def _parsed(value: int) -> list[Any]:
    """What math-verify reads in `value`: a millisecond each, and a group's answers are often the same."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off
    return list(parse(f"${value}$", parsing_timeout=None, raise_on_error=True))
