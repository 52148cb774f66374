"""The Ray actor that drives a run. Light: the command's own process does not import what only the actor needs."""

from __future__ import annotations

from typing import Any

import ray


@ray.remote
class TaskRunner:
    """verl calls `run` once."""

    def run(self, config: Any) -> None:
        """See `zmrl.trainer.runner.ZmrlTaskRunner.run`."""
        from zmrl.trainer.runner import ZmrlTaskRunner

        ZmrlTaskRunner().run(config)
