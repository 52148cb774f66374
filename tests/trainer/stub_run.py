"""`python -m tests.trainer.stub_run RECIPE ...`: zmrl.train with the small host and the small server in place."""

import os
import sys
from pathlib import Path

from omegaconf import OmegaConf

from zmrl import train
from zmrl.trainer import compose

_compose = compose.compose_config


def _with_stubs(recipe, resume=None):
    config = _compose(recipe, resume)
    OmegaConf.set_struct(config, False)
    stubs = {
        "actor_rollout_ref": {
            "model": {"external_lib": "tests.trainer.stub_rollout"},
            "actor": {"zmrl": {"host": "tests.trainer.stub_host:StubHost"}},
            "rollout": {"name": "stub"},
        },
        "ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": _environment()}}},
    }
    return OmegaConf.merge(config, stubs)


def _environment():
    root = str(Path(__file__).parents[2])
    return {"PYTHONPATH": root} | {k: v for k, v in os.environ.items() if k.startswith("ZMRL_TEST_")}


if __name__ == "__main__":
    compose.compose_config = _with_stubs
    sys.exit(train.main())
