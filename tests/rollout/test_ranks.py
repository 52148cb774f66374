"""vLLM on two ranks, each a process of its own, gives the bits of one; the exchanges that make it so are counted."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rollout.harness import RANK, PlainModel, Prompt, Rollout, assert_equal, proved, random_adapter, text
from zmrl.model.tensors import combined_digest, digests
from zmrl.parallel.layout import HEADS, TOKENS
from zmrl.rollout.cache import context_slots
from zmrl.rollout.ranks import bind_cores, prepare_environment
from zmrl.rollout.worker import adapter_bytes

BIND = "VLLM_CPU_OMP_THREADS_BIND"
PROMPTS = [Prompt(text(40 + 25 * i, i), seed=i, adapter=(None, 1, 2)[i % 3], max_tokens=12) for i in range(6)]
EXPERT = "language_model.model.layers.2.block_sparse_moe.experts.63.w2.weight_packed"


LAYOUTS = [
    pytest.param((1, HEADS), marks=pytest.mark.soak, id="TP2"),
    pytest.param((2, HEADS), id="TP2 and DCP2"),
    pytest.param((1, TOKENS), id="TP2, prefill by tokens"),
    pytest.param((2, TOKENS), marks=pytest.mark.soak, id="TP2 and DCP2, prefill by tokens"),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[int, str]:
    """Context ranks, and what the ranks share of a prefill."""
    return request.param


@pytest.fixture(scope="module")
def rollout(few_experts: Path, layout: tuple[int, str]) -> Iterator[Rollout]:
    sizes = {"tensor_parallel_size": 2, "decode_context_parallel_size": layout[0]}
    engine = Rollout(few_experts, prefill=layout[1], max_loras=2, **sizes)
    yield engine
    engine.close()


def rows_by_tokens(rollout: Rollout) -> list[int]:
    """Of each rank, since the engine started."""
    return [rank["events"].get("rows by tokens", 0) for rank in rollout.llm.collective_rpc("zmrl_exchanges")]


@pytest.mark.slow
def test_two_processes_are_one_rank(rollout: Rollout, few_experts: Path, layout: tuple[int, str]) -> None:
    context, prefill = layout
    plain = PlainModel(few_experts)
    plain.model.create_lora(2, RANK, RANK)
    adapters = {version: random_adapter(plain.model, version) for version in (1, 2)}
    for version, buffers in adapters.items():
        for key, buffer in plain.model.adapter_buffers(version - 1).items():
            buffer.copy_(buffers[key])
    rollout.rpc("zmrl_load_adapter", 1, adapters[1], RANK, RANK)
    named = {item.name: item.read() for item in plain.model.lora_slices(adapters[2])}
    rollout.rpc("zmrl_load_adapter", 2, adapter_bytes(named), RANK, RANK)

    taken = [rows_by_tokens(rollout)]
    first = rollout.generate(PROMPTS)
    taken.append(rows_by_tokens(rollout))
    expected = [plain.score(s, None if s.prompt.adapter is None else s.prompt.adapter - 1) for s in first]
    assert_equal(first, expected)
    topk = plain.model.config.index_topk
    proved(topk is not None and min(len(p.ids) for p in PROMPTS) > topk, "every prompt is longer than index_topk")
    again = rollout.generate(PROMPTS)
    assert_equal(again, expected)
    proved(sum(s.cached for s in again) > 0, "prefixes came from the cache")
    taken.append(rows_by_tokens(rollout))
    rollout.forget()
    with rollout.chunks_of(7):
        assert_equal(rollout.generate(PROMPTS), expected)
    proved(rollout.counters()["prefill_chunks"] > 2 * len(PROMPTS), "prompts came in chunks")
    taken.append(rows_by_tokens(rollout))
    for before, after in pairwise(taken):
        rows = [b - a for a, b in zip(before, after, strict=True)]
        assert len(rows) == 2
        proved(min(rows) > 0 if prefill == TOKENS else not any(rows), f"rows that went by tokens: {rows}")

    for rank in rollout.llm.collective_rpc("zmrl_exchanges"):
        tensor, shared, events = rank["tensor"], rank["context"], Counter(rank["events"])
        assert min(tensor[what] for what in ("row-parallel sums", "expert results", "logits")) > 0
        assert (context == 1) == (not shared) and (context == 1) == (events["candidate rows"] == 0)
        assert min(tensor.get(what, 0) > 0 for what in ("queries", "outputs")) == (prefill == TOKENS)
        assert (shared.get("context", 0) > 0) == (prefill == TOKENS and context > 1)
        if context > 1:
            assert min(shared[what] for what in ("candidates", "queries", "maxima", "partial sums")) > 0

    identities = rollout.llm.collective_rpc("zmrl_identity")
    assert len(identities) == 2 and identities[0] == identities[1]
    assert identities[0]["model_digest"] == combined_digest(plain.model.base_buffers())
    held = {f"zmrl-v{v}": combined_digest(plain.model.adapter_buffers(v - 1)) for v in (1, 2)}
    assert identities[0]["adapter_digests"] == held
    rollout.rpc("zmrl_flip_bit", "parameter", EXPERT, 3, 1)  # rank 1 holds it
    assert rollout.rpc("zmrl_identity")["model_digest"] != identities[0]["model_digest"]
    found, wanted = rollout.rpc("zmrl_tensor_digests"), digests(plain.model.tensor_slices())
    assert [name for name in wanted if wanted[name] != found[name]] == [EXPERT]
    rollout.rpc("zmrl_flip_bit", "parameter", EXPERT, 3, 1)
    assert rollout.rpc("zmrl_identity") == identities[0]


def test_slots_of_a_context_rank() -> None:
    generator = torch.Generator().manual_seed(0)
    starts, lengths, block = torch.tensor([0, 5, 6, 37]), [5, 1, 31], 4
    first = [3, 17, 40]  # computed before
    table = torch.randperm(64, generator=generator)[: 3 * 20].reshape(3, 20).int()
    positions = torch.cat([torch.arange(f, f + n) for f, n in zip(first, lengths, strict=True)])
    for size in (1, 2, 4):
        taken: set[tuple[int, int]] = set()
        for rank in range(size):
            slots = context_slots(starts.int(), positions, table, block, rank, size).tolist()
            for request, (f, n) in enumerate(zip(first, lengths, strict=True)):
                for i, position in enumerate(range(f, f + n)):
                    slot = slots[int(starts[request]) + i]
                    assert (slot < 0) == (position % size != rank)
                    if slot >= 0:
                        local = position // size
                        assert slot == int(table[request, local // block]) * block + local % block
                        taken.add((rank, slot))
        assert len(taken) == sum(lengths)


@pytest.mark.parametrize(
    "cores, ranks, wanted",
    [([0, 1], 2, "0|1"), ([0, 1, 4, 5, 6], 2, "0,1|4,5"), ([3], 2, "nobind"), (list(range(8)), 4, "0,1|2,3|4,5|6,7")],
)
def test_ranks_share_the_cores(cores: list[int], ranks: int, wanted: Any) -> None:
    assert bind_cores(cores, ranks) == wanted


def test_engines_of_other_sizes_in_one_process_get_their_own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, then one: vLLM refuses a binding of another number of ranks. What the user sets stays."""
    from vllm.config import ParallelConfig

    monkeypatch.delenv(BIND, raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    bindings = []
    for ranks in (2, 4, 1, 2):
        prepare_environment(ParallelConfig(tensor_parallel_size=ranks))
        bindings.append(os.environ.get(BIND))
    cores = sorted(os.sched_getaffinity(0))
    assert bindings == [bind_cores(cores, 2), bind_cores(cores, 4), None, bind_cores(cores, 2)]
    monkeypatch.setenv(BIND, "0|0")
    for ranks in (2, 1):
        prepare_environment(ParallelConfig(tensor_parallel_size=ranks))
        assert os.environ[BIND] == "0|0"
