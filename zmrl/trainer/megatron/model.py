"""The trainer's wrapper of the model: FP32 masters of the adapters beside the BF16 buffers that the forward reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from zmrl.lora.initialise import initial_lora_a
from zmrl.model.config import K3Config
from zmrl.model.context import SequenceContext
from zmrl.model.gradients import AdapterGradients
from zmrl.model.moe import Experts
from zmrl.model.tensors import TensorSlice
from zmrl.model.transformer import KimiK31
from zmrl.trainer.megatron.parallel import TrainerRanks


class KimiK31Megatron(MegatronModule):
    """A frozen `KimiK31` and the masters of one adapter, in the panel layout of the live buffers without the slot.

    The masters are the only parameters with gradients; their names are `adapters.` or `expert_adapters.` + the keys of
    `KimiK31.lora_buffers()`. Autograd never sees them: the kernels add their gradients to the buffers that
    `gradients` hands them, and `refresh` rounds the masters to the live buffers.
    """

    def __init__(self, model: KimiK31, rank: int, alpha: float, seed: int, ranks: TrainerRanks) -> None:
        """model: loaded, of `ranks.model`. Masters start at PEFT's standard values, drawn from `seed`."""
        super().__init__(_transformer_config(model.config))
        self.model, self.ranks = model, ranks
        self.rank, self.alpha = rank, alpha
        self.model_type = ModelType.encoder_or_decoder  # the schedule asks for it
        self.share_embeddings_and_output_weights = False  # as does finalize_model_grads
        model.create_lora(1, rank, alpha)
        self.expert_keys = {
            f"{item.key}.{field}"
            for item in model.adapted_modules()
            if isinstance(item.module, Experts)
            for field in item.module.lora_buffers()
        }
        """Keys of the masters of experts. These come last, so that Megatron puts their gradients side by side."""
        self.adapters, self.expert_adapters = nn.Module(), nn.Module()
        self.masters: dict[str, nn.Parameter] = {}
        for key, buffer in model.lora_buffers().items():
            root = self.expert_adapters if key in self.expert_keys else self.adapters
            self.masters[key] = _register(root, key, torch.zeros(buffer.shape[1:]))
        self.gradients = AdapterGradients(model)
        self.reset_adapter(seed)

    def forward(self, token_ids: Tensor, context: SequenceContext) -> Tensor:
        """token_ids int64 [T] -> normalised hidden states BF16 [T, hidden]."""
        return self.model(token_ids, context)

    def set_input_tensor(self, tensor: Any) -> None:
        """Part of Megatron's interface; there is one pipeline stage, so nothing arrives."""

    # Masters and live buffers

    @torch.no_grad()
    def reset_adapter(self, seed: int) -> None:
        """PEFT's initial values: A drawn from (seed, name), B zero."""
        for item in self.master_slices():
            if item.name.endswith(".lora_A.weight"):
                rank, in_features = item.shape
                item.write(initial_lora_a(item.name, rank, in_features, seed))
            else:
                item.live().zero_()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters to the live BF16 buffers, to nearest even."""
        for key, buffer in self.model.lora_buffers().items():
            buffer[0].copy_(self.masters[key])

    def master_slices(self) -> Iterator[TensorSlice]:
        """The FP32 masters under their PEFT names."""
        return self.model.lora_slices({key: master.detach() for key, master in self.masters.items()})

    def gradient_slices(self, gradients: dict[str, Tensor]) -> Iterator[TensorSlice]:
        """Gradients, given by key, under PEFT names."""
        return self.model.lora_slices(gradients)

    def live_slices(self) -> Iterator[TensorSlice]:
        """The BF16 buffers that the forward reads, under PEFT names."""
        return self.model.lora_slices(0)

    # Checkpoints

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Iterable[tuple[int, int, int]] = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The masters as Megatron's sharded tensors; the frozen base is not part of a trainer checkpoint.

        Written out because Megatron's default walks into `nn.Module` containers and takes what it finds there for
        replicated tensors. A tensor rank's masters are tensors of their own, under its number: a fused projection has
        parts of several on each rank. So are those of experts on the ranks of all copies, which no other rank has.
        """
        tensor, expert = self.model.ranks.tensor, self.model.ranks.expert
        stem = f"{prefix}adapters." if tensor.size == 1 else f"{prefix}adapters.rank{tensor.rank}."
        copies = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"]
        spread = [key for key in self.masters if key in self.expert_keys and self.model.ranks.copies > 1]
        shared = {key: master for key, master in self.masters.items() if key not in spread}
        sharded = make_sharded_tensors_for_checkpoint(shared, stem, {}, sharded_offsets, dp_cp_group=copies)
        for key in spread:
            name = f"{prefix}adapters.expert_rank{expert.rank}.{key}"
            sharded[name] = make_sharded_tensor_for_checkpoint(
                self.masters[key], name, sharded_offsets, replica_id=0, dp_cp_group=copies
            )
        return sharded


def _register(root: nn.Module, key: str, value: Tensor) -> nn.Parameter:
    """A parameter at the dotted path `key` below `root`."""
    *path, name = key.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    parameter = nn.Parameter(value)
    root.register_parameter(name, parameter)
    return parameter


def _transformer_config(config: K3Config) -> TransformerConfig:
    """What Megatron's DDP, schedule and optimizer read; it does not describe the model (`K3Config` does)."""
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        # Losses of micro-batches are added up. Otherwise the schedule divides them, and DDP the gradients.
        calculate_per_token_loss=True,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
    )
