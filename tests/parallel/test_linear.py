"""Tensor-parallel layers: outputs, input gradients and adapter gradients in the bits of one rank."""

import pytest
import torch
from torch import Tensor

from tests.batch_invariant.chains import same_bits
from tests.batch_invariant.exactness import assert_same_on_every_isa, poisoned, threads
from tests.batch_invariant.test_linear import SCALE, Layer, mixed_slots, rows
from tests.parallel.shards import WORLDS, of_heads
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops.head import log_probs
from zmrl.batch_invariant.ops.linear import linear
from zmrl.batch_invariant.ops.linear_parallel import linear_gradient, tree_sum
from zmrl.batch_invariant.ops.lora import LoraBuffers
from zmrl.batch_invariant.ops.panels import pack_panels, pack_parts, unpack_panels, unpack_parts
from zmrl.parallel import exchange
from zmrl.parallel.group import Group, simulate
from zmrl.parallel.linear import column_parallel, row_parallel, vocabulary_parallel_logits

ALL = (1, *WORLDS)
TOKENS = [13, 3]  # fewer than ranks: some finish no row


def graded(x: Tensor, dy: Tensor, call) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = call(x)
    y.backward(dy)
    return y.detach(), x.grad


def lora_of(a: list[list[Tensor]], b: list[list[Tensor]]) -> LoraBuffers:
    """a, b: by slot, then part."""
    lora = LoraBuffers(torch.stack([pack_parts(s) for s in a]), torch.stack([pack_parts(s) for s in b]), SCALE)
    lora.grad_a, lora.grad_b = torch.zeros(lora.a.shape[1:]), torch.zeros(lora.b.shape[1:])
    return lora


# ---- inputs spread over ranks ----------------------------------------------------------------------------------------


def row_parts(layer: Layer, rank: int, size: int) -> tuple[Tensor, LoraBuffers]:
    a = [[of_heads(a, 1, rank, size) for a in slot] for slot in layer.a]
    return pack_panels(of_heads(layer.w[0], 1, rank, size)), lora_of(a, layer.b)


def rank_rows(group: Group, layer: Layer, x: Tensor, dy: Tensor, slots: Tensor | None) -> list[Tensor]:
    """y, and of this rank's inputs dx and the gradient of A; the gradient of B."""
    n, r = layer.splits[0], layer.rank
    w, lora = row_parts(layer, group.rank, group.size)
    own = of_heads(x, 1, group.rank, group.size)
    y, dx = graded(own, dy, lambda x: row_parallel(group, x, w, n, lora, slots))
    with torch.no_grad():
        assert same_bits(y, row_parallel(group, own, w, n, lora, slots))
    return [y, dx, unpack_panels(lora.grad_a, r), unpack_panels(lora.grad_b, n)]


def run_rows(layer: Layer, x: Tensor, dy: Tensor, slots: Tensor | None, size: int) -> list[list[Tensor]]:
    with poisoned():
        return simulate(size, lambda group: rank_rows(group, layer, x, dy, slots))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", ALL)
def test_row_parallel_layer_has_the_bits_of_one_rank(size, adapted, tokens):
    layer = Layer([37], 24)  # slices of 3 inputs
    x, dy = rows(tokens, 24), rows(tokens, 37, seed=5)
    slots = mixed_slots(tokens) if adapted else None
    layer.gradients()
    wanted, dx = graded(x, dy, lambda x: layer(x, slots, shards=8))
    ranks = run_rows(layer, x, dy, slots, size)
    assert same_bits(torch.cat([r[1] for r in ranks], 1), dx)
    grad_a, grad_b = unpack_panels(layer.lora.grad_a, 16), unpack_panels(layer.lora.grad_b, 37)
    assert same_bits(torch.cat([r[2] for r in ranks], 1), grad_a)
    for y, _, _, own_grad_b in ranks:
        assert same_bits(y, wanted)
        assert same_bits(own_grad_b, grad_b)
    assert not adapted or (set(slots.tolist()) >= {-1, 0} and grad_b.any())


def test_row_parallel_layer_on_every_isa_and_with_threads():
    layer = Layer([300], 512)
    x, dy, slots = rows(70, 512), rows(70, 300, seed=5), mixed_slots(70)
    wanted = assert_same_on_every_isa(lambda: [t for r in run_rows(layer, x, dy, slots, 2) for t in r])
    with threads(2):
        got = [t for r in run_rows(layer, x, dy, slots, 2) for t in r]
    assert all(same_bits(a, b) for a, b in zip(got, wanted, strict=True))


# ---- outputs spread over ranks ---------------------------------------------------------------------------------------


def rank_columns(
    group: Group, layer: Layer, replicated: list[bool], x: Tensor, dy: Tensor, slots: Tensor | None
) -> list[Tensor]:
    """dx, then of every part its outputs, then the gradients of A and of its B."""

    def own(parts: list[Tensor]) -> list[Tensor]:
        return [
            part if whole else of_heads(part, 0, group.rank, group.size)
            for part, whole in zip(parts, replicated, strict=True)
        ]

    w = own(layer.w)
    splits = [len(part) for part in w]
    lora = lora_of(layer.a, [own(b) for b in layer.b])
    own_dy = torch.cat([part.T for part in own([part.T for part in dy.split(layer.splits, 1)])], 1)
    call = (splits, replicated, False, lora, slots)
    y, dx = graded(x, own_dy, lambda x: column_parallel(group, x, pack_parts(w), *call))
    grad_a, grad_b = unpack_parts(lora.grad_a, [layer.rank] * len(w)), unpack_parts(lora.grad_b, splits)
    return [dx, *y.split(splits, 1), *grad_a, *grad_b]


def run_columns(
    layer: Layer, replicated: list[bool], x: Tensor, dy: Tensor, slots: Tensor | None, size: int
) -> list[list[Tensor]]:
    with poisoned():
        return simulate(size, lambda group: rank_columns(group, layer, replicated, x, dy, slots))


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("size", ALL)
def test_column_parallel_layer_has_the_bits_of_one_rank(size, adapted, tokens):
    """A fused projection: heads, a part on all ranks whose share ends inside a panel, one output per rank."""
    splits, replicated = [48, 40, 8], [False, True, False]
    layer = Layer(splits, 21)
    x, dy = rows(tokens, 21), rows(tokens, sum(splits), seed=5)
    slots = mixed_slots(tokens) if adapted else None
    layer.gradients()
    wanted, dx = graded(x, dy, lambda x: layer(x, slots, shards_n=8))
    wanted_a = unpack_parts(layer.lora.grad_a, [16] * 3)
    wanted_b = unpack_parts(layer.lora.grad_b, splits)
    ranks = run_columns(layer, replicated, x, dy, slots, size)
    for own_dx, *rest in ranks:
        assert same_bits(own_dx, dx)
        assert all(same_bits(a, b) for a, b in zip(rest[3:6], wanted_a, strict=True))
    for i, whole in enumerate(replicated):
        outputs, grads = [r[1 + i] for r in ranks], [r[7 + i] for r in ranks]
        if whole:
            assert all(same_bits(y.contiguous(), wanted.split(splits, 1)[i].contiguous()) for y in outputs)
            assert all(same_bits(g, wanted_b[i]) for g in grads)
        else:
            assert same_bits(torch.cat(outputs, 1), wanted.split(splits, 1)[i].contiguous())
            assert same_bits(torch.cat(grads), wanted_b[i])


def test_another_order_of_the_ranks_sums_shows(monkeypatch):
    """Enough rows for BF16 to show an order: outputs of a row-parallel layer, gradients of a column-parallel one."""
    layer = Layer([64], 64)
    x, dy = rows(2000, 64), rows(2000, 64, seed=5)
    y = layer(x, shards=8)
    dx = graded(x, dy, lambda x: layer(x, shards_n=8))[1]

    def results() -> list[Tensor]:
        return [run_rows(layer, x, dy, None, 4)[0][0], run_columns(layer, [False], x, dy, None, 4)[0][0]]

    assert all(same_bits(a, b) for a, b in zip(results(), [y, dx], strict=True))
    plain = exchange.tree_sum
    monkeypatch.setattr(exchange, "tree_sum", lambda parts: plain(parts[[0, 2, 1, 3]]))
    assert not any(same_bits(a, b) for a, b in zip(results(), [y, dx], strict=True))
    # One chain is another function: it is the slices that ranks can share.
    assert not same_bits(layer(x), y)
    assert not same_bits(graded(x, dy, lambda x: layer(x))[1], dx)


@pytest.mark.parametrize("size", ALL)
def test_vocabulary_parallel_head_is_one_row(size):
    vocabulary, hidden = 288, 64
    w, x = rows(vocabulary, hidden, seed=7), rows(9, hidden)
    targets, temperature = torch.arange(9) * 31, torch.full((9,), 0.7)

    def score(logits: Tensor) -> list[Tensor]:
        logp, entropy, digest = log_probs(logits, targets, temperature)
        (logp.sum() + 0.1 * entropy.sum()).backward()
        return [logits.detach(), logp.detach(), entropy.detach(), digest]

    whole = x.clone().requires_grad_()
    wanted = score(linear(whole, pack_panels(w), [vocabulary], fp32_out=True, shards_n=8))

    def run(group: Group) -> list[Tensor]:
        own = x.clone().requires_grad_()
        panels = pack_panels(of_heads(w, 0, group.rank, size))
        got = score(vocabulary_parallel_logits(group, own, panels, vocabulary))
        return [*got, own.grad]

    for got in simulate(size, run):
        assert all(same_bits(a, b) for a, b in zip(got, [*wanted, whole.grad], strict=True))


def test_bad_arguments_are_named():
    x = rows(3, 16)

    def uneven(group: Group) -> None:
        column_parallel(group, x, pack_panels(rows(6, 16)), [6], [True])

    with pytest.raises(OperatorError, match="splits: 6 replicated outputs on 4 ranks"):
        simulate(4, uneven)
    with pytest.raises(OperatorError, match="vocabulary: 10 ids on 4 ranks"):
        simulate(4, lambda group: vocabulary_parallel_logits(group, x, pack_panels(rows(2, 16)), 10))
    with pytest.raises(OperatorError, match="parts: expected 1, 2, 4 or 8"):
        tree_sum(torch.zeros(3, 4))
    with pytest.raises(OperatorError, match="own: part 0 has 6 outputs"):
        linear_gradient(rows(3, 6), pack_panels(rows(6, 16)), [6], [(4, 3)], 1)
