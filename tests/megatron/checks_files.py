"""Checkpoints, adapters, faults and errors of `MegatronHost`; run by `test_in_trainer_process.py`."""

import dataclasses
import shutil

import pytest
import torch

from tests.megatron.hosts import (
    ALPHA,
    BATCH,
    CONFIG,
    Q_B,
    RANK,
    SETTINGS,
    STARTS,
    bits,
    loss_function,
    make_batch,
    make_host,
    run_updates,
    same_scores,
)
from zmrl.model.names import LoraSpec
from zmrl.trainer.megatron import checkpoint
from zmrl.trainer.megatron.host import MegatronHost
from zmrl.trainer.megatron.scoring import SampleError


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(base, tmp_path):
    settings = dataclasses.replace(SETTINGS, decay="cosine")
    unbroken = make_host(base, settings)
    norms = run_updates(unbroken, 4, 2)
    first = make_host(base, settings)
    assert run_updates(first, 2, 2) == norms[:2]
    first.save_checkpoint(tmp_path / "step", {"step": 2, "data": [1, 2]})
    for host in (MegatronHost(base, RANK, ALPHA, settings, seed=99), first):  # a fresh one, and one that has moved on
        run_updates(host, 1, 11, first=50)
        assert host.load_checkpoint(tmp_path / "step") == {"step": 2, "data": [1, 2]}
        assert host.optimizer.updates == 2
        assert run_updates(host, 2, 3, first=2) == norms[2:]
        assert host.identity() == unbroken.identity()
        assert host.learning_rate() == unbroken.learning_rate()
        for key, master in unbroken.module.masters.items():
            assert torch.equal(bits(host.module.masters[key].detach()), bits(master.detach()))
            state, expected = (h.optimizer.megatron.optimizer.state[h.module.masters[key]] for h in (host, unbroken))
            assert all(torch.equal(bits(state[n]), bits(expected[n])) for n in ("step", "exp_avg", "exp_avg_sq"))


def test_a_checkpoint_of_the_start_can_be_resumed(base, tmp_path):
    host = make_host(base)
    host.save_checkpoint(tmp_path / "start", {})
    expected = run_updates(host, 2, 4)
    other = MegatronHost(base, RANK, ALPHA, SETTINGS, seed=99)
    other.load_checkpoint(tmp_path / "start")
    assert run_updates(other, 2, 4) == expected
    assert other.identity() == host.identity()


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_changes(base, host, tmp_path):
    path = tmp_path / "step"
    make_host(base, dataclasses.replace(SETTINGS, lr=5e-3)).save_checkpoint(path, {})
    before = host.identity(), host.learning_rate()
    with pytest.raises(checkpoint.TrainerCheckpointError, match=r"optimizer = .*0.005.*this run has .*0.01"):
        host.load_checkpoint(path)
    make_host(base, rank=32).save_checkpoint(path, {})
    with pytest.raises(checkpoint.TrainerCheckpointError, match="lora_rank = 32, this run has 16"):
        host.load_checkpoint(path)
    host.save_checkpoint(path, {})
    (path / "common.pt").write_bytes(b"")
    with pytest.raises(checkpoint.TrainerCheckpointError, match="cannot be read"):
        host.load_checkpoint(path)
    with pytest.raises(checkpoint.TrainerCheckpointError, match="does not exist"):
        host.load_checkpoint(tmp_path / "nothing")
    assert (host.identity(), host.learning_rate()) == before


def test_a_truncated_checkpoint_is_refused(base, tmp_path):
    host = make_host(base)
    host.save_checkpoint(tmp_path / "step", {})
    (data,) = (tmp_path / "step").glob("*.distcp")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])
    with pytest.raises(checkpoint.TrainerCheckpointError, match="is incomplete"):
        host.load_checkpoint(tmp_path / "step")


def test_saving_replaces_a_checkpoint_as_a_whole(base, tmp_path, monkeypatch):
    host = make_host(base)
    path = tmp_path / "step"
    host.save_checkpoint(path, {"number": 1})
    host.save_checkpoint(path, {"number": 2})

    def full(*_, **__):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch_checkpoint, "save", full)
        with pytest.raises(OSError, match="no space"):
            host.save_checkpoint(path, {"number": 3})
    assert [p.name for p in tmp_path.iterdir()] == ["step"]
    assert host.load_checkpoint(path) == {"number": 2}
    shutil.rmtree(path)


def test_an_exported_adapter_is_loaded_with_the_same_bits(base, host, tmp_path):
    host.save_adapter(tmp_path / "adapter")
    other = MegatronHost(base, RANK, ALPHA, None, seed=99)
    assert other.identity()["adapter_digest"] != host.identity()["adapter_digest"]
    other.load_adapter(tmp_path / "adapter")
    assert other.identity() == host.identity()
    assert other.tensor_digests(adapter=True) == host.tensor_digests(adapter=True)


def test_fast_and_named_formats_hold_the_same_adapter(host):
    tensors = host.adapter_tensors()
    assert tensors.keys() == {name for name, _, _ in LoraSpec(RANK, ALPHA).tensor_specs(CONFIG)}
    buffers = {key: buffer.clone() for key, buffer in host.adapter_buffers().items()}
    for item in host.model.lora_slices(buffers):
        assert torch.equal(bits(item.read()), bits(tensors[item.name]))


def test_initial_adapters_are_pefts_and_depend_on_the_seed_only(base):
    hosts = [MegatronHost(base, RANK, ALPHA, None, seed=seed) for seed in (1, 1, 2)]
    digests = [h.identity()["adapter_digest"] for h in hosts]
    assert digests[0] == digests[1] != digests[2]
    for name, tensor in hosts[0].adapter_tensors().items():
        if "lora_B" in name:
            assert not bool(tensor.any())
        else:
            assert 0 < float(tensor.float().abs().max()) <= tensor.shape[1] ** -0.5 * 1.01


@pytest.mark.parametrize("name", [Q_B, "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight_packed"])
def test_a_flipped_parameter_is_found_by_name(base, name):
    host = make_host(base)
    adapter = "lora" in name
    before = {a: host.tensor_digests(a) for a in (True, False)}, host.identity()
    host.flip_bit("parameter", name, element=3, bit=0)
    after = {a: host.tensor_digests(a) for a in (True, False)}, host.identity()
    assert [n for n in before[0][adapter] if before[0][adapter][n] != after[0][adapter][n]] == [name]
    assert before[0][not adapter] == after[0][not adapter]
    changed = [key for key in before[1] if before[1][key] != after[1][key]]
    assert changed == ["adapter_digest" if adapter else "model_digest"]
    host.flip_bit("parameter", name, element=3, bit=0)
    assert host.identity() == before[1]


@pytest.mark.parametrize(
    "what, tensor, element, bit",
    [
        ("cache", "layers.3.latent", 5, 7),
        ("cache", "layers.4.index", 31 * 32 + 3, 7),  # the sign of the scale of position 0's key; a page has 31 keys
        ("logits", "logits", 5, 0),
    ],
)
def test_a_flip_in_cache_or_logits_shows_in_the_next_scores_only(host, what, tensor, element, bit):
    batch, starts = make_batch(seed=3, lengths=((12, 20), (12, 20)))
    expected, identity = host.forward(batch, starts, 1.0), host.identity()
    host.flip_bit(what, tensor, element, bit)
    faulty = host.forward(batch, starts, 1.0)
    assert not same_scores(faulty[:1], expected[:1])
    assert same_scores(faulty[1:], expected[1:])
    assert host.identity() == identity
    assert same_scores(host.forward(batch, starts, 1.0), expected)


@pytest.mark.parametrize("what, tensor", [("cache", "layers.3.latent"), ("logits", "logits")])
def test_a_flip_shows_in_the_scores_of_the_update_and_not_in_those_of_the_reference(base, what, tensor):
    host = make_host(base)
    batch, starts = make_batch(seed=3, lengths=((12, 20), (12, 20)))
    expected, reference = (host.forward(batch, starts, 1.0, adapter=a) for a in (True, False))
    host.flip_bit(what, tensor, 5, 7)
    assert same_scores(host.forward(batch, starts, 1.0, adapter=False), reference)
    identity = host.identity()
    _, scored = host.forward_backward(batch, starts, 1.0, loss_function, 1)
    assert not same_scores(scored[:1], expected[:1])
    assert same_scores(scored[1:], expected[1:])
    host.zero_grad()  # the update is dropped, and has left nothing behind
    assert host.identity() == identity
    assert same_scores(host.forward_backward(batch, starts, 1.0, loss_function, 1)[1], expected)


def test_unknown_places_for_a_flip_are_refused(host):
    for arguments in (
        ("parameter", "nothing"),
        ("cache", "layers.0.latent"),
        ("cache", "layers.9.index"),
        ("weather", "x"),
    ):
        with pytest.raises(KeyError):
            host.flip_bit(*arguments, 0, 0)


def test_nan_names_the_sample(base):
    host = make_host(base)
    lengths = ((4, 4), (4, 4), (4, 4))
    batch, starts = make_batch(seed=9, lengths=lengths)
    batch[1][5] = 271  # no other sample holds this token
    host.model.embed_tokens.data[271] = torch.nan
    with pytest.raises(SampleError, match="sample 1: NaN in the forward pass at position 5"):
        host.forward(batch, starts, 1.0)
    with pytest.raises(SampleError, match="sample 1"):
        host.forward_backward(batch, starts, 1.0, loss_function, 1)
    batch[1][5] = 5
    host.forward_backward(batch, starts, 1.0, loss_function, 1)  # nothing is left of the failed mini-batch
    assert host.optimizer_step() > 0


def test_a_loss_that_is_not_finite_is_refused(base):
    host = make_host(base)
    with pytest.raises(ValueError, match="loss of samples 2 to 3 is nan"):
        host.forward_backward(
            BATCH, STARTS, 1.0, lambda logp, *_: (logp[-1].sum() * (torch.nan if len(logp[-1]) == 1 else 1), {}), 2
        )
    with pytest.raises(RuntimeError, match="no gradients"):
        host.optimizer_step()


def test_misuse_is_refused(host, base):
    batch, starts = make_batch(seed=1, lengths=((4, 4), (3, 3)))
    for bad, message in (
        (([batch[0].int()], [4]), "expected int64"),
        (([batch[0]], [0]), "a prompt is needed"),
        (([batch[0]], [9]), "starts at 9"),
        (([batch[0] + 1000], [4]), "outside the vocabulary of 288"),
        (([batch[0]], [4, 4]), "1 samples but 2 response starts"),
        (([torch.zeros(33_000, dtype=torch.int64)], [4]), "exceed the context of 32768"),
    ):
        with pytest.raises(SampleError, match=message):
            host.forward(*bad, 1.0)
    for temperature in (0.0, -1.0, 0.001, torch.nan):
        with pytest.raises(ValueError, match="temperature"):
            host.forward(batch, starts, temperature)
    with pytest.raises(ValueError, match="micro_batch_samples"):
        host.forward(batch, starts, 1.0, micro_batch_samples=0)
    with pytest.raises(RuntimeError, match="no gradients"):
        host.optimizer_step()
    scorer = MegatronHost(base, RANK, ALPHA, None, seed=1)
    with pytest.raises(RuntimeError, match="without an optimizer"):
        scorer.forward_backward(batch, starts, 1.0, loss_function, 1)
    assert host.forward([], [], 1.0) == []


def test_a_second_mini_batch_before_the_update_is_refused(base):
    host = make_host(base)
    host.forward_backward(BATCH, STARTS, 1.0, loss_function, 4)
    with pytest.raises(RuntimeError, match="were not used"):
        host.forward_backward(BATCH, STARTS, 1.0, loss_function, 4)
    host.zero_grad()
    host.forward_backward(BATCH, STARTS, 1.0, loss_function, 4)
