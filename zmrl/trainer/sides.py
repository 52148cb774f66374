"""What the two sides of a run hold, asked of all ranks of the trainer and all servers of the rollout, and compared.

Asking starts the work and does not wait: digests of all live parameters are some hundredths of a second of work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import ray

from zmrl.trainer.checker import Identity, tensor_differences


class Held(NamedTuple):
    """What both sides held. Of several servers, or ranks, the first that differs is the one reported."""

    rollout: Identity
    trainer: Identity
    problems: list[str]
    """In words: ranks that differ, adapters that did not arrive."""
    tensors: list[dict[str, Any]]
    """Differing parameters, see `tensor_differences`."""


class Sides:
    """The trainer's worker group and the rollout's server handles, as verl has them."""

    def __init__(self, trainer: Any, servers: Sequence[Any]) -> None:
        self._trainer, self._servers = trainer, servers

    def ask_rollout(self) -> list[Any]:
        """References to what each server answers (`zmrl_identity`); its responses carry it from now on."""
        return [server.zmrl_identity.remote() for server in self._servers]

    def ask_trainer(self) -> list[Any]:
        """References to what each rank answers (`zmrl_evidence`)."""
        return list(self._trainer.zmrl_evidence())

    def held(self, trainers: Sequence[Mapping[str, Any]], rollouts: Sequence[Mapping[str, Any]], version: int) -> Held:
        """From all answers: identities of the ranks and of the servers. Names parameters if they differ.

        version: of the adapter that was synced last.
        """
        trainer = Identity.from_host(trainers[0], version)
        problems = [
            f"trainer rank {rank}: {'; '.join(Identity.from_host(other, version).disagreements(trainer))}"
            for rank, other in enumerate(trainers[1:], 1)
            if Identity.from_host(other, version) != trainer
        ]
        chosen, tensors = 0, list[dict[str, Any]]()
        for number, reported in enumerate(rollouts):
            arrived = reported.get("arrived_digest")
            if arrived != trainers[0]["sent_digest"]:
                problems.append(f"server {number}: the adapter that arrived ({arrived}) is not the one that was sent")
            if not tensors and Identity.from_host(reported, version) != trainer:
                chosen, tensors = number, self._differing_tensors(number, version)
        return Held(Identity.from_host(rollouts[chosen], version), trainer, problems, tensors)

    def flip_bit(self, side: str, arguments: tuple[Any, ...], adapter: int | None) -> None:
        """Fault injection. adapter: version of the rollout's adapter whose parameter it is; None: of the base."""
        if side == "trainer":
            self._trainer.zmrl_flip_bit(*arguments)
        else:
            ray.get(self._servers[0].zmrl_rpc.remote("zmrl_flip_bit", *arguments, adapter))

    def _differing_tensors(self, server: int, version: int) -> list[dict[str, Any]]:
        handle = self._servers[server]
        calls = [handle.zmrl_rpc.remote("zmrl_tensor_digests", adapter) for adapter in (None, version)]
        base, adapter = ray.get(calls)
        return tensor_differences(base | adapter, self._trainer.zmrl_tensor_digests()[0])
