"""Scores, gradients and updates of `MegatronHost`; run by `test_in_trainer_process.py`."""

import dataclasses

import peft
import pytest
import torch

from tests.megatron.hosts import (
    ALPHA,
    BATCH,
    CONFIG,
    Q_A,
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
    weights,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.ops.head import log_probs
from zmrl.model.checkpoint import export_tensors, load_reference, write_checkpoint
from zmrl.model.context import scratch_context
from zmrl.model.initialise import initial_tensors
from zmrl.trainer.megatron import scoring
from zmrl.trainer.megatron.host import MegatronHost
from zmrl.trainer.megatron.optimizer import OptimizerSettings


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


def test_logits_in_parts_give_the_bits_of_all_logits_at_once(base, monkeypatch):
    """Parts of three rows: scores, gradients and the updated adapter."""
    results, counts = [], []
    for rows in (1000, 3):
        monkeypatch.setattr(scoring, "LOGITS_BYTES", rows * 4 * CONFIG.vocab_size)
        host = make_host(base)
        counts.append(count_rows(host.model, monkeypatch))
        _, scored = host.forward_backward(BATCH, STARTS, 0.7, ratio_loss(None), 11)
        results.append((host.optimizer_step(), scored, [bits(m.detach()) for m in host.module.masters.values()]))
    assert results[0][0] == results[1][0]
    assert same_scores(results[0][1], results[1][1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][2], results[1][2], strict=True))
    at_once, parts = counts
    assert max(parts) == 3, "three rows at a time"
    assert sum(parts) == sum(2 * n if n > 3 else n for n in at_once), "each row once forward and once backward"


def count_rows(model, monkeypatch):
    """A list that gets the number of rows of every call of `model.logits`."""
    counts, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: counts.append(len(hidden)) or logits(hidden))
    return counts


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
    before = clipped.optimizer.total.clone()
    assert clipped.optimizer_step() == norm
    assert torch.equal(clipped.optimizer.total, before * (norm / 4 / norm))


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
