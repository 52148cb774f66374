"""Every sample has a seed of its own, the same in every run of the same recipe."""

from itertools import product

from zmrl.trainer.seeds import sample_seed


def test_seeds_are_distinct_reproducible_and_63_bits():
    cases = list(product((1, 2), ("builtin", "aime24"), range(3), range(5), range(8)))
    seeds = [sample_seed(*case) for case in cases]
    assert len(set(seeds)) == len(cases)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [sample_seed(*case) for case in cases]


def test_seeds_are_fixed_for_ever():
    assert sample_seed(1, "builtin", 1, 0, 0) == 5983100201226720942


def test_fields_do_not_run_together():
    assert sample_seed(1, "a", 11, 1, 0) != sample_seed(1, "a", 1, 11, 0)
