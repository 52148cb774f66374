"""The pieces between which ranks exchange: one result with 1 and with 2 threads (which were used) and on all ISAs."""

import numpy as np
import pytest
import torch

from tests.batch_invariant import index_oracle
from tests.batch_invariant.exactness import assert_same_on_every_isa, assert_same_with_threads, fp32, random
from tests.batch_invariant.mla_oracle import make_case
from tests.batch_invariant.test_experts import Moe, output_gradient
from tests.parallel.test_mla import EIGHT
from zmrl.batch_invariant.ops import candidates, experts_parallel, linear_parallel, mla_partial
from zmrl.batch_invariant.ops.panels import pack_panels


def index_keys():
    case = index_oracle.make_case([70, 450])
    counts = case.positions + 1
    counts[:3] = 0
    where = (case.pages, case.block_table, case.cu, counts, case.block_size, 512)
    keys = candidates.index_keys(case.q, case.w, False, *where)
    return keys.view(torch.int16).masked_fill(torch.arange(512) >= counts[:, None], 0)


def ranked_keys():
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 500, (2, 150, 4096)).astype(np.uint16))
    return keys, torch.full((150,), 4096, dtype=torch.int32)


def pick_candidates():
    keys, counts = ranked_keys()
    return candidates.pick_candidates(keys[0], counts, 1536, 1)


KEYS, COUNTS = ranked_keys()
MESSAGES = torch.stack([candidates.pick_candidates(k, COUNTS, 1536, 1) for k in KEYS])
MLA = make_case(EIGHT, [130], topk=20)
SHARD = (MLA.pages, MLA.block_table, MLA.cu, MLA.positions, MLA.selected, MLA.block_size, EIGHT, 1, 0)
QUERIES = random(130, 8, EIGHT.rank + EIGHT.pe)
SCORES, MAXIMUM = mla_partial.mla_scores(QUERIES, *SHARD)
ADAPTER = (lambda lora: (lora.a, lora.b, MLA.slots, lora.scale))(MLA.lora())
SPLITS, OWN = [100, 60], [(7, 80), (0, 60)]
W = torch.cat([pack_panels(random(n, 144, seed=n)) for n in SPLITS])
MOE = Moe(16, topk=2)
Z, ROWS = random(200, 64), torch.arange(200).repeat_interleave(2).int()
IDS, SLOTS = torch.arange(400).mul(7).remainder(16).int(), torch.arange(400).remainder(3).sub(1).int()


def outer():
    grad = torch.ones(7, 144, 16)
    linear_parallel.outer(random(200, 144), fp32(200, 100), torch.arange(200).remainder(2).int() - 1, 0.7, grad)
    return grad


def expert_results_backward():
    grads = MOE.gradients()
    pairs = (Z, ROWS, IDS, fp32(400).abs(), MOE.weights, MOE.lora, SLOTS, 4.0, 25.0)
    return [*experts_parallel.expert_results_backward(output_gradient(200, 64), *pairs), *grads]


PIECES = {
    (candidates, "_index_keys"): index_keys,
    (candidates, "_pick"): pick_candidates,
    (candidates, "_merge"): lambda: candidates.merge_candidates(MESSAGES, COUNTS * 2 - 1, 2048, 1),
    (mla_partial, "_mla_queries"): lambda: mla_partial.mla_queries(MLA.q, MLA.kv_b, EIGHT, *ADAPTER),
    (mla_partial, "_mla_scores"): lambda: mla_partial.mla_scores(QUERIES, *SHARD)[1],
    (mla_partial, "_mla_partial"): lambda: mla_partial.mla_partial(SCORES.clone(), MAXIMUM, *SHARD),
    (mla_partial, "_mla_values"): lambda: mla_partial.mla_values(
        fp32(4, 130, 8, EIGHT.rank + 1).abs(), MLA.kv_b, EIGHT, *ADAPTER
    ),
    (linear_parallel, "_tree_sum"): lambda: linear_parallel.tree_sum(fp32(8, 300001), 0.7),
    (linear_parallel, "_add_adapter"): lambda: linear_parallel.add_adapter(
        fp32(2100, 1001), fp32(2100, 1001, seed=1), torch.arange(2100).remainder(2).int() - 1, 0.7
    ),
    (linear_parallel, "_linear_gradient"): lambda: linear_parallel.linear_gradient(random(200, 160), W, SPLITS, OWN, 4),
    (linear_parallel, "_outer"): outer,
    (experts_parallel, "_expert_results"): lambda: experts_parallel.expert_results(
        Z, ROWS, IDS, MOE.weights, MOE.lora, SLOTS, 4.0, 25.0
    ),
    (experts_parallel, "_backward"): expert_results_backward,
    (experts_parallel, "_combine_experts"): lambda: experts_parallel.combine_experts(
        fp32(5000, 64), torch.arange(20000).mul(3).remainder(5000).int().view(-1, 4), fp32(5000, 4)
    ),
}


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece[1].strip("_"))
def test_piece_has_one_result(piece):
    assert_same_on_every_isa(PIECES[piece])
    assert_same_with_threads(PIECES[piece], *piece)
