"""MLA without rotation (NoPE) and its DSA indexer (specification 2.2, 2.3).

Shapes: B batch, T new tokens, S all tokens so far (S = T without a state), H heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zmrl.model.config import K3Config
from zmrl.model.reference.common import ForwardContext, RMSNorm, linear

E4M3_MAX = 448.0


def quantise_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes (as values) and a power-of-two scale per vector: s = 2^ceil(log2(max(amax, 1e-4) / 448)).

    x [..., D] -> (values [..., D], scale [..., 1]) with x ~ values * scale; straight-through gradient on the values.
    """
    amax = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(amax / E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = torch.ldexp(torch.ones_like(amax), exponent)
    y = x / scale
    rounded = y.detach().float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype)
    return y + (rounded - y).detach(), scale


def select_top_k(scores: Tensor, k: int, allowed: Tensor) -> Tensor:
    """Selection mask: per row the k largest allowed scores; ties go to the lower position.

    scores [..., S] are rounded to BF16 before ranking, -0.0 counts as +0.0 and NaN as -inf; allowed [..., S] bool
    -> mask [..., S].
    """
    rounded = scores.detach().to(torch.bfloat16).float() + 0.0
    rounded = rounded.masked_fill(~allowed | rounded.isnan(), float("-inf"))
    order = torch.sort(rounded, dim=-1, descending=True, stable=True).indices[..., :k]
    return torch.zeros_like(allowed).scatter(-1, order, True) & allowed


def _hadamard(x: Tensor) -> Tensor:
    """x [..., D] times H_D / sqrt(D), D a power of two."""
    size = x.shape[-1]
    y, half = x.unsqueeze(-2), 1
    while half < size:
        y = y.reshape(*x.shape[:-1], size // (2 * half), 2, half)
        y = torch.cat((y[..., 0, :] + y[..., 1, :], y[..., 0, :] - y[..., 1, :]), dim=-1)
        half *= 2
    return y.reshape(x.shape) * size**-0.5


class Indexer(nn.Module):
    """Scores of all earlier positions for each query: I(t, s) = s_k(s) sum_h w'_{t,h} ReLU(q8_{t,h} . k8_s)."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        assert config.index_n_heads is not None and config.index_head_dim is not None and config.q_lora_rank is not None
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.hadamard = config.index_hadamard
        self.wq_b = linear(config.q_lora_rank, self.heads * self.dim)
        self.wk = linear(config.hidden_size, self.dim)
        self.k_norm = nn.LayerNorm(self.dim, eps=config.index_norm_eps)
        self.weights_proj = linear(config.hidden_size, self.heads)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, hidden] -> FP8 key values [B, T, dim] and scales [B, T, 1]."""
        k = self.k_norm(self.wk(x))
        return quantise_fp8(_hadamard(k) if self.hadamard else k)

    def forward(self, c_q: Tensor, x: Tensor, keys: tuple[Tensor, Tensor]) -> Tensor:
        """Normalised q latent [B, T, q_lora_rank], x [B, T, hidden], keys of S tokens -> scores [B, T, S]."""
        q = self.wq_b(c_q).unflatten(-1, (self.heads, self.dim))
        q8, q_scale = quantise_fp8(_hadamard(q) if self.hadamard else q)
        weights = self.weights_proj(x) * q_scale.squeeze(-1) * (self.dim**-0.5 * self.heads**-0.5)
        values, scale = keys
        products = F.relu(torch.einsum("bthd,bsd->bhts", q8, values))
        return torch.einsum("bhts,bth->bts", products, weights) * scale.squeeze(-1).unsqueeze(1)


class MultiHeadLatentAttention(nn.Module):
    """One MLA layer's attention, in explicit (not absorbed) form."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        self.config = config
        heads, hidden = config.num_attention_heads, config.hidden_size
        self.heads = heads
        if config.q_lora_rank is None:
            self.q_proj = linear(hidden, heads * config.qk_head_dim)
        else:
            self.q_a_proj = linear(hidden, config.q_lora_rank)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps)
            self.q_b_proj = linear(config.q_lora_rank, heads * config.qk_head_dim)
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps)
        self.kv_b_proj = linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim))
        if config.mla_use_output_gate:
            self.g_proj = linear(hidden, heads * config.v_head_dim)
        self.o_proj = linear(heads * config.v_head_dim, hidden)
        if config.has_indexer:
            self.indexer = Indexer(config)

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        cfg = self.config
        state = None if ctx.state is None else ctx.state[layer]
        c_q = x if cfg.q_lora_rank is None else self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_proj(x) if cfg.q_lora_rank is None else self.q_b_proj(c_q)
        q = q.unflatten(-1, (self.heads, cfg.qk_head_dim)).transpose(1, 2)
        q_nope, q_pe = q.split((cfg.qk_nope_head_dim, cfg.qk_rope_head_dim), dim=-1)
        c_raw, k_pe = self.kv_a_proj_with_mqa(x).split((cfg.kv_lora_rank, cfg.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(c_raw)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv, k_pe = _extend(state, "kv", kv, 2), _extend(state, "k_pe", k_pe, 1)
        k_nope, v = kv.split((cfg.qk_nope_head_dim, cfg.v_head_dim), dim=-1)

        time, total = x.shape[1], k_pe.shape[1]
        positions = torch.arange(total, device=x.device)
        allowed = (positions <= positions[total - time :, None]).expand(x.shape[0], time, total)
        scores = q_nope @ k_nope.transpose(-1, -2) + q_pe @ k_pe.unsqueeze(1).transpose(-1, -2)
        scores = scores * cfg.qk_head_dim**-0.5

        index_scores: Tensor | None = None
        if cfg.index_topk is not None:
            # Detached inputs: the indexer's loss trains the indexer alone.
            x_detached = x.detach()
            values, scale = self.indexer.keys(x_detached)
            keys = _extend(state, "index_values", values, 1), _extend(state, "index_scale", scale, 1)
            index_scores = self.indexer(c_q.detach(), x_detached, keys)
            ctx.record(f"layers.{layer}.index_scores", index_scores)
            if ctx.sparse:
                allowed = select_top_k(index_scores, cfg.index_topk, allowed)
                ctx.record(f"layers.{layer}.selected", allowed)
        probabilities = torch.softmax(scores.masked_fill(~allowed.unsqueeze(1), float("-inf")), dim=-1)
        if index_scores is not None and ctx.want_index_loss:
            ctx.index_losses.append(index_kl(index_scores, probabilities.detach(), allowed))

        o = (probabilities @ v).transpose(1, 2)
        ctx.record(f"layers.{layer}.mla_output", o)
        o = o.flatten(-2)
        return self.o_proj(o * torch.sigmoid(self.g_proj(x)) if cfg.mla_use_output_gate else o)


def index_kl(index_scores: Tensor, probabilities: Tensor, allowed: Tensor) -> Tensor:
    """DSA's indexer loss: mean over rows of KL(head-summed, L1-normalised attention || softmax(index scores)).

    index_scores [B, T, S], probabilities [B, H, T, S] (detached), allowed [B, T, S]: both distributions live there.
    """
    target = probabilities.sum(1)
    target = target / target.sum(-1, keepdim=True)
    log_index = torch.log_softmax(index_scores.masked_fill(~allowed, float("-inf")), dim=-1)
    terms = torch.where(allowed & (target > 0), target * (target.clamp(min=1e-30).log() - log_index), 0.0)
    return terms.sum(-1).mean()


def _extend(state: dict[str, Tensor] | None, key: str, new: Tensor, dim: int) -> Tensor:
    """`new` after what `state[key]` holds, along `dim`; the state keeps the result."""
    if state is None:
        return new
    if key in state:
        new = torch.cat((state[key], new), dim=dim)
    state[key] = new
    return new
