"""vLLM's CPU model runner and worker with our sampler, adapters, digests and fault injection."""

from __future__ import annotations

import secrets
from copy import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.lora.layers import LoRAMappingType
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import InputBatch

from zmrl.batch_invariant.ops.digest import rows_digest
from zmrl.rollout.digests import DigestStore
from zmrl.rollout.engine import TORCH_LINEAR
from zmrl.rollout.faults import Faults
from zmrl.rollout.lora import AdapterManager
from zmrl.rollout.model import KimiK31ForCausalLM
from zmrl.rollout.patches_vllm import runner_class
from zmrl.rollout.sampler import SampledRows, ZmrlSampler
from zmrl.rollout.scheduler import FAILURES
from zmrl.rollout.settings import leave_group
from zmrl.rollout.torch_linear import use_torch_linear
from zmrl.startup import FIRST_TOKEN, mark


@dataclass(frozen=True)
class RequestIdentity:
    """What a request's samples depend on, and the tag under which its digests are kept."""

    seed: int
    tag: str | None

    @classmethod
    def of(cls, params: SamplingParams | None) -> RequestIdentity:
        """extra_args["zmrl_seed"], else the request's seed, else a random one. TypeError: of another type."""
        extra = (params.extra_args if params is not None else None) or {}
        seed = extra.get("zmrl_seed", params.seed if params is not None else None)
        tag = extra.get("zmrl_tag")
        if seed is None:
            seed = secrets.randbits(64)
        if not isinstance(seed, int) or not isinstance(tag, str | None):
            raise TypeError("zmrl_seed must be an integer and zmrl_tag a text")
        seed &= 2**64 - 1
        return cls(seed - 2**64 if seed >= 2**63 else seed, tag)


@dataclass
class Counters:
    """What the engine did, for tests and parity cells that must prove their condition."""

    steps: int = 0
    tokens: int = 0
    max_requests: int = 0
    """Most requests in one step."""
    max_adapters: int = 0
    """Most different adapters in one step."""
    prefill_chunks: int = 0
    """Steps of requests that were still in their prompt: more than there were requests if prompts were cut."""
    preemptions: int = 0


class ZmrlModelRunner(CPUModelRunner):
    """One step: adapters -> forward -> faults and digests -> our sampler -> failures."""

    model: KimiK31ForCausalLM
    lora_manager: AdapterManager

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.identities: dict[str, RequestIdentity] = {}
        self.digests = DigestStore()
        self.faults = Faults()
        self.failures: dict[str, str] = {}
        """Requests that fail in the running step, and why."""
        self.counters = Counters()

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        self.sampler = ZmrlSampler(self.model_config.logprobs_mode)
        if self.vllm_config.additional_config.get(TORCH_LINEAR):
            use_torch_linear(self.model)
        mark("vLLM worker", "model loaded")

    def load_lora_model(
        self, model: KimiK31ForCausalLM, vllm_config: VllmConfig, device: torch.device
    ) -> KimiK31ForCausalLM:
        self.lora_manager = AdapterManager(vllm_config, device, model.embedding_modules)
        return self.lora_manager.create_lora_manager(model, vllm_config)

    # Requests

    def _update_states(self, scheduler_output: SchedulerOutput) -> object:
        for name in scheduler_output.finished_req_ids:
            self.identities.pop(name, None)
        for request in scheduler_output.scheduled_new_reqs:
            if request.req_id not in self.identities:
                try:
                    identity = RequestIdentity.of(request.sampling_params)
                except TypeError as error:
                    identity = RequestIdentity(0, None)
                    self.failures[request.req_id] = str(error)
                self.identities[request.req_id] = identity
                if identity.tag is not None:
                    self.digests.begin(identity.tag)
            if request.sampling_params is not None and request.sampling_params.seed is not None:
                # With a seed vLLM would make a generator and rewind it after a discarded row, which a CPU generator
                # cannot: the engine would die (v1/worker/gpu_model_runner.py:3502). The identity holds the seed.
                request.sampling_params = copy(request.sampling_params)
                request.sampling_params.seed = None
        self.counters.preemptions += len(scheduler_output.preempted_req_ids or ())
        return super()._update_states(scheduler_output)

    # Adapters

    def set_active_loras(
        self,
        input_batch: InputBatch,
        num_scheduled_tokens: np.ndarray,
        num_sampled_tokens: np.ndarray | None = None,
        mapping_type: LoRAMappingType = LoRAMappingType.LANGUAGE,
    ) -> None:
        """Puts the adapters of the step's requests into slots. A request whose adapter cannot be loaded fails alone."""
        ids = input_batch.request_lora_mapping[: input_batch.num_reqs]
        if not ids.any():
            self.model.slots = None
            return
        requests = input_batch.lora_id_to_lora_request
        slot_of, errors = self.lora_manager.activate([requests[int(i)] for i in np.unique(ids[ids > 0])])
        slot_of[0] = -1
        for row, name in enumerate(input_batch.req_ids):
            if int(ids[row]) in errors:
                self.failures[name] = errors[int(ids[row])]
        slots = np.array([slot_of.get(int(i), -1) for i in ids], dtype=np.int32)
        self.model.slots = torch.from_numpy(np.repeat(slots, num_scheduled_tokens))
        self.counters.max_adapters = max(self.counters.max_adapters, len(set(slots[slots >= 0])))

    # The step

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, intermediate_tensors: object = None) -> object:
        self.failures = {}
        self.model.slots = None
        output = super().execute_model(scheduler_output, intermediate_tensors)
        if self.execute_model_state is not None:
            self.counters.steps += 1
            self.counters.tokens += scheduler_output.total_num_scheduled_tokens
            self._after_forward(self.execute_model_state.logits)
        return output

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> object:
        if self.execute_model_state is not None and grammar_output is not None and self.sampler.rows is not None:
            self.sampler.rows.raw_logits = self.execute_model_state.logits.clone()
        output = super().sample_tokens(grammar_output)
        mark("vLLM worker", FIRST_TOKEN)
        if self.failures:
            assert isinstance(output, ModelRunnerOutput)
            for name in self.failures:
                output.sampled_token_ids[output.req_id_to_index[name]] = []
                output.prompt_logprobs_dict.pop(name, None)
            setattr(output, FAILURES, self.failures)
        return output

    def _after_forward(self, logits: Tensor) -> None:
        """Faults, NaN checks, digests, and the sampler's rows. logits FP32 [R, vocab], one row a request."""
        batch, count = self.input_batch, self.input_batch.num_reqs
        kept = ~self.discard_request_mask.np[:count]
        prompt = batch.num_prompt_tokens[:count]
        positions = self.optimistic_seq_lens_cpu[:count].numpy().astype(np.int64) - prompt
        decoding = batch.num_computed_tokens_cpu[:count] >= prompt
        self.counters.prefill_chunks += int((~decoding).sum())
        self.counters.max_requests = max(self.counters.max_requests, count)
        self.faults.apply(self.model, logits, kept, decoding)
        self._find_nan(logits)
        identities = [self.identities[name] for name in batch.req_ids]
        tagged = [(row, identity.tag) for row, identity in enumerate(identities) if kept[row] and identity.tag]
        if tagged:
            values = rows_digest(logits).tolist()
            for row, tag in tagged:
                self.digests.add(tag, int(positions[row]), values[row])
        seeds = torch.tensor([identity.seed for identity in identities], dtype=torch.int64)
        self.sampler.rows = SampledRows(seeds, torch.from_numpy(np.maximum(positions, 0)))

    def _find_nan(self, logits: Tensor) -> None:
        """Requests in whose tokens an operator met NaN, or whose logits hold NaN, fail; the others go on."""
        context = self.model.context
        assert context is not None and context.flags is not None
        bad = logits.isnan().any(1)
        if context.flags.any():
            sizes = context.cu_seqlens.diff()
            owner = torch.repeat_interleave(torch.arange(sizes.shape[0]), sizes)
            bad[owner[context.flags != 0]] = True
        for row in bad.nonzero().flatten().tolist():
            self.failures.setdefault(
                self.input_batch.req_ids[row], "the model produced NaN; check the checkpoint and the adapter"
            )
        logits[bad] = 0


class ZmrlWorker(CPUWorker):
    """A CPU worker that runs `ZmrlModelRunner`."""

    def init_device(self) -> None:
        mark("vLLM worker", "modules imported")
        leave_group(self.vllm_config)
        with runner_class(ZmrlModelRunner):
            super().init_device()
