"""`KimiK31ForCausalLM`: the model as vLLM holds it. The arithmetic is `zmrl.model.transformer.KimiK31`'s."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFunc, get_temporal_copy_spec
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsLoRA, SupportsMambaPrefixCaching

from zmrl.model.checkpoint import iter_tensors, read_config
from zmrl.model.context import SequenceContext, scratch_context
from zmrl.model.decode import DecodeSteps
from zmrl.model.transformer import KimiK31
from zmrl.rollout.cache import ModelCaches
from zmrl.rollout.lora import AdapterSlots
from zmrl.rollout.ranks import ranks_of
from zmrl.rollout.settings import cache_format, lora_alpha

DUMMY_LENGTH = 64
"""Length of the sequences that a profile or dummy run is cut into: attention over one long one would be quadratic."""


class KimiK31ForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsMambaPrefixCaching, SupportsLoRA):
    """Weights, caches and adapter slots. One forward pass a step, over the packed tokens of all requests."""

    packed_modules_mapping: dict[str, list[str]] = {}
    embedding_modules = {"slots": ""}
    """vLLM's LoRA manager takes modules whose last name stands here and that are a BaseLayerWithLoRA."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.checkpoint = vllm_config.model_config.model
        local = Path(self.checkpoint).is_dir()
        k3 = read_config(self.checkpoint) if local else self.config.to_k3_config()
        self.model = KimiK31(k3, cache_format(vllm_config), ranks_of(vllm_config))
        self.caches = ModelCaches(self.model, vllm_config, f"{prefix}." if prefix else "")
        self.adapters = nn.ModuleDict()
        lora = vllm_config.lora_config
        if lora is not None:
            self.model.create_lora(lora.max_loras, lora.max_lora_rank, lora_alpha(vllm_config))
            for item in self.model.adapted_modules():
                self.adapters[item.key.replace(".", "_")] = nn.ModuleDict({"slots": AdapterSlots(item)})
        self.decode_steps = DecodeSteps(self.model)
        self.slots: Tensor | None = None
        """int32 [T]: adapter slots of the coming step's tokens, set by the runner; None: no adapter in the step."""
        self.context: SequenceContext | None = None
        """Of the last step, for the runner's NaN check and for fault injection."""

    # vLLM's interface

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """An empty state: vLLM then neither pads states nor inflates the block size (platforms/interface.py:1057)."""
        return ((0,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[MambaStateCopyFunc, ...]:
        """Both states move whole between blocks."""
        return (get_temporal_copy_spec, get_temporal_copy_spec)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.model.embed_tokens)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """input_ids [T] -> hidden states BF16 [T, hidden]."""
        if inputs_embeds is not None:
            raise ValueError("prompt embeddings are not supported by this model; send token ids")
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # a profile or dummy run
            whole, rest = divmod(input_ids.shape[0], DUMMY_LENGTH)
            lengths = [DUMMY_LENGTH] * whole + ([rest] if rest else [])
            model = self.model
            return model(input_ids, scratch_context(model.config, lengths, None, model.cache_format, model.ranks))
        context = self.caches.context(metadata, self.slots)
        decoded = self.decode_steps(input_ids, context)
        hidden, self.context = decoded or (self.model(input_ids, context), context)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden BF16 [rows, hidden] -> FP32 [rows, vocab_size], the real vocabulary only."""
        return self.model.logits(hidden_states.contiguous())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Every checkpoint tensor exactly once; ValueError names one that is missing, extra, truncated or wrong."""
        if Path(self.checkpoint).is_dir():
            weights = iter_tensors(self.checkpoint)  # under checkpoint names; checks all files before the first tensor
        loader = self.model.loader(f"checkpoint {self.checkpoint}")
        for name, tensor in weights:
            loader.load(name, tensor)
        loader.finish()
        return {name for name, _ in self.named_parameters()}
