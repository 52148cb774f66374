"""A rollout server and the trainer's end of it, with the interfaces of `zmrl.rollout.verl_*`, around `StubModel`.

Loaded as verl's `model.external_lib` in a test run; stands in for vLLM, which has tests of its own.
"""

from __future__ import annotations

import os

import ray
import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

import zmrl.trainer.engine  # noqa: F401 (registers)
from tests.trainer.stub_host import VOCABULARY, StubModel
from zmrl.rollout.verl_replica import IDENTITY, ROW_DIGESTS, TOKEN_IDS, adapter_version
from zmrl.trainer.checker import adapter_name, tensors_sha256

NAME, EOS = "stub", 258


class StubServer:
    def __init__(self, config):
        self.config, self.model = config, StubModel()
        self.version, self.arrived, self.global_steps = 0, None, None
        self.lose = os.environ.get("ZMRL_TEST_LOSE_TAG")  # a request that fails, to see what becomes of it

    async def ready(self):
        return True

    async def update_weights(self, tensors, global_steps):
        self.arrived = tensors_sha256(tensors.items())
        self.version, self.global_steps = adapter_version(global_steps), global_steps
        if not os.environ.get("ZMRL_TEST_STALE") or self.version == 1:
            self.model.adapter = tensors["table"].clone()

    async def zmrl_identity(self):
        return {
            "model_digest": self.model.digest("base"),
            "adapter_digests": {adapter_name(self.version): self.model.digest("adapter")},
            "kernel_id": "k",
            "function_config": {"vocabulary": VOCABULARY},
            "arrived_digest": self.arrived,
        }

    async def zmrl_rpc(self, method, *args):
        if method == "zmrl_flip_bit":
            return self.model.flip_bit(*args[:4])
        name = "base" if args[0] is None else "adapter"
        return {name: self.model.tensor_digests()[name]}

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        tag = sampling_params["extra_args"]["zmrl_tag"]
        if self.lose and tag == self.lose:
            raise RuntimeError("the server lost this request")
        generator = torch.Generator().manual_seed(sampling_params["extra_args"]["zmrl_seed"])
        greedy = sampling_params["temperature"] == 0
        temperature = sampling_params["temperature"] or 1.0
        ids = list(prompt_ids)
        with torch.no_grad():
            for _ in range(self.config.response_length):
                row = (self.model.base + self.model.adapter)[ids[-1]] / temperature
                noise = -torch.empty(VOCABULARY).exponential_(generator=generator).log()
                ids.append(int((row if greedy else row + noise).argmax()))
                if ids[-1] == EOS:
                    break
            log_probs, digests, _ = self.model.score(torch.tensor(ids), len(prompt_ids), temperature)
        tokens = ids[len(prompt_ids) :]
        extra = {"global_steps": self.global_steps, ROW_DIGESTS: digests.tolist(), TOKEN_IDS: tokens}
        extra[IDENTITY] = await self.zmrl_identity()
        return TokenOutput(token_ids=tokens, log_probs=log_probs.tolist(), stop_reason="completed", extra_fields=extra)

    async def nothing(self, *args, **kwargs):
        return None

    sleep = wake_up = abort_all_requests = resume_generation = clear_kv_cache = nothing


class StubReplica(RolloutReplica):
    async def launch_servers(self):
        server = ray.remote(StubServer).options(name=f"stub_{self.replica_rank}", num_cpus=0, max_concurrency=64)
        self._server_handle = server.remote(self.config)
        await self._server_handle.ready.remote()
        self.servers, self._server_address = [self._server_handle], f"stub-{self.replica_rank}"


class StubAdapter(BaseRollout):
    sent_digest = None

    def __init__(self, config, model_config, device_mesh, **kwargs):
        super().__init__(config, model_config, device_mesh)

    async def resume(self, tags):
        pass

    async def release(self):
        pass

    async def update_weights(self, weights, global_steps=None, **kwargs):
        tensors = dict(weights)
        self.sent_digest = tensors_sha256(tensors.items())
        await ray.get_actor("stub_0").update_weights.remote(tensors, global_steps)


_ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.StubAdapter"
RolloutReplicaRegistry.register(NAME, lambda: StubReplica)
