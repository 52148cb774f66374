"""Compares what the rollout computed with what the trainer computes for the same tokens, bit for bit.

Pure: knows tensors and identities, nothing of verl, vLLM or Megatron. The trainer calls `compare` once a step, before
the update. Equality is equality of bit patterns; a KL estimate proves nothing (FP32 `exp(x)-x-1` is 0.0 for a
one-bit difference). Contract: numerics.md, "Digests and identity" and "Verdicts".
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from zmrl.trainer.verdicts import DIFFERENT, EQUAL, EXIT_CODES, VOID

ABSENT = "absent"
"""The digest of an adapter that a host does not hold; a comparison with it is VOID."""

MAX_NAMED = 20
"""Differing tensors, and samples, that a report names; the rest is counted."""


def adapter_name(version: int) -> str:
    """Name under which the rollout serves adapter `version`: the key of `adapter_digests`."""
    return f"zmrl-v{version}"


@dataclass(frozen=True)
class Identity:
    """What a side held when it computed: two sides with different identities cannot be compared."""

    model_digest: str
    """Digest of the live base parameters."""
    adapter_digest: str
    """Digest of the live adapter of `adapter_version`."""
    adapter_version: int
    """Counts syncs: version s is the adapter that step s samples from."""
    kernel_id: str
    """Hash of kernel sources and flags."""
    function_config: str
    """Everything that is part of the function (KV format, reduction shards, epsilons, ...), as JSON."""

    @classmethod
    def from_host(cls, reported: Mapping[str, Any], version: int) -> Identity:
        """Read what a host reports: `adapter_digest` (trainer), or `adapter_digests` by adapter name (rollout).

        A rollout that does not hold adapter `version` yields the digest ABSENT, which is VOID.
        """
        digests = reported.get("adapter_digests")
        adapter = reported["adapter_digest"] if digests is None else digests.get(adapter_name(version), ABSENT)
        function = json.dumps(reported["function_config"], sort_keys=True)
        return cls(str(reported["model_digest"]), str(adapter), version, str(reported["kernel_id"]), function)

    def disagreements(self, other: Identity) -> list[str]:
        """Sentences, one for each field in which `self` (the rollout's) differs from `other` (the trainer's)."""
        names = [name for name in asdict(self) if name != "function_config"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        ours, theirs = json.loads(self.function_config), json.loads(other.function_config)
        for name in sorted(ours.keys() | theirs.keys()):
            pairs.append((f"function_config {name}", ours.get(name), theirs.get(name)))
        return [f"{name}: rollout {a}, trainer {b}" for name, a, b in pairs if a != b]


@dataclass(frozen=True)
class Sample:
    """One response as both sides saw it. All tensors are [R] with R response tokens."""

    name: str
    """Which sample, in words: data set, problem, number within its group."""
    tokens: Tensor
    """int64: the ids that the trainer scored."""
    mask: Tensor
    """bool: tokens that are trained on."""
    trainer_log_probs: Tensor | None
    """FP32; None if the trainer did not score the sample, which is VOID."""
    rollout_log_probs: Tensor
    """FP32."""
    trainer_digests: Tensor | None
    """int64: digest of the logits row that each token was drawn from; None as above."""
    rollout_digests: Tensor | None
    """int64; None if the server returned none."""
    rollout_tokens: Tensor | None = None
    """int64: the ids that the server returned; None if it returned none, which is VOID."""
    rollout_identity: Identity | None = None
    """What the server held for this sample; None if it did not say, which is VOID."""


@dataclass(frozen=True)
class Difference:
    """The first token whose bits differ."""

    sample: str
    token: int
    """Index among the response's tokens."""
    token_id: int
    rollout: float
    trainer: float
    rollout_bits: str
    trainer_bits: str
    rollout_digest: str
    trainer_digest: str


@dataclass
class StepVerdict:
    """The outcome of one step's comparison."""

    verdict: str
    reasons: list[str]
    """Why it is not EQUAL; empty if it is."""
    samples_expected: int
    samples: int
    """Real samples, without verl's padding."""
    tokens_compared: int = 0
    tokens_different: int = 0
    """Active tokens whose log-probs differ in a bit."""
    rows_different: int = 0
    """Active tokens whose logits rows have different digests."""
    kl_k1: float = 0.0
    """Mean of log p_rollout - log p_trainer, in float64."""
    kl_k3: float = 0.0
    """Mean of exp(-d) - 1 + d with d = log p_rollout - log p_trainer, in float64."""
    max_abs_logprob_diff: float = 0.0
    first: Difference | None = None
    samples_different: list[str] = field(default_factory=list)
    """Names of differing samples, at most MAX_NAMED."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """Parameters that differ, at most MAX_NAMED: name and both digests."""
    rollout: Identity | None = None
    trainer: Identity | None = None

    @property
    def exit_code(self) -> int:
        """0 EQUAL, 3 DIFFERENT, 4 VOID."""
        return EXIT_CODES[self.verdict]

    def step_fields(self) -> dict[str, Any]:
        """The comparison's fields of a line of steps.jsonl."""
        names = (
            "verdict", "samples_expected", "samples", "tokens_compared", "tokens_different", "rows_different", "kl_k1",
            "kl_k3", "max_abs_logprob_diff",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def report(self) -> dict[str, Any]:
        """Everything, for mismatch.json."""
        return asdict(self)

    def summary(self) -> str:
        """One line: what is wrong, or that nothing is."""
        if self.verdict == EQUAL:
            return f"EQUAL {self.tokens_compared}/{self.tokens_compared}"
        return f"{self.verdict}: {'; '.join(self.reasons)}"


def compare(
    samples: Sequence[Sample],
    samples_expected: int,
    rollout: Identity,
    trainer: Identity,
    problems: Iterable[str] = (),
    tensors: Sequence[dict[str, Any]] = (),
) -> StepVerdict:
    """Compare all samples of a step.

    rollout, trainer: the identities of both sides at this step. problems: failures of the rollout, already in words.
    tensors: parameters known to differ (`tensor_differences`). Every count is reported also when the verdict is VOID.
    Raises ValueError where the caller broke the layout (dtypes, shapes), never because of what the sides computed.
    """
    verdict = StepVerdict(EQUAL, [], samples_expected, len(samples), rollout=rollout, trainer=trainer)
    void = [*_identity_problems(samples, rollout, trainer, tensors), *problems]
    verdict.tensors = list(tensors[:MAX_NAMED])
    if len(samples) != samples_expected:
        void.append(f"{len(samples)} samples instead of {samples_expected}: the rollout lost some")

    k1 = k3 = 0.0
    for sample in samples:
        _check_layout(sample)
        problem = _sample_problem(sample)
        if problem:
            void.append(f"{sample.name}: {problem}")
        if sample.trainer_log_probs is None or sample.trainer_digests is None:
            continue
        digests = sample.rollout_digests
        comparable = digests is not None and digests.shape == sample.trainer_digests.shape
        rows = sample.trainer_digests != digests if comparable else torch.zeros_like(sample.mask)
        bits = sample.rollout_log_probs.view(torch.int32) != sample.trainer_log_probs.view(torch.int32)
        bits, rows = bits & sample.mask, rows & sample.mask
        verdict.tokens_compared += int(sample.mask.sum())
        verdict.tokens_different += int(bits.sum())
        verdict.rows_different += int(rows.sum())
        delta = (sample.rollout_log_probs.double() - sample.trainer_log_probs.double())[sample.mask]
        if delta.numel():
            k1 += float(delta.sum())
            k3 += float((torch.expm1(-delta) + delta).sum())
            verdict.max_abs_logprob_diff = _nan_max(verdict.max_abs_logprob_diff, float(delta.abs().max()))
        wrong = bits | rows
        if wrong.any():
            if len(verdict.samples_different) < MAX_NAMED:
                verdict.samples_different.append(sample.name)
            if verdict.first is None:
                verdict.first = _difference(sample, int(wrong.nonzero()[0]))
    if verdict.tokens_compared:
        verdict.kl_k1, verdict.kl_k3 = k1 / verdict.tokens_compared, k3 / verdict.tokens_compared
    else:
        void.append("no token was compared")

    if void:
        verdict.verdict, verdict.reasons = VOID, _shorten(void)
    elif verdict.tokens_different or verdict.rows_different:
        verdict.verdict, verdict.reasons = DIFFERENT, [_describe(verdict)]
    return verdict


def void_before_sampling(
    samples_expected: int,
    rollout: Identity,
    trainer: Identity,
    problems: Iterable[str] = (),
    tensors: Sequence[dict[str, Any]] = (),
) -> StepVerdict | None:
    """The verdict VOID if the two sides do not hold the same thing, so that sampling would be in vain; else None."""
    reasons = [*_identity_problems((), rollout, trainer, tensors), *problems]
    if not reasons:
        return None
    named = list(tensors[:MAX_NAMED])
    return StepVerdict(VOID, _shorten(reasons), samples_expected, 0, tensors=named, rollout=rollout, trainer=trainer)


def tensor_differences(rollout: Mapping[str, int], trainer: Mapping[str, int]) -> list[dict[str, Any]]:
    """Parameters whose digests differ or that one side lacks, in name order: {"name", "rollout", "trainer"}."""
    names = sorted(name for name in rollout.keys() | trainer.keys() if rollout.get(name) != trainer.get(name))
    return [{"name": n, "rollout": _hex64(rollout.get(n)), "trainer": _hex64(trainer.get(n))} for n in names]


def tensors_sha256(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Hex SHA-256 over named CPU tensors in name order: names, dtypes, shapes, bytes. For what was sent and arrived."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _identity_problems(
    samples: Sequence[Sample], rollout: Identity, trainer: Identity, tensors: Sequence[dict[str, Any]]
) -> list[str]:
    problems = rollout.disagreements(trainer)
    sides = (("rollout", rollout), ("trainer", trainer))
    problems += [
        f"the {side} holds no adapter of this version" for side, held in sides if held.adapter_digest == ABSENT
    ]
    counts = Counter(sample.name for sample in samples)
    problems += [f"{name} appears {count} times" for name, count in counts.items() if count > 1]
    if tensors:
        more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
        problems.insert(0, f"parameter {tensors[0]['name']}{more} differs between rollout and trainer")
    for sample in samples:
        if sample.rollout_identity is None:
            problems.append(f"{sample.name}: the server did not say what it held while sampling")
        elif sample.rollout_identity != rollout:
            changed = sample.rollout_identity.disagreements(rollout)
            problems.append(f"{sample.name}: the server held something else while sampling ({'; '.join(changed)})")
    return problems


def _sample_problem(sample: Sample) -> str | None:
    returned = sample.rollout_tokens
    if sample.trainer_log_probs is None or sample.trainer_digests is None:
        return "the trainer did not score it"
    if returned is None:
        return "the server returned no token ids"
    if not torch.equal(returned, sample.tokens):
        return "the trainer scored other token ids than the server returned"
    if sample.rollout_digests is None:
        return "the server returned no row digests"
    if sample.rollout_digests.shape != sample.tokens.shape:
        return f"{sample.rollout_digests.numel()} row digests for {sample.tokens.numel()} tokens"
    for side, values in (("rollout", sample.rollout_log_probs), ("trainer", sample.trainer_log_probs)):
        if not torch.isfinite(values[sample.mask]).all():
            return f"the {side}'s log-prob of an active token is not finite"
    return None


def _check_layout(sample: Sample) -> None:
    shape = sample.tokens.shape
    expected = {
        "mask": torch.bool,
        "trainer_log_probs": torch.float32,
        "rollout_log_probs": torch.float32,
        "trainer_digests": torch.int64,
    }
    for name, dtype in expected.items():
        tensor = getattr(sample, name)
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
            raise ValueError(
                f"{sample.name}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} {list(shape)}"
            )
    for name in ("rollout_digests", "rollout_tokens"):
        tensor = getattr(sample, name)
        if tensor is not None and tensor.dtype != torch.int64:
            raise ValueError(f"{sample.name}: {name} is {tensor.dtype}, expected torch.int64")


def _difference(sample: Sample, token: int) -> Difference:
    assert sample.trainer_log_probs is not None and sample.trainer_digests is not None
    rollout, trainer = float(sample.rollout_log_probs[token]), float(sample.trainer_log_probs[token])
    digests = sample.rollout_digests
    return Difference(
        sample=sample.name,
        token=token,
        token_id=int(sample.tokens[token]),
        rollout=rollout,
        trainer=trainer,
        rollout_bits=_hex32(rollout),
        trainer_bits=_hex32(trainer),
        rollout_digest=_hex64(None if digests is None else int(digests[token])),
        trainer_digest=_hex64(int(sample.trainer_digests[token])),
    )


def _describe(verdict: StepVerdict) -> str:
    first = verdict.first
    assert first is not None
    return (
        f"{verdict.tokens_different} of {verdict.tokens_compared} log-probs and {verdict.rows_different} rows differ, "
        f"first at {first.sample}, token {first.token}: rollout {first.rollout!r} ({first.rollout_bits}), "
        f"trainer {first.trainer!r} ({first.trainer_bits})"
    )


def _shorten(reasons: list[str]) -> list[str]:
    rest = len(reasons) - MAX_NAMED
    return reasons if rest <= 0 else [*reasons[:MAX_NAMED], f"and {rest} more"]


def _nan_max(a: float, b: float) -> float:
    return b if b != b else max(a, b)


def _hex32(value: float) -> str:
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08x}"


def _hex64(value: int | None) -> str:
    return "absent" if value is None else f"0x{value & (2**64 - 1):016x}"
