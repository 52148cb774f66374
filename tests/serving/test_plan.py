"""`python -m zmrl.serving.plan`: the figures of the full model, and refusals. No torch, no vLLM."""

import subprocess
import sys

import pytest

from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import CacheLayout, plan
from zmrl.model.config import PRESETS
from zmrl.parallel.layout import TOKENS
from zmrl.serving.plan import MILLION, Capacity, capacity, main, weight_bytes

PRO = PRESETS["k31-pro"]
COMMAND = "--model k31-pro --tp 8 --dcp 1 --kv fp8 --index fp8 --gpu-memory 288GB".split()


def change(**options: str) -> list[str]:
    command = list(COMMAND)
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if option in command:
            command[command.index(option) + 1] = value
        else:
            command += [option, value]
    return command


def printed(capsys: pytest.CaptureFixture[str], **options: str) -> str:
    assert main(change(**options)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    "options, figure",
    [
        ({"model": "k3"}, "13,824"),
        ({}, "16,992"),
        ({"kv": "nvfp4"}, "11,616"),
        ({"kv": "nvfp4", "index": "mxfp4"}, "10,080"),
        ({"dcp": "8"}, "2,124"),
        ({"dcp": "8", "kv": "nvfp4", "index": "mxfp4"}, "1,260"),
    ],
)
def test_bytes_per_token_and_rank(capsys: pytest.CaptureFixture[str], options: dict[str, str], figure: str) -> None:
    line = next(line for line in printed(capsys, **options).splitlines() if "bytes per token and rank" in line)
    assert line.split("│")[2].strip() == figure


def test_the_command_prints_the_row_its_padding_and_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys)
    for words in (
        "256 tokens, fp8 latents, fp8 index keys",
        "24 latent pages of 256 x 576 B",
        "24 index pages of 256 x 132 B",
        "5 KDA states of 814,080 B",
        "4,349,952",
        "1M-token requests",
        "as much as 3,584 cached tokens",
    ):
        assert words in out
    layout = plan(PRO, CacheFormat("fp8"), 8)
    found = capacity(layout, int(288e9 * 0.9), 0, MILLION)
    assert f"{found.tokens:,}" in out and f"{found.requests:.2f}" in out
    assert found.pool_bytes == 259_200_000_000 - weight_bytes(PRO, 8)


def with_pool(latent: str, ranks: int, index: str = "fp8") -> Capacity:
    """Of 51.7 GB a GPU, which 3.04M FP8 tokens take at TP8."""
    layout = plan(PRO, CacheFormat(latent, index), 8, ranks)
    workspace = layout.token_bytes // 24 * MILLION if ranks > 1 else 0
    return Capacity(layout, int(51.7e9), 0, workspace, 0, MILLION)


def test_the_seeds_capacities_follow_from_one_pool_the_layout_and_the_workspace() -> None:
    """Within 5 %: the states, which DCP does not share (28 of a request's 540 rows), make seven and a half of eight."""
    assert with_pool("fp8", 1).requests == pytest.approx(2.9, abs=0.05)
    for latent, ranks, tokens in (("fp8", 1, 3.04e6), ("nvfp4", 1, 4.49e6), ("fp8", 8, 21.8e6), ("nvfp4", 8, 32.1e6)):
        assert with_pool(latent, ranks).tokens == pytest.approx(tokens, rel=0.05)
    assert with_pool("nvfp4", 8, "mxfp4").requests == pytest.approx(36, abs=0.5)
    assert with_pool("fp8", 8).layout.request_rows(MILLION) == 540
    assert with_pool("fp8", 8).tokens / with_pool("fp8", 1).tokens == pytest.approx(7.5, abs=0.05)


def test_context_parallelism_costs_a_workspace_of_one_layers_context() -> None:
    """708 bytes a token in FP8: 0.74 GB for 2^20 tokens."""
    for formats, bytes_each in ((CacheFormat("fp8"), 708), (CacheFormat("nvfp4", "mxfp4"), 420)):
        assert capacity(plan(PRO, formats, 8, 8), int(288e9), 0, MILLION).workspace_bytes == bytes_each * MILLION
        assert capacity(plan(PRO, formats, 8, 1), int(288e9), 0, MILLION).workspace_bytes == 0


def test_prefill_by_tokens_costs_all_of_kv_b(capsys: pytest.CaptureFixture[str]) -> None:
    whole = 24 * 96 * (128 + 128) * 512 * 2
    assert weight_bytes(PRO, 8, TOKENS) - weight_bytes(PRO, 8) == whole * 7 // 8
    assert f"{weight_bytes(PRO, 8, TOKENS):,}" in printed(capsys, prefill="tokens")


def test_a_reserve_is_taken_off_and_a_block_size_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, reserve="10.5GB", block_size="2048")
    assert "10,500,000,000" in out
    assert "24 latent pages of 2048 x 576 B" in out
    assert "23 KDA states" in out, "vLLM lets no group hold more layers"
    assert CacheLayout(PRO, CacheFormat("fp8"), 2048, 8).row_bytes == 34_799_616


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "k4"}, "'k4' is no preset"),
        ({"block_size": "1000"}, "block size 1000 is no power of two; use 512 or 1024"),
        ({"tp": "7"}, "tensor parallel size 7 does not divide the 96 KDA heads"),
        ({"dcp": "3"}, "decode context parallel size 3 does not divide the tensor parallel size 8"),
        ({"gpu_memory": "288XB"}, "--gpu-memory '288XB' is no size"),
        ({"gpu_memory": "141GB"}, "leave nothing of 126900000000 bytes a rank"),
        ({"reserve": "50GB"}, "one request of 1048576 tokens needs 4125"),
        ({"utilization": "1.5"}, "--utilization 1.5"),
        ({"model": "k3", "prefill": "tokens"}, "this model has no indexer; use heads"),
    ],
)
def test_bad_input_is_one_line_with_exit_code_2(
    capsys: pytest.CaptureFixture[str], options: dict[str, str], message: str
) -> None:
    assert main(change(**options)) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.startswith("plan: ") and captured.err.count("\n") == 1 and message in captured.err


def test_it_needs_neither_torch_nor_vllm() -> None:
    code = "import sys, zmrl.serving.plan; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
