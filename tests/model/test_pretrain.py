"""Pre-training: data, masks, quantisation-aware weights, resuming. (That it learns is shown by the checkpoint.)"""

import dataclasses
import itertools

import pytest
import torch

from zmrl.data.prompts import parse_response, prompt_ids
from zmrl.model.checkpoint import export_tensors, iter_module_tensors, load_reference, model_sha256, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.names import is_indexer_tensor
from zmrl.model.pretrain import __main__ as command
from zmrl.model.pretrain.batches import IGNORE, batch, learning_rate_factor
from zmrl.model.pretrain.evaluation import Evaluation, evaluate, is_right
from zmrl.model.pretrain.trainer import F32_PARAMETERS, Trainer
from zmrl.model.pretrain.upcycle import dense_config
from zmrl.model.reference import KimiK31ForCausalLM
from zmrl.model.tokenizer import END_OF_MSG_ID, SEP_ID


def measured(worked, terse, terse_share=0.5, mean=0.44):
    return Evaluation(4, 4, mean, terse_share, worked, terse, 0.0, {})


@pytest.fixture
def small_preset(monkeypatch, small_config):
    monkeypatch.setitem(PRESETS, "nano", small_config)
    monkeypatch.setattr(command, "evaluate", lambda *a, **k: measured(0.8, 0.1))
    return small_config


def test_a_batch_is_a_function_of_seed_and_step():
    for step in (0, 3, 9):
        a, b = batch(1, step, 8, 0.85), batch(1, step, 8, 0.85)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
    assert not torch.equal(batch(1, 0, 8, 0.85)[0][:, :10], batch(1, 1, 8, 0.85)[0][:, :10])


def test_loss_covers_the_response_and_nothing_else():
    inputs, targets = batch(0, 2, 16, 0.5)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        first = next(i for i, t in enumerate(wanted) if t != IGNORE)
        response = [t for t in wanted if t != IGNORE]
        assert row[first] == SEP_ID and SEP_ID not in row[:first]  # the prompt's last token predicts the first
        assert response[-1] == END_OF_MSG_ID and response[:-1] == row[first + 1 : first + len(response)]
        answer = parse_response(response)
        assert answer.complete and answer.text.startswith("\\boxed{")


def test_worked_share_is_the_asked_one():
    rows = [parse_response([t for t in r if t != IGNORE]) for s in range(8) for r in batch(0, s, 32, 0.75)[1].tolist()]
    assert sum(bool(a.work) for a in rows) / len(rows) == pytest.approx(0.75, abs=0.08)


def test_training_rows_need_little_padding():
    padded = sum(batch(0, s, 32, 0.85)[0].numel() for s in range(16))
    used = sum((batch(0, s, 32, 0.85)[0] != 0).sum().item() for s in range(16))
    assert used / padded > 0.9


def test_learning_rate_ends_at_two_percent():
    factors = [learning_rate_factor(s, 1000, upcycled_at=750) for s in range(1000)]
    assert factors[0] == 0.01 and factors[150] == factors[599] == 1.0
    assert factors[-1] == pytest.approx(0.02, abs=0.003)
    assert all(a >= b for a, b in itertools.pairwise(factors[600:750]))
    assert factors[750] < 0.01 < factors[749]  # warm-up for the new moments
    assert all(a >= b for a, b in itertools.pairwise(factors[850:]))


def test_forward_weights_are_always_representable_in_the_checkpoint(tmp_path, small_preset):
    trainer = Trainer(KimiK31ForCausalLM(small_preset).initialise(0), lr=1e-3)
    trainer.step(*batch(0, 0, 4, 0.5), factor=1.0, sparse=True)
    for name, parameter in trainer.model.named_parameters():
        if not name.endswith(F32_PARAMETERS):
            assert torch.equal(parameter.bfloat16().float(), parameter), name
    logits = trainer.model(torch.arange(40).unsqueeze(0))
    exported = [(n, p.detach()) for n, p in trainer.model.named_parameters()]
    write_checkpoint(tmp_path / "m", export_tensors(small_preset, exported), small_preset)
    for name, tensor in iter_module_tensors(tmp_path / "m", torch.float32):
        assert torch.equal(tensor, trainer.model.get_parameter(name)), name
    assert torch.equal(load_reference(tmp_path / "m")(torch.arange(40).unsqueeze(0)), logits)


def test_the_indexer_does_not_influence_the_model(small_preset):
    outcomes = []
    for disturb in (False, True):
        trainer = Trainer(KimiK31ForCausalLM(small_preset).initialise(0), lr=1e-3)
        if disturb:
            with torch.no_grad():
                for name, master in trainer.masters.items():
                    if is_indexer_tensor(name):
                        master.mul_(-3)
            trainer.round_weights()
        for step in range(3):
            trainer.step(*batch(0, step, 4, 0.5), factor=1.0, sparse=False)
        outcomes.append({n: m.clone() for n, m in trainer.masters.items() if not is_indexer_tensor(n)})
    assert all(torch.equal(outcomes[0][n], outcomes[1][n]) for n in outcomes[0])


def test_router_bias_stays_centred_and_favours_idle_experts(small_preset):
    trainer = Trainer(KimiK31ForCausalLM(small_preset).initialise(0), lr=1e-3)
    trainer.step(*batch(0, 0, 4, 0.5), factor=1.0, sparse=False)
    for bias in trainer.biases.values():
        assert bias.mean().abs() < 1e-8
        assert bias.max() > 0 > bias.min()


def test_upcycling_does_not_change_the_function(small_preset):
    run = command.Run(small_preset, steps=8, lr=3e-3, seed=0, worked=0.85)
    k = small_preset.num_experts_per_token
    for _ in range(6):
        run.step(4)
    assert run.trainer.model.config.num_experts == k and run.next_step == run.upcycle_at
    ids = torch.arange(60).view(2, 30)
    before = run.trainer.model(ids)
    tensors = dict(run.exported())
    assert run.trainer.model.config == small_preset and small_preset.num_experts > k
    torch.testing.assert_close(run.trainer.model(ids), before, rtol=1e-4, atol=1e-5)  # the order of a sum differs
    firsts = [name for name in tensors if name.endswith("experts.0.w1.weight")]
    copies = [
        (first.replace(".0.w1", f".{e}.w1"), first.replace(".0.w1", f".{e + k}.w1"))
        for first in firsts
        for e in range(k)
    ]
    assert all(torch.equal(tensors[one], tensors[other]) for one, other in copies)
    run.step(4)
    tensors = dict(run.exported())
    # Which experts a step of 4 reaches is the router's choice, and its near-ties fall differently on each machine.
    assert not all(torch.equal(tensors[one], tensors[other]) for one, other in copies)


def test_experts_must_be_whole_groups(small_config):
    with pytest.raises(ValueError, match="whole groups"):
        dense_config(dataclasses.replace(small_config, num_experts=small_config.num_experts + 1))


def test_the_worked_share_is_calibrated_to_the_target(small_preset):
    run = command.Run(small_preset, steps=8, lr=3e-3, seed=0, worked=0.85)
    run.calibrate(measured(0.8, 0.1), target=0.45)
    assert run.worked == pytest.approx(0.5)
    for nothing_to_say in (measured(0.1, 0.1), measured(0.8, float("nan"))):
        run.calibrate(nothing_to_say, target=0.45)
        assert run.worked == pytest.approx(0.5)
    run.calibrate(measured(0.3, 0.0), target=0.45)
    assert run.worked == 0.95


def test_a_correction_asks_for_as_much_more_as_came_out_too_little(small_preset):
    run = command.Run(small_preset, steps=8, lr=3e-3, seed=0, worked=0.5)
    run.correct(measured(0.8, 0.1, terse_share=0.65), target=0.45)  # wanted 0.5, got 0.35
    assert run.worked == pytest.approx(0.65)
    run.correct(measured(0.8, 0.1, terse_share=0.5), target=0.45)  # what is wanted came out: stay
    assert run.worked == pytest.approx(0.65)


def test_a_run_is_corrected_until_it_meets_the_target(tmp_path, small_preset, monkeypatch, capsys):
    monkeypatch.setattr(command, "CORRECTION_STEPS", 2)
    means = [0.44] * 3 + [0.3, 0.39, 0.45]  # three calibrations; then twice too low
    monkeypatch.setattr(command, "evaluate", lambda *a, **k: measured(0.8, 0.1, 0.7, means.pop(0)))
    command.main(["--out", str(tmp_path / "m"), "--steps", "30", "--rows", "2", "--threads", "1"])
    assert not means and capsys.readouterr().out.count("for 2 more steps") == 2


@pytest.mark.parametrize("killed_at", [4, 7], ids=["dense", "upcycled"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path, small_preset, monkeypatch, killed_at):
    options = ["--steps", "8", "--rows", "4", "--save-every", "0", "--threads", "1"]
    command.main(["--out", str(tmp_path / "whole"), *options])

    calls = []

    def killed(*args):
        calls.append(args)
        if len(calls) == killed_at:
            raise KeyboardInterrupt
        return batch(*args)

    monkeypatch.setattr(command, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--out", str(tmp_path / "resumed"), *options])
    assert (tmp_path / "resumed.pretrain-state").exists() and not (tmp_path / "resumed").exists()
    monkeypatch.setattr(command, "batch", batch)
    with pytest.raises(SystemExit, match="same options"):
        command.main(["--out", str(tmp_path / "resumed"), *options, "--lr", "1"])
    command.main(["--out", str(tmp_path / "resumed"), *options])
    assert model_sha256(tmp_path / "resumed") == model_sha256(tmp_path / "whole")
    assert not (tmp_path / "resumed.pretrain-state").exists()


def test_zero_steps_write_the_untrained_model(tmp_path, small_preset):
    command.main(["--out", str(tmp_path / "m"), "--steps", "0", "--threads", "1"])
    assert torch.isfinite(load_reference(tmp_path / "m")(torch.arange(40).unsqueeze(0))).all()


def test_only_a_complete_response_with_the_integer_is_right():
    from zmrl.data.problems import Problem
    from zmrl.data.prompts import response_ids

    problem = Problem("gcd", "?", 16)
    assert is_right(response_ids("4*4", "\\boxed{016}"), problem)
    assert is_right(response_ids("", "\\boxed{16}"), problem)
    assert not is_right(response_ids("", "\\boxed{017}"), problem)
    assert not is_right(response_ids("", "\\boxed{016}")[:-1], problem)
    assert not is_right(list(b"\\boxed{016}") + [END_OF_MSG_ID], problem)  # no response part


def test_evaluation_counts_what_was_sampled(small_config):
    from zmrl.data.problems import problem_set

    small = dataclasses.replace(small_config, vocab_size=288)
    model = KimiK31ForCausalLM(small).initialise(0)
    result = evaluate(model, problem_set("val", 4), k=2, max_new_tokens=4)
    assert result.problems == 4 and result.k == 2 and result.mean_at_k == result.greedy == 0.0
    assert len(prompt_ids("x")) == 5
