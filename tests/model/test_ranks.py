"""The model on several ranks gives the bits of the model on one: forward, caches, adapters, digests."""

import dataclasses

import pytest
import torch

from tests.model.paged import PagedHost, Request
from zmrl.model.cache_format import CacheFormat
from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.model.shards import RankBuffers, ranks_digests
from zmrl.model.tensors import combined_digest, digests, flip_bit
from zmrl.model.transformer import KimiK31
from zmrl.parallel.group import ONE_RANK, Group, simulate
from zmrl.parallel.layout import HEADS, TOKENS, Layout, LayoutError
from zmrl.parallel.ranks import Ranks
from zmrl.serving.plan import weight_bytes

LENGTHS = [1, 5, 33, 50]
SLOTS = [-1, 0, 1, 0]
SMALL = dataclasses.replace(PRESETS["nano"], num_experts=24, num_experts_per_token=4, index_topk=8)
LOW_RANK_GATE = dataclasses.replace(
    SMALL,
    linear_attn_config=dataclasses.replace(SMALL.linear_attn_config, use_full_rank_gate=False, num_heads=6),
    attn_res_block_size=None, index_n_heads=None, index_head_dim=None, index_topk=None,
    q_lora_rank=None, mla_use_output_gate=False, expert_format="bf16",
)  # fmt: skip
"""Without latents of queries, without an indexer, and with 6 heads, whose A_log has 8 slots."""
CONFIGS = {"small": SMALL, "Kimi-Linear": LOW_RANK_GATE}


def make_ranks(group, expert=True, context=False):
    return Ranks(group, group if expert else ONE_RANK, group if context else ONE_RANK)


def random_lora(model):
    """Slots 0 and 1 of a whole model."""
    model.create_lora(slots=2, rank=16, alpha=16)
    generator = torch.Generator().manual_seed(5)
    for slot in range(2):
        for item in model.lora_slices(slot):
            item.write(torch.randn(item.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param.replace(" ", "")) / "model"
    config = CONFIGS[request.param]
    write_checkpoint(path, export_tensors(config, initial_tensors(config, seed=3)), config)
    return path


@pytest.fixture(scope="module")
def plain(checkpoint):
    return random_lora(KimiK31.from_checkpoint(checkpoint))


def on_rank(plain, checkpoint, ranks):
    """A rank's model with the adapters of `plain`."""
    model = KimiK31.from_checkpoint(checkpoint, plain.cache_format, ranks)
    model.create_lora(slots=2, rank=16, alpha=16)
    for slot in range(2):
        own = model.own_lora(plain.adapter_buffers(slot))
        for key, buffer in model.adapter_buffers(slot).items():
            buffer.copy_(own[key])
    return model


def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]


def prompts(model):
    """Whole sequences in one step, as the trainer has them: hidden states and logits."""
    slots = torch.tensor(SLOTS, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))
    context = scratch_context(model.config, LENGTHS, slots, model.cache_format, model.ranks)
    hidden = model(torch.cat(sequences()), context)
    return [hidden, model.logits(hidden), context.flags]


def decode(model):
    """A chunk of each prompt, then three tokens at a time, through pages and state slots, as the rollout does."""
    requests = [Request(ids, i, slot=SLOTS[i]) for i, ids in enumerate(sequences())]
    host = PagedHost(model, requests)
    pieces = {r.number: [] for r in requests}
    while any(r.computed < len(r.ids) for r in requests):
        chunks = [
            (r, min(29 if r.computed == 0 else 3, len(r.ids) - r.computed)) for r in requests if r.computed < len(r.ids)
        ]
        for (r, _), rows in zip(chunks, host.step(chunks), strict=True):
            pieces[r.number].append(rows)
    hidden = torch.cat([torch.cat(pieces[r.number]) for r in requests])
    return [hidden, model.logits(hidden)]


def bits(x):
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def same(got, wanted):
    return len(got) == len(wanted) > 0 and all(torch.equal(bits(a), bits(b)) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("how", [prompts, decode])
@pytest.mark.parametrize(
    "layout", [{}, {"expert": False}, {"context": True}], ids=["TP and EP", "TP", "TP, EP and DCP"]
)
def test_the_forward_is_that_of_one_rank(plain, checkpoint, layout, how):
    with torch.no_grad():
        wanted = how(plain)

        def run(group):
            model = on_rank(plain, checkpoint, make_ranks(group, **layout))
            with torch.no_grad():
                return how(model), dict(group.sent)

        for got, sent in simulate(2, run):
            assert same(got, wanted)
            assert {"row-parallel sums", "logits"} <= sent.keys()
            assert ("expert pairs" in sent) == layout.get("expert", True)
            assert ("partial sums" in sent) == layout.get("context", False)
            assert ("candidates" in sent) == (layout.get("context", False) and plain.config.has_indexer)


@pytest.mark.parametrize("formats", [CacheFormat("fp8"), CacheFormat("nvfp4", "mxfp4")], ids=str)
def test_ranks_that_share_a_context_read_every_format(checkpoint, formats):
    plain = random_lora(KimiK31.from_checkpoint(checkpoint, formats))

    def run(group):
        model = on_rank(plain, checkpoint, make_ranks(group, context=True))
        with torch.no_grad():
            return decode(model)

    with torch.no_grad():
        wanted = decode(plain)
    assert all(same(got, wanted) for got in simulate(2, run))


def test_four_ranks_are_one_and_a_wrong_bit_on_one_of_them_shows(plain, checkpoint):
    if plain.config.linear_attn_config.num_heads % 4:
        with pytest.raises(LayoutError, match="heads do not divide evenly"):
            Layout(4, context=4).check(plain.config)
        return

    def run(group, fault):
        model = on_rank(plain, checkpoint, make_ranks(group, context=True))
        if fault and group.rank == 3:
            flip_bit(model.tensor_slices(), "language_model.model.layers.3.self_attn.kv_b_proj.weight", 5, 14)
        with torch.no_grad():
            return prompts(model)

    with torch.no_grad():
        wanted = prompts(plain)
    assert all(same(got, wanted) for got in simulate(4, lambda group: run(group, False)))
    assert not any(same(got, wanted) for got in simulate(4, lambda group: run(group, True)))


def test_input_gradients_come_out_whole(plain, checkpoint):
    """Through everything but MLA, whose latent gradient is one chain over the heads of all ranks."""
    config = plain.config
    layer = 1
    assert not config.is_full_attention(layer) and config.is_moe(layer)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, config.hidden_size, generator=generator).bfloat16()
    dy = torch.randn(50, config.hidden_size, generator=generator).bfloat16()
    slots = torch.zeros(50, dtype=torch.int32)

    def backward(model):
        context = scratch_context(config, [50], slots, ranks=model.ranks)
        leaf = x.clone().requires_grad_()
        block, cache = model.layers[layer], context.caches[layer]
        block.mlp(block.self_attn(leaf, context, cache), context).backward(dy)
        return [leaf.grad]

    wanted = backward(plain)
    for got in simulate(2, lambda group: backward(on_rank(plain, checkpoint, make_ranks(group)))):
        assert same(got, wanted)


def test_a_rank_holds_its_part(plain, checkpoint):
    def run(group):
        model = on_rank(plain, checkpoint, make_ranks(group))
        return {item.name: item for item in model.tensor_slices()}, sum(p.numel() for p in model.parameters())

    whole = {item.name: item.read() for item in plain.tensor_slices()}
    parts = simulate(2, run)
    for name, tensor in whole.items():
        first, second = (items[name] for items, _ in parts)
        if first.cut is not None:
            assert torch.equal(torch.cat([first.read(), second.read()], first.cut.dim), tensor)
        elif first.held and second.held:
            assert torch.equal(first.read(), tensor) and torch.equal(second.read(), tensor)
        else:
            assert torch.equal((first if first.held else second).read(), tensor)
    total = sum(p.numel() for p in plain.parameters())
    assert all(count < 0.75 * total for _, count in parts)


FAULTS = {
    "a part of a tensor": "language_model.model.layers.0.self_attn.q_proj.weight",
    "a copy": "language_model.model.layers.1.block_sparse_moe.gate.weight",
    "an expert": "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight",
}


def test_digests_are_those_of_one_rank_and_see_every_ranks_copy(plain, checkpoint):
    by_name = digests(plain.tensor_slices())
    names = [next(name for name in by_name if name.startswith(start)) for start in FAULTS.values()]

    def combined(model):
        base = RankBuffers(model.base_buffers(), model.tensor_slices(), model.ranks).digest()
        adapter = model.adapter_buffers(1)
        return base, RankBuffers(adapter, model.lora_slices(adapter), model.ranks).digest()

    def run(group):
        model = on_rank(plain, checkpoint, make_ranks(group))
        adapter = model.adapter_buffers(1)
        whole = dict(RankBuffers(adapter, model.lora_slices(adapter), model.ranks).whole())
        same_adapter = all(torch.equal(whole[key], buffer) for key, buffer in plain.adapter_buffers(1).items())
        found = [combined(model), ranks_digests(model.tensor_slices(), model.ranks)]
        for name in names:
            holder = 0 if "experts" in name else 1
            for _ in range(2):  # there and back
                if group.rank == holder:
                    flip_bit(model.tensor_slices(), name, element=5, bit=3)
                found += [combined(model), ranks_digests(model.tensor_slices(), model.ranks)]
        return same_adapter, found

    wanted = (combined_digest(plain.base_buffers()), combined_digest(plain.adapter_buffers(1)))
    for same_adapter, (first, named, *after) in simulate(2, run):
        assert same_adapter and first == wanted and named == by_name
        for name, (flipped, flipped_names, back, back_names) in zip(
            names, (after[i : i + 4] for i in range(0, len(after), 4)), strict=True
        ):
            assert flipped[0] != wanted[0] and flipped[1] == wanted[1]
            assert [n for n in by_name if by_name[n] != flipped_names[n]] == [name]
            assert back == wanted and back_names == by_name


def test_a_layout_that_does_not_fit_is_refused():
    def run(group):
        with torch.device("meta"):
            KimiK31(SMALL, ranks=make_ranks(group))

    with pytest.raises(LayoutError, match=r"4 MLA heads .* use 1, 2 or 4$"):
        simulate(8, run)


class _Size(Group):
    """Of a group of so many ranks; nothing can be exchanged."""

    def _all_gather(self, x, what):
        raise NotImplementedError

    _all_to_all = _all_gather


@pytest.mark.parametrize("size, prefill", [(2, HEADS), (8, HEADS), (8, TOKENS)])
def test_the_plan_of_a_deployment_counts_what_a_rank_holds(size, prefill):
    """Of the full model; A_log and odd widths are padded to whole panels."""
    config, group = PRESETS["k31-pro"], _Size(0, size)
    with torch.device("meta"):
        model = KimiK31(config, ranks=Ranks(group, group, prefill=prefill))
    held = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(config, size, prefill) == pytest.approx(held, rel=1e-4)
