"""`python -m zmrl.train RECIPE [key=value ...] [--dry-run]`: recipe -> verl's configuration -> run.

Everything that can be wrong with the input is found here, before Ray starts and before anything is written. Exit
codes: 0 finished and every step EQUAL, 2 bad input, 3 a step was DIFFERENT, 4 a step was VOID, 1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from zmrl.recipe import Recipe, RecipeError, check_output_dir, load_recipe
from zmrl.trainer.logs import FAILED, STEPS, VAL, RunFiles, step_line, validation_line

if TYPE_CHECKING:
    from zmrl.model.config import K3Config

BAD_INPUT, FAILURE = 2, 1

_RAY_MARKS = (":actor_name:", ":task_name:")
"""Ray begins a worker's log with lines of these (ray/_private/worker.py)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zmrl.train", description="Train a LoRA adapter by GRPO.")
    parser.add_argument("recipe", help="recipe file, e.g. recipes/aime_lora.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys, e.g. steps=10 rollout.n=4")
    parser.add_argument("--dry-run", action="store_true", help="print shapes, counts and memory; start nothing")
    arguments = parser.parse_intermixed_args(argv)
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            dry_run(recipe)
            return 0
        set_environment(recipe)
        check_input(recipe)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return train(recipe)


def dry_run(recipe: Recipe) -> None:
    """Compose verl's configuration and print what the run would need."""
    from omegaconf import OmegaConf

    from zmrl.trainer.compose import compose_config
    from zmrl.trainer.summary import summary

    _check_context(recipe)
    config = compose_config(recipe)
    OmegaConf.to_container(config, resolve=True)
    print(summary(recipe, config))


def set_environment(recipe: Recipe) -> None:
    """Environment of this process, which its children inherit: no telemetry, loopback, offline where all is local."""
    from zmrl.trainer.compose import worker_environment

    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise RecipeError(
            "VLLM_BATCH_INVARIANT is set in the environment: it needs Triton and crashes vLLM on a CPU, and zmrl's own "
            "kernels are batch-invariant without it; unset it"
        )
    os.environ.update(worker_environment(recipe))
    data = [recipe.data.train, *recipe.data.val]
    if all(name == "builtin" or Path(name).exists() for name in data):
        for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
            os.environ.setdefault(name, "1")
    os.environ.setdefault("WANDB_DIR", str(Path(recipe.output_dir).absolute()))
    if not _has_wandb_key():
        os.environ.setdefault("WANDB_MODE", "offline")


def check_input(recipe: Recipe) -> None:
    """Everything that a run reads, looked at once. Raises RecipeError; writes nothing."""
    check_output_dir(recipe)
    recipe.model = str(_checkpoint(recipe))
    _check_context(recipe)

    from zmrl.trainer.dataset import check_data
    from zmrl.trainer.rewards import RewardError, graded, load_reward

    problems = check_data(recipe)
    answer = str(problems[0].answer)
    try:
        reward = load_reward(recipe.reward.function)
        for response in ("", f"\\boxed{{{answer}}}"):
            graded(reward, response, answer, f"{response!r} for problem {problems[0].key}, tried before the start,")
    except (ValueError, RewardError) as error:
        raise RecipeError(str(error)) from None


def train(recipe: Recipe) -> int:
    """Run a checked recipe to its end; returns the exit code."""
    from zmrl.trainer.compose import compose_config

    files = RunFiles(recipe.output_dir)
    logs = files.folder / "logs"
    logs.mkdir(parents=True)
    config = compose_config(recipe)
    print(
        f"zmrl: starting verl, vLLM and Megatron for {recipe.steps} steps, output in {files.folder}\n"
        "      (one to three minutes until the first line; what the processes print goes to logs/)",
        flush=True,
    )
    with _progress(recipe, sys.stdout), _quiet(logs / "driver.log", recipe.debug.verbose):
        crash = _run_verl(config, logs)
    outcome = files.read_outcome()
    if outcome is None:
        print(f"error: the run died without an outcome ({crash}); see {logs}", file=sys.stderr)
        return FAILURE
    if outcome["status"] == FAILED:
        print(f"error: {outcome['message'].strip().splitlines()[-1]}; see {files.folder}", file=sys.stderr)
    elif outcome["exit_code"]:
        print(f"error: {outcome['message'] or 'a step was not EQUAL'}; see {files.folder}", file=sys.stderr)
    else:
        print(f"zmrl: {recipe.steps} steps, all EQUAL; see {files.folder}")
    return int(outcome["exit_code"])


def _run_verl(config: object, logs: Path) -> str:
    """Run verl's trainer in its own Ray instance. Returns what it raised, in a line; the outcome file says the rest."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    from zmrl.trainer.remote import TaskRunner

    try:
        run_ppo(config, TaskRunner)
    except Exception as error:  # the outcome file holds the reason; here only whether there is one
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    finally:
        _keep_logs(logs)
        ray.shutdown()
    return "no error"


def _keep_logs(logs: Path) -> None:
    """Copy the output of all Ray processes, named after what they are: it would be lost with Ray's session."""
    import ray

    if not ray.is_initialized():
        return
    session = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    for file in [*session.glob("worker-*.out"), *session.glob("worker-*.err")]:
        if file.stat().st_size:
            shutil.copy(file, logs / f"{_role(file)}-{file.stem.rpartition('-')[2]}{file.suffix}")


def _role(log: Path) -> str:
    """The actor, or else the task, that a Ray worker's log begins with."""
    with log.open(errors="replace") as stream:
        lines = [line.strip() for _, line in zip(range(20), stream, strict=False)]
    names = [line.removeprefix(mark) for mark in _RAY_MARKS for line in lines if line.startswith(mark)]
    return re.sub(r"[^\w.]+", "_", names[0]) if names else "worker"


@contextlib.contextmanager
def _quiet(log: Path, verbose: bool) -> Iterator[None]:
    """Send what libraries print in this process to a file, so that a person sees one line a step."""
    if verbose:
        yield
        return
    with log.open("w") as stream, contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        yield


@contextlib.contextmanager
def _progress(recipe: Recipe, out: TextIO) -> Iterator[None]:
    """Print a line for every line that the trainer's process appends to steps.jsonl and val.jsonl."""
    done = threading.Event()
    thread = threading.Thread(target=_follow, args=(recipe, done, out), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _follow(recipe: Recipe, done: threading.Event, out: TextIO) -> None:
    seen = dict.fromkeys((VAL, STEPS), 0)
    last = False
    while not last:
        last = done.wait(0.2)
        for name in seen:
            file = Path(recipe.output_dir) / name
            lines = file.read_text().splitlines() if file.exists() else []
            for line in lines[seen[name] :]:
                fields = json.loads(line)
                text = validation_line(fields) if name == VAL else step_line(fields, recipe.steps)
                print(text, file=out, flush=True)
            seen[name] = len(lines)


def _check_context(recipe: Recipe) -> None:
    from zmrl.trainer.summary import cache_bytes

    config = _model_config(recipe)
    rollout = recipe.rollout
    if rollout.max_model_len > config.max_position_embeddings:
        raise RecipeError(
            f"rollout.max_model_len: {rollout.max_model_len} exceeds the model's context of "
            f"{config.max_position_embeddings}; lower it"
        )
    token, sequence = cache_bytes(config)
    if rollout.kv_cache_bytes < (needed := rollout.max_model_len * token + sequence):
        raise RecipeError(
            f"rollout.kv_cache_bytes: {rollout.kv_cache_bytes} does not hold one request of rollout.max_model_len="
            f"{rollout.max_model_len} tokens, which takes {needed}; raise it"
        )


def _model_config(recipe: Recipe) -> K3Config:
    from zmrl.model.config import ConfigError, get_config

    try:
        return get_config(recipe.model)
    except ConfigError as error:
        raise RecipeError(f"model: {error}") from None


def _checkpoint(recipe: Recipe) -> Path:
    """Directory of the base checkpoint; names, shapes, types and sizes of its tensors are checked, none is read."""
    from zmrl.model.checkpoint import CheckpointError, iter_tensors, resolve_model

    try:
        path = resolve_model(recipe.model)
        next(iter_tensors(path))
    except CheckpointError as error:
        raise RecipeError(f"model: {error}") from None
    return path


def _has_wandb_key() -> bool:
    return bool(os.environ.get("WANDB_API_KEY")) or "api.wandb.ai" in _netrc()


def _netrc() -> str:
    file = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    return file.read_text() if file.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
