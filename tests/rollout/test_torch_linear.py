"""The deliberate mismatch of a control run: near enough to be the same model, and different in bits."""

import torch

from tests.rollout.harness import RANK, PlainModel, random_adapter, text
from zmrl.model.context import scratch_context
from zmrl.rollout.torch_linear import use_torch_linear


def logits(plain: PlainModel, ids: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return plain.model.logits(plain.model(ids, scratch_context(plain.model.config, [len(ids)], slots)))


def test_torchs_products_are_near_and_not_equal(checkpoint):
    ids = torch.tensor(text(60, 3))
    slots = torch.arange(60, dtype=torch.int32) % 3 - 1  # no adapter, the first, the second
    models = [PlainModel(checkpoint) for _ in range(2)]
    for plain in models:
        plain.model.create_lora(2, RANK, float(RANK))
        buffers = plain.model.lora_buffers()
        for slot in range(2):
            for key, values in random_adapter(plain.model, seed=slot).items():
                buffers[key][slot].copy_(values)
    assert use_torch_linear(models[1].model) > 10
    ours, torchs = (logits(plain, ids, slots) for plain in models)
    changed = (ours.view(torch.int32) != torchs.view(torch.int32)).any(1)
    assert changed.float().mean() > 0.5, "the rollout is not mismatched"
    cosine = torch.nn.functional.cosine_similarity(ours, torchs, dim=1)
    assert cosine.median() > 0.99, "not the same model"


def test_the_recipe_turns_it_on():
    from zmrl.recipe import Recipe
    from zmrl.trainer.compose import compose_config

    recipe = Recipe(model="nano", output_dir="unused")
    for wanted in (False, True):
        recipe.debug.torch_linear_in_rollout = wanted
        vllm = compose_config(recipe).actor_rollout_ref.rollout.engine_kwargs.vllm
        assert vllm.additional_config.torch_linear is wanted
