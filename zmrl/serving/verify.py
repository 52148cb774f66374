"""`python -m zmrl.serving.verify FILE`: scores a transcript again with the trainer's forward pass, line by line.

Exit code 0 only if every line is EQUAL; 3 if one is DIFFERENT, 4 if one is VOID or there is none, 2 for bad input.
A line is VOID if something that a comparison needs is missing or has changed: the checkpoint, the adapter's directory,
the kernels, a digest. Nothing is compared here: `zmrl.parity.rescore` scores, `zmrl.trainer.checker` judges.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zmrl.batch_invariant.formats import FormatError
from zmrl.lora.peft_io import AdapterError, read_adapter
from zmrl.model.cache_format import CacheFormat
from zmrl.model.checkpoint import CheckpointError, read_config, resolve_model
from zmrl.model.config import ConfigError, K3Config
from zmrl.parity.__main__ import SideFailed, judge, run_side
from zmrl.serving.options import DEFAULT_RANK
from zmrl.trainer.verdicts import DIFFERENT, EQUAL, VOID

TEMPERATURES = {"raw_logprobs": 1.0}
"""Temperature of the log-probs, by mode."""
_LISTS = ("prompt_ids", "token_ids", "log_prob_bits")
_INT64, _INT32 = range(-(2**63), 2**63), range(-(2**31), 2**31)


class LineError(ValueError):
    """A line that cannot be scored: VOID, and why."""


class Group(NamedTuple):
    """What one host can score: a checkpoint, the formats of the cache, and the rank and alpha of adapters."""

    model: str
    cache_format: CacheFormat
    rank: int | None
    alpha: float | None


@dataclass(frozen=True)
class Line:
    """A readable line of a transcript."""

    number: int
    content: dict[str, Any]

    @property
    def adapter(self) -> dict[str, Any] | None:
        return self.content["adapter"]

    def group(self) -> Group:
        """Lines of one group can be scored by one host. Lines of the base model take any rank."""
        found, function = self.adapter or {}, self.content["identity"]["function_config"]
        host = self.content["model"], CacheFormat(function["latent_format"], function["index_format"])
        return Group(*host, found.get("rank"), found.get("alpha"))

    def sample(self) -> dict[str, Any]:
        """As `zmrl.parity` writes samples."""
        kept = ("prompt_ids", "token_ids", "log_prob_bits")
        return {
            "prompt": self.content["request"],
            "number": self.content["choice"],
            "adapter": None if self.adapter is None else self.adapter["path"],
            "temperature": TEMPERATURES[self.content["logprobs_mode"]],
            "digests": self.content["digests"] or [],
            **{name: self.content[name] for name in kept},
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zmrl.serving.verify", description=__doc__)
    parser.add_argument("file", metavar="FILE", type=Path, help="a transcript of python -m zmrl.serving --transcript")
    parser.add_argument("--model", help="the checkpoint, if it is not where it was")
    options = parser.parse_args(arguments)
    try:
        model = None if options.model is None else str(resolve_model(options.model).absolute())
        lines = options.file.read_bytes().split(b"\n")
    except (OSError, CheckpointError) as error:
        print(f"verify: {error}", file=sys.stderr)
        return 2
    verdicts = verify([line for line in lines if line], model)
    for number, (verdict, what) in enumerate(verdicts, 1):
        print(f"{verdict:<9} line {number}: {what}")
    found = [verdict for verdict, _ in verdicts]
    print(", ".join(f"{found.count(verdict)} {verdict}" for verdict in (EQUAL, DIFFERENT, VOID)))
    return 3 if DIFFERENT in found else 0 if found and set(found) == {EQUAL} else 4


def verify(lines: Sequence[bytes], model: str | None = None) -> list[tuple[str, str]]:
    """(verdict, what) of each line. model: the checkpoint to use instead of the lines' own."""
    verdicts: dict[int, tuple[str, str]] = {}
    groups: dict[Group, list[Line]] = defaultdict(list)
    checks = _Checks()
    for number, text in enumerate(lines):
        try:
            line = _read(number, text, model)
            checks.check(line)
            groups[line.group()].append(line)
        except LineError as error:
            verdicts[number] = VOID, str(error)
    for base in [key for key in groups if key.rank is None]:  # the base model joins adapters, if there are any
        joined = next((key for key in groups if key[:2] == base[:2] and key.rank is not None), None)
        if joined is not None:
            groups[joined] += groups.pop(base)
    for group, members in groups.items():
        verdicts |= _verify_group(group, members)
    return [verdicts[number] for number in range(len(lines))]


def _verify_group(group: Group, lines: list[Line]) -> dict[int, tuple[str, str]]:
    rank = DEFAULT_RANK if group.rank is None else group.rank
    adapters = sorted({line.adapter["path"] for line in lines if line.adapter is not None})
    job = {
        "model": group.model,
        "rank": rank,
        "alpha": float(rank) if group.alpha is None else group.alpha,
        "adapters": {path: path for path in adapters},
        "latent_format": group.cache_format.latent,
        "index_format": group.cache_format.index,
    }
    with tempfile.TemporaryDirectory(prefix="zmrl-verify-") as scratch:
        names = [str(Path(scratch) / f"{name}.json") for name in ("job", "samples", "scores")]
        Path(names[0]).write_text(json.dumps(job))
        Path(names[1]).write_text(json.dumps([{"samples": [line.sample() for line in lines]}]))
        try:
            run_side("zmrl.parity.rescore", *names, scratch=Path(scratch))
        except SideFailed as error:
            return {line.number: (VOID, f"could not be scored: {error}") for line in lines}
        scored = json.loads(Path(names[2]).read_text())
    return {line.number: _judge(line, scored) for line in lines}


def _judge(line: Line, scored: dict[str, Any]) -> tuple[str, str]:
    adapter, served = line.adapter, line.content["identity"]
    identities = scored["identities"]
    if adapter is None:  # rank and alpha are part of the function of an adapter only
        served = served | {"function_config": _without_lora(served["function_config"])}
        identities = {"": identities[""] | {"function_config": _without_lora(identities[""]["function_config"])}}
    run = {
        "setting": line.content["request"],
        "samples": [line.sample()],
        "expected": 1,
        "identity": served | {"adapter_digests": {} if adapter is None else {adapter["path"]: adapter["digest"]}},
        "problems": [],
    }
    _, verdict = judge(run, scored | {"identities": identities})
    what = "; ".join(verdict.reasons) or f"{verdict.tokens_compared} tokens"
    return verdict.verdict, f"{line.content['request']}, choice {line.content['choice']}: {what}"


def _without_lora(function: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in function.items() if not key.startswith("lora_")}


class _Checks:
    """What would make the scoring of a whole group fail is found line by line before."""

    def __init__(self) -> None:
        self._configs: dict[str, K3Config | str] = {}
        self._adapters: dict[tuple[Any, ...], str | None] = {}

    def check(self, line: Line) -> None:
        """LineError if the checkpoint, the adapter or the tokens cannot be used."""
        config = self._config(line.content["model"])
        try:
            line.group().cache_format.token_bytes(config)
        except (FormatError, KeyError, TypeError) as error:
            raise LineError(f"the formats of the cache that it was served from cannot be used ({error})") from None
        ids = line.content["prompt_ids"] + line.content["token_ids"]
        if len(ids) > config.max_position_embeddings or max(ids) >= config.vocab_size or min(ids) < 0:
            raise LineError("tokens that the model does not have, or too many of them")
        found = line.adapter
        if found is None:
            return
        key = found["path"], found["rank"], found["alpha"], line.content["model"]
        if key not in self._adapters:
            try:
                read_adapter(found["path"], config, found["rank"], found["alpha"])
                self._adapters[key] = None
            except (AdapterError, OSError) as error:
                self._adapters[key] = str(error)
        problem = self._adapters[key]
        if problem is not None:
            raise LineError(problem)

    def _config(self, model: str) -> K3Config:
        if model not in self._configs:
            try:
                self._configs[model] = read_config(model)
            except (CheckpointError, ConfigError, OSError) as error:
                self._configs[model] = f"checkpoint {model}: {error}"
        found = self._configs[model]
        if isinstance(found, str):
            raise LineError(found)
        return found


def _read(number: int, text: bytes, model: str | None) -> Line:
    """LineError says what is missing or has another type."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise LineError("the line is not JSON: it was cut off or damaged") from None
    if not isinstance(content, dict):
        raise LineError("the line holds no object")
    if model is not None:
        content["model"] = model
    for name, kind in (("request", str), ("choice", int), ("model", str), ("identity", dict)):
        if not isinstance(content.get(name), kind):
            raise LineError(f"{name} is missing")
    for name in _LISTS:
        limits = _INT32 if name == "log_prob_bits" else _INT64
        if not _integers(content.get(name), limits) or not content[name]:
            raise LineError(f"{name} is missing, empty or no list of integers")
    if len(content["token_ids"]) != len(content["log_prob_bits"]):
        raise LineError(f"{len(content['log_prob_bits'])} log-probs for {len(content['token_ids'])} tokens")
    if not _integers(content.setdefault("digests", None) or [], _INT64):
        raise LineError("digests is no list of integers")
    if content.get("logprobs_mode") not in TEMPERATURES:
        raise LineError(f"logprobs_mode {content.get('logprobs_mode')!r} is unknown")
    for name in ("model_digest", "kernel_id", "function_config"):
        if name not in content["identity"]:
            raise LineError(f"the server did not say what it held: identity {name} is missing")
    if "adapter" not in content:
        raise LineError("adapter is missing; it is null for the base model")
    if content["adapter"] is not None and not _is_adapter(content["adapter"]):
        raise LineError("adapter lacks path, digest, rank or alpha")
    return Line(number, content)


def _is_adapter(found: Any) -> bool:
    kinds = {"path": str, "digest": str, "rank": int, "alpha": int | float}
    return isinstance(found, dict) and all(isinstance(found.get(name), kind) for name, kind in kinds.items())


def _integers(found: Any, limits: range) -> bool:
    return isinstance(found, list) and all(type(item) is int and item in limits for item in found)


if __name__ == "__main__":
    sys.exit(main())
