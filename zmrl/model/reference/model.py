"""The decoder, with block attention residuals or plain ones, and the language model (specification 3.1)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zmrl.model.config import K3Config
from zmrl.model.initialise import initial_tensors
from zmrl.model.reference.common import MLP, ForwardContext, RMSNorm, linear
from zmrl.model.reference.kda import KimiDeltaAttention
from zmrl.model.reference.mla import MultiHeadLatentAttention
from zmrl.model.reference.moe import MixtureOfExperts, RoutedExperts


def attn_res_mix(sources: list[Tensor], norm: RMSNorm, projection: nn.Linear) -> Tensor:
    """Block attention residual: softmax over sources of <normalised source, norm.weight * proj.weight>, raw values.

    sources: tensors [..., hidden] -> [..., hidden]. A single source is returned as it is.
    """
    if len(sources) == 1:
        return sources[0]
    values = torch.stack(sources, dim=-2)
    p = torch.softmax(projection(norm(values)), dim=-2)
    return (p * values).sum(-2)


class DecoderLayer(nn.Module):
    """One layer: attention, then MLP or MoE, each reading a mix over blocks + prefix, or the prefix itself."""

    def __init__(self, config: K3Config, layer: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layer = layer
        size = config.attn_res_block_size
        self.starts_block = size is not None and layer % size == 0
        full = config.is_full_attention(layer)
        self.self_attn = MultiHeadLatentAttention(config) if full else KimiDeltaAttention(config)
        if config.is_moe(layer):
            self.block_sparse_moe = MixtureOfExperts(config)
        else:
            self.mlp = MLP(config, config.intermediate_size)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.mixes = size is not None
        if self.mixes:
            self.self_attention_res_norm, self.mlp_res_norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
            self.self_attention_res_proj, self.mlp_res_proj = linear(hidden, 1), linear(hidden, 1)

    def forward(self, blocks: list[Tensor], prefix: Tensor, ctx: ForwardContext) -> Tensor:
        """blocks (extended in place where a block starts) and prefix [B, T, hidden] -> new prefix."""
        h = prefix
        if self.mixes:
            h = attn_res_mix([*blocks, prefix], self.self_attention_res_norm, self.self_attention_res_proj)
        if self.starts_block:
            blocks.append(prefix)
        a = self.self_attn(self.input_layernorm(h), ctx, self.layer)
        ctx.record(f"layers.{self.layer}.attention", a)
        prefix = a if self.starts_block else prefix + a
        h = prefix
        if self.mixes:
            h = attn_res_mix([*blocks, prefix], self.mlp_res_norm, self.mlp_res_proj)
        x = self.post_attention_layernorm(h)
        m = self.block_sparse_moe(x, ctx, self.layer) if hasattr(self, "block_sparse_moe") else self.mlp(x)
        ctx.record(f"layers.{self.layer}.mlp", m)
        return prefix + m


class KimiK31Model(nn.Module):
    """Embedding, layers, output mix and norm."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.mixes = config.attn_res_block_size is not None
        if self.mixes:
            self.output_attn_res_norm = RMSNorm(hidden, eps)
            self.output_attn_res_proj = linear(hidden, 1)

    def forward(self, input_ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids [B, T] -> normalised final hidden states [B, T, hidden]."""
        prefix = self.embed_tokens(input_ids)
        blocks: list[Tensor] = []
        for layer in self.layers:
            prefix = layer(blocks, prefix, ctx)
        if self.mixes:
            prefix = attn_res_mix([*blocks, prefix], self.output_attn_res_norm, self.output_attn_res_proj)
        return self.norm(prefix)


class KimiK31ForCausalLM(nn.Module):
    """The language model. Parameters are uninitialised until `load_tensors` or `initialise`."""

    def __init__(self, config: K3Config, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.model = KimiK31Model(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        self.to(dtype)

    def forward(self, input_ids: Tensor, ctx: ForwardContext | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab]. With `ctx.state` the ids continue the tokens that it remembers.

        Padding belongs at the right end: causality keeps it from real tokens.
        """
        return self.lm_head(self.model(input_ids, ctx or ForwardContext()))

    def new_state(self) -> list[dict[str, Any]]:
        """An empty state for `ForwardContext.state`: per layer KDA state and convolution inputs, or MLA keys."""
        return [{} for _ in range(self.config.num_hidden_layers)]

    def initialise(self, seed: int = 0) -> KimiK31ForCausalLM:
        """Fill all parameters from a seed (`zmrl.model.initialise`)."""
        self.load_tensors(initial_tensors(self.config, seed))
        return self

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (module name, tensor) pairs into the parameters; raises ValueError unless they match exactly."""
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors:
                parameter = parameters.pop(name, None)
                if parameter is None or parameter.shape != tensor.shape:
                    raise ValueError(f"tensor {name} {list(tensor.shape)} does not fit the reference model")
                parameter.copy_(tensor)
        if parameters:
            raise ValueError(f"tensor {min(parameters)} was not given; the reference model needs every tensor")

    def trainable(self) -> dict[str, Tensor]:
        """Leaf tensors for pre-training by name: all parameters but the router bias, experts as stacked tensors."""
        out: dict[str, Tensor] = {}
        for name, module in self.named_modules():
            if isinstance(module, RoutedExperts):
                out[f"{name}.w13"], out[f"{name}.w2"] = module.w13.requires_grad_(), module.w2.requires_grad_()
        for name, parameter in self.named_parameters():
            if ".experts." not in name and parameter.requires_grad:
                out[name] = parameter
        return out
