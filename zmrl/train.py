"""`python -m zmrl.train RECIPE [key=value ...] [--dry-run]`: recipe -> verl's configuration -> run.

Everything that can be wrong with the input is found here, before Ray starts and before anything is written.
Exit codes: 0 finished and every step EQUAL, 2 bad input, 3 a step was DIFFERENT, 4 a step was VOID, 130 interrupted,
1 anything else.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from zmrl import startup as startup_times
from zmrl.progress import progress
from zmrl.recipe import Recipe, RecipeError, check_output_dir, load_recipe
from zmrl.report import REPORT
from zmrl.trainer.logs import DIED, FAILED, FINISHED, RunFiles, worst_exit_code
from zmrl.trainer.resume import LOGS, prepare_resume, run_lock

if TYPE_CHECKING:
    from zmrl.model.config import K3Config

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

STARTUP = "startup.jsonl"
"""What `--startup` prints, as noted."""

RESTARTS = "ZMRL_RESTARTS"
"""Environment variable: how often this run has started itself again."""

_RAY_MARKS = (":actor_name:", ":task_name:")
"""Ray begins a worker's log with lines of these (ray/_private/worker.py)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m zmrl.train", description="Train a LoRA adapter by GRPO.")
    parser.add_argument("recipe", help="recipe file, e.g. recipes/aime_lora.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="recipe keys, e.g. steps=10 rollout.n=4")
    parser.add_argument("--startup", action="store_true", help="print where the time to the first sampled token goes")
    parser.add_argument("--dry-run", action="store_true", help="print shapes, counts and memory; start nothing")
    arguments = parser.parse_intermixed_args(argv)
    try:
        recipe = load_recipe(arguments.recipe, arguments.overrides)
        if arguments.dry_run:
            dry_run(recipe)
            return 0
        set_environment(recipe)
        check_input(recipe)
        return train(recipe, arguments.startup)
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("zmrl: interrupted; resume=auto goes on from the last checkpoint", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever reads the output has gone
        return FAILURE
    except OSError as error:  # the disk is full, or was taken away: the run's files could not be written
        print(f"error: {error}; see to space and permissions, then go on with resume=auto", file=sys.stderr)
        return FAILURE


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
            name = f"{response!r} for problem {problems[0].key}, tried before the start,"
            graded(reward, response, answer, name, recipe.reward.timeout_seconds)
    except (ValueError, RewardError) as error:
        raise RecipeError(str(error)) from None


def train(recipe: Recipe, startup: bool = False) -> int:
    """Run a checked recipe to its end; returns the exit code. Raises RecipeError if its folder cannot be used.

    When a process of the run dies, the command starts itself again, from the last checkpoint.
    """
    folder = Path(recipe.output_dir)
    with run_lock(folder, "driver"):
        if startup:
            startup_times.watch(folder / STARTUP, sys.stdout)
            startup_times.mark("command", "recipe, model and data checked")
        outcome = _attempt(recipe, RunFiles(folder))
        restarts = int(os.environ.get(RESTARTS, "0"))
        if outcome["status"] == DIED and restarts < recipe.restarts:
            print(
                f"zmrl: {_last_line(outcome)}; starting again from the last checkpoint "
                f"(restart {restarts + 1} of {recipe.restarts})",
                flush=True,
            )
            os.environ[RESTARTS] = str(restarts + 1)
            # What ray.shutdown() has left of the dead run, such as a cluster that never came up, would stay a child.
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            # A new image of this process: nothing of the dead run is left in it. Of two overrides the last one counts.
            os.execv(sys.executable, [*sys.orig_argv, "resume=auto"])
    if outcome["status"] in (FAILED, DIED):
        print(f"error: {_last_line(outcome)}; see {folder}", file=sys.stderr)
    elif outcome["exit_code"]:
        print(f"error: {outcome['message'] or 'a step was not EQUAL'}; see {folder}", file=sys.stderr)
    else:
        print(f"zmrl: {recipe.steps} steps, all EQUAL; see {folder}")
    return int(outcome["exit_code"])


def _attempt(recipe: Recipe, files: RunFiles) -> dict[str, Any]:
    """Start the processes once, from the beginning or from where the run is; returns how it ended."""
    from zmrl.trainer.compose import compose_config

    resume = (
        prepare_resume(recipe, lambda line: print(f"zmrl: {line}", flush=True)) if recipe.resume == "auto" else None
    )
    if resume and resume.step == recipe.steps and not resume.validate:
        print(f"zmrl: all {recipe.steps} steps of {files.folder} are done")
        files.outcome(FINISHED, worst_exit_code(files.folder))
    else:
        config = compose_config(recipe, resume)
        logs = _new_folder(files.folder / LOGS)
        where = f"going on after step {resume.step}" if resume and resume.step else f"{recipe.steps} steps"
        print(
            f"zmrl: starting verl, vLLM and Megatron: {where}, output in {files.folder}\n"
            f"      (one to three minutes until the first line; {logs.name}/ gets what the processes print at the end)",
            flush=True,
        )
        shown = progress(recipe, sys.stdout, lambda: _write_report(files.folder))
        with shown, _quiet(logs / "driver.log", recipe.debug.verbose):
            crash = _run_verl(config, logs)
        if files.read_outcome() is None:
            files.outcome(DIED, FAILURE, f"the process that drives the run died ({crash}), see {logs}")
        if files.read_run() is not None:
            _write_report(files.folder)
    outcome = files.read_outcome()
    assert outcome is not None
    return outcome


def _last_line(outcome: dict[str, Any]) -> str:
    return str(outcome["message"]).strip().splitlines()[-1]


def _new_folder(folder: Path) -> Path:
    """`folder`, or the first of folder-2, folder-3, ... that does not exist: a resumed run keeps its older logs."""
    numbered = (folder.with_name(f"{folder.name}-{n}") for n in itertools.count(2))
    fresh = next(path for path in itertools.chain([folder], numbered) if not path.exists())
    fresh.mkdir(parents=True)
    return fresh


def _run_verl(config: object, logs: Path) -> str:
    """Run verl's trainer in its own Ray instance. Returns what it raised, in a line; the outcome file says the rest."""
    import ray
    from verl.trainer.main_ppo import run_ppo

    from zmrl.trainer.remote import TaskRunner

    startup_times.mark("command", "verl imported")
    start = ray.init

    def init(*arguments: object, **keywords: object) -> object:
        """Ray's C++ core installs a handler for SIGTERM that aborts; batch systems send it, so it ends a run as Ctrl-C
        does."""
        context = start(*arguments, **keywords)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        startup_times.mark("command", "Ray up")
        return context

    ray.init = init
    try:
        run_ppo(config, TaskRunner)
    except Exception as error:  # the outcome file holds the reason; here only whether there is one
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
    finally:
        ray.init = start
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


def _write_report(folder: Path) -> None:
    """(Re)write the run's report.html."""
    from zmrl.report.page import write_report

    try:
        write_report([folder], folder / REPORT)
    except Exception as error:  # whatever it is, a run does not fail because of its report
        print(f"warning: no {REPORT}: {error}", file=sys.stderr)


def _check_context(recipe: Recipe) -> None:
    from zmrl.batch_invariant.formats import FormatError
    from zmrl.model.cache_layout import CacheLayoutError
    from zmrl.parallel.layout import Layout, LayoutError
    from zmrl.trainer.summary import cache_layout

    config = _model_config(recipe)
    rollout = recipe.rollout
    if rollout.max_model_len > config.max_position_embeddings:
        raise RecipeError(
            f"rollout.max_model_len: {rollout.max_model_len} exceeds the model's context of "
            f"{config.max_position_embeddings}; lower it"
        )
    trainer = recipe.trainer
    try:
        Layout(trainer.tensor_parallel, trainer.expert_parallel, data=trainer.data_parallel).check(config)
    except LayoutError as error:
        raise RecipeError(f"trainer: {error}") from None
    ranks = rollout.tensor_parallel
    try:
        Layout(ranks, ranks, rollout.context_parallel, prefill=rollout.prefill).check(config)
    except LayoutError as error:
        raise RecipeError(f"rollout: {error}") from None
    try:
        layout = cache_layout(recipe, config)
        layout.check_retention(recipe.cache.prefix_cache_retention_interval)
    except (FormatError, CacheLayoutError) as error:
        raise RecipeError(f"cache: {error}") from None
    try:
        layout.check_pool(rollout.kv_cache_bytes, rollout.max_model_len, rollout.enable_prefix_caching)
    except CacheLayoutError as error:
        raise RecipeError(f"rollout.kv_cache_bytes, rollout.max_model_len: {error}") from None


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
