"""Built-in problems in AIME's answer format: generated arithmetic questions whose answers are integers 0..999.

Seven families (specification: the nano learning study, section 2). No answer is one of the numbers of its question.
Each problem comes with a short worked solution, a *local equation chain*: every operand is copied next to its operator,
and the last step is left to the boxed answer (only a digit sum's chain ends with it). Everything is a pure function of
(split, seed), and the splits are disjoint: a problem belongs to the split that the hash of its canonical key names, and
near-copies (a*b and b*a, gcd(a,b) and gcd(b,a), another name in the same word problem) share a key.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SPLITS = ("train", "val", "calibration")
"""14/16, 1/16 and 1/16 of the problems. Calibrate the worked share on `calibration`, report `val`."""

MAX_ANSWER = 999


@dataclass(frozen=True)
class Problem:
    """A question with an integer answer 0..999."""

    source: str
    """Family or data set, e.g. `gcd`, `aime24`."""
    question: str
    answer: int
    work: str = ""
    """Worked solution without the final answer; empty if none is known."""
    key: str = ""
    """Canonical key: equal for near-copies."""

    def to_dict(self) -> dict[str, Any]:
        """A row for `datasets`."""
        return {"source": self.source, "question": self.question, "answer": self.answer, "work": self.work}


def split_of(key: str) -> str:
    """The split of a canonical key."""
    return {0: "val", 1: "calibration"}.get(zlib.crc32(key.encode()) % 16, "train")


def generate(split: str, seed: int | str = 0) -> Iterator[Problem]:
    """An endless stream of problems of `split`, families in equal shares; repeats occur (some families are small)."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; choose one of {', '.join(SPLITS)}")
    rng = random.Random(f"{split}:{seed}")
    families = list(FAMILIES.values())
    while True:
        family = rng.choice(families)
        problem = family(rng)
        while problem is None or split_of(problem.key) != split or _gives_itself_away(problem):
            problem = family(rng)
        yield problem


def _gives_itself_away(problem: Problem) -> bool:
    """Whether the answer is one of the numbers of the question."""
    return str(problem.answer) in re.findall(r"\d+", problem.question)


def problem_set(split: str, count: int, seed: int | str = 0) -> list[Problem]:
    """`count` problems of `split` with distinct keys. Raises ValueError if the split does not hold that many."""
    out: dict[str, Problem] = {}
    for problem in itertools.islice(generate(split, seed), 100 * count + 10_000):
        out.setdefault(problem.key, problem)
        if len(out) == count:
            return list(out.values())
    raise ValueError(f"the split {split!r} holds fewer than {count} distinct problems; ask for fewer")


def _modmul(rng: random.Random) -> Problem | None:
    a, b, m = rng.randint(2, 12), rng.randint(2, 9), rng.randint(11, 60)
    if not 1 <= a * b // m <= 3:
        return None
    rest, work = a * b, f"{a}*{b}={a * b}"
    while rest >= m:
        rest -= m
        work += f"-{m}={rest}"
    key = f"modmul {min(a, b)} {max(a, b)} {m}"
    return Problem("modmul", f"Find {a}*{b} mod {m}.", a * b % m, work, key)


def _gcd(rng: random.Random) -> Problem | None:
    g, x, y = rng.randint(2, 30), rng.randint(2, 9), rng.randint(2, 9)
    if math.gcd(x, y) != 1 or g * max(x, y) > 150:
        return None
    chain = [g * x, g * y]
    while chain[-1]:
        chain.append(chain[-2] % chain[-1])
    work = ",".join(map(str, chain))
    return Problem("gcd", f"Find gcd({g * x},{g * y}).", g, work, f"gcd {g * min(x, y)} {g * max(x, y)}")


def _digsum(rng: random.Random) -> Problem:
    number = rng.randint(1000, 99999)
    digits = [int(d) for d in str(number)]
    total, work = digits[0], str(digits[0])
    for d in digits[1:]:
        total += d
        work += f"+{d}={total}"
    return Problem("digsum", f"Digit sum of {number}?", total, work, f"digsum {number}")


def _series(rng: random.Random) -> Problem:
    a, d, n = rng.randint(1, 20), rng.randint(2, 9), rng.choice((4, 6, 8, 10))
    last = a + (n - 1) * d
    answer = (a + last) * n // 2
    work = f"{n - 1}*{d}={(n - 1) * d}+{a}={last}+{a}={last + a}*{n // 2}"
    return Problem("series", f"Sum {n} terms {a},{a + d},{a + 2 * d},...", answer, work, f"series {a} {d} {n}")


def _multiples(rng: random.Random) -> Problem:
    d = rng.randint(3, 9)
    limit = rng.randint(10 * d + 1, 999)
    steps: list[str] = []
    rest = 0
    for digit in str(limit):
        rest = rest * 10 + int(digit)
        if steps or rest >= d:
            steps.append(f"{rest}:{rest // d}r{rest % d}")
            rest %= d
    return Problem("multiples", f"Multiples of {d} to {limit}?", limit // d, ",".join(steps), f"multiples {d} {limit}")


def _word(rng: random.Random) -> Problem | None:
    name = rng.choice(("Tom", "Ann", "Max", "Eva", "Sam", "Lia"))
    box, item = rng.choice(("bags", "boxes", "jars")), rng.choice(("pens", "nuts", "coins", "cards"))
    b, a, c = rng.randint(2, 9), rng.randint(2, 12), rng.randint(10, 99)
    verb, sign = rng.choice((("gets", "+"), ("loses", "-")))
    answer = b * a + (c if sign == "+" else -c)
    if answer < 0:
        return None
    question = f"{name} has {b} {box} of {a} {item}, {verb} {c}. Total?"
    return Problem("word", question, answer, f"{b}*{a}={b * a}{sign}{c}", f"word {b} {a} {sign}{c}")


def _base(rng: random.Random) -> Problem:
    base = rng.randint(3, 9)
    x, y, z = rng.randint(1, base - 1), rng.randint(0, base - 1), rng.randint(0, base - 1)
    inner = x * base + y
    work = f"{x}*{base}={x * base}+{y}={inner}*{base}={inner * base}+{z}"
    return Problem("base", f"Convert {x}{y}{z} from base {base}.", inner * base + z, work, f"base {x}{y}{z} {base}")


FAMILIES: dict[str, Callable[[random.Random], Problem | None]] = {
    "modmul": _modmul,
    "gcd": _gcd,
    "digsum": _digsum,
    "series": _series,
    "multiples": _multiples,
    "word": _word,
    "base": _base,
}
"""Name -> draw; a draw outside the family's ranges is None and is drawn again."""
