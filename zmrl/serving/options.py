"""The command line of `python -m zmrl.serving`, checked before anything heavy starts."""

from __future__ import annotations

import argparse
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS, FormatError
from zmrl.lora.peft_io import read_adapter
from zmrl.model.cache_format import DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.cache_layout import CacheLayoutError, plan
from zmrl.model.checkpoint import read_config, resolve_model
from zmrl.parallel.layout import HEADS, PREFILLS, Layout, LayoutError
from zmrl.rollout.engine import OWN_GROUP, engine_args

DEFAULT_RANK = 32
MAX_LOGPROBS = 20
"""Top log-probs a token; OpenAI's own limit."""


class OptionError(ValueError):
    """A command line that cannot be served: the message names the option and the remedy."""


@dataclass(frozen=True)
class Limits:
    """What a client may ask for; more is a 4xx answer."""

    max_body_bytes: int = 4 << 20
    max_n: int = 128
    """Sequences of one request: `n` times its prompts."""
    max_tokens: int | None = None
    """Longest answer; None: the rest of the context."""
    max_concurrent_requests: int = 256
    body_seconds: float = 30.0
    """How long a request's body may take to arrive."""


@dataclass(frozen=True)
class Options:
    """A checked command line."""

    model: Path
    name: str
    """Under which the model is served."""
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    loras: dict[str, Path] = field(default_factory=dict)
    """Adapters loaded at the start, by name."""
    lora_root: Path | None = None
    """Resolved; adapters below it can be loaded at run time."""
    lora_rank: int | None = None
    """None: the server has no adapters."""
    lora_alpha: float | None = None
    max_loras: int = 4
    max_model_len: int | None = None
    max_num_seqs: int = 64
    kv_cache_bytes: int = 512 << 20
    cache_format: CacheFormat = DEFAULT_CACHE_FORMAT
    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    prefill: str = HEADS
    retention_interval: int | None = None
    """Which KDA states the prefix cache keeps, see docs/cache.md; None: at every boundary that a step ends with."""
    limits: Limits = Limits()
    transcript: Path | None = None
    tools: bool = False
    drain_seconds: float = 60.0

    def engine_args(self) -> dict[str, Any]:
        """Engine arguments; what is not said is `zmrl.rollout.engine.engine_args`'."""
        overrides: dict[str, Any] = {
            "logprobs_mode": "raw_logprobs",  # temperature 1, whatever truncation, penalties and grammar do
            "max_logprobs": MAX_LOGPROBS,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(2048, self.max_num_seqs),
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "tensor_parallel_size": self.tensor_parallel_size,
            "decode_context_parallel_size": self.decode_context_parallel_size,
            "prefix_cache_retention_interval": self.retention_interval,
        }
        if self.limits.max_tokens is not None:  # requests that name no max_tokens
            overrides["override_generation_config"] = {"max_new_tokens": self.limits.max_tokens}
        if self.lora_rank is not None:
            # One more than can be named at a time: an adapter that is replaced serves its running requests to the end.
            overrides |= {"max_loras": self.max_loras, "max_cpu_loras": self.max_loras + 1}
        args = engine_args(
            self.model,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
            cache_format=self.cache_format,
            prefill=self.prefill,
            **overrides,
        )
        return args | {"additional_config": args.get("additional_config", {}) | {OWN_GROUP: True}}


def parse(arguments: Sequence[str] | None = None) -> Options:
    """OptionError, CheckpointError, ConfigError or AdapterError says what is wrong; argparse itself exits with 2."""
    given = _parser().parse_args(arguments)
    _check_numbers(given)
    model = resolve_model(given.model)
    loras = dict(_name_and_path(text) for text in given.lora)
    if len(loras) < len(given.lora):
        raise OptionError("--lora: a name is given twice; every adapter needs a name of its own")
    name = given.served_model_name or given.model
    if name in loras:
        raise OptionError(f"--lora: {name!r} is the name of the model; call the adapter otherwise")
    if len(loras) > given.max_loras:
        raise OptionError(f"--lora: {len(loras)} adapters, but --max-loras is {given.max_loras}; raise it")
    _check_host(given.host, given.api_key, given.insecure)
    config = read_config(model)
    context, cache_format = config.max_position_embeddings, CacheFormat(given.latent_format, given.index_format)
    tensor, context_ranks = given.tensor_parallel_size, given.decode_context_parallel_size
    try:
        Layout(tensor, tensor, context_ranks, prefill=given.prefill).check(config)
        layout = plan(config, cache_format, tensor, context_ranks)
        layout.check_retention(given.prefix_cache_retention_interval)
        layout.check_pool(given.kv_cache_bytes, given.max_model_len or context)
    except (FormatError, CacheLayoutError, LayoutError) as error:
        raise OptionError(str(error)) from None
    if (given.max_model_len or 0) > context:
        raise OptionError(f"--max-model-len {given.max_model_len}: the model's context is {context}")
    root = None if given.lora_root is None else Path(os.path.realpath(given.lora_root))
    if root is not None and not root.is_dir():
        raise OptionError(f"--lora-root: {given.lora_root} is no directory")
    if given.transcript is not None:
        _check_transcript(given.transcript)
    rank, alpha = _rank_and_alpha(given, model, loras, root)
    return Options(
        model=model,
        name=name,
        host=given.host,
        port=given.port,
        api_key=given.api_key,
        loras=loras,
        lora_root=root,
        lora_rank=rank,
        lora_alpha=alpha,
        max_loras=given.max_loras,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        kv_cache_bytes=given.kv_cache_bytes,
        cache_format=cache_format,
        tensor_parallel_size=tensor,
        decode_context_parallel_size=context_ranks,
        prefill=given.prefill,
        retention_interval=given.prefix_cache_retention_interval,
        limits=Limits(given.max_body_bytes, given.max_n, given.max_tokens, given.max_concurrent_requests),
        transcript=given.transcript,
        tools=given.enable_auto_tool_choice,
        drain_seconds=given.drain_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = argparse.ArgumentParser(prog="python -m zmrl.serving", description="Serve a model as rollouts are sampled")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint directory, or nano: the embedded one")
    add("--host", default="127.0.0.1", help="any other than loopback needs --api-key or --insecure")
    add("--port", type=int, default=8000, help="0: a free one, which is printed")
    add("--api-key", help="clients must send it; VLLM_API_KEY in the environment does the same")
    add("--insecure", action="store_true", help="serve on another address than loopback without a key")
    add("--served-model-name", help="default: MODEL as given")
    add("--lora", action="append", default=[], metavar="NAME=DIR", help="an adapter (PEFT directory); repeatable")
    add("--lora-root", metavar="DIR", help="adapters below it can be loaded at run time")
    add("--lora-rank", type=int, help=f"rank of every adapter; default: that of --lora, else {DEFAULT_RANK}")
    add("--lora-alpha", type=float, help="alpha of every adapter; default: that of --lora, else the rank")
    add("--max-loras", type=int, default=4, help="adapters loaded, and used in one batch, at a time")
    add("--max-model-len", type=int, help="tokens of prompt and answer; default: the model's context")
    add("--max-num-seqs", type=int, default=64, help="sequences computed at a time")
    add("--kv-cache-bytes", type=int, default=512 << 20, help="memory for latents, index keys and KDA states")
    latent, index = DEFAULT_CACHE_FORMAT.latent, DEFAULT_CACHE_FORMAT.index
    add("--latent-format", choices=LATENT_FORMATS, default=latent, help=f"of cached latents; default: {latent}")
    add("--index-format", choices=INDEX_FORMATS, default=index, help=f"of cached index keys; default: {index}")
    add("--tensor-parallel-size", type=int, default=1, help="ranks that share the model: heads, widths, experts")
    add("--decode-context-parallel-size", type=int, default=1, help="of them, ranks that share a request's tokens")
    add("--prefill", choices=PREFILLS, default=HEADS, help=f"what the ranks share of a prefill; default: {HEADS}")
    add(
        "--prefix-cache-retention-interval",
        type=int,
        metavar="TOKENS",
        help="KDA states kept for prefixes: one every so many tokens; 0: of each prompt the last; "
        "default: at every block boundary that a step ends with",
    )
    add("--max-body-bytes", type=int, default=limits.max_body_bytes, help="of a request")
    add("--max-n", type=int, default=limits.max_n, help="sequences of a request: n times its prompts")
    add("--max-tokens", type=int, help="of an answer; default: the rest of the context")
    add("--max-concurrent-requests", type=int, default=limits.max_concurrent_requests, help="more are answered by 429")
    add(
        "--transcript",
        type=Path,
        metavar="FILE",
        help="append what is served; `python -m zmrl.serving.verify` reads it",
    )
    add("--enable-auto-tool-choice", action="store_true", help="parse Kimi K3's tool calls and reasoning")
    add("--drain-seconds", type=float, default=60.0, help="how long running requests may take after SIGTERM")
    return parser


def _name_and_path(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise OptionError(f"--lora {text}: give NAME=DIR")
    return name, Path(os.path.realpath(path))


def _check_host(host: str, api_key: str | None, insecure: bool) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and not api_key and not os.environ.get("VLLM_API_KEY") and not insecure:
        raise OptionError(f"--host {host} can be reached by others: give --api-key KEY, or say --insecure")


def _check_numbers(given: argparse.Namespace) -> None:
    names = (
        "max_loras max_model_len max_num_seqs kv_cache_bytes max_body_bytes max_n max_tokens max_concurrent_requests"
    ).split()
    for name in names:
        value = getattr(given, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if not 0 <= given.port < 65536:
        raise OptionError(f"--port {given.port}: must be between 0 and 65535")
    if not given.drain_seconds >= 0:
        raise OptionError(f"--drain-seconds {given.drain_seconds}: must not be negative")


def _check_transcript(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as error:
        raise OptionError(f"--transcript {path} cannot be written: {error.strerror}") from None


def _rank_and_alpha(
    given: argparse.Namespace, model: Path, loras: dict[str, Path], root: Path | None
) -> tuple[int | None, float | None]:
    """One engine serves one rank and one alpha. Reads the adapters of --lora, so that a bad one is told at once."""
    if not loras and root is None:
        if given.lora_rank is not None or given.lora_alpha is not None:
            raise OptionError("--lora-rank and --lora-alpha need adapters: give --lora NAME=DIR or --lora-root DIR")
        return None, None
    config = read_config(model)
    rank, alpha = given.lora_rank, given.lora_alpha
    for name, path in loras.items():
        adapter = read_adapter(path, config)
        rank, alpha = adapter.rank if rank is None else rank, adapter.alpha if alpha is None else alpha
        if (adapter.rank, adapter.alpha) != (rank, alpha):
            raise OptionError(
                f"--lora {name}: rank {adapter.rank} and alpha {adapter.alpha:g}, but this server's adapters have rank "
                f"{rank} and alpha {alpha:g}; one rank and one alpha serve all adapters"
            )
    rank = DEFAULT_RANK if rank is None else rank
    if rank < 1 or rank % 16:
        raise OptionError(f"--lora-rank {rank}: adapters need a rank that is a multiple of 16")
    return rank, float(rank) if alpha is None else alpha
