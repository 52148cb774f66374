"""Run folders made by the run's own writer, without a run."""

from pathlib import Path

from zmrl.trainer.logs import SAMPLE_FIELDS, STEP_FIELDS, VAL_FIELDS, RunFiles

HOSTILE = '</td><script>alert(1)</script><img src="http://evil.example/x.png" onerror=alert(2)>&amp;\x00 \\boxed{042}'


def step(number: int, **changes) -> dict:
    """A line of steps.jsonl."""
    fields = dict.fromkeys(STEP_FIELDS, 0) | {
        "step": number, "verdict": "EQUAL", "samples": 8, "samples_expected": 8, "tokens_compared": 200,
        "response_tokens": 200, "kl_k1": 0.0, "kl_k3": 0.0, "reward_mean": number / 10, "reward_std": 0.1,
        "grad_norm": 0.5 / number, "entropy": 1.0 / number,
        "adapter_digest_trainer": "a", "adapter_digest_rollout": "a",
        "seconds": {"rollout": 3.0, "check": 1.0, "train": 5.0, "sync": 0.5, "total": 10.0},
    }  # fmt: skip
    return fields | changes


def validation(number: int, **changes) -> dict:
    """A line of val.jsonl."""
    values = (number, "builtin", 224, 8, 0.45, 0.4, 0.7, 0.6)
    return dict(zip(VAL_FIELDS, values, strict=True)) | changes


def sample(number: int, phase: str = "train", **changes) -> dict:
    """A line of samples.jsonl."""
    values = (number, phase, "builtin", "gcd 4 6", 0, "Find gcd(4,6).", "4,6,2,0\\boxed{002}", "2", 1.0)
    return dict(zip(SAMPLE_FIELDS, values, strict=True)) | changes


def write_run(folder: Path, steps: int = 6, **changes) -> Path:
    """A finished run of `steps` steps, validated before and after; `changes` go into every step's line."""
    folder.mkdir(parents=True)
    files = RunFiles(folder)
    recipe = {"steps": steps, "model": "/somewhere/secret/nano", "output_dir": "/somewhere/secret/out"}
    recipe["validation"] = {"every": steps}
    files.run(
        {
            "recipe": recipe,
            "versions": {"torch": "2.13.0"},
            "model_digest": "digest-of-the-model",
            "kernel_id": "id-of-the-kernels",
        }
    )
    files.samples([sample(0, "validation")])
    files.validation(validation(0))
    for number in range(1, steps + 1):
        files.samples([sample(number), sample(number, key="hostile", response=HOSTILE, reward=0.0)])
        files.step(step(number, **changes))
    files.validation(validation(steps, mean_at_k=0.664))
    files.outcome("finished", 0)
    return folder
