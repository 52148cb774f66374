"""Grading: AIME's rules, the same score in any thread, and no failure that looks like a wrong answer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from zmrl.trainer.rewards import RewardError, aime_integer, aime_reward, compute_score, graded, last_boxed, load_reward

AIME = "zmrl.trainer.rewards:aime_reward"


@pytest.mark.parametrize(
    "response, answer, reward",
    [
        (r"\boxed{016}", "16", 1.0),
        (r"\boxed{16}", "016", 1.0),
        (r"\boxed{000}", "0", 1.0),
        (r"so \(x = \boxed{70}\).", "70", 1.0),
        (r"\boxed{70}\).", "70", 1.0),
        (r"\boxed{{42}}", "042", 1.0),
        (r"\boxed{\text{42}}", "042", 1.0),
        (r"\boxed{\mathbf{42}.}", "042", 1.0),
        (r"\boxed{ 42 }", "042", 1.0),
        (r"\boxed{1} then \boxed{2}", "2", 1.0),
        (r"\boxed{2} then \boxed{1}", "2", 0.0),
        (r"\boxed{5} and \boxed{7", "5", 1.0),
        (r"\boxed{5", "5", 0.0),
        (r"5", "5", 0.0),
        ("", "5", 0.0),
        (r"\boxed{}", "0", 0.0),
        (r"\boxed{-5}", "5", 0.0),
        (r"\boxed{1005}", "5", 0.0),
        (r"\boxed{5.0}", "5", 0.0),
        (r"\boxed{2+3}", "5", 0.0),
        (r"\boxed{\frac{10}{2}}", "5", 0.0),
        (r"work<|sep|>\boxed{204}", "204", 1.0),
    ],
)
def test_aime_rules(response, answer, reward):
    assert aime_reward(response, answer) == reward


def test_last_balanced_box():
    assert last_boxed(r"\boxed{a} \boxed{b{c}d} \boxed{e") == "b{c}d"
    assert last_boxed(r"\boxed{\{x\}}") == r"\{x\}"
    assert last_boxed("none") is None


def test_answers_are_integers_up_to_999():
    assert [aime_integer(t) for t in ("0", "007", "999", "1000", "x", "", "1/2", "٣")] == [0, 7, 999] + [None] * 5


def test_same_score_off_the_main_thread():
    cases = [(rf"\boxed{{{i:03d}}}", str(i // 2 * 2)) for i in range(40)]
    expected = [aime_reward(*case) for case in cases]
    assert sum(expected) == 20
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda case: aime_reward(*case), cases)) == expected
    seen = []
    thread = threading.Thread(target=lambda: seen.append(compute_score(r"\boxed{016}", "16", "one", AIME)))
    thread.start()
    thread.join()
    assert seen == [{"score": 1.0, "acc": 1.0}]


def failing(response: str, answer: str) -> float:
    raise KeyError("no such key")


def not_a_number(response: str, answer: str) -> float:
    return float("nan")


def test_reward_that_raises_or_is_not_finite_names_the_sample():
    with pytest.raises(RewardError, match=r"builtin problem 7 .*KeyError.*no such key"):
        compute_score("x", "1", "builtin problem 7", f"{__name__}:failing")
    with pytest.raises(RewardError, match=r"builtin problem 7 is nan"):
        compute_score("x", "1", "builtin problem 7", f"{__name__}:not_a_number")
    with pytest.raises(RewardError, match="is inf"):
        graded(lambda r, a: float("inf"), "", "", "sample")


def test_an_answer_that_is_none_is_an_error_not_a_zero():
    with pytest.raises(RewardError, match="data set's answer"):
        compute_score(r"\boxed{1}", "one half", "other problem 0", AIME)


def test_unknown_reward_function_is_named():
    for name in ("zmrl.trainer.rewards:absent", "zmrl.absent:f", "zmrl.trainer.rewards:MAX_ANSWER"):
        with pytest.raises(ValueError, match=r"reward\.function"):
            load_reward(name)
