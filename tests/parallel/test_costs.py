"""The bytes that are foretold are those that groups count."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.batch_invariant.mla_oracle import make_case
from tests.batch_invariant.test_experts import Moe, output_gradient
from tests.batch_invariant.test_linear import Layer, rows
from tests.parallel.shards import WORLDS
from tests.parallel.test_experts import COUNT, TOPK, run_ranks, shares
from tests.parallel.test_linear import run_columns, run_rows
from tests.parallel.test_mla import EIGHT, attend
from tests.parallel.test_prefill import DIMS, by_gathered_tokens, make_step
from tests.parallel.test_prefill import TOPK as PREFILL_TOPK
from tests.parallel.test_selection import choose, ranking_keys
from zmrl.model.cache_format import CacheFormat
from zmrl.model.config import PRESETS
from zmrl.parallel import costs
from zmrl.parallel import group as group_module
from zmrl.parallel.group import simulate

TOKENS = 16


class Sent:
    def __init__(self, groups: list[group_module.Group]) -> None:
        self.groups = groups

    def by_rank(self, *what: str) -> list[int]:
        return [sum(n for key, n in g.sent.items() if key in what) for g in self.groups]

    def __call__(self, *what: str) -> set[int]:
        return set(self.by_rank(*what))

    def total(self, *what: str) -> int:
        return sum(self.by_rank(*what))


@pytest.fixture
def sent(monkeypatch):
    """What every rank of every simulation sent."""
    groups = []

    class Recorded(group_module._SimulatedGroup):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            groups.append(self)

    monkeypatch.setattr(group_module, "_SimulatedGroup", Recorded)
    return Sent(groups)


@pytest.mark.parametrize("size", WORLDS)
def test_row_parallel_bytes(size, sent):
    layer, slots = Layer([48], 32), torch.zeros(TOKENS, dtype=torch.int32)
    run_rows(layer, rows(TOKENS, 32), rows(TOKENS, 48), slots, size)
    # Once with gradients, once without.
    wanted = [costs.row_parallel(TOKENS, 48, size, layer.rank, training) for training in (True, False)]
    assert sent("row-parallel sums", "row-parallel rows", "row-parallel t") == {sum(wanted)}


@pytest.mark.parametrize("size", WORLDS)
def test_column_parallel_bytes(size, sent):
    layer, slots = Layer([48, 16], 32), torch.zeros(TOKENS, dtype=torch.int32)
    run_columns(layer, [False, True], rows(TOKENS, 32), rows(TOKENS, 64), slots, size)
    names = [f"column-parallel {what}" for what in ("sums", "rows", "dt")]
    assert sent(*names) == {costs.column_parallel_backward(TOKENS, 32, size, 2, layer.rank)}


@pytest.mark.parametrize("size", WORLDS)
def test_expert_bytes(size, sent):
    moe = Moe(COUNT, topk=TOPK)
    inputs, du = moe.tokens(40), output_gradient(40, moe.latent)
    run_ranks(moe, inputs, du, size, True)
    home = torch.arange(size).repeat_interleave(torch.tensor(shares(40, size)))
    there = inputs[1] // (COUNT // size)
    pairs = int((there != home[:, None]).sum())
    rows = sum(len(set(row.tolist()) - {int(own)}) for row, own in zip(there, home, strict=True))
    assert 0 < rows < pairs or size == 8
    total = sent.total("expert inputs", "expert pairs", "expert results")
    assert total == costs.experts(rows, pairs, moe.latent)


@pytest.mark.parametrize("size", WORLDS)
def test_context_parallel_bytes(size, sent):
    case = make_case(EIGHT, [TOKENS], topk=8)
    attend(case, size)
    wanted = costs.partial_attention(TOKENS, 8, EIGHT.rank, EIGHT.pe, size)
    assert sent("queries", "maxima", "partial sums") == {wanted}
    rng = np.random.default_rng(0)
    keys = ranking_keys(rng.integers(0, 2, (TOKENS, 300)).astype(float))
    choose(keys, np.full(TOKENS, 299, np.int32), 64, size)
    assert sent("candidates") == {0, costs.candidates(TOKENS, 64, size)}  # 0: of the attention above


@pytest.mark.parametrize("size", WORLDS)
def test_prefill_by_tokens_bytes(size, sent):
    """One request of 8 cached positions and 48 new tokens, on ranks that share its context too."""
    step = make_step([8], [48])
    config = replace(
        PRESETS["nano"], num_attention_heads=DIMS.heads, num_key_value_heads=DIMS.heads, kv_lora_rank=DIMS.rank,
        qk_nope_head_dim=DIMS.nope, qk_rope_head_dim=DIMS.pe, v_head_dim=DIMS.v, index_topk=PREFILL_TOPK,
    )  # fmt: skip
    width = (DIMS.rank + DIMS.pe) * 2
    simulate(size, lambda group: by_gathered_tokens(step, group))
    by_tokens = costs.prefill_by_tokens(config, width + step.index.d + 4, 48, 56, size, size)
    assert sent("queries", "outputs", "flags", "context") == {by_tokens}
    by_heads = costs.prefill_by_heads(config, 48, 56, size, size)
    attention = costs.partial_attention(48, DIMS.heads, DIMS.rank, DIMS.pe, size)
    ranked = 56 - PREFILL_TOPK
    assert by_heads == attention + costs.candidates(ranked, PREFILL_TOPK, size)


def test_full_model_gathers_a_context_while_it_is_shorter_than_a_few_hundred_times_the_new_tokens():
    """What one new token saves pays for so many positions, at 8 ranks."""
    config = PRESETS["k31-pro"]
    for formats, positions in ((CacheFormat(), 245), (CacheFormat("fp8"), 445), (CacheFormat("nvfp4", "mxfp4"), 750)):
        token_bytes = formats.latent_bytes(config) + formats.index_bytes(config)
        for length, fewer in ((2048 * positions, True), (2048 * (positions + 1), False)):
            by_tokens = costs.prefill_by_tokens(config, token_bytes, 2048, length, 8, 8)
            assert (by_tokens < costs.prefill_by_heads(config, 2048, length, 8, 8)) == fewer


def test_full_model_on_eight_ranks():
    found = {cost.what: cost for cost in costs.layer_costs(PRESETS["k31-pro"], 64, 8, 32)}
    down, selection = found["dense or shared down_proj"], found["DCP selection"]
    assert down.invariant * 4 == down.plain * 6
    assert selection.plain == 64 * 7 * 16384
    assert selection.plain / selection.invariant == pytest.approx(10.64, abs=0.01)
