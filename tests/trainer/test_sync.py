"""The adapter's way from trainer to rollout: the same bytes, one version, never the base weights, never a hang."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from types import SimpleNamespace

import pytest
import torch

from zmrl.trainer.checker import tensors_sha256

CONFIG = {"r": 32, "lora_alpha": 32, "zmrl_version": 3}


@pytest.fixture(scope="module", autouse=True)
def cpu_platform():
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "zmrl.trainer.verl_plugin"}


@pytest.fixture
def worker():
    """Our extension as vLLM's worker has it, without a model."""
    from zmrl.rollout.verl_worker import ZmrlWorkerExtension

    class Worker(ZmrlWorkerExtension):
        device = torch.device("cpu")
        _is_qat_model = _is_modelopt_qat = False
        error: Exception | None = None

        def _get_zmq_handle(self):
            return f"ipc://{folder}/sync"

        def remove_lora(self, lora_id):
            return False

        def zmrl_load_adapter(self, version, tensors, rank, alpha):
            if self.error:
                raise self.error
            self.loaded = (version, tensors, rank, alpha)

        def zmrl_drop_adapters(self, keep):
            self.kept = keep

    with tempfile.TemporaryDirectory() as folder:  # a socket's path may have 107 characters; tmp_path has more
        yield object.__new__(Worker)  # verl's __new__ patches vLLM and ties the process to its parent


def transfer(worker, tensors, bucket_mb=1):
    """Send as verl's trainer does, receive as its worker does; returns what receiving raised."""
    from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender

    raised = []

    def receive():
        try:
            worker.update_weights_from_ipc(peft_config=CONFIG, base_sync_done=True, use_shm=True)
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    sender = BucketedWeightSender(worker._get_zmq_handle(), bucket_size_mb=bucket_mb, use_shm=True)
    asyncio.run(asyncio.wait_for(sender.async_send_weights(iter(tensors)), timeout=30))
    thread.join(timeout=30)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_an_adapter_of_several_buckets_arrives_with_the_same_bytes(worker):
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 500), (7,), (896, 2, 64, 3), (1, 1), (64, 4000)]
    tensors = [(f"layers.{i}.a", torch.randn(s, generator=generator).bfloat16()) for i, s in enumerate(shapes)]
    sent = tensors_sha256(tensors)
    assert sum(t.nbytes for _, t in tensors) > 1 << 20
    assert transfer(worker, tensors) is None
    version, arrived, rank, alpha = worker.loaded
    assert (version, rank, alpha, worker.kept) == (3, 32, 32, [3])
    assert tensors_sha256(arrived.items()) == sent == worker._zmrl_arrived
    again = [(name, torch.zeros_like(tensor)) for name, tensor in tensors]
    assert transfer(worker, again) is None
    assert tensors_sha256(arrived.items()) == sent, "the first adapter is a view of a buffer that was used again"


def test_an_adapter_that_does_not_load_is_an_error_and_not_a_hang(worker):
    worker.error = ValueError("adapter zmrl-v3: buffer 'x' is missing")
    error = transfer(worker, [("y", torch.zeros(3))])
    assert error is worker.error


def test_the_trainers_end_sends_adapters_only(monkeypatch):
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

    from zmrl.rollout.verl_adapter import ZmrlServerAdapter

    seen = {}

    async def record(self, weights, global_steps=None, **kwargs):
        seen.update(weights=dict(weights), steps=global_steps, **kwargs)

    monkeypatch.setattr(ServerAdapter, "update_weights", record)
    end = object.__new__(ZmrlServerAdapter)
    end._has_server = False
    tensors = {"a": torch.ones(2)}
    asyncio.run(end.update_weights(tensors.items(), 2, peft_config={"r": 32}, base_sync_done=True))
    assert seen["weights"] == tensors
    assert seen["peft_config"] == {"r": 32, "zmrl_version": 3}
    assert end.sent_digest == tensors_sha256(tensors.items())
    for wrong in ({"peft_config": None, "base_sync_done": True}, {"peft_config": {"r": 32}, "base_sync_done": False}):
        with pytest.raises(RuntimeError, match="only an adapter"):
            asyncio.run(end.update_weights(tensors.items(), 2, **wrong))


def test_a_dead_server_is_an_error_and_not_a_hang(monkeypatch):
    from zmrl.rollout import verl_adapter

    monkeypatch.setattr(verl_adapter, "TRANSFER_SECONDS", 0.2)
    with tempfile.TemporaryDirectory() as folder:
        end = object.__new__(verl_adapter.ZmrlServerAdapter)
        end._has_server, end.use_shm, end.zmq_handle, end.rollout_rank, end.replica_rank = (
            False,
            True,
            f"ipc://{folder}/x",
            0,
            0,
        )
        end.config = SimpleNamespace(checkpoint_engine=SimpleNamespace(update_weights_bucket_megabytes=1))
        tensors = {"a": torch.ones(2)}
        with pytest.raises(RuntimeError, match="did not take the adapter"):
            asyncio.run(end.update_weights(tensors.items(), 2, peft_config={"r": 32}, base_sync_done=True))


class Engine:
    """As much of AsyncLLM as the server touches."""

    def __init__(self):
        self.requests, self.calls = [], []

    def generate(self, prompt, lora_request=None):
        self.requests.append(lora_request)

    async def collective_rpc(self, method, args=()):
        self.calls.append(args[0])
        await asyncio.sleep(0.01)
        if "bad" in args[0]:
            raise ValueError("no such tag")
        return [{tag: [len(tag)] for tag in args[0] if tag != "lost"}]


def test_every_request_gets_the_version_in_use_and_none_gets_the_base_model():
    from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID
    from vllm.lora.request import LoRARequest

    from zmrl.rollout.lora import adapter_request
    from zmrl.rollout.verl_server import VersionedEngine

    engine = VersionedEngine(Engine())
    with pytest.raises(RuntimeError, match="no adapter"):
        asyncio.run(engine.list_loras())
    verls = LoRARequest("123", VLLM_LORA_INT_ID, "simon_lora_path")
    for version in (1, 2):
        engine.use(adapter_request(version))
        assert asyncio.run(engine.list_loras()) == {VLLM_LORA_INT_ID}
        engine.generate("prompt", lora_request=verls)
        request = engine.requests[-1]
        assert (request.lora_int_id, request.lora_name) == (version, f"zmrl-v{version}")
        assert str(version) in request.lora_path
    with pytest.raises(RuntimeError, match="adapter"):
        engine.generate("prompt", lora_request=None)


def test_digests_of_requests_that_finish_together_are_fetched_together():
    from zmrl.rollout.digests import DigestTaker
    from zmrl.rollout.verl_server import ZmrlVllmHttpServer

    async def scenario():
        server = object.__new__(ZmrlVllmHttpServer)
        server.engine = Engine()
        digests = DigestTaker(server._take_from_worker)
        tags = [f"tag{i}" for i in range(20)] + ["lost"]
        found = await asyncio.gather(*(digests.take(tag) for tag in tags))
        assert found == [[len(tag)] for tag in tags[:-1]] + [None]
        assert len(server.engine.calls) <= 2
        results = await asyncio.gather(digests.take("bad"), return_exceptions=True)
        assert isinstance(results[0], ValueError)
        assert await digests.take("after") == [5]

    asyncio.run(scenario())
