"""The model on ranks that share a prefill out by tokens: the bits of one rank, and what each rank did."""

import pytest
import torch

from tests.model.paged import PagedHost, Request
from tests.model.test_ranks import SLOTS, SMALL, decode, on_rank, prompts, random_lora, same, sequences
from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.initialise import initial_tensors
from zmrl.model.shards import RankBuffers, ranks_digests
from zmrl.model.tensors import combined_digest, digests, flip_bit
from zmrl.model.transformer import KimiK31
from zmrl.parallel.group import ONE_RANK, simulate
from zmrl.parallel.layout import HEADS, TOKENS
from zmrl.parallel.prefill import requests_by_tokens
from zmrl.parallel.ranks import Ranks

MLA_LAYERS = sum(SMALL.is_full_attention(layer) for layer in range(SMALL.num_hidden_layers))
KV_B = "language_model.model.layers.3.self_attn.kv_b_proj.weight"
CHUNKS = [[(3, 20)], [(2, 17), (3, 1)], [(2, 1), (3, 20), (0, 1)], [(1, 5), (2, 15), (3, 9)]]
"""Steps of (request, new tokens): prefills with decoding beside them, after a prefix and from the start."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "model"
    write_checkpoint(path, export_tensors(SMALL, initial_tensors(SMALL, seed=3)), SMALL)
    return path


@pytest.fixture(scope="module")
def plain(checkpoint):
    return random_lora(KimiK31.from_checkpoint(checkpoint))


def by_tokens(group, context=False, prefill=TOKENS):
    return Ranks(group, group, group if context else ONE_RANK, prefill)


def mixed(model):
    """`CHUNKS` through pages and state slots."""
    requests = [Request(ids, i, slot=SLOTS[i]) for i, ids in enumerate(sequences())]
    host = PagedHost(model, requests)
    steps = [host.step([(requests[i], n) for i, n in chunks]) for chunks in CHUNKS]
    assert all(request.computed == len(request.ids) for request in requests)
    hidden = torch.cat([rows for step in steps for rows in step])
    return [hidden, model.logits(hidden)]


def rows_by_tokens(size):
    """Of `CHUNKS`, without context ranks: rows of chunks with at least 2W tokens that end beyond index_topk."""
    done, count = dict.fromkeys(range(4), 0), 0
    for request, n in (chunk for step in CHUNKS for chunk in step):
        done[request] += n
        count += n if n >= 2 * size and done[request] > SMALL.index_topk else 0
    return count


def on_ranks(plain, checkpoint, size, how, context=False, prefill=TOKENS):
    """Per rank: what `how` gives, what was sent, and what was counted."""

    def run(group):
        model = on_rank(plain, checkpoint, by_tokens(group, context, prefill))
        with torch.no_grad():
            return how(model), dict(group.sent), dict(group.events)

    return simulate(size, run)


@pytest.mark.parametrize("prefill", [HEADS, TOKENS])
@pytest.mark.parametrize("context", [False, True], ids=["TP", "TP and DCP"])
@pytest.mark.parametrize("size", [2, 4])
def test_steps_of_prefill_and_decode_have_the_bits_of_one_rank(plain, checkpoint, size, context, prefill):
    with torch.no_grad():
        wanted = mixed(plain)
    ranks = on_ranks(plain, checkpoint, size, mixed, context, prefill)
    assert all(same(got, wanted) for got, _, _ in ranks)
    rows = [events.get("rows by tokens", 0) for _, _, events in ranks]
    total = sum(n for step in CHUNKS for _, n in step)
    if prefill == HEADS:
        assert not any(rows)
    elif context:  # short chunks far into a request send less as they are
        assert 0 < sum(rows) < total * MLA_LAYERS
        assert all(sent["context"] > 0 and sent["maxima"] > 0 for _, sent, _ in ranks)
    else:
        assert sum(rows) == rows_by_tokens(size) * MLA_LAYERS < total * MLA_LAYERS
    if prefill == TOKENS:
        assert max(rows) - min(rows) <= 2 * len(CHUNKS) * MLA_LAYERS and min(rows) > 0
        assert all(min(sent["outputs"], sent["queries"]) > 0 for _, sent, _ in ranks)


@pytest.mark.parametrize("how", [prompts, decode])
def test_whole_prompts_and_decoding_have_the_bits_of_one_rank(plain, checkpoint, how):
    with torch.no_grad():
        wanted = how(plain)
    for got, _, events in on_ranks(plain, checkpoint, 2, how):
        assert same(got, wanted)
        assert events["rows by tokens"] > 0


@pytest.mark.parametrize("context", [False, True], ids=["TP", "TP and DCP"])
@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(f, id=str(f), marks=[] if f == CacheFormat("nvfp4", "mxfp4") else pytest.mark.soak)
        for f in CACHE_FORMATS
    ],
)
def test_every_format_has_the_bits_of_one_rank(checkpoint, formats, context):
    plain = random_lora(KimiK31.from_checkpoint(checkpoint, formats))
    with torch.no_grad():
        wanted = mixed(plain)
    for got, _, events in on_ranks(plain, checkpoint, 2, mixed, context):
        assert same(got, wanted)
        assert events["rows by tokens"] > 0


def test_nan_is_flagged_where_one_rank_flags_it(plain, checkpoint):
    token = int(sequences()[3][11])

    def flags(model):
        model.embed_tokens[token] = float("nan")
        return prompts(model)[2]

    with torch.no_grad():
        wanted = flags(random_lora(KimiK31.from_checkpoint(checkpoint)))
    assert wanted.any() and not wanted.all()
    for context in (False, True):
        assert all(torch.equal(got, wanted) for got, _, _ in on_ranks(plain, checkpoint, 2, flags, context))


def test_a_rank_has_all_of_kv_b_and_the_digests_of_one_rank(plain, checkpoint):
    by_name = digests(plain.tensor_slices())

    def run(group):
        model = on_rank(plain, checkpoint, by_tokens(group))
        adapter = model.adapter_buffers(1)
        base = RankBuffers(model.base_buffers(), model.tensor_slices(), model.ranks)
        found = base.digest(), RankBuffers(adapter, model.lora_slices(adapter), model.ranks).digest()
        held = {item.name: item.read() for item in model.tensor_slices() if "kv_b" in item.name}
        held |= {item.name: item.read() for item in model.lora_slices(1) if "kv_b" in item.name}
        names = ranks_digests(model.tensor_slices(), model.ranks)
        if group.rank == 1:
            flip_bit(model.tensor_slices(), KV_B, element=5, bit=3)
        wrong = ranks_digests(model.tensor_slices(), model.ranks)
        with torch.no_grad():
            return found, held, names, wrong, base.digest(), mixed(model)

    whole = {item.name: item.read() for item in [*plain.tensor_slices(), *plain.lora_slices(1)]}
    wanted = combined_digest(plain.base_buffers()), combined_digest(plain.adapter_buffers(1))
    with torch.no_grad():
        forward = mixed(plain)
    for found, held, names, wrong, wrong_digest, flipped in simulate(2, run):
        assert len(held) == 3 * MLA_LAYERS and all(torch.equal(part, whole[name]) for name, part in held.items())
        assert found == wanted and names == by_name
        assert [name for name in by_name if wrong[name] != by_name[name]] == [KV_B] and wrong_digest != wanted[0]
        assert not same(flipped, forward)


def test_which_requests_go_by_tokens():
    """topk of SMALL is 8. Requests: new tokens, positions with them."""
    sizes = [(1, 50), (3, 50), (4, 50), (8, 8), (9, 9), (200, 200)]
    cu = torch.tensor([0, *(n for n, _ in sizes)]).cumsum(0).int()
    positions = torch.cat([torch.arange(length - n, length) for n, length in sizes]).int()

    class Size:
        def __init__(self, size):
            self.size = size

    def chosen(tensor, context):
        ranks = Ranks(Size(tensor), Size(tensor), Size(context), TOKENS)
        return requests_by_tokens(SMALL, CacheFormat(), ranks, cu, positions)

    assert chosen(2, 1) == [2, 4, 5]  # at least 4 new tokens, and something to rank
    assert chosen(4, 1) == [4, 5]
    assert chosen(2, 2) == [3, 4, 5]  # by bytes: 4 new tokens do not pay for 50 positions
