"""Kimi Delta Attention: recurrent definition and chunked form (specification 2.1).

Shapes: B batch, T time, H heads, K = V = head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zmrl.model.config import K3Config
from zmrl.model.reference.common import ForwardContext, RMSNorm, linear

FORGOTTEN = -104.0
"""Log-decay whose exponential is 0 in FP32."""
CHUNK = 16
"""Tile length: a bound of -5 keeps the decay inside a tile at >= e^-80, so exp(-L) does not overflow FP32."""


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Token-by-token delta rule, the definition.

    q, k, log_decay [B, T, H, K], v [B, T, H, V], beta [B, T, H], state [B, H, K, V] -> o [B, T, H, V], final state.
    """
    batch, time, heads, dim = q.shape
    s = q.new_zeros(batch, heads, dim, v.shape[-1]) if state is None else state
    out = []
    for t in range(time):
        s = s * log_decay[:, t].exp().unsqueeze(-1)
        u = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", s, k[:, t]))
        s = s + k[:, t].unsqueeze(-1) * u.unsqueeze(-2)
        out.append(torch.einsum("bhkv,bhk->bhv", s, q[:, t]))
    return torch.stack(out, dim=1), s


def chunked_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    bounded: bool = True,
) -> tuple[Tensor, Tensor]:
    """The same function in tiles of 16 tokens; shapes as in `recurrent_kda`.

    bounded: no log-decay is below -5, so the products k_t exp(L_t - L_i) k_i of a tile are one of k exp(L) and one of
    k exp(-L). Without a bound exp(-L) overflows; every difference L_t - L_i <= 0 is exponentiated by itself then, and
    log-decays are cut at `FORGOTTEN`, since a stronger one would drown its weak neighbours in an FP32 sum L.
    """
    if not bounded:
        log_decay = log_decay.clamp(min=FORGOTTEN)
    batch, time, heads, dim = q.shape
    pad = -time % CHUNK
    chunks = (time + pad) // CHUNK

    def tile(x: Tensor) -> Tensor:  # [B, T, H, D] -> [B, H, chunks, CHUNK, D]; padding has k = v = beta = decay = 0
        return F.pad(x, (0, 0, 0, 0, 0, pad)).view(batch, chunks, CHUNK, heads, -1).permute(0, 3, 1, 2, 4)

    q, k, v, beta = tile(q), tile(k), tile(v), tile(beta.unsqueeze(-1))
    cumulative = tile(log_decay).cumsum(-2)
    gamma = cumulative.exp()
    k_in, q_in = k * gamma, q * gamma
    if bounded:
        k_out = (k * (-cumulative).exp()).transpose(-1, -2)
        kk, qk = k_in @ k_out, q_in @ k_out
    else:
        past = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril().unsqueeze(-1)
        difference = cumulative.unsqueeze(-2) - cumulative.unsqueeze(-3)  # [..., t, i, D]
        decayed = difference.masked_fill(~past, float("-inf")).exp() * k.unsqueeze(-3)
        kk, qk = (torch.einsum("...td,...tid->...ti", x, decayed) for x in (k, q))
    a = (beta * kk).tril(-1)
    p = qk.tril()
    # (I + A) U = diag(beta) (V - (Gamma K) S): solve once for both right-hand sides.
    both = torch.linalg.solve_triangular(a, torch.cat((beta * v, beta * k_in), -1), upper=False, unitriangular=True)
    u_v, u_k = both.split((v.shape[-1], dim), dim=-1)
    last = cumulative[..., -1:, :]
    k_end = (k * (last - cumulative).exp()).transpose(-1, -2)
    decay_end = last.exp().transpose(-1, -2)

    s = q.new_zeros(batch, heads, dim, v.shape[-1]) if state is None else state
    out = []
    for c in range(chunks):
        u = u_v[:, :, c] - u_k[:, :, c] @ s
        out.append(q_in[:, :, c] @ s + p[:, :, c] @ u)
        s = s * decay_end[:, :, c] + k_end[:, :, c] @ u
    o = torch.stack(out, dim=2).permute(0, 2, 3, 1, 4).reshape(batch, time + pad, heads, -1)
    return o[:, :time], s


class KimiDeltaAttention(nn.Module):
    """One KDA layer's attention. `A_log` is stored with padding slots; the first `num_heads` count."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        cfg = config.linear_attn_config
        hidden, width = config.hidden_size, cfg.projection_size
        self.num_heads, self.head_dim = cfg.num_heads, cfg.head_dim
        self.lower_bound, self.kernel = cfg.gate_lower_bound, cfg.short_conv_kernel_size
        self.q_proj, self.k_proj, self.v_proj = (linear(hidden, width) for _ in range(3))
        self.full_rank_gate = cfg.use_full_rank_gate
        if self.full_rank_gate:
            self.g_proj = linear(hidden, width)
        else:
            self.g_a_proj, self.g_b_proj = linear(hidden, cfg.head_dim), linear(cfg.head_dim, width)
        self.o_proj = linear(width, hidden)
        self.b_proj = linear(hidden, cfg.num_heads)
        self.f_a_proj = linear(hidden, cfg.head_dim)
        self.f_b_proj = linear(cfg.head_dim, width)
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            nn.utils.skip_init(nn.Conv1d, width, width, self.kernel, groups=width, bias=False) for _ in range(3)
        )
        self.A_log = nn.Parameter(torch.zeros(cfg.a_log_slots))
        self.dt_bias = nn.Parameter(torch.zeros(width))
        self.o_norm = RMSNorm(cfg.head_dim, config.rms_norm_eps)

    def _conv(self, x: Tensor, conv: nn.Conv1d, state: dict[str, Any] | None, key: str) -> Tensor:
        """Depthwise causal convolution over [B, T, width], then SiLU. Keeps the last inputs in `state[key]`."""
        past = None if state is None else state.get(key)
        if past is None:
            past = x.new_zeros(x.shape[0], self.kernel - 1, x.shape[2])
        x = torch.cat((past, x), dim=1)
        if state is not None:
            state[key] = x[:, x.shape[1] - (self.kernel - 1) :]
        time = x.shape[1] - self.kernel + 1
        weight = conv.weight[:, 0].t()
        out = x[:, :time] * weight[0]
        for j in range(1, self.kernel):
            out = out + x[:, j : j + time] * weight[j]
        return F.silu(out)

    def log_decay(self, f: Tensor) -> Tensor:
        """g = l * sigmoid(exp(A_log) * (f + dt_bias)), f [B, T, width] -> [B, T, H, K] in (l, 0).

        Without a lower bound l: g = -exp(A_log) * softplus(f + dt_bias).
        """
        rate = self.A_log[: self.num_heads].exp().unsqueeze(-1)
        x = self._heads(f + self.dt_bias)
        return -rate * F.softplus(x) if self.lower_bound is None else self.lower_bound * torch.sigmoid(rate * x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def forward(self, x: Tensor, ctx: ForwardContext, layer: int) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden]."""
        state = None if ctx.state is None else ctx.state[layer]
        q = self._heads(self._conv(self.q_proj(x), self.q_conv1d, state, "q"))
        k = self._heads(self._conv(self.k_proj(x), self.k_conv1d, state, "k"))
        v = self._heads(self._conv(self.v_proj(x), self.v_conv1d, state, "v"))
        # eps is added to the sum, inside the root
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * self.head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        decay = self.log_decay(self.f_b_proj(self.f_a_proj(x)))
        beta = torch.sigmoid(self.b_proj(x))
        past = None if state is None else state.get("s")
        if ctx.kda_form == "recurrent" or x.shape[1] == 1:
            o, final = recurrent_kda(q, k, v, decay, beta, past)
        else:
            o, final = chunked_kda(q, k, v, decay, beta, past, bounded=self.lower_bound is not None)
        if state is not None:
            state["s"] = final
        ctx.record(f"layers.{layer}.kda_output", o)
        z = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        gated = self.o_norm(o) * torch.sigmoid(self._heads(z))
        return self.o_proj(gated.flatten(-2))
