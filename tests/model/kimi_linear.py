"""Small random Kimi-Linear models made by transformers: the oracle of the family's oldest member."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SIZES: dict[str, dict[str, Any]] = {
    "even": {
        "hidden_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts": 16,
        "num_experts_per_token": 4, "moe_intermediate_size": 32, "intermediate_size": 256, "vocab_size": 288,
        "linear_head_dim": 32, "linear_num_heads": 4,
    },
    "odd": {
        "hidden_size": 77, "num_hidden_layers": 5, "num_attention_heads": 3, "kv_lora_rank": 48,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 5, "v_head_dim": 48, "num_experts": 7, "num_experts_per_token": 3,
        "moe_intermediate_size": 19, "intermediate_size": 101, "vocab_size": 307, "linear_head_dim": 24,
        "linear_num_heads": 5, "num_shared_experts": 2,
        "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
    },
    "q-lora": {
        "hidden_size": 72, "num_hidden_layers": 5, "num_attention_heads": 5, "kv_lora_rank": 16,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 5, "num_experts_per_token": 1,
        "moe_intermediate_size": 40, "intermediate_size": 100, "vocab_size": 289, "linear_head_dim": 8,
        "linear_num_heads": 3, "q_lora_rank": 20, "mlp_layer_types": ["sparse"] * 5,
    },
}  # fmt: skip
LAYERS = ["linear_attention", "full_attention", "linear_attention", "full_attention", "full_attention"]


def make(size: str, decided: bool = False, seed: int = 0) -> nn.Module:
    """A `KimiLinearForCausalLM` in FP32, eager, whose weights are BF16 numbers and all of consequence.

    decided: the router's bias alone decides which experts are chosen, so that BF16 activations cannot turn a near-tie
    around (their weights still depend on the token).
    """
    from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

    fields = SIZES[size]
    config = KimiLinearConfig(
        **fields, num_key_value_heads=fields["num_attention_heads"], layer_types=LAYERS, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, max_position_embeddings=4096,
    )  # fmt: skip
    config._attn_implementation = config._experts_implementation = "eager"
    model = KimiLinearForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)

    def random(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.copy_(1 + 0.1 * random(p))
            elif name.endswith(("A_log", "dt_bias")):
                p.copy_(random(p))  # decays from none to all within a token
            elif "embed" in name or "conv1d" in name:
                p.copy_(0.5 * random(p))
            else:
                p.copy_(random(p) * p.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                spread = 2.0 * torch.randperm(len(buffer), generator=generator)  # a score lies between 0 and 1
                buffer.copy_(spread if decided else 0.05 * random(buffer))
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(tensor.bfloat16())
    return model


def save(model: nn.Module, path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As transformers writes it, in the names of the release; the model stays FP32."""
    model.to(dtype).save_pretrained(path)
    model.float()
    return path


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """FP32 [T, vocab] of a whole sequence."""
    return model(ids[None], use_cache=False).logits[0]


@torch.no_grad()
def logits_by_token(model: Any, ids: Tensor) -> Tensor:
    """The same through the cache, a token at a time."""
    cache, rows = None, []
    for token in ids:
        out = model(token[None, None], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, 0])
    return torch.stack(rows)
