"""Trainer checkpoints: adapter masters, optimizer, schedule, random state; by Megatron's dist_checkpointing.

Written beside the target by all ranks, synced and renamed by the first: a checkpoint is there whole or not at all. The
frozen base is not in it; its digest is, and a checkpoint of another base, rank, alpha, optimizer or cut of the model is
refused before anything is changed. The number of data-parallel ranks may change, unless
the experts are spread over them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import distributed as dist
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from zmrl.files import sync
from zmrl.trainer.checkpoints import CheckpointWriteError, TrainerCheckpointError
from zmrl.trainer.megatron.optimizer import AdapterOptimizer

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


class _InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process.

    Megatron's writer forks (hazardous with OpenMP and gRPC threads, as in a Ray actor) and starts a manager process
    that imports the main module again; a checkpoint of adapters needs neither.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Any) -> None:
        tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(tensors, False),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir, sync_files=False),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(path: str | Path, optimizer: AdapterOptimizer, identity: dict[str, Any], extra: dict[str, Any]) -> None:
    """Write a checkpoint at `path`, replacing one that is there.

    identity: what a resumed run must share. extra: anything that JSON can hold; `load` returns it. TypeError if not.
    """
    payload = {"extra": json.dumps(extra), "identity": json.dumps(identity), "rng": torch.get_rng_state()}
    model = optimizer.module.sharded_state_dict()
    state = {
        "model": model,
        "optimizer": optimizer.megatron.sharded_state_dict(model, metadata=_METADATA),
        "scheduler": optimizer.scheduler.state_dict(),
        **payload,
    }
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    previous = target.with_name(f".{target.name}.old")
    first = dist.get_rank() == 0
    with _together(target):
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
    try:
        with _together(target):
            dist_checkpointing.save(state, str(temporary), _InProcessSave("torch_dist", 1))
        with _together(target):
            if first:
                for file in (*temporary.iterdir(), temporary):
                    sync(file)
                if target.exists():
                    target.rename(previous)
                temporary.rename(target)
                sync(target.parent)
    finally:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def _together(target: Path) -> Iterator[None]:
    """No rank goes on before all have done what is inside; where one fails, all do."""
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as raised:  # the latter, a BaseException, has the failures of all ranks
        error = raised
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, None if error is None else _cause(error))
    if error is not None and not isinstance(error, CheckpointException):
        raise error
    failed = next((failure for failure in failures if failure is not None), None)
    if failed is not None:
        raise CheckpointWriteError(
            f"checkpoint {target} could not be written ({failed}); see to space and permissions"
        ) from error


def load(path: str | Path, optimizer: AdapterOptimizer, identity: dict[str, Any]) -> dict[str, Any]:
    """Restore the state saved at `path`; returns `extra`. TrainerCheckpointError if it does not fit."""
    target = Path(path)
    if not target.is_dir():
        raise TrainerCheckpointError(f"checkpoint {target} does not exist; give the directory of a saved step")
    try:
        common = dist_checkpointing.load_common_state_dict(str(target))
        saved = json.loads(common["identity"])
    except Exception as error:  # torch, pickle, JSON, Megatron and the file system each raise their own
        raise TrainerCheckpointError(
            f"checkpoint {target} cannot be read ({_cause(error)}); resume from an earlier step"
        ) from error
    for key in identity | saved:
        if saved.get(key) != identity.get(key):
            raise TrainerCheckpointError(
                f"checkpoint {target} was written with {key} = {saved.get(key)!r}, this run has {identity.get(key)!r}; "
                "resume with the settings of the run that wrote it, or start afresh"
            )
    model = optimizer.module.sharded_state_dict()
    state = {
        "model": model,
        "optimizer": optimizer.megatron.sharded_state_dict(model, is_loading=True, metadata=_METADATA),
    }
    try:
        loaded = dist_checkpointing.load(state, str(target))  # writes the tensors in place
    except (Exception, CheckpointException) as error:
        raise TrainerCheckpointError(
            f"checkpoint {target} is incomplete ({_cause(error)}); resume from an earlier step"
        ) from error
    optimizer.load_state(loaded["optimizer"], loaded["scheduler"])
    optimizer.module.refresh()
    torch.set_rng_state(loaded["rng"])
    return json.loads(loaded["extra"])


def _cause(error: BaseException) -> str:
    """One line; of torch's collection of failures the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
