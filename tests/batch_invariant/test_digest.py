"""Digests: integers alone; sensitive to every bit, blind to threads, instruction sets, strides and shards."""

import pytest
import torch

from tests.batch_invariant.exactness import assert_same_with_threads
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import digest as module
from zmrl.batch_invariant.ops.digest import rows_digest, tensor_digest, tensor_digests

MASK = 2**64 - 1
TYPES = [torch.uint8, torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.float64]


def mix64(i, bits):
    x = bits ^ (i * 0x9E3779B97F4A7C15 & MASK)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def bits_of(t):
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[t.element_size()]
    return t.contiguous().view(unsigned).flatten().tolist()


def expected(t, offset=0):
    total = sum(mix64(offset + i, b) for i, b in enumerate(bits_of(t))) & MASK
    return total - 2**64 if total >= 2**63 else total


def random(shape, dtype, seed=0):
    g = torch.Generator().manual_seed(seed)
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=g, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("isa", native.available_isas())
def test_digest_is_the_defined_sum(dtype, isa):
    t = random((5, 77), dtype)
    with native.use_isa(isa):
        assert rows_digest(t).tolist() == [expected(row) for row in t]
        assert int(tensor_digest(t)) == expected(t)
        assert tensor_digests(t.view(5, 7, 11)).tolist() == [expected(row) for row in t]


def test_every_flipped_bit_changes_the_digest():
    t = random((33,), torch.bfloat16)
    seen = {int(tensor_digest(t))}
    for i in range(33):
        for bit in range(16):
            flipped = t.clone()
            flipped.view(torch.int16)[i] ^= torch.tensor(1 << bit, dtype=torch.int32).to(torch.int16)
            seen.add(int(tensor_digest(flipped)))
    assert len(seen) == 1 + 33 * 16


def test_order_signs_of_zero_and_length_matter():
    t = torch.tensor([1.0, 2.0, 0.0])
    others = [torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 2.0, -0.0]), torch.tensor([1.0, 2.0, 0.0, 0.0])]
    assert len({int(tensor_digest(x)) for x in [t, *others]}) == 4


def test_shards_of_a_row_add_up():
    t = random((4, 1000), torch.float32)
    parts = [rows_digest(t[:, a:b], offset=a) for a, b in ((0, 1), (1, 500), (500, 1000))]
    assert torch.equal(sum(parts), rows_digest(t))


def test_row_stride_does_not_matter():
    t = random((9, 300), torch.bfloat16)
    assert torch.equal(rows_digest(t[2:7, 13:290]), rows_digest(t[2:7, 13:290].contiguous()))


def test_threads_do_not_matter():
    t = random((3, 400_001), torch.bfloat16)
    assert_same_with_threads(lambda: tensor_digests(t), module, "_digest")
    assert_same_with_threads(lambda: tensor_digest(t), module, "_digest")


def test_empty_tensors_and_scalars():
    assert int(tensor_digest(torch.zeros(0))) == 0
    assert rows_digest(torch.zeros(3, 0)).tolist() == [0, 0, 0] and rows_digest(torch.zeros(0, 3)).shape == (0,)
    assert int(tensor_digest(torch.tensor(2.5))) == expected(torch.tensor([2.5]))
    assert torch.ops.zmrl.rows_digest(torch.zeros(3, 2, device="meta")).shape == (3,)


def test_parameters_are_read_without_autograd():
    p = torch.nn.Parameter(torch.ones(4))
    assert int(tensor_digest(p)) == expected(p.detach()) and not tensor_digest(p).requires_grad


def test_tensors_that_are_not_contiguous_are_refused():
    with pytest.raises(OperatorError, match="contiguous"):
        tensor_digest(torch.zeros(4, 4).T)
    with pytest.raises(OperatorError, match="contiguous"):
        rows_digest(torch.zeros(4, 4).T)
    with pytest.raises(OperatorError, match="contiguous"):
        tensor_digests(torch.zeros(4, 4, 4)[:, :, :2])
    with pytest.raises(OperatorError, match="bytes"):
        rows_digest(torch.zeros(2, 2, dtype=torch.complex128))
