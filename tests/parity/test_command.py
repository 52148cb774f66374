"""The parity command as a person runs it: vLLM and Megatron, each in a process of its own."""

import pytest

from zmrl.model.cache_format import CACHE_FORMATS, CacheFormat
from zmrl.parity.__main__ import main

pytestmark = pytest.mark.slow


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
    """A reduced matrix, see tests/rollout/test_formats.py; the default formats have the one below as well."""
    settings = "batch-8,chunk-7,cache-warm,preempted,rescored,adapter-3"
    chosen = ["--latent-format", formats.latent, "--index-format", formats.index]
    assert main(["--model", "nano", "--max-tokens", "8", "--settings", settings, *chosen]) == 0
    out = capfd.readouterr().out
    assert out.count("EQUAL") == 6
    assert "VOID" not in out
    assert "DIFFERENT" not in out


def test_vllm_and_megatron_agree(capfd):
    settings = "batch-8,alone,chunk-7,cache-warm,rescored,adapter-3,temperature-0.7"
    assert main(["--model", "nano", "--max-tokens", "8", "--settings", settings]) == 0
    out = capfd.readouterr().out
    assert out.count("EQUAL") == 7 and "VOID" not in out and "DIFFERENT" not in out
