"""Adapters by name: loaded at the start or at run time, from directories of our trainer or of `peft`.

Every load gets an id of its own. Id, name and path are part of the prefix cache's key, and an id never comes back with
other weights (`zmrl.rollout.lora`): an adapter that is loaded again under its name meets none of its former blocks.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
from http import HTTPStatus
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from zmrl.lora.peft_io import CONFIG_FILE, WEIGHTS_FILE, AdapterError
from zmrl.serving.engine import ServingEngine
from zmrl.serving.errors import error_answer

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class Adapters:
    """What `OpenAIServingModels` does for adapters, with the checks that it lacks."""

    def __init__(
        self,
        engine: ServingEngine,
        models: OpenAIServingModels,
        root: Path | None,
        most: int,
        rank: int | None,
        alpha: float | None,
    ) -> None:
        """root: resolved; adapters below it can be loaded by clients. most: adapters that can be loaded at a time."""
        self.engine, self.models, self.root, self.most = engine, models, root, most
        self.rank, self.alpha = rank, alpha
        self._lock = asyncio.Lock()

    async def load(self, name: str, path: Path, replace: bool = False) -> str:
        """Loads the directory `path` (resolved) under `name`; the adapter's digest. AdapterError says what is wrong."""
        async with self._lock:
            known = self.models.lora_requests
            self._check_name(name, replace)
            if len(known) - (name in known) >= self.most:
                raise AdapterError(f"{self.most} adapters are loaded (--max-loras); unload one first")
            if len(self.engine.loaded) > self.most:
                raise AdapterError("a replaced adapter still has running requests; try again when they have ended")
            for file in (CONFIG_FILE, WEIGHTS_FILE):
                _check_file(path / file)
            request = LoRARequest(name, self.models.lora_id_counter.inc(1), str(path))
            try:
                await self.engine.add_lora(request)
            except EngineDeadError:
                raise
            except Exception as error:  # of the engine's process, which sends the message only
                raise AdapterError(re.sub(r"^Call to \w+ method failed: ", "", str(error))) from None
            lora_id = request.lora_int_id
            self.engine.loaded.add(lora_id)
            digest = await self.engine.worker("zmrl_adapter_digest", lora_id)
            if self.engine.transcript is not None:
                self.engine.transcript.adapters[lora_id] = {
                    "name": name, "path": str(path), "version": lora_id, "digest": digest,
                    "rank": self.rank, "alpha": self.alpha,
                }  # fmt: skip
            former = known.get(name)
            known[name] = request
            if former is not None:
                self.engine.retire(former.lora_int_id)
            return digest

    async def unload(self, name: str) -> None:
        """New requests cannot name it any more; running ones end with it. KeyError if there is none."""
        async with self._lock:
            self.engine.retire(self.models.lora_requests.pop(name).lora_int_id)

    def below_root(self, path: str) -> Path:
        """A client's path, resolved. AdapterError unless it is a directory below the root that holds no link out."""
        if self.root is None:
            raise AdapterError("adapters cannot be loaded at run time; start the server with --lora-root DIR")
        if not path or "\0" in path or len(path) > 4096:
            raise AdapterError("lora_path is no path")
        found = Path(os.path.realpath(self.root / path))
        inside = [found, *(Path(os.path.realpath(found / file)) for file in (CONFIG_FILE, WEIGHTS_FILE))]
        if not all(item.is_relative_to(self.root) for item in inside):
            raise AdapterError("lora_path leads out of --lora-root; copy the adapter below it")
        if not os.path.isdir(found):  # Path.is_dir raises where a name is too long
            raise AdapterError("lora_path is no directory below --lora-root")
        return found

    def _check_name(self, name: str, replace: bool) -> None:
        if not _NAME.fullmatch(name):
            raise AdapterError("lora_name: letters, digits and . _ : / - only, at most 128, a letter or digit first")
        if self.models.is_base_model(name):
            raise AdapterError(f"lora_name {name!r} is the name of the model")
        if name in self.models.lora_requests and not replace:
            raise AdapterError(f"lora_name {name!r} is in use; unload it first, or set load_inplace")


def _check_file(path: Path) -> None:
    """A pipe or device in place of a file would keep the engine reading for ever."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        if path.name == WEIGHTS_FILE and path.parent.is_dir():
            raise AdapterError(f"{WEIGHTS_FILE} is missing; only safetensors is read, convert other formats") from None
        raise AdapterError(f"{path.name} is missing; give the directory of a PEFT adapter") from None
    except OSError as error:
        raise AdapterError(f"{path.name} cannot be read ({error.strerror})") from None
    if not regular:
        raise AdapterError(f"{path.name} is no regular file")


class LoadRequest(BaseModel):
    """Body of /v1/load_lora_adapter, as vLLM's."""

    lora_name: str
    lora_path: str
    """Below --lora-root; relative to it, or absolute."""
    load_inplace: bool = False
    """Replace the adapter of this name. Running requests end with the old one."""


class UnloadRequest(BaseModel):
    """Body of /v1/unload_lora_adapter, as vLLM's."""

    lora_name: str


def adapter_routes(adapters: Adapters) -> APIRouter:
    """/v1/load_lora_adapter and /v1/unload_lora_adapter."""
    router = APIRouter()

    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: LoadRequest) -> JSONResponse:
        try:
            path = adapters.below_root(request.lora_path)
            digest = await adapters.load(request.lora_name, path, request.load_inplace)
        except AdapterError as error:
            return error_answer(HTTPStatus.BAD_REQUEST, str(error))
        return JSONResponse({"lora_name": request.lora_name, "digest": digest})

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: UnloadRequest) -> JSONResponse:
        try:
            await adapters.unload(request.lora_name)
        except KeyError:
            return error_answer(HTTPStatus.NOT_FOUND, f"there is no adapter {request.lora_name!r}", "lora_name")
        return JSONResponse({"lora_name": request.lora_name})

    return router
