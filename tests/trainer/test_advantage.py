"""GRPO's advantages are finite and small for nearly equal rewards (NeMo-RL#4161), and exactly zero for equal ones."""

import math

import numpy as np
import pytest
import torch

from zmrl.trainer.advantage import group_advantages, grpo_advantage


def advantages(*groups):
    rewards = torch.tensor([r for group in groups for r in group])
    labels = np.array([str(i) for i, group in enumerate(groups) for _ in group], dtype=object)
    return group_advantages(rewards, labels)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.35, 0.1, 1e-30, 1e30])
@pytest.mark.parametrize("n", [2, 3, 7, 8])
def test_equal_rewards_give_zero(value, n):
    assert torch.equal(advantages([value] * n), torch.zeros(n))


def test_nearly_equal_rewards_give_small_advantages():
    for delta in (1e-4, 1e-6, 3e-8):
        found = advantages([0.35] * 7 + [0.35 + delta])
        assert torch.isfinite(found).all()
        assert found.abs().max() <= 7 / math.sqrt(8) + 1e-6


def test_groups_are_independent_and_keep_their_places():
    together = advantages([0.0, 1.0, 1.0], [1.0, 0.0, 0.0])
    assert torch.equal(together, torch.cat([advantages([0.0, 1.0, 1.0]), advantages([1.0, 0.0, 0.0])]))
    assert together[0] < 0 < together[1]
    assert abs(float(together.sum())) < 1e-6


def test_a_group_of_one_gets_zero():
    assert torch.equal(advantages([1.0]), torch.zeros(1))


def test_a_reward_that_is_not_finite_is_an_error():
    with pytest.raises(ValueError, match="sample 1 is nan"):
        advantages([0.0, math.nan])


def test_advantage_stands_at_active_tokens_only():
    rewards = torch.tensor([[0.0, 1.0, math.nan], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    found, returns = grpo_advantage(rewards, mask, np.array(["a", "a"], dtype=object))
    assert torch.equal(found, returns)
    assert torch.equal(found[0, :2], found[0, 0].expand(2))
    assert found[0, 2] == found[1, 1] == 0
    assert found[0, 0] == -found[1, 0] > 0
