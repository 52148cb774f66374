"""verl's engine contract over a small host: verl's own loss, the layout of log-probs, what must not leak into it."""

from __future__ import annotations

import math

import pytest
import torch

from tests.trainer.engines import (
    PROMPTS,
    RESPONSES,
    SEVERAL,
    advantages,
    check,
    compared,
    make_batch,
    make_engine,
    process_group,
    same_bits,
    update,
    verl_environment,
)
from zmrl.model.cache_format import CacheFormat
from zmrl.recipe import Recipe
from zmrl.trainer.compose import compose_config


@pytest.fixture(scope="module", autouse=True)
def group():
    verl_environment()
    with process_group():
        yield


@pytest.fixture
def engine(tmp_path):
    return lambda *overrides: make_engine(tmp_path, *overrides)


def test_host_and_rollout_get_the_formats_of_the_recipe(engine):
    recipe = Recipe(model="nano", output_dir="unused")
    recipe.cache.latent_format, recipe.cache.index_format = "nvfp4", "mxfp4"
    extra = compose_config(recipe).actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config
    assert (extra.latent_format, extra.index_format, extra.prefill) == ("nvfp4", "mxfp4", "heads")
    made = engine("cache.latent_format=nvfp4", "cache.index_format=mxfp4")
    assert made.host.cache_format == CacheFormat("nvfp4", "mxfp4")
    assert engine().host.cache_format == CacheFormat("bf16", "fp8")


@pytest.mark.parametrize("interval, text", [(0, "0"), (128, "128"), (None, "None")])
def test_the_recipe_says_which_states_the_rollout_keeps(interval, text):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    recipe = Recipe(model="nano", output_dir="unused")
    recipe.cache.prefix_cache_retention_interval = interval
    given = compose_config(recipe).actor_rollout_ref.rollout.engine_kwargs.vllm.prefix_cache_retention_interval
    assert given == text
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    read = parser.parse_args(["--prefix-cache-retention-interval", given])
    assert read.prefix_cache_retention_interval == interval


def test_scores_have_verls_layout_and_dtypes(engine):
    made, data = engine(), make_batch()
    rows = check(made, data)
    host = made.host.forward(list(data["input_ids"].unbind()), PROMPTS, 0.7)
    for row, score, length in zip(rows["log_probs"], host, RESPONSES, strict=True):
        assert row.dtype == torch.float32
        assert row.shape == (length,)
        assert torch.equal(row.view(torch.int32), score.log_probs.view(torch.int32))
    handed_over = compared(made)
    assert [digest.dtype for digest in handed_over["digests"]] == [torch.int64] * len(RESPONSES)
    assert same_bits(handed_over["digests"], [score.digests for score in host])
    assert same_bits({name: handed_over[name] for name in rows}, rows)


def test_reference_policy_is_scored_without_the_adapter(engine):
    made, data = engine(), make_batch()
    with torch.no_grad():
        made.host.model.adapter += torch.randn(288, 288, generator=torch.Generator().manual_seed(3))
    with made.disable_adapter():
        reference = check(made, data)["log_probs"]
    policy = check(made, data)["log_probs"]
    assert made.host.calls == ["forward adapter=False", "forward adapter=True"]
    assert not any(torch.equal(a, b) for a, b in zip(reference, policy, strict=True))


def test_update_moves_towards_positive_advantages(engine):
    made = engine(SEVERAL)
    old = check(made, make_batch())["log_probs"]
    output = update(made, make_batch(old_log_probs=old, advantages=advantages()))
    assert made.host.steps == 1
    assert output["metrics"]["grad_norm"] > 0
    assert output["metrics"]["actor/ppo_kl"].values == [0.0] * len(RESPONSES)
    new = check(made, make_batch())["log_probs"]
    for i, (before, after) in enumerate(zip(old, new, strict=True)):
        assert bool((after > before).all()) == (i % 2 == 0)


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_gradient_does_not_depend_on_micro_batches(engine, micro):
    def gradient(size):
        made = engine()
        update(made, make_batch(micro=size, advantages=advantages()))
        return made.host.adapter.grad

    torch.testing.assert_close(gradient(micro), gradient(4), rtol=0, atol=1e-6)


# One update a step: the forward of the update is the one that is compared


def separately_scored(engine, **options):
    check(engine, make_batch(**options))
    return compared(engine)


def test_one_update_waits_for_the_verdict_and_is_scored_by_its_own_forward(engine):
    expected = separately_scored(engine())
    made = engine()
    before = made.host.identity()
    output = update(made, make_batch(advantages=advantages()))
    assert same_bits(compared(made), expected)
    assert made.host.calls == ["forward_backward 4"], "the samples were scored again"
    assert (made.host.steps, made.host.identity()) == (0, before)
    assert "grad_norm" not in output["metrics"] and output["metrics"]["actor/ppo_kl"].values == [0.0] * len(RESPONSES)
    applied = made.apply_update()
    assert applied["grad_norm"] > 0 and applied["lr"] == made.host.settings.lr
    assert made.host.steps == 1 and made.host.identity() != before
    assert made.compared_scores().names == [], "scores of the policy before the update"


@pytest.mark.parametrize("micro", [1, 3, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_one_update_has_the_bits_of_one_after_a_separate_pass(engine, micro, masked):
    masks = [torch.ones(r, dtype=torch.int64) for r in RESPONSES]
    if masked:
        masks[1][2:4] = 0
    options = {"masks": masks, "micro": micro, "advantages": advantages()}
    options["ref_log_prob"] = [torch.full((r,), -5.0) for r in RESPONSES]
    separate, folded = engine(SEVERAL, "trainer.kl_coef=0.5"), engine("trainer.kl_coef=0.5")
    scores = separately_scored(separate, masks=masks)
    expected = update(separate, make_batch(old_log_probs=scores["log_probs"], **options))
    output = update(folded, make_batch(**options))
    assert same_bits(compared(folded), scores)
    assert folded.apply_update()["grad_norm"] == expected["metrics"].pop("grad_norm") > 0
    assert output["loss"] == expected["loss"]
    for metrics in (output["metrics"], expected["metrics"]):
        metrics |= {name: metric.values for name, metric in metrics.items() if hasattr(metric, "values")}
    assert output["metrics"] == expected["metrics"]
    assert torch.equal(folded.host.adapter.view(torch.int32), separate.host.adapter.view(torch.int32))


def test_scores_are_handed_over_by_sample(engine):
    from verl.utils import tensordict_utils as tu

    expected = engine()
    check(expected, make_batch())
    expected = expected.compared_scores().split()
    made = engine()
    update(made, tu.index_select_tensor_dict(make_batch(advantages=advantages()), [3, 0, 2, 1]))
    scores = made.compared_scores()
    assert scores.names == ["second_1", "first_0", "second_0", "first_1"]
    found = scores.split()
    assert all(same_bits(found[name], expected[name]) for name in expected) and len(found) == len(expected) == 4
    assert made.host.calls == ["forward_backward 4"]


def test_an_update_that_fails_leaves_no_scores(engine):
    made = engine()
    update(made, make_batch(advantages=advantages()))
    bad = advantages()
    bad[1][0] = math.nan
    with pytest.raises(FloatingPointError):
        update(made, make_batch(advantages=bad))
    assert made.compared_scores().names == []


def test_two_samples_of_one_name_are_refused(engine):
    made, data = engine(), make_batch(advantages=advantages())
    data["session_id"][1] = 0
    with pytest.raises(ValueError, match="4 samples of a step have 3 names"):
        update(made, data)


def test_a_flip_shows_in_the_scores_of_the_update_and_not_in_those_of_the_reference(engine):
    other = engine()
    reference = check(other, make_batch())
    clean = compared(other)
    made = engine()
    made.host.flip_bit("logits", "", 0, 0)
    with made.disable_adapter():
        assert same_bits(check(made, make_batch()), reference), "a fresh adapter is zero"
    assert made.compared_scores().names == [], "nothing is compared with the reference"
    update(made, make_batch(advantages=advantages()))
    rows = compared(made)
    assert not same_bits(rows["digests"][:1], clean["digests"][:1])
    assert same_bits(rows["digests"][1:], clean["digests"][1:])


def test_gradients_that_are_not_applied_are_dropped(engine):
    made, fresh = engine(), engine()
    update(made, make_batch(advantages=[-10 * a for a in advantages()]))
    for one in (made, fresh):
        update(one, make_batch(advantages=advantages()))
        one.apply_update()
    assert torch.equal(made.host.adapter, fresh.host.adapter)
    for one in (made, engine()):
        with pytest.raises(RuntimeError, match="no gradients wait"):
            one.apply_update()
    assert made.host.steps == 1


# Several updates a step: a separate pass is compared


def test_update_that_does_not_start_from_the_checked_bits_is_refused(engine):
    from zmrl.trainer.engine import UpdateMismatchError

    made = engine(SEVERAL)
    old = check(made, make_batch())["log_probs"]
    made.host.perturb_update = 1e-6
    with pytest.raises(UpdateMismatchError, match="token 0"):
        update(made, make_batch(old_log_probs=old, advantages=advantages()))
    assert made.host.steps == 0


def test_later_updates_of_a_step_may_move_away_from_the_checked_bits(engine):
    made = engine(SEVERAL)
    assert made.host.settings.total_steps == 2 * max(made.optimizer_config.total_training_steps, 1)
    old = check(made, make_batch())["log_probs"]
    for _ in range(2):
        update(made, make_batch(old_log_probs=old, advantages=advantages()))
    assert made.host.steps == 2


# What must not leak into the loss


def test_nan_at_a_masked_position_does_not_leak(engine):
    masks = [torch.ones(r, dtype=torch.int64) for r in RESPONSES]
    masks[1][2:4] = 0
    clean = engine(SEVERAL)
    old = check(clean, make_batch())["log_probs"]
    update(clean, make_batch(masks=masks, old_log_probs=old, advantages=advantages()))
    dirty, bad_old, bad_advantages = engine(SEVERAL), [o.clone() for o in old], advantages()
    bad_old[1][2], bad_advantages[1][3] = math.nan, math.nan
    output = update(dirty, make_batch(masks=masks, old_log_probs=bad_old, advantages=bad_advantages))
    assert math.isfinite(sum(output["loss"]))
    assert torch.equal(dirty.host.adapter.grad, clean.host.adapter.grad)


@pytest.mark.parametrize("name", ["advantages", "old_log_probs", "ref_log_prob"])
def test_nan_at_an_active_position_is_an_error_that_names_it(engine, name):
    made = engine(SEVERAL)
    old = check(made, make_batch())["log_probs"]
    made.optimizer_step = lambda: 0.0
    made._updates_since_check = 1
    fields = {"old_log_probs": [o.clone() for o in old], "advantages": advantages()}
    fields["ref_log_prob"] = [o.clone() for o in old]
    fields[name][3][2] = math.nan
    with pytest.raises(FloatingPointError, match=f"{name} of sample 3 .* token 2"):
        update(made, make_batch(**fields))


def test_fully_masked_batch_has_a_finite_loss(engine):
    masks = [torch.zeros(r, dtype=torch.int64) for r in RESPONSES]
    made = engine()
    output = update(made, make_batch(masks=masks, advantages=advantages()))
    assert output["loss"] == [0.0, 0.0]
    assert not made.host.adapter.grad.any()


def test_kl_to_the_reference_enters_the_loss(engine):
    made = engine("trainer.kl_coef=0.5")
    old = check(made, make_batch())["log_probs"]
    zero = [torch.zeros(r) for r in RESPONSES]
    reference = [o + 0.3 for o in old]
    output = update(made, make_batch(advantages=zero, ref_log_prob=reference))
    assert "kl_loss" in output["metrics"]
    assert made.host.adapter.grad.abs().sum() > 0


def test_only_the_adapter_is_exported(engine):
    made = engine()
    tensors, config = made.get_per_tensor_param(base_sync_done=True)
    assert [name for name, _ in tensors] == ["table"]
    assert (config["r"], config["lora_alpha"], config["bias"]) == (32, 32, "none")
    assert "gate_proj" not in config["target_modules"]
    with pytest.raises(RuntimeError, match="base model"):
        made.get_per_tensor_param(base_sync_done=False)
