"""verl's agent loop with a seed of its own for every sample, graded where it is, and with failures that arrive where
they matter."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from zmrl.startup import mark
from zmrl.trainer import early, patches_verl
from zmrl.trainer.rewards import RewardError, compute_score
from zmrl.trainer.sampler import ERROR, ERROR_KIND, REWARD
from zmrl.trainer.seeds import sample_name, sample_seed

# verl publishes the Ray actor; its class is needed to derive from.
_AgentLoopWorker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class


class ZmrlAgentLoopWorker(_AgentLoopWorker):
    """Runs one agent loop per sample. verl's default seeds nothing; one seed per group would give n equal samples."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        mark("agent loop", "modules imported")
        patches_verl.token_builder()
        super().__init__(*args, **kwargs)
        self._graders = ThreadPoolExecutor(thread_name_prefix="reward")
        mark("agent loop", "ready")

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, session_id: int, **kwargs: Any
    ) -> Any:
        """verl's loop for sample `session_id` of a problem.

        A failure is also written under the key that the sample would have had, so that the trainer can say which
        sample failed and why: verl itself only logs it and pads the batch.
        """
        source, index, step = kwargs["data_source"], int(kwargs["index"]), int(trajectory["step"])
        validate = bool(trajectory["validate"])
        partition = "val" if validate else "train"
        seed = sample_seed(self.config.zmrl.seed, source, step, index, session_id)
        tag = f"{partition}/{step}/{source}/{index}/{session_id}"
        params = dict(sampling_params, seed=seed, extra_args={"zmrl_tag": tag, "zmrl_seed": seed})
        if validate and session_id == self.config.zmrl.validation.n:  # the one after those of mean@n
            params["temperature"] = 0.0
        try:
            return await super()._run_agent_loop(params, trajectory, session_id=session_id, **kwargs)
        except Exception as error:
            cause = getattr(error, "cause", error)  # Ray wraps what was raised in another process
            reward = isinstance(error, RewardError) or isinstance(cause, RewardError)
            name = sample_name(source, index, session_id)
            message = str(cause) if reward else f"{name}: {type(cause).__name__}: {cause}"
            failure = {"status": "failure", ERROR: message, ERROR_KIND: REWARD if reward else "rollout"}
            await tq.async_kv_put(key=f"{kwargs['uid']}_{session_id}_0", partition_id=partition, tag=failure)
            raise

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        """Grade the last of a sample's outputs, in a thread of this process.

        verl sends it to a reward worker, all columns of the batch with it: more work on both sides than the grade.
        """
        graded = outputs[-1]
        reward = self.config.zmrl.reward

        def grade() -> dict[str, float]:
            text = self.tokenizer.decode(graded.response_ids, skip_special_tokens=True)
            answer = kwargs["reward_model"]["ground_truth"]
            sample = f"{kwargs['data_source']} problem {kwargs['index']}"
            return compute_score(text, answer, sample, reward.function, reward.timeout_seconds)

        began = time.perf_counter()
        found = await asyncio.get_running_loop().run_in_executor(self._graders, grade)
        graded.metrics.compute_score = time.perf_counter() - began
        graded.reward_score = found["score"]
        graded.extra_fields["reward_extra_info"] = found


class ZmrlAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with the worker above."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = early.actor_class(ZmrlAgentLoopWorker)
