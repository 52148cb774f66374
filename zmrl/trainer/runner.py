"""verl's task runner: the process that drives a run. Says how it ended in outcome.json, whatever happens."""

from __future__ import annotations

import traceback
from typing import Any

from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.utils.config import validate_config

from zmrl.recipe import RecipeError
from zmrl.rollout.verl_replica import ROLLOUT_NAME, register_rollout
from zmrl.trainer import early, patches_verl
from zmrl.trainer.advantage import grpo_advantage
from zmrl.trainer.agent_loop import ZmrlAgentLoopWorker
from zmrl.trainer.alive import is_death
from zmrl.trainer.checkpoints import TrainerCheckpointError
from zmrl.trainer.logs import BAD_INPUT, DIED, FAILED, FINISHED, RunFiles
from zmrl.trainer.ppo import StepMismatchError, ZmrlTrainer
from zmrl.trainer.resume import LOCK_SECONDS, run_lock
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
        try:
            register_rollout()
            patches_verl.local_load_balancer()
            validate_config(config, need_reference_policy(config), need_critic(config))
            with run_lock(files.folder, "trainer", LOCK_SECONDS):
                _start_early(config)
                super().run(config)
        except StepMismatchError as error:
            files.outcome(error.verdict.verdict, error.verdict.exit_code, str(error))
        except (RewardError, RecipeError) as error:
            files.outcome(BAD_INPUT, 2, str(error))
        except Exception as error:
            cause = getattr(error, "cause", error)  # Ray wraps what was raised in another process
            if isinstance(cause, TrainerCheckpointError):
                files.outcome(BAD_INPUT, 2, str(cause))
                return
            lines = "".join(traceback.format_exception(error))
            death = error if is_death(error) else self._death()
            if death is None:
                files.outcome(FAILED, 1, lines)
            else:
                # A death met inside a task comes wrapped, and the wrapper's first line names the task only.
                first = str(getattr(death, "cause", None) or death).splitlines()[0]
                files.outcome(DIED, 1, f"{lines}\n{first}")
            raise
        else:
            files.outcome(FINISHED, self.trainer.exit_code)

    def _death(self) -> Exception | None:
        """What tells that a process that the trainer needs is gone, whatever error that led to."""
        try:
            self.trainer.require_processes()
        except Exception as error:
            return error if is_death(error) else None
        return None


def _start_early(config: Any) -> None:
    """Let the processes import that are needed last, while verl starts the others."""
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.nnodes * config.trainer.n_gpus_per_node > 1:
        return
    if rollout.name != ROLLOUT_NAME:
        early.start(ZmrlAgentLoopWorker)
    else:
        early.start(ZmrlAgentLoopWorker, "zmrl.rollout.verl_server")
        from zmrl.rollout.verl_server import ZmrlVllmReplica

        ZmrlVllmReplica.start_early(rollout.max_num_seqs)
