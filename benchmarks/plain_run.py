"""`python -m benchmarks.plain_run RECIPE ...`: zmrl.train as an ordinary pipeline would be, for `benchmarks.step`.

torch's own linear layers and experts on both sides, and verl's separate pass for old log-probs.
"""

import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from zmrl import train
from zmrl.trainer import compose

_compose = compose.compose_config


def plain_config(recipe: Any, resume: Any = None) -> Any:
    """`compose_config`'s, with other products, and as if there were several updates a step."""
    config = _compose(recipe, resume)
    OmegaConf.set_struct(config, False)
    root = str(Path(__file__).parents[1])
    plain = {
        "actor_rollout_ref": {
            "actor": {"zmrl": {"host": "benchmarks.plain_host:PlainHost", "updates_per_step": 2}},
            "rollout": {"engine_kwargs": {"vllm": {"worker_cls": "benchmarks.plain_worker.PlainWorker"}}},
        },
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"PYTHONPATH": root}}}},
    }
    return OmegaConf.merge(config, plain)


if __name__ == "__main__":
    compose.compose_config = plain_config
    sys.exit(train.main())
