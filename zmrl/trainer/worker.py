"""verl's training worker, able to say what it holds, to update after the verdict, and to have one bit flipped."""

from __future__ import annotations

from typing import Any

from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from zmrl.rollout.verl_replica import register_rollout

register_rollout()


class ZmrlActorRolloutRefWorker(ActorRolloutRefWorker):
    """Actor, reference (the actor without its adapter) and the trainer's end of the rollout, in one process."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def zmrl_evidence(self) -> dict[str, Any]:
        """This rank's part of a comparison, in one answer.

        identity: what the host holds now (`MegatronHost.identity`), and `sent_digest`: SHA-256 of the adapter that was
        sent last.
        scores: `ZmrlEngine.compared_scores`.
        """
        engine = self.actor.engine
        sent = {"sent_digest": getattr(self.rollout, "sent_digest", None)}
        return {"identity": engine.host.identity() | sent, "scores": engine.compared_scores()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zmrl_tensor_digests(self) -> dict[str, int]:
        """Digest of every live parameter by name: of the base under checkpoint names, the adapter under PEFT names."""
        host = self.actor.engine.host
        return host.tensor_digests(adapter=False) | host.tensor_digests(adapter=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zmrl_apply_update(self) -> dict[str, float]:
        """Take the optimizer step that waits for the verdict (`ZmrlEngine.apply_update`): its `grad_norm` and `lr`."""
        return dict(self.actor.engine.apply_update())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def zmrl_flip_bit(self, what: str, tensor: str, element: int, bit: int) -> None:
        """Flip one bit of a parameter now, or of cache or logits in the adapter's next forward pass."""
        self.actor.engine.host.flip_bit(what, tensor, element, bit)
