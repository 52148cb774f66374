"""The parity command as a person runs it: vLLM and Megatron, each in a process of its own."""

import pytest

from zmrl.parity.__main__ import main

pytestmark = pytest.mark.slow


def test_vllm_and_megatron_agree(capfd):
    settings = "batch-8,alone,chunk-7,cache-warm,rescored,adapter-3,temperature-0.7"
    assert main(["--model", "nano", "--max-tokens", "8", "--settings", settings]) == 0
    out = capfd.readouterr().out
    assert out.count("EQUAL") == 7 and "VOID" not in out and "DIFFERENT" not in out
