"""The groups that a rank of a model belongs to; they say which part of it the rank holds."""

from __future__ import annotations

from dataclasses import dataclass

from zmrl.parallel.group import ONE_RANK, Group
from zmrl.parallel.layout import HEADS, Layout


@dataclass(frozen=True)
class Ranks:
    """A rank's groups. By default there is one rank, which holds everything."""

    tensor: Group = ONE_RANK
    """Share out heads, widths and the vocabulary, and see the same tokens."""
    expert: Group = ONE_RANK
    """Share out the routed experts. Either the tensor group itself, whose ranks take a part of the tokens each to the
    experts; or the ranks of all copies of the model, where rank d * T + t is tensor rank t of copy d."""
    context: Group = ONE_RANK
    """Share out the positions of latents and index keys: some ranks, or all, of a tensor group."""
    prefill: str = HEADS
    """How the tensor ranks share out a prefill (`layout.PREFILLS`). By tokens every rank has all of kv_b, and the model
    has no backward."""

    @property
    def copies(self) -> int:
        """Copies of the model among whose ranks the experts are. Each has tokens of its own; they make the exchanges
        of their micro-batches together."""
        return max(self.expert.size // self.tensor.size, 1)

    @property
    def layout(self) -> Layout:
        """The sizes, for `Layout.check`."""
        return Layout(self.tensor.size, self.expert.size, self.context.size, data=self.copies, prefill=self.prefill)


SINGLE = Ranks()
