"""Sampled and greedy accuracy of a reference model on built-in problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from zmrl.data.problems import Problem
from zmrl.data.prompts import parse_response, prompt_ids
from zmrl.model.reference import KimiK31ForCausalLM
from zmrl.model.reference.generate import sample


class Evaluation(NamedTuple):
    """Sampled accuracy. See the nano learning study, section 1, for why the parts are reported."""

    problems: int
    k: int
    mean_at_k: float
    terse_share: float
    accuracy_worked: float
    accuracy_terse: float
    greedy: float
    by_family: dict[str, float]

    def __str__(self) -> str:
        families = " ".join(f"{n} {a:.2f}" for n, a in sorted(self.by_family.items()))
        return (
            f"mean@{self.k} {self.mean_at_k:.3f} over {self.problems} problems: terse {self.terse_share:.2f}, "
            f"right if worked {self.accuracy_worked:.3f}, if terse {self.accuracy_terse:.3f}, "
            f"greedy {self.greedy:.3f} | {families}"
        )


def evaluate(
    model: KimiK31ForCausalLM,
    problems: Sequence[Problem],
    k: int = 8,
    max_new_tokens: int = 56,
    seed: int = 0,
    sparse: bool = True,
) -> Evaluation:
    """Sample k answers per problem at temperature 1 and one greedy answer; an answer is right if its integer is."""
    rows = [p for p in problems for _ in range(k)]
    outputs: list[list[int]] = []
    for start in range(0, len(rows), 512):
        prompts = [prompt_ids(p.question) for p in rows[start : start + 512]]
        outputs += sample(model, prompts, max_new_tokens, seed=seed + start, sparse=sparse)
    greedy = sample(model, [prompt_ids(p.question) for p in problems], max_new_tokens, temperature=0, sparse=sparse)
    right = [is_right(o, p) for o, p in zip(outputs, rows, strict=True)]
    terse = [not parse_response(o).work for o in outputs]
    family: dict[str, list[bool]] = {}
    for p, r in zip(rows, right, strict=True):
        family.setdefault(p.source, []).append(r)
    return Evaluation(
        problems=len(problems),
        k=k,
        mean_at_k=_mean(right),
        terse_share=_mean(terse),
        accuracy_worked=_mean([r for r, t in zip(right, terse, strict=True) if not t]),
        accuracy_terse=_mean([r for r, t in zip(right, terse, strict=True) if t]),
        greedy=_mean([is_right(o, p) for o, p in zip(greedy, problems, strict=True)]),
        by_family={n: _mean(r) for n, r in family.items()},
    )


def is_right(ids: Sequence[int], problem: Problem) -> bool:
    """Whether a complete response boxes the problem's answer."""
    answer = parse_response(ids)
    match = re.fullmatch(r"\\boxed\{(\d+)\}", answer.text)
    return answer.complete and match is not None and int(match[1]) == problem.answer


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else float("nan")
