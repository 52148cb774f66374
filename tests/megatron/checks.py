"""Checks of `MegatronHost`, run by `test_in_trainer_process.py` in a process of their own."""

import dataclasses
import shutil
from pathlib import Path

import peft
import pytest
import torch

from zmrl.batch_invariant import native
from zmrl.batch_invariant.ops.head import log_probs
from zmrl.model.checkpoint import export_tensors, load_reference, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import LoraSpec
from zmrl.trainer.megatron import checkpoint
from zmrl.trainer.megatron.host import MegatronHost
from zmrl.trainer.megatron.optimizer import OptimizerSettings
from zmrl.trainer.megatron.scoring import SampleError

RANK, ALPHA = 16, 32
CONFIG = dataclasses.replace(PRESETS["nano"], num_experts=24, num_experts_per_token=4, index_topk=8)
SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.5, warmup_steps=2, total_steps=8)
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model"
    write_checkpoint(path, export_tensors(CONFIG, initial_tensors(CONFIG, seed=5)), CONFIG)
    return path


@pytest.fixture(scope="module", autouse=True)
def restore_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def make_host(base, settings=SETTINGS, adapter_scale=0.05, rank=RANK, alpha=ALPHA):
    """A host whose adapter is not zero, so that its scores differ from the base's."""
    host = MegatronHost(base, rank, alpha, settings, seed=7)
    generator = torch.Generator().manual_seed(2)
    for item in host.module.master_slices():
        item.write(torch.randn(item.shape, generator=generator) * adapter_scale)
    host.module.refresh()
    return host


@pytest.fixture(scope="module")
def host(base):
    """For checks that change nothing."""
    return make_host(base)


def make_batch(
    seed=0, lengths=((5, 9), (3, 0), (20, 12), (1, 1), (7, 30), (9, 2), (2, 17), (15, 6), (4, 4), (6, 0), (3, 11))
):
    generator = torch.Generator().manual_seed(seed)
    batch = [torch.randint(0, 256, (prompt + response,), generator=generator) for prompt, response in lengths]
    return batch, [prompt for prompt, _ in lengths]


BATCH, STARTS = make_batch()


def weights(sample, count):
    """Advantages of a sample's tokens."""
    return torch.randn(count, generator=torch.Generator().manual_seed(100 + sample))


def loss_function(log_probs, entropy, samples):
    total = torch.zeros(())
    for logp, ent, sample in zip(log_probs, entropy, samples, strict=True):
        total = total - (weights(sample, len(logp)) * logp).sum() / 90 - 0.01 * ent.sum() / 90
    return total, {"samples": samples, "loss": float(total)}


def bits(tensor):
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def same_scores(a, b):
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(bits(getattr(x, f)), bits(getattr(y, f)))
        for x, y in pairs
        for f in ("log_probs", "digests", "entropy")
    )


# Scores


@pytest.mark.parametrize("adapter", [True, False])
def test_scores_are_those_of_the_model_called_directly(host, adapter):
    scored = host.forward(BATCH, STARTS, 0.7, adapter=adapter, micro_batch_samples=4)
    assert [len(s.log_probs) for s in scored] == [len(ids) - start for ids, start in zip(BATCH, STARTS, strict=True)]
    for ids, start, sample in zip(BATCH, STARTS, scored, strict=True):
        if start == len(ids):
            continue
        slots = torch.zeros(len(ids), dtype=torch.int32) if adapter else None
        with torch.no_grad():
            logits = host.model.logits(host.model(ids, scratch_context(CONFIG, [len(ids)], slots)))[start - 1 : -1]
            logp, entropy, digest = log_probs(logits, ids[start:], torch.full((len(ids) - start,), 0.7))
        assert torch.equal(bits(sample.log_probs), bits(logp))
        assert torch.equal(bits(sample.entropy), bits(entropy))
        assert torch.equal(sample.digests, digest)
        expected = torch.log_softmax(logits.double() / 0.7, -1).gather(1, ids[start:, None])[:, 0]
        torch.testing.assert_close(sample.log_probs.double(), expected, rtol=1e-5, atol=1e-5)


def test_scores_do_not_depend_on_packing_order_or_threads(host):
    expected = host.forward(BATCH, STARTS, 1.3, micro_batch_samples=1)
    for size, threads in ((2, 1), (3, 2), (len(BATCH), 1), (len(BATCH), 2)):
        torch.set_num_threads(threads)
        assert same_scores(host.forward(BATCH, STARTS, 1.3, micro_batch_samples=size), expected), (size, threads)
    backwards = host.forward(BATCH[::-1], STARTS[::-1], 1.3, micro_batch_samples=5)
    assert same_scores(backwards[::-1], expected)


def test_the_adapter_changes_the_scores(host):
    with_adapter, without = (host.forward(BATCH, STARTS, 1.0, adapter=a) for a in (True, False))
    assert not any(
        torch.equal(a.log_probs, b.log_probs) for a, b in zip(with_adapter, without, strict=True) if len(a.log_probs)
    )


def test_a_zero_adapter_gives_the_values_of_the_base(base):
    fresh = MegatronHost(base, RANK, ALPHA, None, seed=1)
    scores = [fresh.forward(BATCH, STARTS, 1.0, adapter=a) for a in (True, False)]
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(*scores, strict=True))


def test_the_update_scores_the_samples_as_the_forward_does(base):
    host = make_host(base)
    expected = host.forward(BATCH, STARTS, 1.0)
    metrics, scored = host.forward_backward(BATCH, STARTS, 1.0, loss_function, 2)
    assert same_scores(scored, expected)
    assert [i for m in metrics for i in m["samples"]] == list(range(len(BATCH)))


def ratio_loss(old_log_probs):
    """A loss as GRPO's, of the probability ratio to `old_log_probs` by sample; None: to the log-probs at hand."""

    def loss(log_probs, entropy, samples):
        total = torch.zeros(())
        for logp, sample in zip(log_probs, samples, strict=True):
            old = logp.detach() if old_log_probs is None else old_log_probs[sample]
            total = total - (weights(sample, len(logp)) * torch.exp(logp - old)).sum() / 90
        return total, {}

    return loss


@pytest.mark.parametrize("size", [2, 11])
def test_an_update_scored_by_its_own_forward_has_the_bits_of_one_after_a_separate_pass(base, size):
    """The whole of what a step changes; and until `optimizer_step`, when the verdict is there, nothing has changed."""
    states = []
    for separate in (True, False):
        host = make_host(base)
        before = host.identity()
        old = [s.log_probs for s in host.forward(BATCH, STARTS, 0.7)] if separate else None
        _, scored = host.forward_backward(BATCH, STARTS, 0.7, ratio_loss(old), size)
        assert host.identity() == before and host.optimizer.updates == 0
        state = host.optimizer.megatron.optimizer.state
        assert not any(bool(values["exp_avg"].any()) for values in state.values())
        norm = host.optimizer_step()
        masters = [bits(m.detach()) for m in host.module.masters.values()]
        moments = [bits(values[n]) for values in state.values() for n in ("exp_avg", "exp_avg_sq")]
        states.append((host.identity(), norm, host.learning_rate(), scored, masters + moments))
        assert host.identity() != before
    assert states[0][:3] == states[1][:3]
    assert same_scores(states[0][3], states[1][3])
    assert all(torch.equal(a, b) for a, b in zip(states[0][4], states[1][4], strict=True))


@pytest.mark.parametrize("size", [2, 11])
def test_the_engine_gives_these_bits_with_one_update_and_after_a_separate_pass(base, tmp_path, size):
    """verl's loss over the real model: `ZmrlEngine`, without verl's processes."""
    from tests.trainer import engines

    fields = {"micro": size, "advantages": engines.advantages()}
    made = {}
    for override in ("trainer.epochs=1", engines.SEVERAL):
        host = "zmrl.trainer.megatron.host:MegatronHost"
        options = (override, "trainer.lr=0.01")
        made[override] = engines.make_engine(tmp_path, *options, host=host, model=str(base), rank=RANK)
    folded, separate = made.values()
    for _ in range(2):  # the second update has an adapter that is not zero, and momentum
        scores = engines.check(separate, engines.make_batch())
        expected = engines.update(separate, engines.make_batch(old_log_probs=scores["log_probs"], **fields))
        before = folded.host.identity()
        output = engines.update(folded, engines.make_batch(**fields))
        assert engines.same_bits(engines.check(folded, engines.make_batch()), scores)
        assert folded.host.identity() == before
        assert folded.apply_update()["grad_norm"] == expected["metrics"]["grad_norm"] > 0
        assert output["loss"] == expected["loss"]
        assert folded.host.identity() == separate.host.identity() != before
    masters = (engine.host.module.masters.values() for engine in (folded, separate))
    assert all(torch.equal(bits(a.detach()), bits(b.detach())) for a, b in zip(*masters, strict=True))


# Gradients and updates


def test_gradients_agree_with_autograd_of_the_reference(tmp_path):
    """All experts and positions are selected, so rounding cannot change a selection."""
    config = dataclasses.replace(CONFIG, num_experts=4, num_experts_per_token=4, index_topk=64)
    base = tmp_path / "model"
    write_checkpoint(base, export_tensors(config, initial_tensors(config, seed=5)), config)
    host = make_host(base)
    host.forward_backward(BATCH, STARTS, 0.7, loss_function, 2)
    ours = {item.name: item.read() for item in host.module.gradient_slices(host.optimizer.gradients)}
    host.save_adapter(tmp_path / "adapter")

    model = peft.PeftModel.from_pretrained(load_reference(base), tmp_path / "adapter", is_trainable=True).double()
    parts, entropies = [], []
    for ids, start in zip(BATCH, STARTS, strict=True):
        rows = torch.log_softmax(model(ids[None])[0, start - 1 : -1] / 0.7, -1)
        parts.append(rows.gather(1, ids[start:, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    loss_function(parts, entropies, list(range(len(BATCH))))[0].backward()
    theirs = {n.replace(".default", ""): p.grad for n, p in model.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()

    errors = {n: float((ours[n] - theirs[n]).norm() / theirs[n].norm()) for n in ours}
    worst = max(errors, key=errors.get)
    assert errors[worst] < 0.15, f"{worst}: {errors[worst]:.3f}"
    assert sum(errors.values()) / len(errors) < 0.03


def run_updates(host, steps, micro_batch_samples, first=0):
    norms = []
    for step in range(first, first + steps):
        batch, starts = make_batch(seed=step)
        host.forward_backward(batch, starts, 1.0, loss_function, micro_batch_samples)
        norms.append(host.optimizer_step())
        host.zero_grad()
    return norms


def test_updates_do_not_depend_on_micro_batches_threads_or_instruction_set(base):
    results = []
    for size, threads, isa in ((1, 1, None), (2, 2, None), (11, 1, None), (2, 1, "scalar")):
        torch.set_num_threads(threads)
        with native.use_isa(isa or native.isa()):
            host = make_host(base)
            norms = run_updates(host, 3, size)
        masters = [bits(m.detach()) for m in host.module.masters.values()]
        results.append((norms, host.identity()["adapter_digest"], masters))
    start = make_host(base).identity()["adapter_digest"]
    for norms, digest, masters in results[1:]:
        assert norms == results[0][0]
        assert digest == results[0][1] != start
        assert all(torch.equal(a, b) for a, b in zip(masters, results[0][2], strict=True))


def test_live_buffers_are_the_rounded_masters_and_padding_stays_zero(base):
    host = make_host(base)
    run_updates(host, 2, 3)
    for key, live in host.adapter_buffers().items():
        assert torch.equal(bits(live), bits(host.module.masters[key].detach().bfloat16())), key
    padded = 0
    for source in (host.module.live_slices(), host.module.gradient_slices(host.optimizer.gradients)):
        for item in source:
            encoded = item.form.encode(item.read()).reshape(item.live().shape)
            assert torch.equal(bits(encoded), bits(item.live())), item.name
            padded += item.live().numel() > item.read().numel()
    assert padded, "no tensor has padded rows: the check is void"


def test_only_the_adapter_changes(base):
    host = make_host(base)
    before = host.tensor_digests(adapter=False), host.tensor_digests(adapter=True)
    run_updates(host, 1, 4)
    assert host.tensor_digests(adapter=False) == before[0]
    after = host.tensor_digests(adapter=True)
    assert before[1].keys() == after.keys() and after[Q_A] != before[1][Q_A] and after[Q_B] != before[1][Q_B]


def test_clipping_bounds_the_gradient_by_our_norm(base):
    host = make_host(base)
    norm = run_updates(host, 1, 4)[0]
    clipped = make_host(base, dataclasses.replace(SETTINGS, clip_grad=norm / 4))
    batch, starts = make_batch(seed=0)
    clipped.forward_backward(batch, starts, 1.0, loss_function, 4)
    before = clipped.optimizer.tree.total.clone()
    assert clipped.optimizer_step() == norm
    assert torch.equal(clipped.optimizer.tree.total, before * (norm / 4 / norm))


@pytest.mark.parametrize(
    "decay, expected", [("constant", [0.5, 1, 1, 1, 1, 1]), ("cosine", [0.5, 1, 0.853553, 0.5, 0.146447, 0])]
)
def test_learning_rate_schedule(base, decay, expected):
    settings = OptimizerSettings(lr=1e-3, warmup_steps=2, total_steps=6, decay=decay)
    host = make_host(base, settings)
    rates = []
    for _ in range(6):
        host.optimizer.scheduler.step(1)
        rates.append(host.learning_rate())
    assert rates == pytest.approx([1e-3 * e for e in expected], abs=1e-9)


def test_an_update_without_active_tokens_has_a_finite_loss_and_changes_nothing(base):
    """Case 16."""
    host = make_host(base, dataclasses.replace(SETTINGS, weight_decay=0.0))
    batch = [torch.arange(n) for n in (3, 5, 4)]
    digest = host.identity()["adapter_digest"]
    metrics, scored = host.forward_backward(batch, [3, 5, 4], 1.0, loss_function, 2)
    assert all(m["loss"] == 0.0 for m in metrics) and [len(s.log_probs) for s in scored] == [0, 0, 0]
    assert host.optimizer_step() == 0.0
    assert host.identity()["adapter_digest"] == digest


# Checkpoints


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


# Adapters


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


# Faults and errors


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
