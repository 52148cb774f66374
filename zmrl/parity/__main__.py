"""`python -m zmrl.parity --model nano [--adapter DIR] [--prompts FILE] [--settings a,b,...] [--latent-format fp8]
[--rollout-tp 2 [--rollout-dcp 2] [--rollout-prefill tokens]]`.

Prints a table, one row a setting. Exit code 0 only if every setting is EQUAL; 3 if one is DIFFERENT, 4 if one is VOID
or a side fails, 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from zmrl.batch_invariant import native
from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS, FormatError
from zmrl.data.problems import problem_set
from zmrl.data.prompts import prompt_ids
from zmrl.lora.peft_io import AdapterError, read_adapter, write_adapter
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.checkpoint import CheckpointError, read_config, resolve_model, write_random_checkpoint
from zmrl.model.config import PRESETS, ConfigError, K3Config
from zmrl.model.names import LoraSpec
from zmrl.parallel.layout import HEADS, PREFILLS, Layout, LayoutError
from zmrl.parity.settings import default_settings, sample_key, settings_for
from zmrl.trainer.checker import Identity, Sample, StepVerdict, compare
from zmrl.trainer.verdicts import DIFFERENT, EQUAL

ADAPTERS = 3
"""Adapters that the settings use; those not given are drawn at random."""
LARGEST_RANDOM = 100_000_000
"""Parameters of the largest preset that random weights are made for."""


class ParityError(ValueError):
    """Bad input: exit code 2."""


class SideFailed(RuntimeError):
    """A side ended without a result: nothing was compared, exit code 4."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file has no width: rows stay lines
    try:
        with tempfile.TemporaryDirectory(prefix="zmrl-parity-") as scratch:
            job = _job(options, Path(scratch))
            runs, scored = _run_both(job, Path(scratch))
            verdicts = [judge(run, scored) for run in runs]
    except (ParityError, AdapterError, CheckpointError, ConfigError, FormatError, LayoutError) as error:
        print(f"parity: {error}", file=sys.stderr)
        return 2
    except SideFailed as error:
        print(f"parity: VOID: {error}", file=sys.stderr)
        return 4
    _print(console, verdicts)
    found = {verdict.verdict for _, verdict in verdicts}
    return 0 if found == {EQUAL} else 3 if DIFFERENT in found else 4


def judge(run: dict[str, Any], scored: dict[str, Any]) -> tuple[str, StepVerdict]:
    """The verdict over the samples of one setting. run: what the rollout wrote; scored: what the trainer wrote."""
    used = sorted({s["adapter"] for s in run["samples"] if s["adapter"]})
    ours, theirs = run["identity"], scored["identities"]
    rollout = _identity(ours, {name: ours["adapter_digests"].get(name, "absent") for name in used})
    trainer = _identity(theirs[""], {name: theirs[name]["adapter_digest"] for name in used})
    samples = []
    for sample in run["samples"]:
        score = scored["scores"][sample_key(sample)]
        tokens = torch.tensor(sample["token_ids"], dtype=torch.int64)
        samples.append(
            Sample(
                name=f"prompt {sample['prompt']} sample {sample['number']}",
                tokens=tokens,
                mask=torch.ones_like(tokens, dtype=torch.bool),
                trainer_log_probs=_floats(score["log_prob_bits"]),
                rollout_log_probs=_floats(sample["log_prob_bits"]),
                trainer_digests=torch.tensor(score["digests"], dtype=torch.int64),
                rollout_digests=torch.tensor(sample["digests"], dtype=torch.int64),
                rollout_tokens=tokens,
                rollout_identity=rollout,
            )
        )
    return run["setting"], compare(samples, run["expected"], rollout, trainer, run["problems"])


def _floats(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def _identity(host: dict[str, Any], adapters: dict[str, str]) -> Identity:
    return Identity(
        model_digest=host["model_digest"],
        adapter_digest=json.dumps(adapters, sort_keys=True),
        adapter_version=0,
        kernel_id=host["kernel_id"],
        function_config=json.dumps(host["function_config"], sort_keys=True),
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zmrl.parity", description=__doc__)
    parser.add_argument("--model", default="nano", help="a checkpoint, nano (embedded), or a preset: random weights")
    parser.add_argument("--adapter", action="append", default=[], help="PEFT directory; up to three, default: random")
    parser.add_argument("--prompts", help="text file, a prompt a line; default: generated problems")
    parser.add_argument("--settings", help="names, separated by commas; default: all")
    parser.add_argument("--max-tokens", type=int, default=24, help="longest response")
    parser.add_argument("--rank", type=int, default=32, help="rank of random adapters")
    latent, index = DEFAULT_CACHE_FORMAT.latent, DEFAULT_CACHE_FORMAT.index
    parser.add_argument("--latent-format", default=latent, choices=LATENT_FORMATS, help="of both sides' caches")
    parser.add_argument("--index-format", default=index, choices=INDEX_FORMATS, help="likewise, of the index keys")
    parser.add_argument(
        "--rollout-tp", type=int, default=1, help="tensor parallel size of vLLM; the trainer has 1 rank"
    )
    parser.add_argument("--rollout-dcp", type=int, default=1, help="of them, decode context parallel ranks")
    parser.add_argument("--rollout-prefill", choices=PREFILLS, default=HEADS, help="what they share of a prefill")
    return parser.parse_args(arguments)


def _job(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    model = _model(options.model, scratch)
    config = read_config(model)
    cache_format = CacheFormat(options.latent_format, options.index_format)
    cache_format.token_bytes(config)
    tensor, context = options.rollout_tp, options.rollout_dcp
    Layout(tensor, tensor, context, prefill=options.rollout_prefill).check(config)
    known = {s.name: s for s in settings_for(tensor, native.available_isas(), options.rollout_prefill)}
    settings = options.settings.split(",") if options.settings else list(known)
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ParityError(f"--settings: unknown {', '.join(unknown)}; there are {', '.join(known)}")
    if options.max_tokens < 1:
        raise ParityError("--max-tokens must be at least 1")
    prompts = _prompts(options.prompts)
    response = max(options.max_tokens, *(known[name].least_tokens for name in settings))
    longest = max(map(len, prompts)) + response
    if longest > config.max_position_embeddings:
        raise ParityError(
            f"--prompts: a prompt and a response of {response} take {longest} tokens, the model's context is "
            f"{config.max_position_embeddings}; shorten the prompt or --max-tokens, or leave settings out"
        )
    given = [read_adapter(path, config) for path in options.adapter]
    if len(given) > ADAPTERS:
        raise ParityError(f"--adapter: at most {ADAPTERS} adapters are used")
    kinds = {(adapter.rank, adapter.alpha) for adapter in given}
    if len(kinds) > 1:
        raise ParityError(f"--adapter: one rank and one alpha serve all adapters, these have {sorted(kinds)}")
    rank, alpha = kinds.pop() if kinds else (options.rank, float(options.rank))
    adapters = {f"adapter-{i}": str(Path(path).absolute()) for i, path in enumerate(options.adapter)}
    for i in range(len(adapters), ADAPTERS):
        path = scratch / f"adapter-{i}"
        write_adapter(path, _random_adapter(config, rank, alpha, seed=i), config, rank, alpha, str(model))
        adapters[f"adapter-{i}"] = str(path)
    return {
        "model": str(model),
        "settings": settings,
        "prompts": prompts,
        "max_tokens": options.max_tokens,
        "max_model_len": longest + 1,  # re-scoring in vLLM samples one token more
        "adapters": adapters,
        "rank": rank,
        "alpha": alpha,
        "latent_format": options.latent_format,
        "index_format": options.index_format,
        "tensor_parallel_size": tensor,
        "decode_context_parallel_size": context,
        "prefill": options.rollout_prefill,
    }


def _model(name: str, scratch: Path) -> Path:
    """A checkpoint directory, an embedded checkpoint, or random weights of a small preset, written to `scratch`."""
    small = [preset for preset, config in PRESETS.items() if config.total_parameters() < LARGEST_RANDOM]
    try:
        return resolve_model(name)
    except CheckpointError as error:
        if name not in small:
            raise ParityError(f"{error}, or name one of the presets {', '.join(small)}") from None
    write_random_checkpoint(name, scratch / name)
    return scratch / name


def _prompts(path: str | None) -> list[list[int]]:
    """Token ids. Default: 1 to 8 generated problems each, long enough for chunks, blocks and selection to matter."""
    if path is not None:
        try:
            lines = [line for line in Path(path).read_text().splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ParityError(f"--prompts: {error}") from None
        if not lines:
            raise ParityError(f"--prompts: {path} holds no prompt")
        return [prompt_ids(line) for line in lines]
    questions = iter(p.question for p in problem_set("val", 36, seed="parity"))
    return [prompt_ids(" ".join(next(questions) for _ in range(count))) for count in range(1, 9)]


def _random_adapter(config: K3Config, rank: int, alpha: float, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: (torch.randn(spec.shape, generator=generator) * 0.05).bfloat16()
        for spec in LoraSpec(rank, int(alpha)).tensor_specs(config)
    }


def _run_both(job: dict[str, Any], scratch: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Each side in a process of its own; a side that fails ends the command with its output."""
    names = {name: str(scratch / f"{name}.json") for name in ("job", "rollout", "scores")}
    Path(names["job"]).write_text(json.dumps(job))
    print(f"parity: sampling {len(job['settings'])} settings with vLLM", file=sys.stderr, flush=True)
    run_side("zmrl.parity.rollout", names["job"], names["rollout"], scratch=scratch)
    print("parity: scoring every sample again with Megatron", file=sys.stderr, flush=True)
    run_side("zmrl.parity.rescore", names["job"], names["rollout"], names["scores"], scratch=scratch)
    return json.loads(Path(names["rollout"]).read_text()), json.loads(Path(names["scores"]).read_text())


def run_side(module: str, *arguments: str, scratch: Path) -> None:
    log = scratch / f"{module}.log"
    with open(log, "w") as file:
        result = subprocess.run([sys.executable, "-m", module, *arguments], stdout=file, stderr=subprocess.STDOUT)
    if result.returncode:
        tail = "\n".join(log.read_text().splitlines()[-40:])
        raise SideFailed(f"{module} ended with exit code {result.returncode}:\n{tail}")


def _print(console: Console, verdicts: list[tuple[str, StepVerdict]]) -> None:
    table = Table("verdict", "setting", "what", "samples", "tokens", "differ", "rows differ", "max |d|")
    conditions = {setting.name: setting.what for setting in default_settings(native.available_isas())}
    for name, v in verdicts:
        counts = (v.samples, v.tokens_compared, v.tokens_different, v.rows_different, v.max_abs_logprob_diff)
        table.add_row(v.verdict, name, conditions[name], *map(str, counts))
    console.print(table)
    for name, v in verdicts:
        for reason in v.reasons:
            console.print(f"{name}: {reason}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
