"""What the exchanges of a layer cost: bytes that one rank sends to others, in the plain and in the invariant form.

Plain is what a framework that does not fix the order of sums sends: ring all-reduce of BF16, per-rank partial sums of
experts, log-sum-exp of partial vocabularies and of partial attention, the generic top-k merge. The invariant numbers
are those that the groups of `tests/parallel` count. Tokens must divide evenly among the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from zmrl.batch_invariant.ops.candidates import SEGMENT
from zmrl.model.config import K3Config
from zmrl.parallel.selection import capacity

BF16, FP32, WORD = 2, 4, 4


@dataclass(frozen=True)
class Cost:
    """Bytes that one rank sends in one layer for a step's tokens."""

    what: str
    plain: int
    invariant: int


def _to_others(size: int, n: int) -> int:
    """Of n bytes that are spread evenly over all ranks, those that leave a rank."""
    return n * (size - 1) // size


def row_parallel(tokens: int, outputs: int, size: int, lora_rank: int = 0, training: bool = False) -> int:
    """Sums in FP32 (outputs and the adapter's t) to the owners of rows, finished rows in BF16 to all.

    training: t in BF16 to all as well, for the gradient of B.
    """
    sums = _to_others(size, tokens * (outputs + lora_rank) * FP32)
    return sums + _to_others(size, tokens * (outputs + (lora_rank if training else 0)) * BF16)


def column_parallel_backward(tokens: int, inputs: int, size: int, parts: int = 1, lora_rank: int = 0) -> int:
    """The same for the input gradient and dt, which all ranks need in FP32 for the gradient of A."""
    dt = parts * lora_rank
    return _to_others(size, tokens * ((inputs + dt) * FP32 + inputs * BF16 + dt * FP32))


def all_reduce(tokens: int, width: int, size: int) -> int:
    """A ring all-reduce of BF16 rows."""
    return 2 * _to_others(size, tokens * width * BF16)


def candidates(tokens: int, topk: int, size: int, segments: int = 1) -> int:
    """One round of the exact merge, when no row must be sent again."""
    return tokens * (segments + capacity(topk, size)) * WORD * (size - 1)


def generic_merge(tokens: int, topk: int, size: int) -> int:
    """Every rank's own topk as FP32 scores and 32-bit positions."""
    return tokens * topk * 2 * WORD * (size - 1)


def partial_attention(tokens: int, heads: int, kv_lora_rank: int, pe: int, size: int) -> int:
    """Queries of own heads, maxima of all heads, sums of the others' heads."""
    own = heads // size
    a_head = (kv_lora_rank + pe) * BF16 + (kv_lora_rank + 1) * FP32
    return tokens * (size - 1) * (own * a_head + heads * FP32)


def plain_partial_attention(tokens: int, heads: int, kv_lora_rank: int, pe: int, size: int) -> int:
    """Queries of own heads; outputs in BF16 and log-sum-exp of the others' heads."""
    return tokens * (size - 1) * heads // size * ((kv_lora_rank + pe) * BF16 + kv_lora_rank * BF16 + FP32)


def prefill_by_heads(config: K3Config, rows: int, length: int, tensor: int, context: int) -> int:
    """`rows` new tokens of a request that has `length` positions with them, one MLA layer: what context ranks send."""
    assert config.index_topk is not None
    topk, heads = config.index_topk, config.num_attention_heads // tensor * context
    ranked = min(rows, max(length - topk, 0))
    segments = -(-length // (context * SEGMENT))
    attention = partial_attention(rows, heads, config.kv_lora_rank, config.qk_rope_head_dim, context)
    return attention + candidates(ranked, topk, context, segments)


def prefill_by_tokens(config: K3Config, token_bytes: int, rows: int, length: int, tensor: int, context: int) -> int:
    """The same by tokens: queries there, outputs and flags back; the request's positions to all context ranks.

    token_bytes: latent and index key of a token in one layer, as they are stored.
    """
    a_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    exchanged = _to_others(tensor, rows * config.num_attention_heads // tensor * a_head * BF16)
    flags = rows // tensor * (tensor - 1) * WORD
    return exchanged + flags + length // context * (context - 1) * token_bytes


def ranks_met(topk: int, size: int) -> float:
    """On how many ranks the experts of a token lie, if they are spread at random."""
    return size * (1 - (1 - 1 / size) ** topk)


def experts(rows: float, pairs: float, latent: int) -> float:
    """Rows of the experts' width in BF16 there; three words a pair there, its result in FP32 back."""
    return rows * latent * BF16 + pairs * (3 * WORD + latent * FP32)


def plain_experts(rows: float, latent: int) -> float:
    """Rows of the experts' width in BF16 there, and one partial sum a row in BF16 back."""
    return rows * latent * 2 * BF16


def layer_costs(config: K3Config, tokens: int, size: int, lora_rank: int) -> list[Cost]:
    """The forward exchanges of the layers of `config` on `size` ranks (TP, EP and DCP alike) for a step of `tokens`."""
    hidden, latent, k = config.hidden_size, config.expert_hidden_size, config.num_experts_per_token
    met = ranks_met(k, size)
    sent = tokens / size * (size - 1) / size
    costs = [
        Cost("o_proj with LoRA", all_reduce(tokens, hidden, size), row_parallel(tokens, hidden, size, lora_rank)),
        Cost("dense or shared down_proj", all_reduce(tokens, hidden, size), row_parallel(tokens, hidden, size)),
        Cost(
            "routed experts",
            round(plain_experts(sent * met, latent)),
            round(experts(sent * met, sent * k, latent)),
        ),
        Cost("logits", tokens * 2 * FP32 * (size - 1), tokens * config.vocab_size // size * FP32 * (size - 1)),
    ]
    if config.index_topk is not None and size > 1:
        topk = config.index_topk
        costs.append(Cost("DCP selection", generic_merge(tokens, topk, size), candidates(tokens, topk, size)))
    if size > 1:
        heads = (config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim, size)
        costs.append(Cost("DCP attention", plain_partial_attention(tokens, *heads), partial_attention(tokens, *heads)))
    return costs


def prefill_flop(config: K3Config, ranked: int, read: int, heads: int) -> int:
    """FLOP of one MLA layer's indexer scores and absorbed attention, for so many positions ranked and latents read."""
    assert config.index_n_heads is not None and config.index_head_dim is not None
    a_score = 2 * config.index_n_heads * config.index_head_dim
    a_latent = 2 * (2 * config.kv_lora_rank + config.qk_rope_head_dim)
    return ranked * a_score + read * heads * a_latent
