"""Absorbed MLA over selected latent rows: order, invariances in bits, accuracy against explicit MLA, refusals."""

import pytest
import torch

from tests.batch_invariant import mla_oracle as oracle
from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import (
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    outputs,
    relative_error,
    strided,
    threads,
)
from tests.batch_invariant.mla_oracle import FULL, NANO, ODD, make_case
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import mla as module
from zmrl.batch_invariant.ops.latents import LatentFormat, latent_store
from zmrl.batch_invariant.ops.mla import mla_attention


def assert_same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    assert same_bits(a.contiguous(), b.contiguous())


@pytest.fixture(autouse=True)
def one_thread():
    with threads(1):
        yield


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("dims", [NANO, ODD], ids=["nano", "odd"])
def test_output_has_the_documented_order(dims, isa):
    case = make_case(dims, [1, 37, 9], topk=20)
    with native.use_isa(isa):
        out = case.forward().float().numpy()
    for slot in (-1, 0, 1, 2):
        tokens = (case.slots == slot).nonzero().flatten().tolist()
        assert len(tokens) > 3
        for token in (*tokens[:2], *tokens[-2:]):
            assert (out[token].view("int32") == oracle.exact_attention(case, token).view("int32")).all(), token


def test_token_is_independent_of_the_number_of_tokens_and_of_its_place():
    case = make_case(NANO, [130], topk=32, block_size=16)
    whole = case.forward()
    for m in range(1, 131):
        assert_same_bits(case.forward(rows=slice(0, m)), whole[:m])
        assert_same_bits(case.forward(rows=slice(m - 1, m)), whole[m - 1 : m])  # alone: a decode step


def test_request_is_independent_of_the_batch():
    case = make_case(ODD, [7, 1, 64, 20], topk=24)
    whole = case.forward()
    for r in range(4):
        rows = slice(int(case.cu[r]), int(case.cu[r + 1]))
        alone = case.attend(case.q[rows], lora=case.lora(), rows=rows, table=case.block_table[r:])
        assert_same_bits(alone, whole[rows])


@pytest.mark.parametrize("adapters", [False, True])
def test_heads_are_independent_of_each_other(adapters):
    """A tensor-parallel rank with some of the heads gives the bits of the whole."""
    case = make_case(NANO, [33], topk=16)
    whole = case.forward(adapters).view(33, 4, -1)
    for first, heads in ((0, 1), (1, 2), (3, 1), (1, 3)):
        part = make_case(NANO, [33], topk=16)
        part.dims = NANO._replace(heads=heads)
        rows = slice(first * 64, (first + heads) * 64)
        part.q = case.q.view(33, 4, 48)[:, first : first + heads].reshape(33, -1)
        part.weight, part.lora_b = case.weight[rows], case.lora_b[:, rows].contiguous()
        assert_same_bits(part.forward(adapters).view(33, heads, -1), whole[:, first : first + heads])


def test_output_is_independent_of_threads():
    case = make_case(NANO, [300, 100], topk=64, block_size=16)
    assert_same_with_threads(case.forward, module, "_mla_attention")


def test_output_is_independent_of_threads_for_one_token_with_many_heads():
    case = make_case(NANO._replace(heads=24), [900], topk=900, block_size=16)
    assert_same_with_threads(lambda: case.forward(rows=slice(899, 900)), module, "_mla_attention")


@pytest.mark.parametrize("dims", [NANO, ODD], ids=["nano", "odd"])
def test_output_is_independent_of_the_instruction_set(dims):
    case = make_case(dims, [70, 13], topk=40)
    assert_same_on_every_isa(case.forward)


def test_output_is_independent_of_row_strides():
    case = make_case(NANO, [29], topk=16)
    expected = case.forward()
    case.q, case.selected, case.block_table = (
        strided(case.q),
        strided(case.selected, fill=-9),
        strided(case.block_table, fill=999),
    )
    assert not case.q.is_contiguous()
    assert_same_bits(case.forward(), expected)


@pytest.mark.parametrize("block_size", [1, 2, 7, 16, 200])
def test_output_is_independent_of_the_page_layout(block_size):
    expected = make_case(NANO, [90, 40], topk=32, block_size=5).forward()
    assert_same_bits(make_case(NANO, [90, 40], topk=32, block_size=block_size).forward(), expected)
    case = make_case(NANO, [90, 40], topk=32, block_size=block_size)
    columns = case.block_table.shape[1]
    case.block_table = torch.arange(2 * columns).int().view(2, columns)  # pages in order, without gaps
    case.pages = torch.zeros(2 * columns, block_size * 160, dtype=torch.uint8)
    slots = torch.cat([torch.arange(n) + r * columns * block_size for r, n in enumerate((90, 40))])
    latent_store(case.kv, case.pages, slots, block_size, NANO.rank)
    assert_same_bits(case.forward(), expected)


def test_selection_is_padded_freely():
    case = make_case(NANO, [20], topk=20)
    expected = case.forward()
    case.selected = torch.cat([case.selected, torch.full((20, 13), -1).int()], 1)
    assert_same_bits(case.forward(), expected)


def test_absent_adapter_leaves_the_base_bits_and_a_zero_adapter_the_values():
    case = make_case(NANO, [25], topk=16)
    base = case.forward(adapters=False)
    without = case.slots == -1
    assert without.any()
    assert not without.all()
    assert_same_bits(case.forward()[without], base[without])
    case.lora_b.zero_()
    assert torch.equal(case.forward(), base)


def test_every_element_is_written():
    case = make_case(ODD, [31, 2], topk=8)
    assert_same(outputs(case.forward), [case.forward()])
    assert outputs(case.forward)[0].isfinite().all()


@pytest.mark.parametrize("dims", [NANO, ODD], ids=["nano", "odd"])
def test_output_is_close_to_explicit_attention(dims):
    case = make_case(dims, [60, 21], topk=32)
    wanted = oracle.explicit_attention(
        case, case.q.double(), case.kv.double(), case.lora_a.double(), case.lora_b.double(), range(81)
    )
    assert relative_error(case.forward(), wanted) < 5e-3


def test_full_size_heads_over_2048_of_32768_positions():
    length, tokens = 32768, 3
    case = make_case(FULL._replace(heads=1), [tokens], topk=1)
    g = torch.Generator().manual_seed(1)
    case.dims = FULL
    case.kv = torch.randn(length, 576, generator=g).bfloat16()
    case.pages, case.block_table, slots = oracle.pages_for([length], 16, 1152, g)
    case.block_size = 16
    latent_store(case.kv, case.pages, slots, 16, FULL.rank)
    case.q = torch.randn(tokens, 96 * 192, generator=g).bfloat16()
    case.weight = (torch.randn(96 * 256, 512, generator=g) * 0.07).bfloat16()
    case.lora_b = (torch.randn(1, 96 * 256, 32, generator=g) * 0.2).bfloat16()
    case.lora_a = (torch.randn(1, 32, 512, generator=g) * 0.04).bfloat16()
    case.slots = torch.tensor([0, -1, 0]).int()
    case.positions = torch.arange(length - tokens, length).int()
    case.selected = torch.stack(
        [torch.randperm(length - tokens, generator=g)[:2048].sort().values for _ in range(tokens)]
    ).int()
    with threads(2):
        out = case.forward()
    heads = 4  # of the explicit reference: heads are independent
    case.cu = torch.tensor([0, tokens]).int()
    wanted = oracle.explicit_attention(
        case, case.q.double(), case.kv.double(), case.lora_a.double(), case.lora_b.double(), range(tokens), heads
    )
    assert relative_error(out.view(tokens, 96, 128)[:, :heads].reshape(tokens, -1), wanted) < 6e-3
    for t in range(tokens):
        assert_same_bits(case.forward(rows=slice(t, t + 1)), out[t : t + 1])


def test_extreme_scores_do_not_overflow():
    case = make_case(NANO, [40], topk=40)
    case.q *= 1000
    out = case.forward(adapters=False)
    wanted = oracle.explicit_attention(
        case, case.q.double(), case.kv.double(), case.lora_a.double(), 0 * case.lora_b.double(), range(40)
    )
    assert out.isfinite().all()
    assert relative_error(out, wanted) < 0.05  # q_lat is BF16: near-ties of huge scores differ


def test_nan_in_one_latent_reaches_the_tokens_that_select_it_only():
    case = make_case(NANO, [40], topk=10)
    clean = case.forward()
    case.kv[7] = float("nan")
    block = case.block_table[0, 7 // 5].item() * 5 + 7 % 5
    latent_store(case.kv[7:8], case.pages, torch.tensor([block]), 5, NANO.rank)
    hit = (case.selected == 7).any(1)
    assert hit.any()
    out = case.forward()
    assert out[hit].isnan().all()
    assert_same_bits(out[~hit], clean[~hit])


def test_latent_store_copies_rows_and_skips_minus_one():
    kv = torch.randn(9, 30).bfloat16()[:, :24]
    pages = torch.zeros(4, 3 * 48 + 10, dtype=torch.uint8)
    slots = torch.tensor([11, 0, -1, 5, 3, -1, 7, 8, 1])
    latent_store(kv, pages, slots, 3, 16)
    stored = pages[:, : 3 * 48].contiguous().view(torch.bfloat16).view(12, 24)
    for t, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(stored[slot], kv[t])
    untouched = torch.tensor([s not in slots for s in range(12)])
    assert not stored[untouched].any()
    assert not pages[:, 144:].any()
    with pytest.raises(OperatorError, match="slot_mapping: token 1"):
        latent_store(kv[:2], pages, torch.tensor([0, 12]), 3, 16)


# ---- formats ---------------------------------------------------------------------------------------------------------

QUANTISED = [LatentFormat("fp8"), LatentFormat("fp8", 0.037), LatentFormat("nvfp4")]


@pytest.mark.parametrize("isa", native.available_isas())
@pytest.mark.parametrize("latents", QUANTISED, ids=str)
def test_attention_over_quantised_rows_is_attention_over_their_values(latents, isa):
    """The same bits as over BF16 pages that hold the decoded values, and other bits than over what was stored."""
    with native.use_isa(isa):
        case = make_case(NANO, [1, 37, 90], topk=20, latents=latents)
        out = case.forward()
    plain = make_case(NANO, [1, 37, 90], topk=20)
    assert not same_bits(plain.forward(), out)
    slots = torch.cat(
        [plain.block_table[r, torch.arange(n) // 5] * 5 + torch.arange(n) % 5 for r, n in enumerate((1, 37, 90))]
    )
    latent_store(case.kv, plain.pages, slots.long(), 5, NANO.rank)
    assert_same_bits(plain.forward(), out)
    for token in (0, 20, 37, 100, 127):
        assert (out[token].float().numpy().view("int32") == oracle.exact_attention(case, token).view("int32")).all()


@pytest.mark.parametrize("latents", QUANTISED, ids=str)
def test_quantised_rows_are_independent_of_pages_threads_and_neighbours(latents):
    case = make_case(NANO, [300, 100], topk=64, block_size=16, latents=latents)
    assert_same_with_threads(case.forward, module, "_mla_attention")
    whole = case.forward()
    assert_same_bits(make_case(NANO, [300, 100], topk=64, block_size=1, latents=latents).forward(), whole)
    for m in (1, 17, 300):
        assert_same_bits(case.forward(rows=slice(0, m)), whole[:m])
        assert_same_bits(case.forward(rows=slice(m - 1, m)), whole[m - 1 : m])


@pytest.mark.parametrize("latents", QUANTISED, ids=str)
def test_nan_in_a_quantised_latent_reaches_the_tokens_that_select_it_only(latents):
    case = make_case(NANO, [40], topk=10, latents=latents)
    clean = case.forward()
    row = case.kv[7:8].clone()
    row[0, 3] = float("nan")
    latent_store(row, case.pages, (case.block_table[0, 1] * 5 + 2)[None].long(), 5, NANO.rank, latents)
    hit = (case.selected == 7).any(1)
    out = case.forward()
    assert hit.any()
    assert out[hit].isnan().any(1).all()
    assert_same_bits(out[~hit], clean[~hit])


def test_a_format_that_the_rank_does_not_allow_is_named():
    case = make_case(ODD, [5], topk=4)
    case.latents = LatentFormat("nvfp4")
    with pytest.raises(OperatorError, match=r"^format: latent format nvfp4: kv_lora_rank 80"):
        case.forward()
    case.latents = LatentFormat("fp8", -1.0)
    with pytest.raises(OperatorError, match=r"^scale"):
        case.forward()


def test_meta_device_gives_shapes():
    case = make_case(NANO, [6], topk=4)
    tensors = [t.to("meta") for t in (case.q, case.pages, case.block_table, case.cu, case.positions, case.selected)]
    out = mla_attention(tensors[0], None, *tensors[1:], case.block_size, case.kv_b.to("meta"), case.dims)
    assert out.is_meta
    assert out.shape == (6, 128)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda c: setattr(c, "q", c.q[:, 1:])),
        ("q", lambda c: setattr(c, "q", c.q.float())),
        ("kv_b", lambda c: setattr(c, "weight", c.weight[:-16])),
        ("b", lambda c: setattr(c, "lora_b", c.lora_b[:, :-16])),
        ("a", lambda c: setattr(c, "lora_a", c.lora_a[:, :, :-1])),
        ("slots", lambda c: setattr(c, "slots", c.slots + 5)),
        ("dims", lambda c: setattr(c, "dims", c.dims._replace(nope=24))),
        ("pages", lambda c: setattr(c, "pages", c.pages[:, :-1])),
        ("block_table", lambda c: setattr(c, "block_table", c.block_table[:, :1])),
        ("block_table", lambda c: setattr(c, "block_table", c.block_table + 100)),
        ("block_table", lambda c: setattr(c, "block_table", c.block_table.long())),
        ("cu_seqlens", lambda c: setattr(c, "cu", c.cu - 1)),
        ("positions", lambda c: setattr(c, "positions", c.positions[:-1])),
        ("selected: token 0", lambda c: c.selected.fill_(-1)),
        ("selected: token 3", lambda c: c.selected[3].copy_(torch.tensor([2, 1, -1, -1]))),
        ("selected: token 2", lambda c: c.selected[2].copy_(torch.tensor([1, 3, -1, -1]))),
        ("block_size", lambda c: setattr(c, "block_size", 0)),
    ],
)
def test_unusable_argument_is_named(name, change):
    case = make_case(NANO, [11], topk=4)
    change(case)
    with pytest.raises(OperatorError, match=f"^{name}"):
        case.forward()


@pytest.mark.parametrize("dims", [NANO, ODD], ids=["nano", "odd"])
@pytest.mark.parametrize("adapters", [False, True])
def test_dense_attention_is_attention_to_every_position(dims, adapters):
    lengths = [1, 70, 9]
    case = make_case(dims, lengths, topk=70)  # every position is selected
    expected = case.forward(adapters)
    shorter = make_case(dims, lengths, topk=8).forward(adapters)
    case.selected = None
    assert_same_bits(case.forward(adapters), expected)
    assert not same_bits(shorter, expected)
    for m in (1, 40, 70):  # a prefix alone, and its last token alone: a decode step
        rows, first = slice(1, 1 + m), case.block_table[1:]
        part = case.attend(case.q[rows], lora=case.lora() if adapters else None, rows=rows, table=first)
        assert_same_bits(part, expected[rows])
        rows = slice(m, 1 + m)
        part = case.attend(case.q[rows], lora=case.lora() if adapters else None, rows=rows, table=first)
        assert_same_bits(part, expected[rows])


@pytest.mark.parametrize("latents", QUANTISED, ids=str)
def test_dense_attention_over_quantised_rows_is_attention_to_every_position(latents):
    lengths = [1, 70, 9]
    case = make_case(NANO, lengths, topk=70, latents=latents)
    expected = case.forward()
    assert not same_bits(make_case(NANO, lengths, topk=70).forward(), expected)  # BF16 latents
    assert not same_bits(make_case(NANO, lengths, topk=8, latents=latents).forward(), expected)
    case.selected = None
    assert_same_bits(case.forward(), expected)
    assert_same_on_every_isa(case.forward)
    for m in (0, 7, 69):  # decode steps
        rows = slice(1 + m, 2 + m)
        part = case.attend(case.q[rows], lora=case.lora(), rows=rows, table=case.block_table[1:])
        assert_same_bits(part, expected[rows])


def test_dense_attention_is_independent_of_threads_and_the_instruction_set():
    case = make_case(NANO, [300, 100], topk=1, block_size=16)
    case.selected = None
    assert_same_with_threads(case.forward, module, "_mla_attention")
    assert_same_on_every_isa(case.forward)


def test_dense_attention_needs_positions_from_0():
    case = make_case(NANO, [5], topk=4)
    case.selected, case.positions[3] = None, -1
    with pytest.raises(OperatorError, match="token 3"):
        case.forward()


def test_adapters_need_slots():
    c = make_case(NANO, [3], topk=4)
    arguments = c.q, None, c.pages, c.block_table, c.cu, c.positions, c.selected, c.block_size, c.kv_b, c.dims
    with pytest.raises(OperatorError, match="slots"):
        mla_attention(*arguments, c.lora())
