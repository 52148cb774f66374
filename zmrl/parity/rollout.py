"""The rollout side of the parity command: vLLM in this process, one engine per set of engine arguments.

`python -m zmrl.parity.rollout JOB RESULT`; both are JSON. Samples are written with the bits of their log-probs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from zmrl.batch_invariant import native
from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import CacheLayout
from zmrl.model.checkpoint import read_config
from zmrl.parallel.layout import TOKENS
from zmrl.parity.settings import BLOCK_SIZE, Observation, Setting, default_settings
from zmrl.rollout.engine import engine_args, quiet_environment

quiet_environment()
set_num_threads = torch.set_num_threads
"""vLLM's CPU worker replaces torch's function by one that does nothing (v1/worker/cpu_worker.py:145)."""


def sampled_bits(rows: list[Any], token_ids: list[int]) -> list[int]:
    """Bit patterns of the log-prob of each token, from vLLM's dictionaries (id -> log-prob), where they are floats."""
    values = [row[token].logprob for row, token in zip(rows, token_ids, strict=True)]
    return torch.tensor(values, dtype=torch.float32).view(torch.int32).tolist()


class Rollout:
    """Runs settings on engines that are made when first needed."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.config = job, read_config(job["model"])
        self.topk = self.config.index_topk or 0
        self.cache_format = CacheFormat(job["latent_format"], job["index_format"])
        self.ranks = {key: job[key] for key in ("tensor_parallel_size", "decode_context_parallel_size")}
        self.engine: Any = None
        self.engine_key: str | None = None
        self.reference: list[dict[str, Any]] = []
        """Samples of the latest setting at temperature 1 without adapters: what `rescored` scores again."""

    def run(self, setting: Setting) -> dict[str, Any]:
        """Samples, identity and observation of one setting."""
        self._ensure_engine(setting.engine)
        before_threads = torch.get_num_threads()
        set_num_threads(setting.threads)
        try:
            with native.use_isa(setting.isa or native.isa()):
                return self._run(setting)
        finally:
            set_num_threads(before_threads)

    def _run(self, setting: Setting) -> dict[str, Any]:
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache could not be emptied")
        if setting.warm:
            self._sample(setting)
        self._worker("zmrl_counters", True)
        before = self._rows_by_tokens()
        samples = self._rescore() if setting.rescore else self._sample(setting)
        counters, identity = self._worker("zmrl_counters"), self._worker("zmrl_identity")
        rows = None
        if self.job["prefill"] == TOKENS:
            rows = min(after - start for after, start in zip(self._rows_by_tokens(), before, strict=True))
        if setting.temperature == 1.0 and not setting.adapters and not setting.rescore:
            self.reference = samples
        seen = Observation(
            prefill_chunks=counters["prefill_chunks"],
            max_requests=counters["max_requests"],
            max_adapters=counters["max_adapters"],
            preemptions=counters["preemptions"],
            cached_tokens=[s.pop("cached_tokens") for s in samples],
            prompt_lengths=[len(s["prompt_ids"]) for s in samples],
            response_lengths=[len(s["token_ids"]) for s in samples],
            isa=native.isa(),
            threads=counters["threads"],
            index_topk=self.topk,
            rows_by_tokens=rows,
        )
        return {
            "setting": setting.name,
            "samples": samples,
            "expected": len(self.job["prompts"]) * (1 if setting.rescore else setting.samples),
            "identity": identity,
            "problems": setting.failed_proofs(seen),
        }

    def _ensure_engine(self, overrides: dict[str, Any]) -> None:
        key = json.dumps(overrides, sort_keys=True)
        if key == self.engine_key:
            return
        import gc

        from vllm import LLM

        self.engine = None
        gc.collect()
        if self.ranks["tensor_parallel_size"] > 1:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # as many threads as OMP_NUM_THREADS says
        if "num_gpu_blocks_override" in overrides:
            overrides = overrides | {"num_gpu_blocks_override": self._blocks(overrides["num_gpu_blocks_override"])}
        lora = {"lora_rank": self.job["rank"], "lora_alpha": self.job["alpha"], "max_loras": 3, "max_cpu_loras": 4}
        sizes = {"max_model_len": self.job["max_model_len"], "block_size": BLOCK_SIZE, **self.ranks}
        how = {"cache_format": self.cache_format, "prefill": self.job["prefill"]}
        arguments = {**how, **sizes, **lora, **overrides}
        self.engine = LLM(**engine_args(self.job["model"], **arguments))
        self.engine_key = key

    def _blocks(self, blocks: int) -> int:
        """For as many requests as so many blocks of a single rank hold."""
        one, mine = (
            CacheLayout(self.config, self.cache_format, BLOCK_SIZE, *ranks).request_rows(self.job["max_model_len"])
            for ranks in ((1, 1), tuple(self.ranks.values()))
        )
        return -(-blocks * mine // one)

    def _worker(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer."""
        return self.engine.collective_rpc(method, args=arguments)[0]

    def _rows_by_tokens(self) -> list[int]:
        """Of every rank, since the engine started."""
        ranks = self.engine.collective_rpc("zmrl_exchanges")
        return [rank["events"].get("rows by tokens", 0) for rank in ranks]

    def _sample(self, setting: Setting) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        adapters: list[str | None] = [None, *list(self.job["adapters"])[: setting.adapters]]
        plan: list[tuple[Any, ...]] = []
        for index, prompt in enumerate(self.job["prompts"]):
            for number in range(setting.samples):
                tag = f"{setting.name}/{index}/{number}"
                seed = 1_000_003 * index + number
                parameters = SamplingParams(
                    temperature=setting.temperature,
                    max_tokens=max(self.job["max_tokens"], setting.least_tokens),
                    ignore_eos=True,  # every sample has its full length; no log-prob changes
                    logprobs=0,
                    extra_args={"zmrl_tag": tag, "zmrl_seed": seed},
                )
                plan.append((index, number, prompt, adapters[len(plan) % len(adapters)], tag, parameters))
        groups = [[item] for item in plan] if setting.alone else [plan]
        outputs = [output for group in groups for output in self._generate(group)]
        digests = self._worker("zmrl_take_digests", [item[4] for item in plan])
        return [
            {
                "prompt": index,
                "number": number,
                "adapter": adapter,
                "temperature": setting.temperature,
                "prompt_ids": prompt,
                "token_ids": list(output.outputs[0].token_ids),
                "log_prob_bits": sampled_bits(output.outputs[0].logprobs, output.outputs[0].token_ids),
                "digests": digests.get(tag, []),
                "cached_tokens": output.num_cached_tokens or 0,
            }
            for (index, number, prompt, adapter, tag, _), output in zip(plan, outputs, strict=True)
        ]

    def _generate(self, group: list[tuple]) -> list[Any]:
        from vllm.lora.request import LoRARequest

        names = list(self.job["adapters"])
        requests = [
            None if adapter is None else LoRARequest(adapter, names.index(adapter) + 1, self.job["adapters"][adapter])
            for _, _, _, adapter, _, _ in group
        ]
        prompts = [{"prompt_token_ids": item[2]} for item in group]
        return self.engine.generate(prompts, [item[5] for item in group], lora_request=requests, use_tqdm=False)

    def _rescore(self) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        if not self.reference:
            raise RuntimeError("the setting 'rescored' needs one before it that samples at temperature 1")
        first = [s for s in self.reference if s["number"] == 0]
        prompts = [{"prompt_token_ids": s["prompt_ids"] + s["token_ids"]} for s in first]
        outputs = self.engine.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        samples = []
        for sample, output in zip(first, outputs, strict=True):
            start = len(sample["prompt_ids"])
            # prompt_logprobs carry no row digests: the sampled ones stand in, so this setting compares log-probs only
            bits = sampled_bits(output.prompt_logprobs[start:], sample["token_ids"])
            samples.append({**sample, "log_prob_bits": bits, "cached_tokens": output.num_cached_tokens or 0})
        return samples


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    wanted = {s.name: s for s in default_settings(native.available_isas())}
    rollout = Rollout(job)
    # settings that share an engine run one after the other, in the order given
    order = sorted(job["settings"], key=lambda name: (json.dumps(wanted[name].engine), job["settings"].index(name)))
    results = {}
    for name in order:
        results[name] = rollout.run(wanted[name])
        print(f"rollout: {name}", file=sys.stderr, flush=True)
    Path(result_path).write_text(json.dumps([results[name] for name in job["settings"]]))


if __name__ == "__main__":
    main(*sys.argv[1:])
