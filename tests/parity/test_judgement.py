"""The parity command's verdicts, its proofs of conditions, and its bad input. No engine runs here."""

import json

import pytest
import torch

from zmrl.parity.__main__ import judge, main
from zmrl.parity.settings import Observation, default_settings, sample_key

IDENTITY = {"model_digest": "m", "adapter_digests": {"adapter-0": "a"}, "kernel_id": "k", "function_config": {"f": 1}}
TRAINER = {"model_digest": "m", "adapter_digest": "none", "kernel_id": "k", "function_config": {"f": 1}}


def run_and_scores(adapter=None):
    """One sample of three tokens that both sides agree on."""
    bits = torch.tensor([-0.5, -1.25, -3.0]).view(torch.int32).tolist()
    sample = {
        "prompt": 0, "number": 0, "adapter": adapter, "temperature": 1.0, "prompt_ids": [1, 2], "token_ids": [3, 4, 5],
        "log_prob_bits": bits, "digests": [7, 8, 9],
    }  # fmt: skip
    run = {"setting": "batch-8", "samples": [sample], "expected": 1, "identity": IDENTITY, "problems": []}
    identities = {"": TRAINER, "adapter-0": TRAINER | {"adapter_digest": "a"}}
    scored = {"identities": identities, "scores": {sample_key(sample): {"log_prob_bits": bits, "digests": [7, 8, 9]}}}
    return json.loads(json.dumps(run)), json.loads(json.dumps(scored))


@pytest.mark.parametrize("adapter", [None, "adapter-0"])
def test_equal_bits_are_equal(adapter):
    name, verdict = judge(*run_and_scores(adapter))
    assert (name, verdict.verdict, verdict.tokens_compared) == ("batch-8", "EQUAL", 3)


def test_one_bit_of_a_log_prob_is_different():
    run, scored = run_and_scores()
    run["samples"][0]["log_prob_bits"][1] ^= 1
    _, verdict = judge(run, scored)
    assert verdict.verdict == "DIFFERENT" and verdict.tokens_different == 1 and verdict.first.token == 1


def test_one_bit_of_a_logits_row_is_different():
    run, scored = run_and_scores()
    run["samples"][0]["digests"][2] ^= 1
    _, verdict = judge(run, scored)
    assert verdict.verdict == "DIFFERENT" and verdict.rows_different == 1 and verdict.tokens_different == 0


@pytest.mark.parametrize("spoil", ["condition", "sample", "digest", "model", "adapter", "function"])
def test_what_was_not_tested_is_void(spoil):
    run, scored = run_and_scores("adapter-0")
    if spoil == "condition":
        run["problems"] = ["condition not met: no token came from the prefix cache"]
    elif spoil == "sample":
        run["expected"] = 2
    elif spoil == "digest":
        run["samples"][0]["digests"].pop()
    elif spoil == "adapter":
        run["identity"]["adapter_digests"] = {}
    else:
        key = {"model": "model_digest", "function": "function_config"}[spoil]
        run["identity"][key] = {"other": 1}
    assert judge(run, scored)[1].verdict == "VOID"


def observation(**changes):
    """A run in which every setting's condition occurred, but those in `changes`."""
    seen = {
        "prefill_chunks": 500, "max_requests": 64, "max_adapters": 3, "preemptions": 1, "cached_tokens": [0, 0],
        "prompt_lengths": [100, 200], "response_lengths": [8, 8], "isa": "avx2", "threads": 1, "index_topk": 32,
    }  # fmt: skip
    return Observation(**(seen | changes))


@pytest.mark.parametrize(
    "name, good, bad",
    [
        ("batch-8", {}, {"max_requests": 7}),
        ("alone", {"max_requests": 1}, {"max_requests": 2}),
        ("chunk-7", {}, {"prefill_chunks": 10}),
        ("chunk-64", {}, {"prompt_lengths": [64, 64]}),
        ("cache-warm", {"cached_tokens": [48, 0]}, {}),
        ("cache-cold", {}, {"cached_tokens": [48, 0]}),
        ("preempted", {}, {"preemptions": 0}),
        ("adapter-3", {}, {"max_adapters": 2}),
        ("threads-2", {"threads": 2}, {}),
        ("isa-avx2", {}, {"isa": "scalar"}),
        ("rescored", {}, {"index_topk": 300}),
        ("batch-8", {"rows_by_tokens": 40}, {"rows_by_tokens": 0}),
    ],
)
def test_a_setting_proves_its_condition(name, good, bad):
    setting = {s.name: s for s in default_settings(["avx2"])}[name]
    assert setting.failed_proofs(observation(**good)) == []
    spoiled = good | bad if bad else {}
    assert len(setting.failed_proofs(observation(**spoiled))) == 1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "no-such-model"], "no directory and no embedded"),
        (["--model", "k31-pro"], "name one of the presets nano, nano-b, nano-k3, nano-linear"),
        (["--settings", "alone,sideways"], "unknown sideways"),
        (["--rollout-tp", "3"], "use 1, 2, 4 or 8"),
        (["--rollout-tp", "2", "--settings", "threads-2"], "unknown threads-2"),
        (["--rollout-prefill", "tokens"], "use heads, or more tensor ranks"),
        (["--rollout-tp", "2", "--rollout-prefill", "tokens", "--settings", "chunk-1"], "unknown chunk-1"),
        (["--rollout-dcp", "2"], "those of a tensor group, of 1; use 1"),
        (["--max-tokens", "0"], "at least 1"),
        (["--max-tokens", "100000"], "context"),
        (["--prompts", "no-such-file"], "no-such-file"),
        (["--adapter", "no-such-adapter"], "adapter_config.json is missing"),
    ],
)
def test_bad_input_is_one_error_and_exit_code_2(capsys, arguments, message):
    assert main(arguments) == 2
    printed = capsys.readouterr().err.strip().splitlines()
    assert len(printed) == 1 and message in printed[0]
