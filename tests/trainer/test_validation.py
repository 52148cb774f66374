"""What validation reports beside mean@k, and which answers are kept."""

import asyncio
import math
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zmrl.data.prompts import prompt_ids, response_ids
from zmrl.model.tokenizer import END_OF_MSG_ID
from zmrl.recipe import load_recipe
from zmrl.trainer.agent_loop import ZmrlAgentLoopWorker
from zmrl.trainer.compose import compose_config
from zmrl.trainer.logs import SAMPLE_FIELDS, SAMPLES_KEPT, TEXT_LIMIT, VAL_FIELDS
from zmrl.trainer.samples import GradedSample, exact_mean, first_of_each
from zmrl.trainer.validation import validation_lines

RECIPE = Path(__file__).parents[2] / "recipes" / "aime_lora.yaml"
WORK, TERSE = response_ids("4,6,2,0", "\\boxed{002}"), response_ids("", "\\boxed{002}")


def sample(index: int, number: int, response: list[int] = WORK, dataset: str = "builtin") -> GradedSample:
    return GradedSample(dataset, index, number, f"gcd {index}", "2", 1.0, prompt_ids("Find gcd(4,6)."), response)


def line(samples, right, problems=2, k=2, greedy=True):
    (found,) = validation_lines(7, samples, right, {"builtin": problems}, k, greedy)
    assert set(found) == set(VAL_FIELDS)
    return found


def test_terse_means_no_work_before_the_answer():
    assert not sample(0, 0, WORK).terse
    assert sample(0, 0, TERSE).terse
    assert sample(0, 0, [END_OF_MSG_ID]).terse and sample(0, 0, []).terse
    assert not sample(0, 0, list(b"4,6,2")).terse  # cut off while working


def test_scores_are_those_of_the_drawn_samples_and_the_greedy_one_stands_apart():
    samples = [sample(0, 0), sample(0, 1, TERSE), sample(0, 2), sample(1, 0), sample(1, 1), sample(1, 2, TERSE)]
    found = line(samples, [True, False, False, True, False, True])
    assert found == {
        "step": 7, "dataset": "builtin", "n_problems": 2, "k": 2, "mean_at_k": 0.5, "terse_share": 0.25,
        "accuracy_given_work": 2 / 3, "greedy_accuracy": 0.5,
    }  # fmt: skip
    # the definition of the learning study: mean@k = p A_work + (1 - p) A_terse
    share, work, terse = 1 - found["terse_share"], found["accuracy_given_work"], 0.0
    assert math.isclose(found["mean_at_k"], share * work + (1 - share) * terse)


def test_a_missing_sample_counts_as_wrong():
    found = line([sample(0, 0), sample(1, 2)], [True, True])
    assert (found["mean_at_k"], found["greedy_accuracy"]) == (0.25, 0.5)
    assert (found["terse_share"], found["accuracy_given_work"]) == (0.0, 1.0)


def test_nothing_of_a_kind_is_null_and_not_zero():
    found = line([], [])
    assert (found["mean_at_k"], found["greedy_accuracy"]) == (0.0, 0.0)
    assert (found["terse_share"], found["accuracy_given_work"]) == (None, None)
    assert line([sample(0, 0, TERSE)], [True])["accuracy_given_work"] is None
    assert line([sample(0, 0)], [True], greedy=False)["greedy_accuracy"] is None


def test_data_sets_are_told_apart():
    samples = [sample(0, 0, TERSE, "aime"), sample(0, 0)]
    first, second = validation_lines(0, samples, [False, True], {"builtin": 1, "aime": 1}, 1, False)
    assert (first["dataset"], first["mean_at_k"], first["terse_share"]) == ("aime", 0.0, 1.0)
    assert (second["dataset"], second["mean_at_k"], second["terse_share"]) == ("builtin", 1.0, 0.0)


def test_kept_answers_are_the_first_sample_of_the_first_problems_of_each_data_set():
    samples = [sample(i, n, dataset=d) for d in ("aime", "builtin") for i in range(9) for n in range(3)]
    kept = [(s.dataset, s.index, s.number) for s in first_of_each(samples)]
    assert kept == [(d, i, 0) for d in ("aime", "builtin") for i in range(SAMPLES_KEPT)]


def test_a_line_has_the_texts_and_a_bounded_size():
    decode = lambda ids: bytes(i for i in ids if i < 256).decode()  # noqa: E731
    found = sample(3, 0).line(5, "train", decode)
    assert tuple(found) == SAMPLE_FIELDS
    assert found["prompt"] == "Find gcd(4,6)." and found["response"] == "4,6,2,0\\boxed{002}"
    long = sample(3, 0, list(b"x" * 5000)).line(5, "train", decode)["response"]
    assert long.startswith("x" * TEXT_LIMIT + " [and 3000 more")


def test_mean_of_entropies_is_exact_in_any_order():
    values = [1e16, 1.0, -1e16, 1.0]
    assert exact_mean(iter(values)) == exact_mean(reversed(values)) == 0.5
    assert exact_mean(iter([])) is None


@pytest.mark.parametrize("greedy, samples", [(True, 5), (False, 4)])
def test_the_greedy_answer_is_one_more_sample_of_a_problem(greedy, samples):
    recipe = load_recipe(RECIPE, ["validation.n=4", f"validation.greedy={greedy}"])
    assert compose_config(recipe).actor_rollout_ref.rollout.val_kwargs.n == samples


def test_only_the_sample_after_the_drawn_ones_of_a_validation_is_greedy(monkeypatch):
    """The drawn ones keep their seeds whether or not there is a greedy one; training has none."""
    temperatures = {}

    async def run(self, params, trajectory, *, session_id, **kwargs):
        temperatures[trajectory["validate"], session_id] = params["temperature"]

    monkeypatch.setattr(ZmrlAgentLoopWorker.__mro__[1], "_run_agent_loop", run)
    worker = object.__new__(ZmrlAgentLoopWorker)
    worker.config = OmegaConf.create({"zmrl": {"seed": 1, "validation": {"n": 2}}})
    shared = {"temperature": 0.7}
    for validate in (True, False):
        for number in range(3):
            call = worker._run_agent_loop(
                shared, {"step": 1, "validate": validate}, session_id=number, data_source="builtin", index=0, uid="u"
            )
            asyncio.run(call)
    assert temperatures == {
        (True, 0): 0.7, (True, 1): 0.7, (True, 2): 0.0, (False, 0): 0.7, (False, 1): 0.7, (False, 2): 0.7,
    }  # fmt: skip
    assert shared == {"temperature": 0.7}
