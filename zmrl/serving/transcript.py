"""The transcript: what was served, with the evidence to compute it again. One JSON object a line, one line a sequence.

A line holds prompt and answer as token ids, the bits of the answer's log-probs and their mode, the digests of the
logits rows, and what the server held: checkpoint, adapter, kernels, function. It is on disk before the client has the
end of its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import struct
import time
from collections.abc import Awaitable, Callable
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.exceptions import GenerationError
from vllm.logger import init_logger
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from zmrl.rollout.digests import DigestTaker

logger = init_logger("vllm.zmrl.transcript")

LOGPROBS_MODE = "raw_logprobs"
"""Log-probs at temperature 1, before truncation, penalties and grammars."""


class Transcript:
    """The file, and what its lines have in common."""

    def __init__(
        self,
        path: Path,
        model: Path,
        identity: dict[str, Any],
        take_digests: Callable[[list[str]], Awaitable[dict[str, list[int]]]],
    ) -> None:
        """identity: `zmrl_identity` of the worker. OSError if the file cannot be written."""
        self.path, self.model = path, str(model.absolute())
        self.identity = {key: identity[key] for key in ("model_digest", "kernel_id", "function_config", "isa")}
        self.digests = DigestTaker(take_digests)
        self.adapters: dict[int, dict[str, Any]] = {}
        """What a line says of an adapter, by its id."""
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._torn = False

    def begin(self, request_id: str, params: SamplingParams, lora: LoRARequest | None) -> tuple[Record, SamplingParams]:
        """A record, and the parameters to sample with: tagged, and with the log-probs that the record needs."""
        tag = f"transcript-{secrets.token_hex(16)}"
        params = copy(params)
        params.extra_args = (params.extra_args or {}) | {"zmrl_tag": tag}
        if params.logprobs is None:
            params.logprobs = 0
        adapter = None if lora is None else self.adapters[lora.lora_int_id]
        return Record(self, request_id, params, tag, adapter), params

    def append(self, line: dict[str, Any]) -> None:
        """One write, so that lines of several servers in a file stay whole. GenerationError if the disk is full."""
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if self._torn:
            data = b"\n" + data
        try:
            self._torn = os.write(self._file, data) < len(data)
        except OSError as error:
            raise GenerationError(f"the transcript cannot be written ({error.strerror})") from None
        if self._torn:
            raise GenerationError("the transcript cannot be written: the disk is full")

    def close(self) -> None:
        os.close(self._file)


@dataclass
class _Answer:
    """One sequence as far as it was served."""

    tokens: list[int] = field(default_factory=list)
    bits: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Record:
    """One request on its way into the transcript."""

    def __init__(
        self, transcript: Transcript, request_id: str, params: SamplingParams, tag: str, adapter: dict[str, Any] | None
    ) -> None:
        self.transcript, self.request_id, self.params, self.adapter = transcript, request_id, params, adapter
        self.tags = [tag] if params.n == 1 else [f"{tag}/{i}" for i in range(params.n)]
        self.prompt: list[int] = []
        self.answers: dict[int, _Answer] = {}
        self.written = False

    def add(self, output: RequestOutput) -> None:
        """Some more of the answer; streamed outputs hold only what is new."""
        self.prompt = list(output.prompt_token_ids or self.prompt)
        for part in output.outputs:
            answer = self.answers.setdefault(part.index, _Answer())
            answer.tokens += part.token_ids
            answer.bits += _bits(part)
            answer.finish_reason = part.finish_reason or answer.finish_reason

    async def write(self) -> None:
        """Appends a line for each sequence."""
        self.written = True
        found = await asyncio.gather(*(self.transcript.digests.take(tag) for tag in self.tags))
        for index, answer in sorted(self.answers.items()):
            rows = found[index]
            self.transcript.append(
                {
                    "request": self.request_id,
                    "choice": index,
                    "time": round(time.time(), 3),
                    "model": self.transcript.model,
                    "adapter": self.adapter,
                    "prompt_ids": self.prompt,
                    "token_ids": answer.tokens,
                    "log_prob_bits": answer.bits,
                    "logprobs_mode": LOGPROBS_MODE,
                    # The engine may be a token ahead of a stop string.
                    "digests": None if rows is None else rows[: len(answer.tokens)],
                    "finish_reason": answer.finish_reason,
                    "seed": self.params.seed,
                    "temperature": self.params.temperature,
                    "identity": self.transcript.identity,
                }
            )

    async def abandon(self) -> None:
        """The request ended early. What a client may have been sent is recorded; the rest of the digests forgotten."""
        for answer in self.answers.values():
            answer.finish_reason = answer.finish_reason or "abort"
        try:
            await self.write()
        except (GenerationError, EngineDeadError) as error:
            logger.error("request %s is not in the transcript: %s", self.request_id, error)


def _bits(part: CompletionOutput) -> list[int]:
    """Bit patterns of the log-probs of the sampled tokens, as signed 32-bit integers."""
    rows = part.logprobs
    assert rows is not None and len(rows) == len(part.token_ids)
    values = [row[token].logprob for row, token in zip(rows, part.token_ids, strict=True)]
    return list(struct.unpack(f"<{len(values)}i", struct.pack(f"<{len(values)}f", *values)))
