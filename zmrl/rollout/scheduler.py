"""vLLM's scheduler, taught to fail single requests that the worker reports."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from zmrl.rollout.patches_vllm import check_source
from zmrl.rollout.settings import leave_group

logger = init_logger("vllm.zmrl.scheduler")

FAILURES = "zmrl_failures"
"""Attribute of a `ModelRunnerOutput`: request id -> why that request failed in this step."""


class ZmrlScheduler(Scheduler):
    """An exception in the worker would end the engine for every client; a failed request ends alone.

    Its blocks leave the prefix cache: they may hold NaN, or were computed without the adapter that their key names.
    The client sees finish_reason "error" and the message as stop_reason.
    """

    def __init__(self, vllm_config: VllmConfig, *arguments: Any, **keywords: Any) -> None:
        check_source(Scheduler._mamba_block_aligned_split, "b2a08c774ae495bf")
        super().__init__(vllm_config, *arguments, **keywords)
        leave_group(vllm_config)

    def _mamba_block_aligned_split(self, request: Request, num_new_tokens: int, *args: int, **kwargs: int) -> int:
        """Ends a prefill chunk at each multiple of the retention interval too.

        The state of a boundary exists only where a chunk ends; vLLM alone keeps those multiples that happen to be ends.
        """
        tokens = super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        interval = self.cache_config.prefix_cache_retention_interval
        if not interval:
            return tokens
        start = request.num_computed_tokens + sum(args) + sum(kwargs.values())
        return min(tokens, interval - start % interval)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        failures: dict[str, str] = getattr(model_runner_output, FAILURES, None) or {}
        for request_id, message in failures.items():
            if request_id in self.requests:
                logger.error("request %s failed: %s", request_id, message)
                groups = self.kv_cache_manager.get_block_ids(request_id)
                self.kv_cache_manager.evict_blocks({block for group in groups for block in group})
                self.grammar_compile_error_reqs.add(request_id)  # vLLM's list of requests to end with an error
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if failures:
            for client in outputs.values():
                for output in client.outputs:
                    if output.request_id in failures:
                        output.stop_reason = failures[output.request_id]
        return outputs
