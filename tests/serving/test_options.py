"""A command line is refused before anything heavy starts, and says why."""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zmrl.lora.peft_io import write_adapter
from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.initialise import initial_tensors
from zmrl.model.names import LoraSpec
from zmrl.serving.__main__ import main
from zmrl.serving.options import OptionError, parse


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint `model`, and adapters `r16` and `r32`."""
    place = tmp_path_factory.mktemp("options")
    config = dataclasses.replace(PRESETS["nano"], num_experts=8, num_experts_per_token=2)
    write_checkpoint(place / "model", export_tensors(config, initial_tensors(config, seed=2)), config)
    for rank in (16, 32):
        tensors = {n: torch.ones(shape).bfloat16() for n, shape, _ in LoraSpec(rank).tensor_specs(config)}
        write_adapter(place / f"r{rank}", tensors, config, rank, 2 * rank, "model")
    return place


def test_defaults() -> None:
    options = parse(["nano"])
    assert (options.host, options.name, options.lora_rank) == ("127.0.0.1", "nano", None)
    args = options.engine_args()
    assert args["logprobs_mode"] == "raw_logprobs" and "enable_lora" not in args
    assert args["enable_prefix_caching"] and args["enable_chunked_prefill"] and args["dtype"] == "bfloat16"


def test_kept_states_reach_the_engine() -> None:
    key = "prefix_cache_retention_interval"
    assert parse(["nano"]).engine_args()[key] is None
    assert parse(["nano", "--prefix-cache-retention-interval", "128"]).engine_args()[key] == 128


def test_formats_of_the_cache_reach_the_engine() -> None:
    extra = parse(["nano", "--latent-format", "nvfp4", "--index-format", "mxfp4"]).engine_args()["additional_config"]
    assert (extra["latent_format"], extra["index_format"]) == ("nvfp4", "mxfp4")
    defaults = parse(["nano"]).engine_args()["additional_config"]
    assert (defaults["latent_format"], defaults["index_format"]) == ("bf16", "fp8")


def test_ranks_reach_the_engine() -> None:
    args = parse(["nano", "--tensor-parallel-size", "4", "--decode-context-parallel-size", "2"]).engine_args()
    assert (args["tensor_parallel_size"], args["decode_context_parallel_size"]) == (4, 2)
    assert args["additional_config"]["prefill"] == "heads"
    args = parse(["nano", "--tensor-parallel-size", "2", "--prefill", "tokens"]).engine_args()
    assert args["additional_config"]["prefill"] == "tokens"


def test_rank_and_alpha_come_from_the_adapter(place: Path) -> None:
    options = parse([str(place / "model"), "--lora", f"a={place / 'r16'}"])
    assert (options.lora_rank, options.lora_alpha) == (16, 32.0)
    args = options.engine_args()
    assert args["max_lora_rank"] == 16 and args["additional_config"]["lora_alpha"] == 32.0
    by_root = parse([str(place / "model"), "--lora-root", str(place)])
    assert (by_root.lora_rank, by_root.lora_alpha) == (32, 32.0)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_others_are_served_only_on_purpose(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(OptionError, match="--api-key"):
        parse(["nano", "--host", host])
    assert parse(["nano", "--host", host, "--api-key", "secret"]).api_key == "secret"
    assert parse(["nano", "--host", host, "--insecure"]).host == host
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert parse(["nano", "--host", host]).host == host


def test_loopback_needs_no_key() -> None:
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert parse(["nano", "--host", host]).host == host


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["nothing"], "no directory and no embedded checkpoint"),
        (["{place}/model", "--lora", "a"], "give NAME=DIR"),
        (["{place}/model", "--lora", "a={place}/none"], "adapter_config.json is missing"),
        (["{place}/model", "--lora", "a={place}/r16", "--lora", "a={place}/r16"], "given twice"),
        (["{place}/model", "--lora", "a={place}/r16", "--lora", "b={place}/r32"], "one rank and one alpha"),
        (["{place}/model", "--lora", "a={place}/r16", "--lora-rank", "32"], "one rank and one alpha"),
        (["{place}/model", "--lora", "{place}/model={place}/r16"], "name of the model"),
        (["{place}/model", "--lora", "a={place}/r16", "--max-loras", "0"], "at least 1"),
        (["{place}/model", "--lora-root", "{place}/none"], "is no directory"),
        (["{place}/model", "--lora-root", "{place}", "--lora-rank", "24"], "multiple of 16"),
        (["{place}/model", "--lora-rank", "32"], "need adapters"),
        (["nano", "--max-model-len", "33000"], "context is 32768"),
        (["nano", "--prefix-cache-retention-interval", "100"], "no positive multiple of the block size 64"),
        (["nano", "--prefix-cache-retention-interval", "-64"], "-64 is no positive multiple"),
        (["nano", "--kv-cache-bytes", "1000"], "a cache of 1000 bytes has 0 rows"),
        (["nano", "--max-n", "0"], "--max-n 0"),
        (["nano", "--port", "70000"], "between 0 and 65535"),
        (["nano", "--drain-seconds", "-1"], "negative"),
        (["nano", "--tensor-parallel-size", "8"], "4 MLA heads do not divide evenly; use 1, 2 or 4"),
        (["nano", "--prefill", "tokens"], "prefill by tokens: one rank has nothing to share; use heads"),
        (["nano", "--decode-context-parallel-size", "2"], "those of a tensor group, of 1; use 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], reason: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([argument.format(place=place) for argument in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("serving: ") and reason in line


def test_a_taken_port_is_told_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["nano", "--port", str(taken.getsockname()[1])]) == 2
    assert "in use" in capsys.readouterr().err


def test_a_transcript_that_cannot_be_written_is_told_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nano", "--transcript", str(tmp_path / "none" / "t.jsonl")]) == 2
    assert "--transcript" in capsys.readouterr().err


def test_help_needs_no_engine() -> None:
    code = "import sys, zmrl.serving.options as o; o._parser().format_help(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
