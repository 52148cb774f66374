"""Decode steps of the rollout engine with and without replay: `python -m benchmarks.decode [--batches 1 8 64]`.

The engine runs in this process with one thread. Rounds of the same requests alternate between steps that call every
operator from Python and steps that repeat a recorded program (`zmrl.model.decode`). Times are of the thread's own CPU
clock, so that other work on the machine does not count. `left`: what of a step is neither the decoder nor the head.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch

from zmrl.rollout.engine import engine_args, quiet_environment

CHECKPOINT = Path(__file__).parents[1] / "checkpoints" / "nano"
PROMPT, NEW = 100, 64


class Stopwatch:
    """Seconds by name of the methods that it wraps."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def wrap(self, owner: Any, method: str, name: str) -> None:
        plain: Callable[..., Any] = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return plain(*arguments, **options)
            finally:
                self.seconds[name] += time.thread_time() - start

        setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    quiet_environment()
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)  # now: vLLM binds its threads and makes later calls do nothing (cpu_worker.py:145)
    llm = LLM(**engine_args(CHECKPOINT))
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    watch, model = Stopwatch(), runner.model
    replay = model.decode_steps
    watch.wrap(model, "forward", "decoder")
    watch.wrap(model, "compute_logits", "head")
    watch.wrap(core.scheduler, "schedule", "scheduler")
    watch.wrap(core.scheduler, "update_from_output", "scheduler")
    for name in ("_prepare_inputs", "_build_attention_metadata"):
        watch.wrap(runner, name, "inputs and metadata")
    watch.wrap(runner, "sample_tokens", "sampler")
    for batch in arguments.batches:
        prompts = [{"prompt_token_ids": [256] + [(7 * i + j) % 250 for j in range(PROMPT - 1)]} for i in range(batch)]
        params = SamplingParams(max_tokens=NEW, ignore_eos=True, temperature=1.0, logprobs=0)
        times: dict[bool, list[float]] = {True: [], False: []}
        parts: dict[bool, Counter[str]] = {}
        for turn in range(arguments.rounds + 1):
            for on in (False, True):
                model.decode_steps = replay if on else lambda *_: None
                watch.seconds.clear()
                before, start = replay.replayed, time.thread_time()
                llm.generate(prompts, params, use_tqdm=False)
                if turn:
                    times[on].append((time.thread_time() - start) / NEW)
                parts[on] = Counter(watch.seconds)
                if on and replay.replayed == before:
                    raise RuntimeError("no step was replayed")
        ratio = statistics.median(a / b for a, b in zip(times[False], times[True], strict=True))
        print(f"batch {batch}: replayed steps {ratio:.2f} times as fast")
        for on, name in ((False, "operators"), (True, "replayed")):
            step = statistics.median(times[on])
            shares = ", ".join(f"{part} {seconds / NEW * 1e3:.2f}" for part, seconds in parts[on].most_common())
            left = step - (parts[on]["decoder"] + parts[on]["head"]) / NEW
            print(
                f"  {name:9} {batch / step:7.0f} tokens/s  {step * 1e3:6.2f} ms a step  left {left / step:4.0%}"
                f"  (ms: {shares})",
                flush=True,
            )


if __name__ == "__main__":
    main()
