"""What a step trains on, and with which learning rate: functions of the step alone."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from zmrl.data.problems import generate
from zmrl.data.prompts import boxed, prompt_ids, response_ids

WARMUP_STEPS, FLAT_UNTIL, FINAL_LR = 100, 0.6, 0.02
BATCHES_PER_POOL = 8
"""Rows are drawn for so many batches at a time and sorted by length, so that a batch needs little padding."""
IGNORE = -100


def batch(seed: int, step: int, rows: int, worked: float) -> tuple[Tensor, Tensor]:
    """Inputs and targets [rows, T] of a step (targets: `IGNORE` outside the response), a function of its arguments."""
    pool, piece = divmod(step, BATCHES_PER_POOL)
    stream, rng = generate("train", f"{seed}:{pool}"), random.Random(f"{seed}:{pool}:worked")
    drawn = []
    for _ in range(rows * BATCHES_PER_POOL):
        problem = next(stream)
        work = problem.work if rng.random() < worked else ""
        prompt = prompt_ids(problem.question)
        drawn.append((prompt, response_ids(work, boxed(problem.answer))))
    drawn.sort(key=lambda row: len(row[0]) + len(row[1]))
    pieces = [drawn[i * rows : (i + 1) * rows] for i in range(BATCHES_PER_POOL)]
    rng.shuffle(pieces)
    chosen = pieces[piece]
    width = max(len(p) + len(r) for p, r in chosen) - 1
    inputs = torch.zeros(rows, width, dtype=torch.long)
    targets = torch.full((rows, width), IGNORE)
    for i, (prompt, response) in enumerate(chosen):
        ids = torch.tensor(prompt + response)
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, len(prompt) - 1 : len(ids) - 1] = ids[len(prompt) :]
    return inputs, targets


def learning_rate_factor(step: int, steps: int, upcycled_at: int) -> float:
    """Warm-up, constant to 60 % of the run, then linear to 2 %; warm-up again when upcycling resets the moments."""
    done = step / steps
    factor = 1.0 if done < FLAT_UNTIL else FINAL_LR + (1 - FINAL_LR) * max(0.0, 1 - done) / (1 - FLAT_UNTIL)
    since = step - upcycled_at if step >= upcycled_at else step
    return factor * min(1.0, (since + 1) / WARMUP_STEPS)
