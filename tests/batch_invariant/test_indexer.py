"""The indexer: stored keys, scores, exact top-k with ties, invariances in bits, refusals."""

import numpy as np
import pytest
import torch

from tests.batch_invariant import index_oracle as oracle
from tests.batch_invariant.exactness import (
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    outputs,
    strided,
    threads,
)
from tests.batch_invariant.index_oracle import make_case
from zmrl.batch_invariant import native
from zmrl.batch_invariant.formats import index_key_bytes
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import indexer as module
from zmrl.batch_invariant.ops.indexer import index_store


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


# ---- stored keys -----------------------------------------------------------------------------------------------------


FORMATS = ["fp8", "mxfp4"]
SHAPES = [
    *((4, 32, hadamard, name) for hadamard in (False, True) for name in FORMATS),
    (7, 48, False, "fp8"), (3, 21, False, "fp8"), (5, 96, False, "mxfp4"), (2, 128, True, "mxfp4"),
]  # fmt: skip
"""Heads, D, Hadamard, format."""


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(
    ("d", "hadamard", "name"),
    [
        *((d, hadamard, name) for d, hadamard in ((32, False), (32, True), (128, True)) for name in FORMATS),
        (24, False, "fp8"),
        (7, False, "fp8"),
        (96, False, "mxfp4"),
    ],
)
def test_stored_keys_are_the_quantised_layer_norm(d, hadamard, name, isa):
    with native.use_isa(isa):
        case = make_case([23, 40], d=d, hadamard=hadamard, format=name)
    normed = oracle.layer_norm(case.k.float().numpy(), case.ln_w.numpy(), case.ln_b.numpy(), 1e-6)
    values, scales = oracle.quantise(normed, hadamard, name)
    got_values, got_scales = case.stored()
    assert (got_values.view("int32") == values.view("int32")).all()
    assert (got_scales.view("int32") == scales.view("int32")).all()


def test_norm_weights_may_be_bf16():
    case = make_case([9])
    case.ln_w, case.ln_b = case.ln_w.bfloat16(), case.ln_b.bfloat16()
    case.store()
    stored = case.pages.clone()
    case.ln_w, case.ln_b = case.ln_w.float(), case.ln_b.float()
    case.store()
    assert torch.equal(case.pages, stored)
    case.ln_b = case.ln_b.bfloat16()
    with pytest.raises(OperatorError, match=r"^ln_b"):
        case.store()


def test_scale_is_the_power_of_two_at_or_above_amax_over_448():
    for amax, scale in (
        (448.0, 1.0),
        (448.5, 2.0),
        (449.0, 2.0),
        (896.0, 2.0),
        (224.0, 0.5),
        (0.0, 2.0**-22),
        (3e-5, 2.0**-22),
    ):
        pages = torch.zeros(1, 36, dtype=torch.uint8)
        index_store(
            torch.zeros(1, 32).bfloat16(),
            torch.ones(32),
            torch.full((32,), amax),
            1e-6,
            False,
            pages,
            torch.tensor([0]),
            1,
        )
        assert pages[0, 32:].view(torch.float32).item() == scale


def test_keys_without_a_slot_are_not_stored_and_pages_are_not_overrun():
    case = make_case([11])
    before = case.pages.clone()
    case.k = -case.k
    case.slot_mapping = torch.where(torch.arange(11) == 4, case.slot_mapping, -1)
    case.store()
    changed = (case.pages != before).nonzero()
    block, place = divmod(int(case.slot_mapping[4]), 5)
    assert (changed[:, 0] == block).all()
    assert {int(c) for c in changed[:, 1]} <= {
        *range(place * 32, place * 32 + 32),
        *range(160 + place * 4, 164 + place * 4),
    }
    with pytest.raises(OperatorError, match="slot_mapping: token 0"):
        index_store(case.k, case.ln_w, case.ln_b, 1e-6, False, case.pages, torch.full((11,), 10**6), 5)


# ---- selection -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize(("heads", "d", "hadamard", "name"), SHAPES)
def test_selection_is_that_of_the_oracle(heads, d, hadamard, name, isa):
    with native.use_isa(isa):
        case = make_case([70, 45], heads, d, topk=16, hadamard=hadamard, format=name)
        got = case.select()
    for token in (0, 14, 15, 16, 17, 30, 47, 48, 64, 69, 70, 100, 114):
        assert got[token].tolist() == case.expected(token)[0]


@pytest.mark.parametrize("name", FORMATS)
def test_every_prefix_length(name):
    case = make_case([130], topk=32, block_size=16, format=name)
    got = case.select()
    for token in range(130):
        assert got[token].tolist() == case.expected(token)[0]
        assert torch.equal(case.alone(token)[0], got[token])
        assert torch.equal(case.select(slice(0, token + 1), torch.tensor([0, token + 1]).int()), got[: token + 1])


def test_short_contexts_take_all_positions():
    got = make_case([40], topk=64).select()
    for token in range(40):
        assert got[token].tolist() == list(range(token + 1)) + [-1] * (63 - token)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("distinct", [1, 2, 5])
def test_ties_at_the_cut_go_to_lower_positions(distinct, name):
    """Keys repeat within and across pages, so equal scores straddle the cut."""
    case = make_case([100], topk=24, block_size=7, format=name)
    case.k = case.k[:distinct].repeat(100 // distinct, 1)
    case.store()
    got = case.select()
    tied = 0
    for token in range(24, 100):
        wanted, scores = case.expected(token)
        assert got[token].tolist() == wanted
        cut = min(scores[wanted])
        tied += (scores == cut).sum() > (scores[wanted] == cut).sum()
    assert tied > 60


@pytest.mark.parametrize("name", FORMATS)
def test_zero_keys_and_negative_products_tie_at_zero(name):
    case = make_case([60], topk=10, format=name)
    case.k[::2] = 0
    case.ln_b.zero_()
    case.store()
    got = case.select()
    chosen_zero = 0
    for token in range(60):
        wanted, scores = case.expected(token)
        assert got[token].tolist() == wanted
        chosen = scores[[s for s in wanted if s >= 0]]
        chosen_zero += token >= 10 and (chosen == 0).any() and (scores == 0).sum() > (chosen == 0).sum()
    assert chosen_zero > 5


def test_minus_zero_ties_with_zero():
    case = make_case([20], heads=1, topk=4)
    case.k[::2] = 0  # score +0
    case.ln_b.zero_()
    case.w.fill_(-1e-44)  # a positive product makes a score that rounds to -0
    case.q = case.k[1:2].repeat(20, 1)
    case.k[1::2] = case.k[1]
    case.store()
    assert case.select()[19].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_all_zero_scores_take_the_first_positions(name):
    """Weights of zero: every position ties at the cut, within and across pages."""
    case = make_case([90], topk=16, block_size=8, format=name)
    assert case.select()[89].tolist() != list(range(16))
    case.w[:] = 0
    assert all(case.select()[t].tolist() == list(range(16)) for t in range(15, 90))
    case.w[:] = 1
    case.k[:] = 0
    case.ln_b.zero_()
    case.store()
    assert all(case.select()[t].tolist() == list(range(16)) for t in range(15, 90))


@pytest.mark.parametrize("name", FORMATS)
def test_nan_ranks_last_and_raises_the_flag(name):
    case = make_case([50], topk=16, format=name)
    flags = torch.zeros(50, dtype=torch.int32)
    clean = case.select(flags=flags)
    assert not flags.any()
    case.k[5] = float("nan")
    case.store()
    got = case.select(flags=flags)
    assert flags.tolist() == [0] * 16 + [1] * 34
    for token in range(16, 50):
        scored = case.expected(token)
        assert np.isnan(scored[1][5])
        assert got[token].tolist() == scored[0]
        assert 5 not in got[token]
    assert torch.equal(got[:16], clean[:16])
    case.w[30] = float("nan")  # every score of this token
    flags.zero_()
    got = case.select(flags=flags)
    assert flags[30] == 1
    assert got[30].tolist() == list(range(16))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_infinite_scores_are_ranked():
    case = make_case([40], heads=2, topk=8)
    case.w[:] = torch.tensor([torch.inf, 1.0])
    case.w[1::2, 0] = -torch.inf
    flags = torch.zeros(40, dtype=torch.int32)
    got = case.select(flags=flags)
    for token in range(8, 40):
        wanted, scores = case.expected(token)
        assert got[token].tolist() == wanted
        assert flags[token] == int(np.isnan(scores).any())


# ---- invariances -----------------------------------------------------------------------------------------------------


def test_request_is_independent_of_the_batch_and_its_order():
    case = make_case([50, 1, 80, 33], topk=20)
    whole, table = case.select(), case.block_table
    for r in range(4):
        rows = slice(int(case.cu[r]), int(case.cu[r + 1]))
        case.block_table = table[r : r + 1]
        assert torch.equal(case.select(rows, torch.tensor([0, rows.stop - rows.start]).int()), whole[rows])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 300])
def test_selection_is_independent_of_the_page_layout(block_size, name):
    expected = make_case([150, 60], topk=20, format=name).select()
    assert torch.equal(make_case([150, 60], topk=20, block_size=block_size, format=name).select(), expected)
    case = make_case([150, 60], topk=20, block_size=block_size, format=name)
    columns = case.block_table.shape[1]
    case.block_table = torch.arange(2 * columns).int().view(2, columns)
    case.pages = torch.zeros(2 * columns, block_size * index_key_bytes(name, 32), dtype=torch.uint8)
    case.slot_mapping = torch.cat([torch.arange(n) + r * columns * block_size for r, n in enumerate((150, 60))])
    case.store()
    assert torch.equal(case.select(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_selection_is_independent_of_row_strides_and_of_the_instruction_set(name):
    case = make_case([60], heads=5, topk=20, format=name)
    expected = case.select()
    case.q, case.w, case.block_table = strided(case.q), strided(case.w), strided(case.block_table, fill=999)
    assert not case.q.is_contiguous()
    assert_same(assert_same_on_every_isa(case.select), [expected])


@pytest.mark.parametrize("name", FORMATS)
def test_selection_and_stored_keys_are_independent_of_threads(name):
    case = make_case([500, 300], topk=32, block_size=16, format=name)
    assert_same_with_threads(case.select, module, "_index_select")
    case = make_case([2000], d=128, format=name)

    def stored():
        case.pages.fill_(0)
        case.store()
        return case.pages.clone().view(torch.int32)

    assert_same_with_threads(stored, module, "_index_store")


def test_every_element_is_written():
    case = make_case([50], topk=20)
    assert_same(outputs(case.select), [case.select()])


@pytest.mark.parametrize("name", FORMATS)
def test_full_size_selection_of_2048_of_32768_positions(name):
    """One token alone (its positions shared out over threads) and in a batch (one thread each): the oracle's set."""
    length = 32768
    case = make_case([length], heads=1, d=128, topk=2048, block_size=16, format=name)
    g = torch.Generator().manual_seed(3)
    case.q = torch.randn(6, 32 * 128, generator=g).bfloat16()
    case.w = torch.randn(6, 32, generator=g)
    case.positions = torch.arange(length - 6, length).int()
    with threads(2):
        together = case.select(cu=torch.tensor([0, 6]).int())
        case.block_table = case.block_table.expand(6, -1)
        assert torch.equal(case.select(cu=torch.arange(7).int()), together)
        for t in range(6):
            assert torch.equal(case.alone(t)[0], together[t])
    keys, scales = (x[: length - 5] for x in case.stored())
    q = case.q[0].float().numpy().reshape(32, 128)
    scores = oracle.index_scores(q, case.w[0].numpy(), keys, scales, False, name)
    assert together[0].tolist() == oracle.best(scores, 2048)


def test_many_tokens_with_long_contexts_pass_in_chunks():
    """300 tokens with 32,768 positions: more ranking keys than one chunk (2^23) holds."""
    length = 32768
    case = make_case([length], heads=1, d=16, topk=16, block_size=16)
    rows = slice(length - 300, length)
    got = case.select(rows, torch.tensor([0, 300]).int())
    for i in (0, 254, 255, 256, 257, 299):
        assert torch.equal(case.alone(length - 300 + i)[0], got[i])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda c: setattr(c, "q", c.q[:, :-1])),
        ("q", lambda c: setattr(c, "q", c.q.float())),
        ("w", lambda c: setattr(c, "w", c.w.bfloat16())),
        ("pages", lambda c: setattr(c, "pages", c.pages[:, :-1])),
        ("block_table", lambda c: setattr(c, "block_table", c.block_table[:, :2])),
        ("block_table", lambda c: setattr(c, "block_table", c.block_table - 100)),
        ("cu_seqlens", lambda c: setattr(c, "cu", c.cu + 1)),
        ("positions", lambda c: setattr(c, "positions", c.positions.long())),
        ("positions: token 7", lambda c: c.positions[7].fill_(-1)),
        ("topk", lambda c: setattr(c, "topk", 0)),
    ],
)
def test_unusable_argument_is_named(name, change):
    case = make_case([30], topk=4)
    change(case)
    with pytest.raises(OperatorError, match=f"^{name}"):
        case.select()


def test_a_format_that_the_vectors_do_not_allow_is_named():
    case = make_case([5], d=48)
    case.format = "mxfp4"
    with pytest.raises(OperatorError, match=r"^format: index format mxfp4: index_head_dim 48"):
        case.select()
    with pytest.raises(OperatorError, match=r"^format: index format mxfp4: index_head_dim 48"):
        case.store()


def test_hadamard_needs_a_power_of_two_and_flags_their_type():
    with pytest.raises(OperatorError, match=r"^hadamard"):
        make_case([5], d=24, hadamard=True)
    with pytest.raises(OperatorError, match=r"^flags"):
        make_case([5]).select(flags=torch.zeros(5))
