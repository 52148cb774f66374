"""The rollout side of verl: versions of the adapter, and the registration of our subclasses. Imports nothing heavy.

Three processes take part: the trainer's end (`verl_adapter.py`, in the training worker), the server
(`verl_server.py`), and vLLM's worker (`verl_worker.py`). verl names its one adapter "123" for ever, so that a stale
block of the prefix cache is a hit, and serves the base model if the adapter is absent; here an adapter has a version,
in its id, its name, its path and every request.
"""

from __future__ import annotations

ROLLOUT_NAME = "vllm"
"""verl's own name, behind which our classes are put: verl compares with it in many places."""

VERSION_KEY = "zmrl_version"
"""Key of the adapter's version in the PEFT configuration that travels with it."""

ROW_DIGESTS, TOKEN_IDS, IDENTITY = "zmrl_row_digests", "zmrl_token_ids", "zmrl_identity"
"""Keys of `TokenOutput.extra_fields`: int64 digest per token; the ids as sampled; what the server held."""


def adapter_version(global_steps: int | None) -> int:
    """Version of the adapter that is synced after `global_steps` steps; step s samples from version s."""
    return (global_steps or 0) + 1


def register_rollout() -> None:
    """Put our classes behind verl's name `vllm`, in this process. vLLM is imported when a class is asked for."""
    from verl.workers.rollout import base
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    key = (ROLLOUT_NAME, "async")
    if key not in base._ROLLOUT_REGISTRY:  # private: verl has no function to register the trainer's end
        raise RuntimeError(f"verl's rollout registry no longer holds {key}; adapt zmrl/rollout/verl_replica.py")
    base._ROLLOUT_REGISTRY[key] = "zmrl.rollout.verl_adapter.ZmrlServerAdapter"
    RolloutReplicaRegistry.register(ROLLOUT_NAME, _load_replica)


def _load_replica() -> type:
    from zmrl.rollout.verl_server import ZmrlVllmReplica

    return ZmrlVllmReplica
