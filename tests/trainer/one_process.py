"""A step of verl's trainer in one process: verl's own methods around a dictionary instead of TransferQueue, a call
instead of a worker group, and the small model on both sides."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.trainer.engines import jagged, make_engine

PROBLEMS, SAMPLES, EOS = 2, 2, 258


class Store:
    """TransferQueue's functions, over rows that are dictionaries."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        rows = [self.rows[key] for key in keys]
        names = [name for name in select_fields or rows[0] if name in rows[0]]  # TransferQueue, too, leaves out others
        columns = {name: [row[name] for row in rows] for name in names}
        return TensorDict({name: _column(values) for name, values in columns.items()}, batch_size=len(keys))

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        from transfer_queue import KVBatchMeta

        for i, key in enumerate(keys):
            row = self.rows.setdefault(key, {})
            for name, column in fields.items():
                value = (column.unbind() if isinstance(column, torch.Tensor) else list(column))[i]
                row[name] = getattr(value, "data", value) if isinstance(value, NonTensorData) else value
            if tags is not None:
                self.tags[key] = tags[i]
        tags = [self.tags[key] for key in keys]
        return KVBatchMeta(keys=keys, tags=tags, partition_id=partition_id, fields=list(self.rows[keys[0]]))

    def batch(self):
        """All rows, as the replay buffer hands them out."""
        from transfer_queue import KVBatchMeta

        return KVBatchMeta(keys=list(self.rows), tags=[self.tags[key] for key in self.rows], partition_id="train")


def _column(values: list[Any]) -> Any:
    return jagged(values) if isinstance(values[0], torch.Tensor) else NonTensorStack(*values)


class Handle:
    """A Ray actor's handle whose calls are made at once; what `ray.get` is given is the answer."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: asyncio.run(getattr(self._actor, name)(*arguments)))


class Workers:
    """What the trainer calls: verl's training worker around an engine, fed from the store as verl's bridge does."""

    _dispatch_info = {"actor": [0]}

    def __init__(self, engine: Any, store: Store) -> None:
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        self.engine, self.store = engine, store
        self.worker = TrainingWorker.__new__(TrainingWorker)
        self.worker.engine, self.worker.engine_config, self.worker.model_config = engine, engine.engine_config, {}
        engine.engine_config.micro_batch_size_per_gpu = engine.engine_config.infer_micro_batch_size_per_gpu = 2
        self.worker.profiler = SimpleNamespace(rank=0, step=lambda: None, check_enable=lambda: False)
        self.worker.flops_counter = SimpleNamespace(estimate_flops=lambda *_, **__: (1.0, 1.0))
        self.worker.device_name = "cpu"
        self.worker.loss_fn = functools.partial(ppo_loss, config=engine.actor_config)

    def _data(self, batch):
        from verl.utils import tensordict_utils as tu

        data = self.store.kv_batch_get(batch.keys, batch.partition_id, batch.fields)
        for name, value in batch.extra_info.items():
            tu.assign_non_tensor_data(data, name, value)
        return data

    def update_actor(self, batch):
        return self.worker.train_mini_batch(self._data(batch))

    def compute_log_prob(self, batch):
        output = self.worker.infer_batch(self._data(batch))
        names = [name for name, value in output.items() if isinstance(value, torch.Tensor)]
        return self.store.kv_batch_put(batch.keys, batch.partition_id, output.select(*names))

    def zmrl_evidence(self):
        identity = self.engine.host.identity() | {"sent_digest": None}
        return [{"identity": identity, "scores": self.engine.compared_scores()}]

    def zmrl_tensor_digests(self):
        host = self.engine.host
        return [host.tensor_digests(adapter=False) | host.tensor_digests(adapter=True)]

    def zmrl_apply_update(self):
        return [self.engine.apply_update()]

    def zmrl_flip_bit(self, *arguments):
        self.engine.host.flip_bit(*arguments)


def sample(trainer: Any) -> None:
    """Start a step: the adapter goes to the server, which answers each of PROBLEMS problems SAMPLES times."""
    server, store = trainer.server, trainer.store
    trainer.global_steps += 1
    server.version = trainer._version = trainer.global_steps
    server.model.adapter = trainer.host.adapter.detach().clone()
    store.rows.clear()
    store.tags.clear()
    for problem in range(PROBLEMS):
        prompt = list(range(40 + problem, 50 + 2 * problem))
        for number in range(SAMPLES):
            extra = {"zmrl_tag": "", "zmrl_seed": 100 * trainer.global_steps + 10 * problem + number}
            params = {"temperature": 0.7, "extra_args": extra}
            out = asyncio.run(server.generate(prompt, params, ""))
            response = torch.tensor(out.token_ids)
            ids = torch.cat([torch.tensor(prompt), response])
            mask = torch.ones_like(response)
            reward = torch.zeros(len(response))
            reward[-1] = float(number)
            key = f"uid{problem}_{number}_0"
            store.rows[key] = {
                "uid": f"uid{problem}", "session_id": number, "data_source": "builtin", "index": problem,
                "input_ids": ids, "prompts": torch.tensor(prompt), "responses": response, "position_ids": ids * 0,
                "attention_mask": torch.ones_like(ids), "response_mask": mask, "loss_mask": mask, "rm_scores": reward,
                "rollout_log_probs": torch.tensor(out.log_probs), "extra_fields": out.extra_fields,
                "extra_info": {"key": str(problem)}, "reward_model": {"ground_truth": "1"}, "num_turns": 2,
            }  # fmt: skip
            store.tags[key] = {"seq_len": len(ids), "status": "success"}


def make_trainer(folder: Path, monkeypatch: Any, *overrides: str) -> Any:
    """A `ZmrlTrainer` before step 1, with its `store`, `engine`, `host` and `server`; `sample` and `train` do one."""
    engine = make_engine(folder, "rollout.temperature=0.7", *overrides)

    from verl.trainer.ppo import padding_utils
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.v1 import trainer_base

    from tests.trainer.stub_rollout import StubServer
    from zmrl.recipe import load_recipe
    from zmrl.trainer import evidence, ppo, samples, sides
    from zmrl.trainer.advantage import grpo_advantage
    from zmrl.trainer.compose import compose_config

    store = Store()
    for module in (padding_utils, trainer_base, evidence, samples):
        monkeypatch.setattr(module, "tq", store)
    monkeypatch.setitem(ADV_ESTIMATOR_REGISTRY, "zmrl_grpo", grpo_advantage)

    options = [f"rollout.prompts_per_step={PROBLEMS}", f"rollout.n={SAMPLES}", "rollout.temperature=0.7", *overrides]
    recipe = load_recipe(folder / "recipe.yaml", [*options, f"output_dir={folder}"])
    trainer = ppo.ZmrlTrainer(compose_config(recipe))
    trainer.ref_in_actor, trainer.curr_step_profile = True, False
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.checkpoint_manager = SimpleNamespace(sleep_replicas=lambda: None)
    trainer.replay_buffer = SimpleNamespace(problems=[], sample=lambda **_: (store.batch(), {}))
    trainer.tokenizer = SimpleNamespace(eos_token_id=EOS, decode=str)
    trainer.logger = SimpleNamespace(log=lambda data, step: None)
    trainer.global_steps = 0
    trainer.actor_rollout_wg = Workers(engine, store)
    trainer.store, trainer.engine, trainer.host = store, engine, engine.host
    trainer.server = StubServer(SimpleNamespace(response_length=6))

    trainer.llm_server_manager = SimpleNamespace(server_handles=[Handle(trainer.server)])
    for module in (ppo, sides):
        monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda answers, timeout=None: answers))
    return trainer


def train(trainer: Any) -> dict[str, Any]:
    """The rest of a step, up to its line; returns verl's metrics."""
    metrics: dict[str, Any] = {}
    trainer.timing_raw = {}
    trainer.on_step_begin()
    trainer._step_once(metrics, trainer.timing_raw, PROBLEMS)
    trainer._write_step()
    return metrics
