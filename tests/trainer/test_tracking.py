"""Weights & Biases gets our lines: read back from the files of an offline run. No dependency reports home."""

import json
import os
import subprocess
import sys

import pytest
import wandb
from verl.utils.tracking import Tracking

from tests.report.runs import step, validation
from tests.trainer.wandb_files import history
from zmrl.recipe import Recipe
from zmrl.trainer.compose import worker_environment
from zmrl.trainer.tracking import step_metrics, validation_metrics


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """Weights & Biases as a run without a key has it."""
    switches = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
    for name, value in (worker_environment(Recipe()) | switches).items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_an_offline_run_holds_the_lines_of_steps_and_validations(offline):
    lines = [step(1), step(2, verdict="DIFFERENT", tokens_different=3, kl_k3=1e-12, grad_norm=None)]
    tracking = Tracking("zmrl", "test", ["wandb"], {"trainer": {}})
    tracking.log(data=validation_metrics(validation(0)) | {"val-core/builtin/acc/mean@8": 0.45}, step=0)
    for line in lines:
        tracking.log(data=step_metrics(line), step=line["step"])  # the trainer, with the step's line
        tracking.log(data={"actor/entropy": 0.5}, step=line["step"])  # verl, at the end of the step
    tracking.finish()
    wandb.teardown()  # the end of wandb's own process, which writes the file
    rows = {row["_step"]: row for row in history(offline)}
    assert sorted(rows) == [0, 1, 2]
    assert rows[0]["zmrl/val/builtin/mean_at_k"] == 0.45
    assert rows[0]["zmrl/val/builtin/greedy_accuracy"] == 0.6
    for line in lines:
        row = rows[line["step"]]
        for name, value in line.items():
            if isinstance(value, dict):
                assert {k: row[f"zmrl/{name}/{k}"] for k in value} == value
            elif value is None:
                assert f"zmrl/{name}" not in row
            else:
                assert row[f"zmrl/{name}"] == value, name
        assert row["zmrl/check_share"] == 0.1
        assert row["actor/entropy"] == 0.5  # verl's own metrics are in the same row
    counts = {name: sum(row.get(f"zmrl/verdict_{name}", 0) for row in rows.values()) for name in ("EQUAL", "DIFFERENT")}
    assert counts == {"EQUAL": 1, "DIFFERENT": 1}
    assert (rows[2]["zmrl/tokens_different"], rows[2]["zmrl/kl_k3"]) == (3, 1e-12)


SWITCHES = {
    "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_ERROR_REPORTING": "false",
}  # fmt: skip

REPORTERS = """
import importlib, json, os, sys
import huggingface_hub.constants as hub
from ray._common.usage import usage_lib as ray
from vllm.usage import usage_lib as vllm
from wandb.env import error_reporting_enabled
for switches in json.loads(sys.argv[1]):
    for name in json.loads(sys.argv[2]):
        os.environ.pop(name, None)
    os.environ.update(switches)
    importlib.reload(hub)
    vllm._USAGE_STATS_ENABLED = None
    print([not hub.HF_HUB_DISABLE_TELEMETRY, ray.usage_stats_enabled(), vllm.is_usage_stats_enabled(),
           error_reporting_enabled()])
"""


def test_every_switch_is_in_the_environment_of_every_process():
    assert SWITCHES.items() <= worker_environment(Recipe()).items()


def test_every_dependency_that_reports_home_says_that_it_is_off(tmp_path):
    """Asked of the packages themselves; without the switches they say that they are on, so the question is one."""
    cases = json.dumps([{}, worker_environment(Recipe())]), json.dumps(list(SWITCHES))
    command, home = [sys.executable, "-c", REPORTERS, *cases], {"HOME": str(tmp_path)}
    result = subprocess.run(command, env=os.environ | home, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == [str([True] * 4), str([False] * 4)]
