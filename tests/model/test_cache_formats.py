"""The forward through every format of the cache: pages against the trainer's one pass, ties, gradients, identity."""

import dataclasses

import pytest
import torch

from tests.model.paged import BLOCK_SIZE, PagedHost, Request
from zmrl.batch_invariant.formats import FormatError
from zmrl.model import attention
from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.config import PRESETS, without_indexer
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.model.transformer import KimiK31, function_config

CONFIG = dataclasses.replace(PRESETS["nano"], num_experts=24, num_experts_per_token=4, index_topk=12)
LENGTHS = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 4 * BLOCK_SIZE + 3]
TIES = ("no ties", "keys tie", "scores are zero")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("formats") / "model"
    write_checkpoint(path, export_tensors(CONFIG, initial_tensors(CONFIG, seed=11)), CONFIG)
    return path


@pytest.fixture(scope="module")
def models(checkpoint):
    """One by format."""
    return {formats: KimiK31.from_checkpoint(checkpoint, formats) for formats in CACHE_FORMATS}


@pytest.fixture(scope="module")
def dense():
    """K3 by format."""
    config = without_indexer(CONFIG)
    found = {formats: KimiK31(config, formats) for formats in CACHE_FORMATS}
    for model in found.values():
        loader = model.loader("initial tensors")
        for name, tensor in export_tensors(config, initial_tensors(config, seed=11)):
            loader.load(name, tensor)
        loader.finish()
    return found


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, 256, (n,), generator=generator) for n in LENGTHS]


def whole(model, ids):
    """One sequence in one piece: what the trainer computes. Bits of the hidden states."""
    with torch.no_grad():
        hidden = model(ids, scratch_context(model.config, [len(ids)], cache_format=model.cache_format))
    return hidden.view(torch.int16)


def paged(model, sequences, chunk):
    """All sequences together, in chunks, through shuffled pages."""
    requests = [Request(ids, i) for i, ids in enumerate(sequences)]
    host = PagedHost(model, requests)
    rows = {r.number: [] for r in requests}
    while waiting := [r for r in requests if r.computed < len(r.ids)]:
        chunks = [(r, min(chunk, len(r.ids) - r.computed)) for r in waiting]
        for (r, _), part in zip(chunks, host.step(chunks), strict=True):
            rows[r.number].append(part)
    return [torch.cat(rows[i]).view(torch.int16) for i in range(len(sequences))]


@pytest.mark.parametrize("ties", TIES)
@pytest.mark.parametrize("formats", CACHE_FORMATS, ids=str)
def test_pages_and_one_pass_give_the_same_bits(models, sequences, formats, ties, monkeypatch):
    """Also where all index scores of a row tie, within and across pages: as equal keys, or as zeros."""
    model, chosen = models[formats], []
    select = attention.index_select

    def record(*arguments):
        chosen.append(select(*arguments))
        return chosen[-1]

    monkeypatch.setattr(attention, "index_select", record)
    for layer in model.layers:
        if hasattr(layer.self_attn, "indexer") and ties != TIES[0]:
            indexer = layer.self_attn.indexer
            changed = indexer.k_norm_weight if ties == TIES[1] else indexer.weights_proj.weight
            monkeypatch.setattr(changed, "data", torch.zeros_like(changed))
    expected = [whole(model, ids) for ids in sequences]
    last = chosen[-1][-1]
    assert (last.tolist() == list(range(CONFIG.index_topk))) == (ties != TIES[0]), "the condition did not occur"
    for chunk in (1, 7, 64):
        for found, wanted in zip(paged(model, sequences, chunk), expected, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("formats", [f for f in CACHE_FORMATS if f.index == "fp8"], ids=lambda f: f.latent)
def test_dense_attention_through_pages_and_in_one_pass_gives_the_same_bits(dense, sequences, formats):
    """K3: no indexer, no index keys, and a backward over the values that the pages give back."""
    model = dense[formats]
    assert formats.index_bytes(model.config) == 0
    for chunk in (1, 7, 64):
        for ids, found in zip(sequences, paged(model, sequences, chunk), strict=True):
            assert torch.equal(found, whole(model, ids))
    assert formats.latent == "bf16" or not torch.equal(found, whole(dense[CacheFormat("bf16")], ids))


def test_every_format_is_another_function(models, sequences):
    """A format that changed no bit would not have been used."""
    seen = {whole(model, sequences[-1]).numpy().tobytes() for model in models.values()}
    assert len(seen) == len(CACHE_FORMATS)
    configs = [function_config(model) for model in models.values()]
    assert all(a != b for i, a in enumerate(configs) for b in configs[:i])


def test_the_static_scale_is_part_of_the_function(models, sequences):
    scaled = KimiK31(dataclasses.replace(CONFIG, latent_scale=0.37), CacheFormat("fp8"))
    plain = models[CacheFormat("fp8")]
    scaled.load_state_dict(plain.state_dict())
    assert not torch.equal(whole(scaled, sequences[-1]), whole(plain, sequences[-1]))
    assert function_config(scaled) != function_config(plain)


@pytest.mark.parametrize("formats", [CacheFormat("bf16"), CacheFormat("fp8"), CacheFormat("nvfp4")], ids=str)
def test_gradients_pass_straight_through_where_nothing_is_clipped(checkpoint, sequences, formats, monkeypatch):
    """The backward sees the values that the pages give back; the adapter before the cache gets gradients."""
    model = KimiK31.from_checkpoint(checkpoint, formats)
    model.create_lora(1, 16, 16)
    generator = torch.Generator().manual_seed(0)
    for buffer in model.lora_buffers().values():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    layer = next(layer for layer in model.layers if hasattr(layer.self_attn, "indexer")).self_attn
    lora = layer.in_proj.lora
    lora.grad_a, lora.grad_b = torch.zeros(lora.a.shape[1:]), torch.zeros(lora.b.shape[1:])
    stored = []
    store = attention.latent_store
    monkeypatch.setattr(attention, "latent_store", lambda kv, *rest: (stored.append(kv), store(kv, *rest))[1])
    read = []
    attend = attention.mla_attention
    monkeypatch.setattr(attention, "mla_attention", lambda q, kv, *rest: (read.append(kv), attend(q, kv, *rest))[1])
    ids = sequences[-1]
    slots = torch.zeros(len(ids), dtype=torch.int32)
    hidden = model(ids, scratch_context(CONFIG, [len(ids)], slots, formats))
    hidden.float().square().sum().backward()
    assert lora.grad_a.abs().sum() > 0
    assert (read[0] is stored[0]) == (formats.latent == "bf16")
    assert torch.equal(read[0], attention.latent_values(stored[0], CONFIG.kv_lora_rank, layer.latents))


def test_a_format_that_the_model_does_not_allow_is_refused():
    config = dataclasses.replace(PRESETS["nano"], kv_lora_rank=48, index_head_dim=24)
    with pytest.raises(FormatError, match="kv_lora_rank 48 is no multiple of 64"):
        KimiK31(config, CacheFormat("nvfp4"))
    with pytest.raises(FormatError, match="index_head_dim 24 is no multiple of 32"):
        KimiK31(config, CacheFormat("fp8", "mxfp4"))
