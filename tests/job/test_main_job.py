"""The main job on the real stack: verl, vLLM and Megatron in their own processes, on the embedded nano model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = ["rollout.prompts_per_step=4", "rollout.n=4", "rollout.max_tokens=24", "data.train_size=64", "data.val_size=8"]
RECIPE = "recipes/aime_lora.yaml"


def train(
    out: Path, *overrides: str, recipe: str = RECIPE, timeout: float = 850
) -> tuple[subprocess.CompletedProcess[str], list[dict], dict]:
    """Runs the recipe; the result, the lines of steps.jsonl, and mismatch.json."""
    command = [sys.executable, "-m", "zmrl.train", recipe, f"output_dir={out}", *SMALL, *overrides]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    steps = out / "steps.jsonl"
    lines = [json.loads(line) for line in steps.read_text().splitlines()] if steps.exists() else []
    mismatch = out / "mismatch.json"
    return result, lines, json.loads(mismatch.read_text()) if mismatch.exists() else {}


@pytest.mark.slow
@pytest.mark.parametrize("mini_batches", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_every_step_is_equal_while_the_adapter_moves(tmp_path, mini_batches):
    """At temperature 0.7, with a reference-policy KL, and AIME problems to validate on.

    With one update a step its own forward is compared; with two, a pass before them.

    A learning rate this large makes a prefix cached for the former adapter visible (prime-rl#1650), a temperature
    applied on one side only (slime#557), and base weights sent in place of the adapter (verl#7014).
    """
    aime = tmp_path / "aime.jsonl"
    problem = {"problem": "Find the number of elements of the set {1, 2, ..., 7}.", "answer": "007"}
    aime.write_text(json.dumps(problem) + "\n")
    overrides = ["steps=3", "trainer.lr=0.02", "trainer.warmup_steps=0", "rollout.temperature=0.7"]
    overrides += ["trainer.kl_coef=0.01", f"trainer.mini_batches={mini_batches}"]
    overrides += ["validation.n=2", f"data.val=[builtin,{aime}]"]
    result, steps, mismatch = train(tmp_path / "run", *overrides)
    assert result.returncode == 0, result.stdout + result.stderr
    assert not mismatch and [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["verdict"] == "EQUAL" and step["samples"] == step["samples_expected"] == 16
        assert step["tokens_compared"] == step["response_tokens"] > 0
        assert (step["tokens_different"], step["rows_different"]) == (0, 0)
        assert (step["kl_k1"], step["kl_k3"], step["max_abs_logprob_diff"]) == (0.0, 0.0, 0.0)
        assert step["adapter_digest_trainer"] == step["adapter_digest_rollout"]
        phases = step["seconds"]
        assert sum(phases[p] for p in ("rollout", "check", "train", "sync")) <= phases["total"]
    moving = [s["adapter_digest_trainer"] for s in steps if s["grad_norm"] > 0]
    assert len(moving) >= 2 and len(set(moving)) == len(moving), "no update moved the adapter"
    rows = [json.loads(line) for line in (tmp_path / "run" / "val.jsonl").read_text().splitlines()]
    assert {row["dataset"] for row in rows} == {"builtin", "aime"} or len({row["dataset"] for row in rows}) == 2
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert {"recipe", "versions", "cpu", "isa", "function_config", "kernel_id", "model_digest"} <= set(run)


@pytest.mark.soak
@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize(
    "what, tensor, verdict",
    [
        ("parameter", "language_model.model.layers.0.self_attn.q_proj.weight", "VOID"),
        ("parameter", "language_model.model.layers.3.block_sparse_moe.experts.17.w2.weight_packed", "VOID"),
        ("parameter", "base_model.model.model.layers.3.block_sparse_moe.experts.17.w1.lora_A.weight", "VOID"),
        ("cache", "layers.3.latent", "DIFFERENT"),
        ("logits", "", "DIFFERENT"),
    ],
)
def test_one_flipped_bit_stops_the_run_at_that_step(tmp_path, side, what, tensor, verdict):
    # Element 4, bit 7 of a latent page is the lowest exponent bit of a BF16 number: it changes much and makes no NaN.
    fault = f"debug.fault={{step: 2, side: {side}, what: {what}, tensor: '{tensor}', element: 4, bit: 7}}"
    result, steps, mismatch = train(tmp_path / "run", "steps=3", "validation.every=0", "trainer.lr=0.02", fault)
    assert result.returncode == {"DIFFERENT": 3, "VOID": 4}[verdict], result.stdout + result.stderr
    assert [step["verdict"] for step in steps] == ["EQUAL", verdict]
    assert mismatch["step"] == 2 and mismatch["verdict"] == verdict
    if verdict == "VOID":
        assert [t["name"] for t in mismatch["tensors"]] == [tensor]
    else:
        assert mismatch["tensors"] == [] and mismatch["first"]["rollout_digest"] != mismatch["first"]["trainer_digest"]
