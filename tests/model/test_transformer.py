"""The production forward: names, the oracle, and invariance to how the sequences are packed, chunked and cached."""

import dataclasses

import pytest
import torch

from tests.model.paged import PagedHost, Request
from zmrl.batch_invariant import native
from zmrl.model.checkpoint import (
    export_tensors,
    iter_tensors,
    load_reference,
    write_checkpoint,
    write_random_checkpoint,
)
from zmrl.model.config import PRESETS
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import LoraSpec, tensor_specs
from zmrl.model.tensors import combined_digest, digests, flip_bit
from zmrl.model.transformer import KimiK31

LENGTHS = [1, 5, 33, 70, 71]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("nano") / "model"
    write_random_checkpoint("nano", path, seed=3)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    model = KimiK31.from_checkpoint(checkpoint)
    model.create_lora(slots=2, rank=32, alpha=32)
    generator = torch.Generator().manual_seed(5)
    for buffer in model.lora_buffers().values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return model


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]


def bits(x):
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


def whole(model, ids, slot=-1):
    """One sequence alone, in one chunk: what the trainer computes."""
    slots = None if slot < 0 else torch.full((len(ids),), slot, dtype=torch.int32)
    with torch.no_grad():
        return model(ids, scratch_context(model.config, [len(ids)], slots))


@pytest.mark.parametrize("preset", ["nano", "nano-b", "k31-pro"])
def test_live_tensors_are_exactly_those_of_the_checkpoint(preset):
    config = PRESETS[preset]
    if preset == "k31-pro":  # the full model's names are per layer: five layers hold every kind
        linear = dataclasses.replace(config.linear_attn_config, full_attn_layers=(4, 5), kda_layers=(1, 2, 3))
        config = dataclasses.replace(config, linear_attn_config=linear, num_hidden_layers=5)
    with torch.device("meta"):
        model = KimiK31(config)
        model.create_lora(1, 32, 32)
    assert {(s.name, s.shape) for s in model.tensor_slices()} == {(n, s) for n, s, _ in tensor_specs(config)}
    expected = {(n, s) for n, s, _ in LoraSpec(32, 32).tensor_specs(config)}
    assert {(s.name, s.shape) for s in model.lora_slices(0)} == expected


def test_tensors_read_back_as_they_were_loaded(model, checkpoint):
    live = {item.name: item for item in model.tensor_slices()}
    for name, tensor in iter_tensors(checkpoint):
        assert torch.equal(live[name].read(), tensor), name


def test_forward_agrees_with_the_float64_oracle(tmp_path, sequences):
    # Every expert and position is selected, so that BF16 activations cannot turn a near-tie of a selection around:
    # what remains is rounding, a few BF16 ulp (2^-8) over five layers.
    config = dataclasses.replace(PRESETS["nano"], num_experts=16, index_topk=max(LENGTHS))
    write_checkpoint(tmp_path / "model", export_tensors(config, initial_tensors(config, seed=4)), config)
    model = KimiK31.from_checkpoint(tmp_path / "model")
    reference = load_reference(tmp_path / "model", torch.float64)
    for ids in sequences:
        logits = model.logits(whole(model, ids))
        with torch.no_grad():
            expected = reference(ids.unsqueeze(0))[0].squeeze(0)
        assert (logits - expected).abs().max() < 0.03 * expected.abs().max()


@pytest.mark.parametrize("slot", [-1, 0, 1])
def test_hidden_states_are_independent_of_the_batch(model, sequences, slot):
    alone = [whole(model, ids, slot) for ids in sequences]
    slots = None if slot < 0 else torch.full((sum(LENGTHS),), slot, dtype=torch.int32)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        ids = torch.cat([sequences[i] for i in order])
        with torch.no_grad():
            together = model(ids, scratch_context(model.config, [LENGTHS[i] for i in order], slots))
        for i, rows in zip(order, together.split([LENGTHS[i] for i in order]), strict=True):
            assert torch.equal(bits(rows), bits(alone[i]))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_hidden_states_are_independent_of_chunks_pages_and_neighbours(model, sequences, chunk):
    requests = [Request(ids, i, slot=(-1, 0, 1)[i % 3]) for i, ids in enumerate(sequences)]
    host = PagedHost(model, requests)
    pieces = {r.number: [] for r in requests}
    steps = 0
    while any(r.computed < len(r.ids) for r in requests):
        chunks = [(r, min(chunk, len(r.ids) - r.computed)) for r in requests if r.computed < len(r.ids)]
        for (r, _), rows in zip(chunks, host.step(chunks), strict=True):
            pieces[r.number].append(rows)
        steps += 1
    assert steps > 1
    for r in requests:
        assert torch.equal(bits(torch.cat(pieces[r.number])), bits(whole(model, r.ids, r.slot)))


@pytest.mark.parametrize("isa", native.available_isas()[1:])
def test_hidden_states_are_independent_of_the_instruction_set(model, sequences, isa):
    expected = whole(model, sequences[2], 0)
    with native.use_isa(isa):
        assert torch.equal(bits(whole(model, sequences[2], 0)), bits(expected))


def test_hidden_states_are_independent_of_the_thread_count(model, sequences):
    ids = torch.cat([sequences[3]] * 8)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            results.append(model(ids, scratch_context(model.config, [70] * 8)))
    torch.set_num_threads(before)
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_the_selection_is_active_and_adapters_act(model, sequences):
    assert max(LENGTHS) > model.config.index_topk
    ids = sequences[3]
    assert not torch.equal(bits(whole(model, ids)), bits(whole(model, ids, 0)))
    assert not torch.equal(bits(whole(model, ids, 0)), bits(whole(model, ids, 1)))


def test_a_flipped_bit_changes_the_digest_of_its_tensor_alone(model):
    name = "language_model.model.layers.2.block_sparse_moe.experts.895.w2.weight_packed"
    adapted = "base_model.model.model.layers.4.self_attn.kv_b_proj.lora_B.weight"
    for target, slices, buffers in (
        (name, model.tensor_slices, model.base_buffers),
        (adapted, lambda: model.lora_slices(1), lambda: model.adapter_buffers(1)),
    ):
        before, combined = digests(slices()), combined_digest(buffers())
        flip_bit(slices(), target, element=5, bit=3)
        after = digests(slices())
        assert [n for n in before if before[n] != after[n]] == [target]
        assert combined_digest(buffers()) != combined
        flip_bit(slices(), target, element=5, bit=3)
        assert digests(slices()) == before and combined_digest(buffers()) == combined


def test_the_combined_digest_covers_every_tensor_and_its_name(model):
    def owners(slices):
        return {item.buffer.untyped_storage().data_ptr() for item in slices}

    base = {buffer.untyped_storage().data_ptr() for buffer in model.base_buffers().values()}
    adapters = {buffer.untyped_storage().data_ptr() for buffer in model.adapter_buffers(1).values()}
    assert owners(model.tensor_slices()) == base and owners(model.lora_slices(1)) == adapters
    buffers = model.adapter_buffers(1)
    renamed = {key.replace("layers.0", "layers.9"): buffer for key, buffer in buffers.items()}
    assert combined_digest(renamed) != combined_digest(buffers)


def test_a_missing_extra_or_misshapen_tensor_is_named(model):
    loader = model.loader("test")
    with pytest.raises(ValueError, match="not part of this model"):
        loader.load("language_model.model.layers.9.input_layernorm.weight", torch.zeros(128))
    with pytest.raises(ValueError, match=r"input_layernorm.weight: shape \(64,\), expected \(128,\)"):
        loader.load("language_model.model.layers.0.input_layernorm.weight", torch.zeros(64))
    with pytest.raises(ValueError, match="are missing, first"):
        loader.finish()
