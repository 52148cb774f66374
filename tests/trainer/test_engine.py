"""verl's engine contract over a small host: verl's own loss, the layout of log-probs, what must not leak into it."""

from __future__ import annotations

import functools
import math
import os

import pytest
import torch

from zmrl.model.cache_format import CacheFormat
from zmrl.recipe import Recipe, load_recipe
from zmrl.trainer.compose import compose_config

PROMPTS = [3, 1, 5, 2]
RESPONSES = [4, 6, 1, 3]


@pytest.fixture(scope="module")
def group():
    import torch.distributed as dist

    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "zmrl.trainer.verl_plugin"}
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def actor(group, tmp_path):
    """verl's actor configuration, composed from a recipe."""
    from verl.utils.config import omega_conf_to_dataclass

    def build(*overrides: str):
        file = tmp_path / "recipe.yaml"
        file.write_text("model: nano\noutput_dir: out\n")
        options = ["rollout.prompts_per_step=2", "rollout.n=2", "trainer.lr=0.5", *overrides]
        return omega_conf_to_dataclass(compose_config(load_recipe(file, options)).actor_rollout_ref.actor)

    return build


@pytest.fixture
def engine(actor):
    from types import SimpleNamespace

    from verl.workers.engine.base import EngineRegistry

    import zmrl.trainer.engine  # noqa: F401 (registers)

    def build(*overrides: str):
        config = actor(*overrides)
        config.zmrl.__dict__["host"] = "tests.trainer.stub_host:StubHost"
        model = SimpleNamespace(local_path="nano", lora_rank=32, lora_alpha=32)
        made = EngineRegistry.new(
            "language_model", "zmrl", model, config.engine, config.optim, checkpoint_config=config.checkpoint
        )
        made.initialize()
        made.actor_config = config
        return made

    return build


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_batch(responses=RESPONSES, masks=None, micro=2, **fields):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 288, (p + r,), generator=generator) for p, r in zip(PROMPTS, responses, strict=True)]
    masks = masks or [torch.ones(r, dtype=torch.int64) for r in responses]
    columns = {
        "input_ids": jagged(ids),
        "prompts": jagged(i[:p] for i, p in zip(ids, PROMPTS, strict=True)),
        "responses": jagged(i[p:] for i, p in zip(ids, PROMPTS, strict=True)),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
    }
    columns |= {name: jagged(rows) for name, rows in fields.items()}
    data = TensorDict(columns, batch_size=len(ids))
    tu.assign_non_tensor(
        data, temperature=0.7, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False, global_batch_size=len(ids)
    )
    return data


def check(engine, data):
    """The old-log-prob pass; returns response rows of log-probs and digests, as verl's trainer slices them."""
    from verl.workers.utils.padding import response_from_nested

    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    mask = data["response_mask"]
    names = ("log_probs", "row_digests", "entropy")
    return {name: list(response_from_nested(output[name], mask).unbind()) for name in names}


def update(engine, data):
    from verl.workers.utils.losses import ppo_loss

    with engine.train_mode():
        return engine.train_batch(data, functools.partial(ppo_loss, config=engine.actor_config))


def advantages(responses=RESPONSES):
    return [torch.full((r,), (-1.0) ** i) for i, r in enumerate(responses)]


def test_host_and_rollout_get_the_formats_of_the_recipe(engine):
    recipe = Recipe(model="nano", output_dir="unused")
    recipe.cache.latent_format, recipe.cache.index_format = "nvfp4", "mxfp4"
    extra = compose_config(recipe).actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config
    assert (extra.latent_format, extra.index_format) == ("nvfp4", "mxfp4")
    made = engine("cache.latent_format=nvfp4", "cache.index_format=mxfp4")
    assert made.host.cache_format == CacheFormat("nvfp4", "mxfp4")
    assert engine().host.cache_format == CacheFormat("bf16", "fp8")


def test_scores_have_verls_layout_and_dtypes(engine):
    made, data = engine(), make_batch()
    rows = check(made, data)
    host = made.host.forward(list(data["input_ids"].unbind()), PROMPTS, 0.7)
    for row, digest, score, length in zip(rows["log_probs"], rows["row_digests"], host, RESPONSES, strict=True):
        assert row.dtype == torch.float32
        assert digest.dtype == torch.int64
        assert row.shape == (length,)
        assert torch.equal(row.view(torch.int32), score.log_probs.view(torch.int32))
        assert torch.equal(digest, score.digests)


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
    made = engine()
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
        old = check(made, make_batch())["log_probs"]
        update(made, make_batch(micro=size, old_log_probs=old, advantages=advantages()))
        return made.host.adapter.grad

    torch.testing.assert_close(gradient(micro), gradient(4), rtol=0, atol=1e-6)


def test_update_that_does_not_start_from_the_checked_bits_is_refused(engine):
    from zmrl.trainer.engine import UpdateMismatchError

    made = engine()
    old = check(made, make_batch())["log_probs"]
    made.host.perturb_update = 1e-6
    with pytest.raises(UpdateMismatchError, match="token 0"):
        update(made, make_batch(old_log_probs=old, advantages=advantages()))
    assert made.host.steps == 0


def test_later_updates_of_a_step_may_move_away_from_the_checked_bits(engine):
    made = engine("trainer.epochs=2")
    assert made.host.settings.total_steps == 2 * max(made.optimizer_config.total_training_steps, 1)
    old = check(made, make_batch())["log_probs"]
    for _ in range(2):
        update(made, make_batch(old_log_probs=old, advantages=advantages()))
    assert made.host.steps == 2


def test_nan_at_a_masked_position_does_not_leak(engine):
    masks = [torch.ones(r, dtype=torch.int64) for r in RESPONSES]
    masks[1][2:4] = 0
    clean = engine()
    old = check(clean, make_batch())["log_probs"]
    update(clean, make_batch(masks=masks, old_log_probs=old, advantages=advantages()))
    dirty, bad_old, bad_advantages = engine(), [o.clone() for o in old], advantages()
    bad_old[1][2], bad_advantages[1][3] = math.nan, math.nan
    output = update(dirty, make_batch(masks=masks, old_log_probs=bad_old, advantages=bad_advantages))
    assert math.isfinite(sum(output["loss"]))
    assert torch.equal(dirty.host.adapter.grad, clean.host.adapter.grad)


@pytest.mark.parametrize("name", ["advantages", "old_log_probs", "ref_log_prob"])
def test_nan_at_an_active_position_is_an_error_that_names_it(engine, name):
    made = engine("trainer.epochs=2")
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
    old = check(made, make_batch())["log_probs"]
    output = update(made, make_batch(masks=masks, old_log_probs=old, advantages=advantages()))
    assert output["loss"] == [0.0, 0.0]
    assert not made.host.adapter.grad.any()


def test_kl_to_the_reference_enters_the_loss(engine):
    made = engine("trainer.kl_coef=0.5")
    old = check(made, make_batch())["log_probs"]
    zero = [torch.zeros(r) for r in RESPONSES]
    reference = [o + 0.3 for o in old]
    output = update(made, make_batch(old_log_probs=old, advantages=zero, ref_log_prob=reference))
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
