"""The built-in problems: right, deterministic, disjoint and not guessable."""

import itertools
import math
import re
from collections import Counter

import pytest

from zmrl.data.problems import FAMILIES, SPLITS, generate, problem_set, split_of
from zmrl.data.prompts import boxed, prompt_ids, response_ids

PINNED = [
    "Find gcd(112,140).",
    "Digit sum of 65922?",
    "Digit sum of 26734?",
]


def solve(p) -> int:
    """The answer from the question's text alone."""
    n = [int(x) for x in re.findall(r"\d+", p.question)]
    match p.source:
        case "modmul":
            return n[0] * n[1] % n[2]
        case "gcd":
            return math.gcd(n[0], n[1])
        case "digsum":
            return sum(map(int, str(n[0])))
        case "series":
            return sum(n[1] + i * (n[2] - n[1]) for i in range(n[0]))
        case "multiples":
            return sum(1 for i in range(n[0], n[1] + 1, n[0]))
        case "word":
            return n[0] * n[1] + (n[2] if "gets" in p.question else -n[2])
        case "base":
            return int(str(n[0]), n[1])
    raise AssertionError(p.source)


@pytest.mark.parametrize("split", SPLITS)
def test_answers_are_right_and_three_digits_at_most(split):
    for p in itertools.islice(generate(split, 3), 2000):
        assert p.answer == solve(p), p
        assert 0 <= p.answer <= 999


def test_equations_in_the_work_hold():
    for p in itertools.islice(generate("train", 1), 3000):
        if "=" in p.work:
            terms = p.work.split("=")
            for left, right in itertools.pairwise(terms):
                # left: `<number><op><number>`, after the previous `=`; right begins with its value
                assert eval(re.search(r"\d+[*+-]\d+$", left)[0]) == int(re.match(r"\d+", right)[0]), p
        if p.source == "digsum":
            assert p.work.endswith(f"={p.answer}"), p
        if p.source in ("series", "word", "base"):  # the last step is left to the answer
            assert eval(re.search(r"\d+[*+-]\d+$", p.work)[0]) == p.answer, p


def test_problems_are_a_function_of_split_and_seed():
    a, b = (list(itertools.islice(generate("train", "s"), 50)) for _ in range(2))
    assert a == b
    assert a != list(itertools.islice(generate("train", "t"), 50))


def test_first_problems_are_pinned():
    assert [p.question for p in itertools.islice(generate("val", 0), 3)] == PINNED


def test_splits_are_disjoint_by_canonical_key():
    keys = {s: {p.key for p in itertools.islice(generate(s, 0), 3000)} for s in SPLITS}
    for a, b in itertools.combinations(SPLITS, 2):
        assert not keys[a] & keys[b]
    assert all(split_of(k) == s for s in SPLITS for k in keys[s])


def test_near_copies_share_a_key():
    problems = list(itertools.islice(generate("train", 0), 20_000))
    by_content = {}
    for p in problems:
        numbers = tuple(sorted(map(int, re.findall(r"\d+", p.question))))
        if p.source in ("gcd", "modmul"):
            by_content.setdefault((p.source, numbers, p.answer), set()).add(p.key)
        if p.source == "word":
            stripped = re.sub(r"[A-Z][a-z]+ |bags|boxes|jars|pens|nuts|coins|cards", "", p.question)
            by_content.setdefault(stripped, set()).add(p.key)
    assert max(len(k) for k in by_content.values()) == 1


def test_no_constant_answer_is_right_more_than_five_percent_of_the_time():
    for problems in (list(itertools.islice(generate("train", 0), 7000)), problem_set("val", 448)):
        counts = Counter(p.answer for p in problems)
        assert counts.most_common(1)[0][1] / len(problems) < 0.05


def test_no_answer_is_a_number_of_its_question():
    problems = list(itertools.islice(generate("train", 0), 7000))
    assert not any(p.answer in map(int, re.findall(r"\d+", p.question)) for p in problems)


def test_families_have_equal_shares():
    counts = Counter(p.source for p in itertools.islice(generate("train", 0), 7000))
    assert counts.keys() == FAMILIES.keys()
    assert all(850 < n < 1150 for n in counts.values())


def test_prompts_and_responses_are_short():
    for p in itertools.islice(generate("train", 0), 3000):
        assert len(prompt_ids(p.question)) <= 52
        assert len(response_ids(p.work, boxed(p.answer))) <= 56


def test_a_set_has_distinct_problems_or_is_refused(monkeypatch):
    assert len({p.key for p in problem_set("val", 224)}) == 224
    with pytest.raises(ValueError, match="unknown split"):
        next(generate("test"))
    for name in FAMILIES.keys() - {"base"}:
        monkeypatch.delitem(FAMILIES, name)
    with pytest.raises(ValueError, match="fewer than 300"):
        problem_set("val", 300)
