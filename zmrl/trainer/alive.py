"""Notices that a process of the run is gone. What waits for it would wait for ever, and what it left undone would look
like missing samples; both are cured by starting again, a mismatch is not.
"""

from __future__ import annotations

import time

from ray._private import state
from ray.exceptions import RayActorError, WorkerCrashedError

SECONDS = 2.0
"""Ray is asked at most this often by `Watch.poll`."""


class ProcessDiedError(RuntimeError):
    """A process that the run needs has died; the message names it."""


class Watch:
    """The Ray actors that are not dead when it is made: all of a run's processes but vLLM's engine, which its server
    speaks for. Some are still starting then, and may die as well."""

    def __init__(self) -> None:
        self._watched = {key for key, actor in state.actors().items() if actor["State"] != "DEAD"}
        self._asked = time.monotonic()

    def require(self) -> None:
        """Raises ProcessDiedError if one of them is dead."""
        self._asked = time.monotonic()
        for key, actor in state.actors(actor_state_name="DEAD").items():
            if key in self._watched:
                raise ProcessDiedError(f"a process of the run died: {actor['ActorClassName']} (pid {actor['Pid']})")

    def poll(self) -> None:
        """`require`, now and then."""
        if time.monotonic() - self._asked >= SECONDS:
            self.require()


def is_death(error: BaseException) -> bool:
    """True if `error` says that a process of the run is gone: a Ray worker, or vLLM's engine behind its server."""
    cause = getattr(error, "cause", error)  # Ray wraps what was raised in another process
    died = isinstance(error, RayActorError | WorkerCrashedError | ProcessDiedError)
    return died or type(cause).__name__ == "EngineDeadError"
