"""Two real processes over gloo send and get what two simulated ranks do: bits and bytes."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.mla_oracle import make_case
from tests.batch_invariant.test_experts import Moe, output_gradient
from tests.batch_invariant.test_linear import Layer, mixed_slots, rows
from tests.parallel.test_experts import COUNT, TOPK, rank_experts
from tests.parallel.test_linear import rank_columns, rank_rows
from tests.parallel.test_mla import EIGHT, rank_attends
from tests.parallel.test_prefill import BLOCK, STEPS, by_tokens, make_step
from tests.parallel.test_selection import families, local_keys, one_rank_order, ranking_keys
from zmrl.parallel.group import Group, TorchGroup, simulate
from zmrl.parallel.prefill import gather_context
from zmrl.parallel.selection import exchange_top_k

Results = tuple[list[torch.Tensor], dict[str, int], dict[str, int]]


def scenario(group: Group) -> Results:
    """One of everything that ranks exchange; tensors, bytes and events."""
    topk, positions = 64, np.full(20, 511, np.int32)
    keys = ranking_keys(families(np.random.default_rng(0), 20, 512)["one rank"])
    selected = exchange_top_k(group, local_keys(keys, group.rank, group.size), torch.from_numpy(positions), topk)
    assert (selected.numpy() == one_rank_order(keys, positions, topk)).all()
    slots = mixed_slots(13)
    layer, moe = Layer([37], 24), Moe(COUNT, topk=TOPK)
    fused = Layer([48, 40, 8], 21)
    step = make_step(*STEPS["after a prefix"])
    where = (step.lengths, BLOCK)
    latents = gather_context(group, step.mla.pages, step.mla.block_table, *where, [(EIGHT.rank + EIGHT.pe) * 2])
    whole = (step.mla.pages, step.mla.block_table, BLOCK), (step.index.pages, step.index.block_table, BLOCK)
    tensors = [
        selected,
        rank_attends(group, make_case(EIGHT, [1, 37, 9], topk=20)),
        *rank_rows(group, layer, rows(13, 24), rows(13, 37, seed=5), slots),
        *rank_columns(group, fused, [False, True, False], rows(13, 21), rows(13, 96, seed=5), slots),
        *rank_experts(group, moe, moe.tokens(40), output_gradient(40, moe.latent), True)[0],
        *by_tokens(step, group, *whole),
        latents[0].int(),
    ]
    return tensors, dict(group.sent), dict(group.events)


def rank_process(rank: int, size: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{directory}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.save(scenario(TorchGroup()), f"{directory}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_are_two_simulated_ranks(tmp_path: Path):
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=rank_process, args=(rank, 2, str(tmp_path))) for rank in range(2)]
    for process in processes:
        process.start()
    wanted = simulate(2, scenario)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    for rank, (tensors, sent, events) in enumerate(wanted):
        got, got_sent, got_events = torch.load(tmp_path / f"{rank}.pt")
        assert len(got) == len(tensors) > 20
        assert all(same_bits(a.contiguous(), b.contiguous()) for a, b in zip(got, tensors, strict=True))
        assert got_sent == sent
        assert got_events == events
    assert sum(events.get("candidate rows sent again", 0) for _, _, events in wanted) > 0
