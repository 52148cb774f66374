"""verl's task runner: the process that drives a run. Says how it ended in outcome.json, whatever happens."""

from __future__ import annotations

import traceback
from typing import Any

from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.config import validate_config

from zmrl.rollout.verl_replica import register_rollout
from zmrl.trainer.advantage import grpo_advantage
from zmrl.trainer.logs import BAD_INPUT, FAILED, FINISHED, RunFiles
from zmrl.trainer.ppo import StepMismatchError, ZmrlTrainer
from zmrl.trainer.rewards import RewardError

# verl publishes the Ray actor; its class is needed to derive from.
_TaskRunner: Any = TaskRunnerV1.__ray_metadata__.modified_class


class ZmrlTaskRunner(_TaskRunner):
    """Registers our classes in the driving process and runs verl's trainer."""

    def run(self, config: Any) -> None:
        """Run to the end. Exceptions do not cross process borders well, so the outcome is written to a file first."""
        files = RunFiles(config.zmrl.output_dir)
        TRAINER_REGISTRY[config.trainer.v1.trainer_mode] = ZmrlTrainer
        ADV_ESTIMATOR_REGISTRY[config.algorithm.adv_estimator] = grpo_advantage
        register_rollout()
        try:
            validate_config(config, need_reference_policy(config), need_critic(config))
            super().run(config)
        except StepMismatchError as error:
            files.outcome(error.verdict.verdict, error.verdict.exit_code, str(error))
        except RewardError as error:
            files.outcome(BAD_INPUT, 2, str(error))
        except Exception as error:
            lines = "".join(traceback.format_exception(error))
            files.outcome(FAILED, 1, lines)
            raise
        else:
            files.outcome(FINISHED, self.trainer.exit_code)
