"""Groups of ranks: what is exchanged, counted and refused; the simulation and torch.distributed agree."""

import pytest
import torch

from zmrl.parallel.group import Group, SimulationError, simulate


def parts_of(rank: int, size: int) -> list[torch.Tensor]:
    """rank*10 + receiver, repeated receiver + 1 times, nothing for rank 0."""
    return [torch.full((r if r else 0, 2), rank * 10 + r, dtype=torch.bfloat16) for r in range(size)]


def exchange(group: Group) -> tuple[list, list, dict[str, int]]:
    gathered = group.all_gather(torch.tensor([group.rank, -1], dtype=torch.int16), "numbers")
    received = group.all_to_all(parts_of(group.rank, group.size), "rows")
    return gathered.tolist(), [part.tolist() for part in received], dict(group.sent)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchanges_arrive_in_rank_order_and_bytes_are_counted(size):
    for rank, (gathered, received, sent) in enumerate(simulate(size, exchange)):
        assert gathered == [[r, -1] for r in range(size)]
        assert received == [[[r * 10 + rank] * 2] * rank for r in range(size)]
        others = sum(r for r in range(size) if r != rank)
        assert sent == {"numbers": 4 * (size - 1), "rows: sizes": 8 * size * (size - 1), "rows": 4 * others}


def test_a_received_tensor_is_the_receivers_own():
    def run(group: Group) -> torch.Tensor:
        mine = torch.full((2,), float(group.rank))
        seen = group.all_gather(mine, "first")
        mine.fill_(-1.0)
        group.all_gather(mine, "second")
        return seen

    assert simulate(2, run)[0].tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_the_simulation_runs_with_the_callers_kernel_threads():
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert simulate(3, lambda group: torch.get_num_threads()) == [threads] * 3
    finally:
        torch.set_num_threads(before)


def test_ranks_at_different_exchanges_are_an_error():
    with pytest.raises(SimulationError, match="different exchanges: a, b"):
        simulate(2, lambda group: group.all_gather(torch.zeros(1), "ab"[group.rank]))
    with pytest.raises(SimulationError, match="has left"):
        simulate(2, lambda group: group.rank and group.all_gather(torch.zeros(1), "alone"))
    with pytest.raises(SimulationError, match="expected"):
        simulate(2, lambda group: group.all_to_all([torch.zeros(1, 1)] * 2, "rows", [1, 2]))


def test_the_error_of_a_rank_is_raised_and_ends_the_others():
    def run(group: Group) -> None:
        if group.rank == 1:
            raise KeyError("lost")
        group.all_gather(torch.zeros(1), "never")

    with pytest.raises(KeyError, match="lost"):
        simulate(3, run)
