"""A recipe is typed and complete; whatever is wrong with it is one line that names the key and the remedy."""

from pathlib import Path

import pytest

from zmrl.recipe import RecipeError, check_output_dir, load_recipe

MINIMAL = "model: some/model\noutput_dir: some/output\n"
RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe_file(tmp_path):
    def write(text: str = MINIMAL) -> Path:
        file = tmp_path / "recipe.yaml"
        file.write_text(text)
        return file

    return write


@pytest.mark.parametrize("name", ["aime_lora", "aime_lora_tp2", "aime_lora_mixed", "aime_lora_k31_pro"])
def test_shipped_recipes_are_valid(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert (recipe.lora.rank, recipe.lora.alpha) == (32, 32)
    assert recipe.on_mismatch == "abort"


def test_overrides_win_and_are_typed(recipe_file):
    recipe = load_recipe(
        recipe_file(MINIMAL + "rollout: {n: 4}\n"),
        ["rollout.n=16", "trainer.lr=5e-4", "data.val=[builtin,other.jsonl]", "debug.verbose=true"],
    )
    assert (recipe.rollout.n, recipe.trainer.lr, recipe.debug.verbose) == (16, 5e-4, True)
    assert recipe.data.val == ["builtin", "other.jsonl"]
    assert recipe.samples_per_step == 16 * recipe.rollout.prompts_per_step


def test_ranks_of_the_trainer_that_do_not_fit_are_refused(recipe_file):
    file = recipe_file(MINIMAL + "rollout: {n: 3, prompts_per_step: 2}\n")
    assert load_recipe(file, ["trainer.data_parallel=2", "trainer.tensor_parallel=4"]).trainer_ranks == 8
    ranks = ["trainer.tensor_parallel=2", "rollout.tensor_parallel=2", "debug.torch_linear_in_rollout=true"]
    with pytest.raises(RecipeError, match=r"torch_linear_in_rollout: .* set rollout\.tensor_parallel=2 to 1$"):
        load_recipe(file, ranks)
    for size in (1, 4, 8):
        load_recipe(file, ["trainer.data_parallel=2", "trainer.tensor_parallel=4", f"trainer.expert_parallel={size}"])
    with pytest.raises(RecipeError, match=r"trainer\.expert_parallel: 2 is not .*; set 1, 4 or 8$"):
        load_recipe(file, ["trainer.data_parallel=2", "trainer.tensor_parallel=4", "trainer.expert_parallel=2"])
    for overrides in (["trainer.data_parallel=4"], ["trainer.data_parallel=2", "trainer.mini_batches=2"]):
        with pytest.raises(RecipeError, match=r"trainer\.data_parallel: . samples of a mini-batch .* rollout\.n$"):
            load_recipe(file, overrides)


def test_one_validation_set_needs_no_brackets(recipe_file):
    assert load_recipe(recipe_file(), ["data.val=aime24.jsonl"]).data.val == ["aime24.jsonl"]


def test_fault_can_be_given_key_by_key_or_whole(recipe_file):
    one = load_recipe(recipe_file(), ["debug.fault={step: 2, side: trainer, what: logits}"]).debug.fault
    two = load_recipe(recipe_file(), ["debug.fault.step=2", "debug.fault.side=trainer", "debug.fault.what=logits"])
    assert one == two.debug.fault
    assert load_recipe(recipe_file()).debug.fault is None


def test_recipe_round_trips_through_its_dictionary(recipe_file):
    import yaml

    recipe = load_recipe(recipe_file(), ["debug.fault={step: 2, what: cache}"])
    assert load_recipe(recipe_file(yaml.safe_dump(recipe.to_dict()))) == recipe


@pytest.mark.parametrize(
    "override, words",
    [
        ("foo=1", ["unknown key foo"]),
        ("rollout.temprature=1", ["unknown key rollout.temprature"]),
        ("debug.fault.bits=1", ["unknown key debug.fault.bits"]),
        ("steps=many", ["steps", "Integer"]),
        ("steps=1.5", ["steps", "Integer"]),
        ("steps=0", ["steps"]),
        ("steps", ["'steps'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("steps =3", ["'steps =3'", "without spaces"]),
        ("data.val=", ["'data.val='", "has no value"]),
        ("trainer.betas=[0.9", ["override 'trainer.betas=[0.9'", "correct or quote"]),
        ("lora=5", ["lora: 5", "lora.rank="]),
        ("data.too_long=cut", ["data.too_long", "refuse or skip"]),
        ("rollout.temperature=0", ["rollout.temperature", "set a temperature"]),
        ("rollout.temperature=-1", ["rollout.temperature"]),
        ("rollout.temperature=0.009", ["rollout.temperature"]),
        ("rollout.temperature=.nan", ["rollout.temperature"]),
        ("validation.temperature=0", ["validation.temperature"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "changes the distribution", "trainer does not"]),
        ("rollout.top_k=20", ["rollout.top_k"]),
        ("rollout.min_p=0.1", ["rollout.min_p"]),
        ("rollout.repetition_penalty=1.05", ["rollout.repetition_penalty"]),
        ("rollout.presence_penalty=0.5", ["rollout.presence_penalty"]),
        ("rollout.frequency_penalty=0.5", ["rollout.frequency_penalty"]),
        ("rollout.n=1", ["rollout.n"]),
        ("rollout.max_tokens=0", ["rollout.max_tokens"]),
        ("rollout.max_model_len=48", ["rollout.max_model_len", "raise"]),
        ("rollout.max_num_batched_tokens=8", ["rollout.max_num_batched_tokens", "long_prefill_token_threshold"]),
        ("lora.rank=24", ["lora.rank", "multiple of 16"]),
        ("lora.rank=0", ["lora.rank"]),
        ("lora.alpha=0", ["lora.alpha"]),
        ("rollout.lora_rank=16", ["rollout.lora_rank=16", "lora.rank=32"]),
        ("trainer.lora_alpha=64", ["trainer.lora_alpha=64", "lora.alpha=32"]),
        ("trainer.mini_batches=3", ["trainer.mini_batches", "divisor"]),
        ("trainer.data_parallel=3", ["trainer.data_parallel: 3", "set 1, 2, 4 or 8"]),
        ("rollout.context_parallel=0", ["rollout.context_parallel: 0", "set 1, 2, 4 or 8"]),
        ("rollout.tensor_parallel=2", ["rollout.tensor_parallel", "the trainer, which has 1", "more ranks"]),
        ("trainer.tensor_parallel=16", ["trainer.tensor_parallel: 16", "set 1, 2, 4 or 8"]),
        (
            "trainer.expert_parallel=2",
            ["trainer.expert_parallel: 2", "trainer.tensor_parallel=1", "trainer.data_parallel=1", "set 1"],
        ),
        ("trainer.betas=[0.9]", ["trainer.betas"]),
        ("trainer.lr=0", ["trainer.lr"]),
        ("trainer.lr=inf", ["trainer.lr", "no positive number"]),
        ("trainer.lr=fast", ["override: trainer.lr"]),
        ("stepz=3", ["override: unknown key stepz"]),
        ("output_dir=''", ["output_dir has no value"]),
        ("resume=always", ["resume", "never or auto"]),
        ("restarts=-1", ["restarts"]),
        ("reward.timeout_seconds=0", ["reward.timeout_seconds"]),
        ("on_mismatch=ignore", ["on_mismatch", "abort"]),
        ("seed=-1", ["seed"]),
        ("data.val=[]", ["data.val"]),
        ("reward.function=grade", ["reward.function", "package.module:function"]),
        ("debug.fault={step: 101}", ["debug.fault.step", "1..100"]),
        ("debug.fault={side: both}", ["debug.fault.side"]),
        ("debug.fault={what: weights}", ["debug.fault.what"]),
        ("debug.fault={step: 1}", ["debug.fault.tensor"]),
        ("debug.fault={what: logits, bit: 64}", ["debug.fault"]),
    ],
)
def test_wrong_value_is_one_line_that_names_key_and_remedy(recipe_file, override, words):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file(), [override])
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "text, words",
    [
        ("output_dir: x\n", ["model has no value"]),
        ("model: x\n", ["output_dir has no value"]),
        (MINIMAL + "steps: 1\nsteps: 2\n", ["duplicate key steps"]),
        ("- a\n", ["top level"]),
        ("a: [", ["not YAML"]),
        (MINIMAL + "stepz: 3\n", ["recipe.yaml: unknown key stepz"]),
    ],
)
def test_damaged_file_is_one_line(recipe_file, text, words):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe_file(text))
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_binary_file_is_one_line(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"not a text file|not YAML"):
        load_recipe(tmp_path / "recipe.yaml")


def test_missing_file_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"absent\.yaml"):
        load_recipe(tmp_path / "absent.yaml")


def test_used_output_folder_is_refused_and_left_alone(recipe_file, tmp_path):
    """prime-rl#2304: a fresh run would train on what an older one left."""
    used = tmp_path / "used"
    used.mkdir()
    recipe = load_recipe(recipe_file(), [f"output_dir={used}"])
    check_output_dir(recipe)
    (used / "steps.jsonl").write_text("{}\n")
    with pytest.raises(RecipeError, match="not empty"):
        check_output_dir(recipe)
    assert [f.name for f in used.iterdir()] == ["steps.jsonl"]
