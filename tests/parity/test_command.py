"""The parity command as a person runs it: vLLM and Megatron, each in a process of its own."""

import pytest

from tests.model import kimi_linear
from zmrl.data.problems import problem_set
from zmrl.data.prompts import prompt_ids
from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.model.tokenizer import ByteTokenizer
from zmrl.parity.__main__ import main

pytestmark = pytest.mark.slow


def run(capfd, model, settings, *arguments):
    """Each of `settings` is EQUAL and nothing else is printed as a verdict."""
    code = main(["--model", str(model), "--max-tokens", "8", "--settings", ",".join(settings), *arguments])
    out, err = capfd.readouterr()
    assert code == 0, f"exit code {code}:\n{out}\n{err}"
    assert out.count("EQUAL") == len(settings) and "VOID" not in out and "DIFFERENT" not in out, out


def test_vllm_and_megatron_agree(capfd):
    settings = ["batch-8", "alone", "chunk-7", "cache-warm", "rescored", "adapter-3", "temperature-0.7"]
    run(capfd, "nano", settings)


@pytest.mark.parametrize(
    "formats",
    [
        pytest.param(
            formats, marks=[] if formats == CacheFormat("nvfp4", "mxfp4") else pytest.mark.soak, id=str(formats)
        )
        for formats in CACHE_FORMATS
    ],
)
def test_vllm_and_megatron_agree_in_every_format(capfd, formats):
    """A reduced matrix, see tests/rollout/test_formats.py; the default formats have the one above as well."""
    settings = ["batch-8", "chunk-7", "cache-warm", "preempted", "rescored", "adapter-3"]
    run(capfd, "nano", settings, "--latent-format", formats.latent, "--index-format", formats.index)


@pytest.mark.soak
@pytest.mark.parametrize("formats", [CacheFormat("bf16", "fp8"), CacheFormat("nvfp4", "mxfp4")], ids=str)
def test_vllm_and_megatron_agree_on_one_request_of_32k_tokens(capfd, tmp_path, formats):
    """All that nano's context holds but the one token that re-scoring would sample."""
    problems = " ".join(p.question for p in problem_set("val", 1400, seed="long"))
    words = problems[: 32_767 - 8 - len(prompt_ids(""))]
    (tmp_path / "prompt").write_text(words)
    assert len(prompt_ids(words)) + 8 == 32_767
    arguments = (
        "--prompts",
        str(tmp_path / "prompt"),
        "--latent-format",
        formats.latent,
        "--index-format",
        formats.index,
    )
    run(capfd, "nano", ["alone", "cache-warm", "rescored"], *arguments)


def test_vllm_and_megatron_agree_on_kimi_linear(capfd):
    run(capfd, "nano-linear", ["batch-8", "chunk-7", "adapter-3"])


@pytest.mark.soak
@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "--rollout-dcp 2",
        "--rollout-dcp 2 --latent-format fp8",
        "--rollout-prefill tokens",
        "--rollout-dcp 2 --rollout-prefill tokens --latent-format fp8",
    ],
)
def test_a_rollout_of_two_ranks_agrees_with_a_trainer_of_one(capfd, arguments):
    settings = ["batch-8", "alone", "chunk-7", "cache-warm", "preempted", "rescored", "adapter-3", "temperature-0.7"]
    run(capfd, "nano", settings, "--rollout-tp", "2", *arguments.split())


@pytest.mark.soak
@pytest.mark.parametrize("member", ["nano-k3", "nano-linear"])
def test_vllm_and_megatron_agree_on_every_member_in_every_setting(capfd, member):
    assert main(["--model", member, "--max-tokens", "8"]) == 0
    out = capfd.readouterr().out
    assert out.count("EQUAL") >= 15 and "VOID" not in out and "DIFFERENT" not in out


@pytest.mark.soak
def test_vllm_and_megatron_agree_on_a_checkpoint_that_transformers_made(capfd, tmp_path):
    path = kimi_linear.save(kimi_linear.make("even"), tmp_path / "model")
    ByteTokenizer(vocab_size=288, model_max_length=4096).save_pretrained(path)
    run(capfd, path, ["batch-8", "chunk-7", "cache-warm", "rescored", "adapter-3"])
