"""The gradients of the adapter on several ranks are those of one, over micro-batches of a sample shard."""

import pytest
import torch

from tests.model.test_ranks import bits, checkpoint, make_ranks, on_rank, plain, same, sequences  # noqa: F401
from zmrl.model.context import scratch_context
from zmrl.model.gradients import AdapterGradients
from zmrl.model.shards import RankBuffers
from zmrl.parallel.group import simulate
from zmrl.parallel.layout import Layout, LayoutError


def gradients(model, micro_batches=((0, 2), (2, 4)), spoil=False):
    """FP32 by key, as a single rank has them; slot 0."""
    own = {key: torch.zeros(buffer.shape[1:]) for key, buffer in model.lora_buffers().items()}
    buffers = AdapterGradients(model)
    buffers.bind(own)
    direction = torch.randn(
        sum(map(len, sequences())), model.config.vocab_size, generator=torch.Generator().manual_seed(4)
    )
    first = 0
    for start, stop in micro_batches:
        ids = sequences()[start:stop]
        slots = torch.zeros(sum(map(len, ids)), dtype=torch.int32)
        context = scratch_context(model.config, list(map(len, ids)), slots, ranks=model.ranks)
        logits = model.logits(model(torch.cat(ids), context))
        logits.backward(direction[first : first + len(slots)])
        first += len(slots)
    if spoil and model.ranks.tensor.rank == 1:
        own["layers.3.self_attn.in_proj.a"].view(torch.int32)[0, 0, 0] ^= 1
    buffers.finish()
    return dict(RankBuffers(own, model.lora_slices(own), model.ranks).whole())


@pytest.mark.parametrize(
    ("size", "expert"), [(2, True), (2, False), (4, True)], ids=["TP2 and EP2", "TP2", "TP4 and EP4"]
)
def test_gradients_are_those_of_one_rank(plain, checkpoint, size, expert):  # noqa: F811
    if plain.config.linear_attn_config.num_heads % size:
        with pytest.raises(LayoutError, match="heads do not divide evenly"):
            Layout(size, size if expert else 1).check(plain.config)
        return
    wanted = gradients(plain)
    assert all(bool(gradient.any()) for gradient in wanted.values())
    wrong_shards = gradients(plain, ((2, 4), (0, 2)))
    assert not same(list(wrong_shards.values()), list(wanted.values()))

    def run(group):
        return gradients(on_rank(plain, checkpoint, make_ranks(group, expert=expert))), group.sent

    for got, sent in simulate(size, run):
        assert got.keys() == wanted.keys()
        differing = [key for key in wanted if not torch.equal(bits(got[key]), bits(wanted[key]))]
        assert not differing
        assert {"column-parallel sums", "latent gradients", "head sums"} <= sent.keys()
        assert ("expert input gradients" in sent) == expert


def test_a_bit_that_differs_on_one_rank_shows(plain, checkpoint):  # noqa: F811
    wanted = gradients(plain)

    def run(group):
        return gradients(on_rank(plain, checkpoint, make_ranks(group)), spoil=True)

    assert not same(list(simulate(2, run)[1].values()), list(wanted.values()))
