"""Engines as verl makes them, without verl's workers, and batches in verl's layout."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from zmrl.recipe import load_recipe
from zmrl.trainer.compose import compose_config

PROMPTS = [3, 1, 5, 2]
RESPONSES = [4, 6, 1, 3]

STUB = "tests.trainer.stub_host:StubHost"
SEVERAL = "trainer.epochs=2"
"""An override: two updates a step, so that verl scores the samples in a pass of its own."""


def verl_environment() -> None:
    """What `import verl` reads; to be called before it."""
    os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "zmrl.trainer.verl_plugin"}


@contextmanager
def process_group() -> Iterator[None]:
    """The group of this one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def make_engine(folder: Path, *overrides: str, host: str = STUB, model: str = "nano", rank: int = 32):
    """An engine from verl's configuration, composed from a recipe that is written to `folder`."""
    verl_environment()
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.engine.base import EngineRegistry

    import zmrl.trainer.engine  # noqa: F401 (registers)

    file = folder / "recipe.yaml"
    file.write_text("model: nano\noutput_dir: out\n")
    options = ["rollout.prompts_per_step=2", "rollout.n=2", "trainer.lr=0.5", *overrides]
    config = omega_conf_to_dataclass(compose_config(load_recipe(file, options)).actor_rollout_ref.actor)
    config.zmrl.__dict__["host"] = host
    held = SimpleNamespace(local_path=model, lora_rank=rank, lora_alpha=rank)
    made = EngineRegistry.new(
        "language_model", "zmrl", held, config.engine, config.optim, checkpoint_config=config.checkpoint
    )
    made.initialize()
    made.actor_config = config
    return made


def jagged(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def make_batch(responses=RESPONSES, masks=None, micro=2, **fields):
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 288, (p + r,), generator=generator) for p, r in zip(PROMPTS, responses, strict=True)]
    masks = masks or [torch.ones(r, dtype=torch.int64) for r in responses]
    columns = {
        "input_ids": jagged(ids),
        "prompts": jagged(i[:p] for i, p in zip(ids, PROMPTS, strict=True)),
        "responses": jagged(i[p:] for i, p in zip(ids, PROMPTS, strict=True)),
        "response_mask": jagged(masks),
        "loss_mask": jagged(masks),
        "session_id": torch.arange(len(ids)) % 2,
    }
    columns |= {name: jagged(rows) for name, rows in fields.items()}
    data = TensorDict(columns, batch_size=len(ids))
    tu.assign_non_tensor_stack(data, "uid", ["first", "first", "second", "second"])
    tu.assign_non_tensor(
        data, temperature=0.7, micro_batch_size_per_gpu=micro, use_dynamic_bsz=False, global_batch_size=len(ids)
    )
    return data


def check(engine, data):
    """A pass of its own over the samples: what verl's trainer makes of the answer, as rows of the response tokens."""
    from verl.workers.utils.padding import response_from_nested

    with engine.eval_mode():
        output = engine.infer_batch(data)["model_output"]
    mask = data["response_mask"]
    return {name: list(response_from_nested(output[name], mask).unbind()) for name in ("log_probs", "entropy")}


def compared(engine):
    """The scores that the engine hands over for the comparison, by field, in the order of its samples."""
    scores = engine.compared_scores().split().values()
    return {name: [getattr(score, name) for score in scores] for name in ("log_probs", "digests", "entropy")}


def update(engine, data):
    """One mini-batch of verl's."""
    from verl.workers.utils.losses import ppo_loss

    with engine.train_mode():
        return engine.train_batch(data, functools.partial(ppo_loss, config=engine.actor_config))


def advantages(responses=RESPONSES):
    return [torch.full((r,), (-1.0) ** i) for i, r in enumerate(responses)]


def same_bits(a, b) -> bool:
    """Of two `check`s, or of two lists of tensors."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)
    kinds = {4: torch.int32, 8: torch.int64}
    pairs = list(zip(a, b, strict=True))
    assert pairs
    return all(torch.equal(x.view(kinds[x.element_size()]), y.view(kinds[y.element_size()])) for x, y in pairs)
