"""Verdicts: equality of bits, and only over what can be compared. One flipped bit anywhere is seen."""

import dataclasses
import math

import pytest
import torch

from zmrl.trainer.checker import (
    ABSENT,
    Identity,
    Sample,
    compare,
    tensor_differences,
    tensors_sha256,
)
from zmrl.trainer.verdicts import DIFFERENT, EQUAL, VOID

IDENTITY = Identity("base", "adapter", 3, "kernels", '{"index_topk": 32}')


def make_sample(name: str = "", length: int = 5, seed: int = 0, **changes) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    log_probs = -(torch.rand(length, generator=generator) * 0.7 + 0.25)  # any flipped bit leaves these finite
    digests = torch.randint(-(2**63), 2**63 - 1, (length,), generator=generator)
    tokens = torch.randint(0, 256, (length,), generator=generator)
    fields = {
        "name": name or f"builtin problem 0 sample {seed}",
        "tokens": tokens,
        "mask": torch.ones(length, dtype=torch.bool),
        "trainer_log_probs": log_probs.clone(),
        "rollout_log_probs": log_probs.clone(),
        "trainer_digests": digests.clone(),
        "rollout_digests": digests.clone(),
        "rollout_tokens": tokens.clone(),
        "rollout_identity": IDENTITY,
    }
    return Sample(**(fields | changes))


def flip(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    out = tensor.clone()
    view = out.view(torch.int32 if tensor.element_size() == 4 else torch.int64)
    view[element] ^= 1 << bit
    return out


def judge(samples, expected=None, rollout=IDENTITY, trainer=IDENTITY, **more):
    return compare(samples, len(samples) if expected is None else expected, rollout, trainer, **more)


def test_same_bits_and_identities_are_equal():
    verdict = judge([make_sample(seed=i, length=3 + i) for i in range(4)])
    assert (verdict.verdict, verdict.exit_code, verdict.reasons) == (EQUAL, 0, [])
    assert verdict.tokens_compared == 3 + 4 + 5 + 6
    assert (verdict.kl_k1, verdict.kl_k3, verdict.max_abs_logprob_diff) == (0.0, 0.0, 0.0)
    assert verdict.summary() == "EQUAL 18/18"


@pytest.mark.parametrize("bit", range(31))
@pytest.mark.parametrize("token", [0, 4])
def test_one_flipped_bit_of_one_log_prob_is_different(bit, token):
    sample = make_sample()
    flipped = flip(sample.rollout_log_probs, token, bit)
    verdict = judge([make_sample(seed=1), dataclasses.replace(sample, rollout_log_probs=flipped)])
    assert (verdict.verdict, verdict.exit_code, verdict.tokens_different) == (DIFFERENT, 3, 1)
    assert (verdict.first.sample, verdict.first.token) == (sample.name, token)
    assert verdict.first.rollout_bits != verdict.first.trainer_bits
    assert verdict.first.trainer == float(sample.trainer_log_probs[token])


def test_one_bit_difference_has_a_nonzero_kl_in_float64():
    sample = make_sample()
    verdict = judge([dataclasses.replace(sample, rollout_log_probs=flip(sample.rollout_log_probs, 2, 0))])
    assert 0 < verdict.max_abs_logprob_diff < 1e-6
    assert verdict.kl_k1 != 0
    assert 0 < verdict.kl_k3 < 1e-12


def test_negative_zero_is_not_zero():
    zero = torch.zeros(2)
    verdict = judge([make_sample(length=2, trainer_log_probs=zero, rollout_log_probs=-zero)])
    assert (verdict.verdict, verdict.tokens_different, verdict.kl_k3) == (DIFFERENT, 2, 0.0)


@pytest.mark.parametrize("bit", [0, 31, 62])
def test_one_flipped_bit_of_one_row_digest_is_different(bit):
    sample = make_sample()
    verdict = judge([dataclasses.replace(sample, rollout_digests=flip(sample.rollout_digests, 1, bit))])
    assert (verdict.verdict, verdict.tokens_different, verdict.rows_different) == (DIFFERENT, 0, 1)
    assert verdict.first.rollout_digest != verdict.first.trainer_digest


def test_masked_tokens_are_not_compared():
    sample = make_sample(mask=torch.tensor([True, False, True, True, True]))
    bad = sample.rollout_log_probs.clone()
    bad[1] = math.nan
    verdict = judge([dataclasses.replace(sample, rollout_log_probs=bad)])
    assert (verdict.verdict, verdict.tokens_compared) == (EQUAL, 4)


def test_equal_nans_at_active_tokens_are_void():
    bad = make_sample().trainer_log_probs.clone()
    bad[3] = math.nan
    verdict = judge([make_sample(trainer_log_probs=bad, rollout_log_probs=bad.clone())])
    assert (verdict.verdict, verdict.exit_code, verdict.tokens_different) == (VOID, 4, 0)
    assert "not finite" in verdict.reasons[0]
    assert math.isnan(verdict.max_abs_logprob_diff)


def test_missing_sample_is_void_although_the_rest_is_equal():
    verdict = judge([make_sample(seed=i) for i in range(3)], expected=4)
    assert (verdict.verdict, verdict.samples, verdict.samples_expected) == (VOID, 3, 4)
    assert "3 samples instead of 4" in verdict.summary()


def test_more_samples_than_expected_are_void():
    assert judge([make_sample(seed=i) for i in range(3)], expected=2).verdict == VOID


@pytest.mark.parametrize("samples", [[], [make_sample(length=0)], [make_sample(mask=torch.zeros(5, dtype=torch.bool))]])
def test_no_active_token_is_void(samples):
    verdict = judge(samples)
    assert (verdict.verdict, verdict.tokens_compared, verdict.kl_k3) == (VOID, 0, 0.0)
    assert "no token was compared" in verdict.reasons


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Identity)])
def test_any_differing_identity_is_void_and_named(name):
    changed = {"adapter_version": 4, "function_config": '{"index_topk": 64}'}.get(name, "other")
    other = dataclasses.replace(IDENTITY, **{name: changed})
    verdict = judge([make_sample(rollout_identity=other)], rollout=other)
    assert verdict.verdict == VOID
    assert any(reason.startswith(name) for reason in verdict.reasons)


def test_void_wins_over_different():
    sample = make_sample()
    flipped = dataclasses.replace(sample, rollout_log_probs=flip(sample.rollout_log_probs, 0, 3))
    verdict = judge([flipped], rollout=dataclasses.replace(IDENTITY, kernel_id="older"))
    assert (verdict.verdict, verdict.tokens_different) == (VOID, 1)


def test_a_server_that_changed_while_sampling_is_void():
    stale = dataclasses.replace(IDENTITY, adapter_digest="older")
    verdict = judge([make_sample(), make_sample(seed=1, rollout_identity=stale)])
    assert verdict.verdict == VOID
    assert "while sampling" in verdict.reasons[0]


def test_other_token_ids_are_void():
    sample = make_sample()
    assert judge([dataclasses.replace(sample, rollout_tokens=sample.tokens[:-1])]).verdict == VOID
    assert judge([dataclasses.replace(sample, rollout_tokens=sample.tokens + 1)]).verdict == VOID


def test_absent_or_short_digests_are_void():
    assert judge([make_sample(rollout_digests=None)]).verdict == VOID
    assert judge([make_sample(rollout_digests=torch.zeros(4, dtype=torch.int64))]).verdict == VOID


def test_failures_of_the_rollout_are_reported():
    verdict = judge([make_sample()], expected=2, problems=["builtin problem 7: server died"])
    assert verdict.verdict == VOID
    assert "builtin problem 7: server died" in verdict.reasons


def test_differing_parameter_is_void_and_named():
    tensors = tensor_differences({"a": 1, "b": 2, "c": -3}, {"a": 1, "b": 5, "d": 4})
    assert [t["name"] for t in tensors] == ["b", "c", "d"]
    assert tensors[0] == {"name": "b", "rollout": "0x0000000000000002", "trainer": "0x0000000000000005"}
    assert (tensors[1]["rollout"], tensors[1]["trainer"]) == ("0xfffffffffffffffd", "absent")
    verdict = judge([make_sample()], tensors=tensors)
    assert verdict.verdict == VOID
    assert "parameter b and 2 more" in verdict.reasons[0]
    assert verdict.report()["tensors"][0]["name"] == "b"


def test_wrong_dtype_is_an_error_of_the_caller():
    with pytest.raises(ValueError, match="trainer_log_probs"):
        judge([make_sample(trainer_log_probs=torch.zeros(5, dtype=torch.bfloat16))])


def test_host_reports_become_identities():
    common = {"model_digest": "base", "kernel_id": "kernels", "function_config": {"index_topk": 32}}
    rollout = Identity.from_host(common | {"adapter_digests": {"zmrl-v3": "adapter"}}, 3)
    trainer = Identity.from_host(common | {"adapter_digest": "adapter"}, 3)
    assert rollout == trainer == IDENTITY
    assert Identity.from_host(common | {"adapter_digests": {"zmrl-v2": "adapter"}}, 3).adapter_digest == "absent"


def test_sha256_of_tensors_sees_names_shapes_dtypes_and_bits_but_not_order():
    a, b = torch.arange(6.0), torch.ones(2, 3, dtype=torch.bfloat16)
    digest = tensors_sha256([("a", a), ("b", b)])
    assert tensors_sha256([("b", b), ("a", a)]) == digest
    others = [
        [("a", a.view(2, 3)), ("b", b)],
        [("b", a), ("a", b)],
        [("a", a), ("b", b.view(torch.int16))],
        [("a", flip(a, 0, 0)), ("b", b)],
    ]
    assert all(tensors_sha256(other) != digest for other in others)
    assert tensors_sha256([("a", torch.arange(12.0)[::2])]) == tensors_sha256([("a", torch.arange(0.0, 12.0, 2))])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rollout_identity": None}, "did not say what it held"),
        ({"rollout_tokens": None}, "returned no token ids"),
        ({"trainer_log_probs": None, "trainer_digests": None}, "the trainer did not score it"),
    ],
)
def test_missing_evidence_is_void(change, words):
    verdict = judge([make_sample(**change)])
    assert verdict.verdict == VOID and words in verdict.reasons[0]


def test_a_sample_that_stands_in_for_a_lost_one_is_void():
    verdict = judge([make_sample(), make_sample()])
    assert verdict.verdict == VOID and "appears 2 times" in verdict.reasons[0]


def test_an_adapter_that_neither_side_holds_is_void():
    absent = dataclasses.replace(IDENTITY, adapter_digest=ABSENT)
    verdict = judge([make_sample(rollout_identity=absent)], rollout=absent, trainer=absent)
    assert verdict.verdict == VOID and "holds no adapter" in verdict.reasons[0]
