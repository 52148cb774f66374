"""What a validation says beside mean@k. A lift of mean@k can be a behaviour selected, not arithmetic learned: the share
of terse answers, the accuracy of the others and the greedy accuracy tell the two apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zmrl.trainer.samples import GradedSample


def validation_lines(
    step: int, samples: Sequence[GradedSample], right: Sequence[bool], problems: Mapping[str, int], k: int, greedy: bool
) -> list[dict[str, Any]]:
    """Lines of val.jsonl, one per data set, in name order.

    samples: all that arrived; numbers 0..k-1 of a problem are drawn, number k is greedy. right: whether each is.
    problems: their number by data set. A missing sample counts as wrong in `mean_at_k` and `greedy_accuracy`;
    `terse_share` and `accuracy_given_work` are over the drawn samples that arrived, and null without any.
    """
    return [
        {"step": step, "dataset": dataset, "n_problems": count, "k": k}
        | _scores([(s, r) for s, r in zip(samples, right, strict=True) if s.dataset == dataset], count, k, greedy)
        for dataset, count in sorted(problems.items())
    ]


def _scores(graded: Sequence[tuple[GradedSample, bool]], problems: int, k: int, greedy: bool) -> dict[str, Any]:
    drawn = [(sample.terse, right) for sample, right in graded if sample.number < k]
    with_work = [right for terse, right in drawn if not terse]
    best = [right for sample, right in graded if sample.number == k]
    return {
        "mean_at_k": sum(right for _, right in drawn) / (problems * k),
        "terse_share": _mean([terse for terse, _ in drawn]),
        "accuracy_given_work": _mean(with_work),
        "greedy_accuracy": sum(best) / problems if greedy else None,
    }


def _mean(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
