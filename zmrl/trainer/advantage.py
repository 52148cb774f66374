"""GRPO's advantage, exact where verl's is nearly so.

verl computes a group's mean in FP32: for equal rewards such as 0.35 the mean can be off by one bit, and what is left,
divided by a tiny standard deviation, is an advantage out of rounding error. Here statistics are in float64 and a group
of equal rewards has advantage zero.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the standard deviation, as in verl."""


def group_advantages(rewards: Tensor, groups: np.ndarray) -> Tensor:
    """(r - mean) / (std + EPSILON) within each group. rewards: [B]; groups: [B] labels; returns FP32 [B].

    A group of one sample or of equal rewards gets 0. With n samples no advantage exceeds (n - 1) / sqrt(n) in
    magnitude, however close the rewards are. Raises ValueError for a reward that is not finite.
    """
    if not torch.isfinite(rewards).all():
        bad = int((~torch.isfinite(rewards)).nonzero()[0])
        raise ValueError(f"reward of sample {bad} is {float(rewards[bad])}; correct reward.function")
    members: dict[Any, list[int]] = defaultdict(list)
    for position, group in enumerate(groups):
        members[group].append(position)
    advantages = torch.zeros(len(rewards), dtype=torch.float64)
    for positions in members.values():
        values = rewards[positions].double()
        if len(positions) > 1 and bool((values != values[0]).any()):
            advantages[positions] = (values - values.mean()) / (values.std() + EPSILON)
    return advantages.float()


def grpo_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, config: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """verl's advantage estimator `zmrl_grpo`: [B, R] rewards and mask -> (advantages, returns), both [B, R].

    A reward belongs to a response and sits at one of its tokens; whatever is at masked positions is not looked at.
    """
    rewards = torch.where(response_mask.bool(), token_level_rewards, 0.0).double().sum(-1)
    advantages = group_advantages(rewards, index).unsqueeze(-1) * response_mask
    return advantages, advantages
