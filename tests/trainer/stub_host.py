"""A host with the interface of `zmrl.trainer.megatron.host.MegatronHost` and a model of a few numbers."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zmrl.parallel.group import ONE_RANK
from zmrl.parallel.ranks import SINGLE
from zmrl.trainer.checker import tensors_sha256
from zmrl.trainer.megatron.parallel import TrainerRanks

VOCABULARY = 288


@dataclass(frozen=True)
class OptimizerSettings:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip_grad: float
    warmup_steps: int
    total_steps: int


@dataclass(frozen=True)
class ScoredSample:
    log_probs: Tensor
    digests: Tensor
    entropy: Tensor


class StubModel:
    """Next-token logits are a row of a table, by the last token; the adapter is a second table."""

    def __init__(self) -> None:
        self.base = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
        self.adapter = torch.zeros(VOCABULARY, VOCABULARY, requires_grad=True)
        self.flip_logits = False

    def logits(self, ids: Tensor, adapter: bool = True) -> Tensor:
        table = self.base + self.adapter if adapter else self.base
        logits = table[ids]
        if self.flip_logits and adapter:
            self.flip_logits = False
            with torch.no_grad():
                logits.view(-1).view(torch.int32)[0] ^= 1
        return logits

    def score(self, ids: Tensor, start: int, temperature: float, adapter: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.logits(ids[start - 1 : -1], adapter)
        digests = logits.detach().view(torch.int32).long().sum(-1)
        # One row at a time: torch's log_softmax is not this test's subject.
        rows = [(row / temperature).log_softmax(-1) for row in logits]
        log_probs = torch.stack([row[i] for row, i in zip(rows, ids[start:].tolist(), strict=True)])
        return log_probs, digests, torch.stack([-(row.exp() * row).sum() for row in rows])

    def flip_bit(self, what: str, tensor: str, element: int, bit: int) -> None:
        if what == "logits":
            self.flip_logits = True
        elif what == "parameter":
            table = {"base": self.base, "adapter": self.adapter.detach()}[tensor]
            table.view(torch.int32).view(-1)[element] ^= 1 << bit

    def tensor_digests(self) -> dict[str, int]:
        pairs = {"base": self.base, "adapter": self.adapter.detach()}
        return {name: int(table.view(torch.int32).long().sum()) for name, table in pairs.items()}

    def digest(self, name: str) -> str:
        table = self.base if name == "base" else self.adapter.detach()
        return tensors_sha256([(name, table)])[:16]


class StubHost:
    def __init__(self, model_path, lora_rank, lora_alpha, optimizer, seed, cache_format, layout):
        self.ranks = TrainerRanks(SINGLE, ONE_RANK, dist.group.WORLD)
        self.settings, self.steps, self.cache_format = optimizer, 0, cache_format
        self.model = StubModel()
        self.calls: list[str] = []
        self.perturb_update = 0.0

    @property
    def adapter(self) -> Tensor:
        return self.model.adapter

    def forward(self, batch, response_starts, temperature, adapter=True, micro_batch_samples=8):
        self.calls.append(f"forward adapter={adapter}")
        with torch.no_grad():
            pairs = zip(batch, response_starts, strict=True)
            return [ScoredSample(*self.model.score(ids, start, temperature, adapter)) for ids, start in pairs]

    def forward_backward(self, batch, response_starts, temperature, loss_function, micro_batch_samples):
        self.calls.append(f"forward_backward {len(batch)}")
        scored = []
        for first in range(0, len(batch), micro_batch_samples):
            samples = list(range(first, min(first + micro_batch_samples, len(batch))))
            scores = [self.model.score(batch[i], response_starts[i], temperature) for i in samples]
            log_probs = [score[0] + self.perturb_update for score in scores]
            loss, _ = loss_function(log_probs, [score[2] for score in scores], samples)
            loss.backward()
            triples = zip(log_probs, scores, strict=True)
            scored += [ScoredSample(logp.detach(), score[1], score[2].detach()) for logp, score in triples]
        return [], scored

    def optimizer_step(self):
        self.steps += 1
        norm = float(self.adapter.grad.norm())
        with torch.no_grad():
            self.adapter.sub_(self.settings.lr * self.adapter.grad)
        return norm

    def zero_grad(self):
        self.adapter.grad = None

    def learning_rate(self):
        return self.settings.lr

    def adapter_buffers(self):
        return {"table": self.adapter.detach().clone()}

    def identity(self):
        digests = {"model_digest": self.model.digest("base"), "adapter_digest": self.model.digest("adapter")}
        return digests | {"kernel_id": "k", "function_config": {"vocabulary": VOCABULARY}}

    def tensor_digests(self, adapter: bool):
        name = "adapter" if adapter else "base"
        return {name: self.model.tensor_digests()[name]}

    def flip_bit(self, what, tensor, element, bit):
        self.model.flip_bit(what, tensor, element, bit)

    def save_checkpoint(self, path, extra):
        Path(path).mkdir(parents=True)
        if os.environ.get("ZMRL_TEST_DISK_FULL") == str(extra["global_step"]):
            raise OSError(errno.ENOSPC, "No space left on device")
        step, _, once = os.environ.get("ZMRL_TEST_DIE_SAVING", "").partition(":")
        if step == str(extra["global_step"]) and not Path(once).exists():
            Path(once).touch()
            (Path(path) / "stub.pt").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        torch.save({"adapter": self.adapter.detach(), "extra": extra}, Path(path) / "stub.pt")

    def load_checkpoint(self, path):
        state = torch.load(Path(path) / "stub.pt")
        with torch.no_grad():
            self.adapter.copy_(state["adapter"])
        return state["extra"]

    def save_adapter(self, path):
        Path(path).mkdir()
