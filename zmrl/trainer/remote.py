"""The Ray actor that drives a run. Light: the command's own process does not import what only the actor needs."""

from __future__ import annotations

from typing import Any

import ray

from zmrl.startup import mark


@ray.remote
class TaskRunner:
    """verl calls `run` once."""

    def run(self, config: Any) -> None:
        """See `zmrl.trainer.runner.ZmrlTaskRunner.run`."""
        mark("task runner", "process up")
        from zmrl.trainer.runner import ZmrlTaskRunner

        mark("task runner", "modules imported")
        ZmrlTaskRunner().run(config)
