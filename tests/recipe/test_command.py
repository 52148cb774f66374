"""`python -m zmrl.train`: bad input is one line and exit code 2, with nothing written; --dry-run needs no weights."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments, **environment):
    command = [sys.executable, "-m", "zmrl.train", *map(str, arguments)]
    env = {k: v for k, v in os.environ.items() if k != "VLLM_BATCH_INVARIANT"} | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    from zmrl.model.checkpoint import write_random_checkpoint

    path = tmp_path_factory.mktemp("model") / "nano"
    write_random_checkpoint("nano", path)
    return path


@pytest.fixture
def recipe(tmp_path, checkpoint):
    file = tmp_path / "recipe.yaml"
    data = "data: {train_size: 32, val_size: 8}"
    file.write_text(f"model: {checkpoint}\noutput_dir: {tmp_path / 'out'}\nsteps: 2\n{data}\n")
    return file


def test_dry_run_of_the_full_model_needs_no_weights_and_no_engines():
    code = (
        "import sys; from zmrl.train import main\n"
        "assert main(['recipes/aime_lora_k31_pro.yaml', '--dry-run', 'steps=7']) == 0\n"
        "print(sorted({'torch', 'ray', 'vllm', 'verl', 'megatron'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    counts = {"base": "2,779,663,004,416", "active": "104,368,141,056", "LoRA": "53,023,546,368"}
    for count in counts.values():
        assert count in result.stdout
    assert re.search(r"memory .*1\.56 TB", result.stdout)


@pytest.mark.parametrize(
    "override, words",
    [
        ("rollout.temprature=1", "unknown key rollout.temprature"),
        ("model=absent/model", "model: "),
        ("model=k31-pro", "is no directory and no embedded checkpoint"),
        ("data.train=absent.jsonl", "data.train: data set absent.jsonl does not exist"),
        ("data.val=absent.jsonl", "data.val: data set absent.jsonl does not exist"),
        ("rollout.max_model_len=60", "prompt tokens"),
        ("rollout.max_model_len=100000", "rollout.max_model_len"),
        (
            "trainer.tensor_parallel=8",
            "trainer: tensor parallel size 8: 4 MLA heads do not divide evenly; use 1, 2 or 4",
        ),
        ("rollout.prefill=tokens", "rollout: prefill by tokens: one rank has nothing to share; use heads"),
        ("rollout.context_parallel=2", "rollout: context parallel size 2: its ranks are those of a tensor group, of 1"),
        ("rollout.prompts_per_step=64", "data.train: 32 problems are fewer"),
        ("reward.function=zmrl.absent:f", "reward.function"),
        ("reward.function=tests.trainer.stub_reward:raising", "KeyError: 'no such grade'"),
        ("reward.function=tests.trainer.stub_reward:not_a_number", "is nan"),
        ("rollout.kv_cache_bytes=100000", "a cache of 100000 bytes has 3 rows of 25088 bytes"),
        ("cache.prefix_cache_retention_interval=-64", "is negative; set 0, a number or null"),
        (
            "cache.prefix_cache_retention_interval=100",
            "100 is no positive multiple of the block size 64 (bf16 latents, fp8 index",
        ),
        ("cache.latent_format=fp4", "cache.latent_format: 'fp4' is unknown; set one of bf16, fp8, nvfp4"),
        ("data.train=README.md", "data.train: data set README.md: a local file must be .jsonl, .json or .parquet"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2_and_nothing_written(recipe, tmp_path, override, words):
    result = run(recipe, override)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert not (tmp_path / "out").exists()


def test_truncated_checkpoint_is_named(recipe, checkpoint, tmp_path):
    import shutil

    copy = tmp_path / "cut"
    shutil.copytree(checkpoint, copy)
    weights = copy / "model.safetensors"
    with weights.open("r+b") as stream:
        stream.truncate(weights.stat().st_size - 100)
    result = run(recipe, f"model={copy}")
    assert result.returncode == 2
    assert "truncated" in result.stderr


def test_used_output_folder_is_refused(recipe, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "steps.jsonl").write_text("{}\n")
    result = run(recipe)
    assert result.returncode == 2
    assert "not empty" in result.stderr


def test_batch_invariant_variable_is_refused(recipe, tmp_path):
    result = run(recipe, VLLM_BATCH_INVARIANT="1")
    assert result.returncode == 2
    assert "unset it" in result.stderr
    assert not (tmp_path / "out").exists()
