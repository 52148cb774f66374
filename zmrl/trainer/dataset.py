"""Problem sets as verl wants them, and their check before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from zmrl.data.aime import DataError, load_aime
from zmrl.data.problems import Problem, problem_set
from zmrl.data.prompts import prompt_ids
from zmrl.recipe import Recipe, RecipeError

BUILTIN = "builtin"


def source_name(name: str) -> str:
    """Short name of a data set in logs: `builtin`, the stem of a file, or the hub name."""
    return Path(name).stem if name.endswith((".jsonl", ".json", ".parquet")) else name


def load_problems(
    name: str, split: str, count: int, seed: int, max_prompt_tokens: int, too_long: str = "refuse"
) -> list[Problem]:
    """Problems of data set `name`; `split` ("train" or "val"), `count` and `seed` concern the built-in ones only.

    Raises DataError for a data set that is missing or damaged and for a prompt of more than `max_prompt_tokens` ids;
    with `too_long="skip"` such problems of a file or hub data set are left out.
    """
    if name != BUILTIN:
        return load_aime(name, max_prompt_tokens, too_long)
    problems = problem_set(split, count, seed)
    for problem in problems:
        length = len(prompt_ids(problem.question))
        if length > max_prompt_tokens:
            message = f"builtin problem {problem.key} has {length} prompt tokens, the limit is {max_prompt_tokens}"
            raise DataError(f"{message}; raise the prompt limit")
    return problems


def check_data(recipe: Recipe) -> list[Problem]:
    """Load every data set of the recipe once; returns the training problems. Raises RecipeError naming the key."""
    names = [("data.train", recipe.data.train, "train", recipe.data.train_size)]
    names += [("data.val", name, "val", recipe.data.val_size) for name in recipe.data.val]
    limit = recipe.max_prompt_tokens
    loaded: dict[str, list[Problem]] = {}
    for key, name, split, count in names:
        try:
            loaded[key] = problems = load_problems(name, split, count, recipe.seed, limit, recipe.data.too_long)
        except (DataError, ValueError) as error:
            hint = f" (rollout.max_model_len - rollout.max_tokens = {limit})" if "prompt tokens" in str(error) else ""
            raise RecipeError(f"{key}: {error}{hint}") from None
        if key == "data.train" and len(problems) < recipe.rollout.prompts_per_step:
            raise RecipeError(
                f"data.train: {len(problems)} problems are fewer than rollout.prompts_per_step="
                f"{recipe.rollout.prompts_per_step}; lower it or add problems"
            )
    return loaded["data.train"]


class ProblemDataset(Dataset):
    """verl's data set (`data.custom_cls`): rows of problems, in order, with their index.

    verl does not say whether it wants training or validation problems, so its "files" are named `train:NAME` and
    `val:NAME` (see `compose`). The recipe's numbers are under `config.zmrl`.
    """

    def __init__(
        self, data_files: list[str], tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        for file in data_files:
            split, _, name = file.partition(":")
            ours = config.zmrl
            count = ours.train_size if split == "train" else ours.val_size
            problems = load_problems(name, split, count, ours.seed, config.max_prompt_length, ours.too_long)
            self.rows += [_row(source_name(name), index, problem) for index, problem in enumerate(problems)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, Any]:
        # verl needs one tensor in a batch; the rest are plain values.
        return self.rows[item] | {"dummy_tensor": torch.zeros(1, dtype=torch.uint8)}


def _row(source: str, index: int, problem: Problem) -> dict[str, Any]:
    return {
        "data_source": source,
        "raw_prompt": [{"role": "user", "content": problem.question}],
        "reward_model": {"style": "rule", "ground_truth": str(problem.answer)},
        "extra_info": {"index": index, "key": problem.key},
        "index": index,
    }
