"""Which layouts exist: others are refused before any process starts, with the sizes that would work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zmrl.model.config import K3Config

REDUCTION_SLICES = 8
"""Slices of a sum that ranks can share (numerics.md rule 2)."""

INTERLEAVE = 1
"""Adjacent positions on a context rank. Another number would cut rule 6's shards (position mod 8) apart."""

SIZES = (1, 2, 4, 8)
"""World sizes that own whole slices of a reduction (numerics.md rules 2 and 6)."""

HEADS, TOKENS = PREFILLS = ("heads", "tokens")
"""How the MLA layers of a prefill are shared out: as decoding is, or by `zmrl.parallel.prefill`."""


class LayoutError(ValueError):
    """A layout that would not give the bits of one rank, or cannot be cut; the message names sizes that work."""


@dataclass(frozen=True)
class Layout:
    """Ranks by what they share out. Kept apart from the model: no size here changes a bit of a result."""

    tensor: int = 1
    """Heads, dense and shared-expert widths, the vocabulary (tensor parallelism)."""
    expert: int = 1
    """Routed experts, among the ranks of a tensor group or of all copies; 1: every rank has all of them."""
    context: int = 1
    """Positions of the latents and index keys (decode context parallelism), among the ranks of a tensor group."""
    interleave: int = INTERLEAVE
    """Adjacent positions on a rank."""
    block_size: int = 0
    """Positions of a block of the paged cache, on all ranks together; 0: there is none."""
    data: int = 1
    """Copies of the model that take samples each (the trainer)."""
    prefill: str = HEADS
    """What the tensor ranks share of a prefill: one of `PREFILLS`."""

    def check(self, config: K3Config) -> None:
        """LayoutError if `config` cannot be laid out so."""
        for name, size in (("tensor", self.tensor), ("context", self.context), ("data", self.data)):
            if size not in SIZES:
                raise LayoutError(
                    f"{name} parallel size {size}: sums are always {REDUCTION_SLICES} slices, of which a rank owns "
                    f"whole ones; use {_listed(SIZES)}"
                )
        for name, count in _shared_out(config).items():
            if count % self.tensor:
                raise LayoutError(_uneven(name, count, "tensor", self.tensor, SIZES))
        if self.expert < 1 or config.num_experts % self.expert:
            divisors = [n for n in range(1, config.num_experts + 1) if config.num_experts % n == 0]
            raise LayoutError(_uneven("experts", config.num_experts, "expert", self.expert, divisors))
        if self.expert not in expert_sizes(self.tensor, self.data):
            sizes = [n for n in expert_sizes(self.tensor, self.data) if config.num_experts % n == 0]
            raise LayoutError(
                f"expert parallel size {self.expert}: experts are whole on every rank, or shared out among the ranks "
                f"of a tensor group, here {self.tensor}, or those of all copies, here {self.tensor * self.data}; use "
                f"{_listed(sizes)}"
            )
        if self.tensor % self.context:
            sizes = [n for n in SIZES if self.tensor % n == 0]
            raise LayoutError(
                f"context parallel size {self.context}: its ranks are those of a tensor group, of {self.tensor}; use "
                f"{_listed(sizes)}"
            )
        if self.context > 1:
            self._check_context()
        self._check_prefill(config)

    def _check_prefill(self, config: K3Config) -> None:
        if self.prefill not in PREFILLS:
            raise LayoutError(f"prefill by {self.prefill!r} is unknown; use {_listed(PREFILLS)}")
        if self.prefill == TOKENS and self.tensor == 1:
            raise LayoutError(f"prefill by {TOKENS}: one rank has nothing to share; use {HEADS}, or more tensor ranks")
        if self.prefill == TOKENS and not config.has_indexer:
            raise LayoutError(
                f"prefill by {TOKENS}: it shares out what the indexer ranks, and this model has no indexer; use {HEADS}"
            )

    def _check_context(self) -> None:
        if self.interleave != INTERLEAVE:
            raise LayoutError(
                f"interleave {self.interleave}: attention sums by position mod {REDUCTION_SLICES}, which only an "
                f"interleave of {INTERLEAVE} keeps on one rank; use {INTERLEAVE}"
            )
        if self.block_size % self.context:
            below = self.block_size // self.context * self.context
            sizes = [n for n in (below, below + self.context) if n]
            raise LayoutError(
                f"block size {self.block_size}: each of {self.context} ranks holds its share of a block; use a "
                f"multiple of {self.context}, such as {_listed(sizes)}"
            )


def expert_sizes(tensor: int, data: int) -> tuple[int, ...]:
    """Numbers of ranks that the routed experts can be shared out among."""
    return tuple(sorted({1, tensor, tensor * data}))


def _shared_out(config: K3Config) -> dict[str, int]:
    """What a tensor group cuts, by name. Projections to a low rank are whole on a rank: their sums are cut."""
    linear = config.linear_attn_config
    cut = {
        "MLA heads": config.num_attention_heads,
        "KDA heads": linear.num_heads,
        "dense MLP outputs": config.intermediate_size,
        "shared-expert outputs": config.shared_intermediate_size,
        "ids of the vocabulary": config.vocab_size,
        "kv_a_proj outputs": config.kv_lora_rank + config.qk_rope_head_dim,
        "f_a_proj outputs": linear.head_dim,
    }
    if config.q_lora_rank is not None:
        cut["q_a_proj outputs"] = config.q_lora_rank
    return cut


def _uneven(name: str, count: int, kind: str, size: int, sizes: tuple[int, ...] | list[int]) -> str:
    fitting = _listed([n for n in sizes if count % n == 0])
    return f"{kind} parallel size {size}: {count} {name} do not divide evenly; use {fitting}"


def _listed(sizes: Sequence[int | str]) -> str:
    *rest, last = map(str, sizes)
    return f"{', '.join(rest)} or {last}" if rest else last
