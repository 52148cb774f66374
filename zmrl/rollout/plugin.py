"""vLLM plugin (entry point group `vllm.general_plugins`, name `zmrl`).

vLLM calls `register` in every process that it starts: front end, engine core and workers. It must be idempotent.
"""

from __future__ import annotations

import os

from zmrl.model.config import ARCHITECTURE


def register() -> None:
    """Makes vLLM know the model, its caches, workers and chat format. RuntimeError if VLLM_BATCH_INVARIANT is set."""
    if os.environ.get("VLLM_BATCH_INVARIANT", "0") not in ("", "0"):
        raise RuntimeError(
            "VLLM_BATCH_INVARIANT is set: on a CPU it makes vLLM 0.32 crash in its first norm (it installs Triton "
            "kernels), and zmrl does not need it, its kernels are batch-invariant. Unset VLLM_BATCH_INVARIANT."
        )
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.reasoning import ReasoningParserManager
    from vllm.renderers.registry import RENDERER_REGISTRY
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    from zmrl.model.tokenizer import register as register_tokenizer
    from zmrl.rollout import patches_vllm
    from zmrl.rollout.model import KimiK31ForCausalLM
    from zmrl.rollout.settings import TOKENIZER_MODE, KimiK31Settings

    patches_vllm.apply()
    register_tokenizer()
    if ARCHITECTURE not in MODELS_CONFIG_MAP:
        # By its name, vLLM would start a process to look at the class whenever its source is new: 10 s.
        ModelRegistry.register_model(ARCHITECTURE, KimiK31ForCausalLM)
        MODELS_CONFIG_MAP[ARCHITECTURE] = KimiK31Settings
        MambaAttentionBackendEnum.register("ZMRL_KDA", "zmrl.rollout.cache.KdaBackend")
        TokenizerRegistry.register(TOKENIZER_MODE, "vllm.tokenizers.hf", "CachedHfTokenizer")
        RENDERER_REGISTRY.register(TOKENIZER_MODE, "zmrl.serving.chat_renderer", "ChatRenderer")
        ReasoningParserManager.register_lazy_module("kimi_k3", "zmrl.serving.chat_parser", "ByteReasoningParser")
