"""What the test of an operator needs: poisoned outputs, all instruction sets and thread counts, all batches, oracles.

Equality is equality of bits; only a comparison with float64 has a tolerance.
"""

from contextlib import contextmanager

import numpy as np
import torch

from tests.batch_invariant.chains import fma, same_bits
from zmrl.batch_invariant import native

FUNCTIONS = ("exp", "log", "tanh", "sigmoid", "softplus")
_elementary = native.kernel("zm_elementary", "ppii")


def elementary(name, x):
    """One of `FUNCTIONS` of a numpy FP32 array, in the kernels' own arithmetic."""
    source = torch.from_numpy(np.ascontiguousarray(x, np.float32))
    out = torch.full_like(source, float("nan"))
    assert _elementary(source, out, source.numel(), FUNCTIONS.index(name)) >= 1
    return out.numpy()


def sum_lanes(x):
    """Rule 4: the sum over the last axis in 16 lanes, combined by halving distance."""
    x = np.asarray(x, np.float32)
    lane = np.zeros((*x.shape[:-1], 16), np.float32)
    for i in range(0, x.shape[-1], 16):
        part = np.zeros_like(lane)
        part[..., : min(16, x.shape[-1] - i)] = x[..., i : i + 16]
        lane = lane + part
    return _halve(lane)


def dot_lanes(a, b):
    """Rule 4 for a product: each lane a chain of fused multiply-adds."""
    a, b = np.broadcast_arrays(np.asarray(a, np.float32), np.asarray(b, np.float32))
    lane = np.zeros((*a.shape[:-1], 16), np.float32)
    for i in range(0, a.shape[-1], 16):
        m = min(16, a.shape[-1] - i)
        lane[..., :m] = fma(a[..., i : i + m], b[..., i : i + m], lane[..., :m])
    return _halve(lane)


def _halve(lane):
    for d in (8, 4, 2, 1):
        lane = lane[..., :d] + lane[..., d : 2 * d]
    return lane[..., 0]


def random(*shape, seed=0, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def fp32(*shape, seed=0, scale=1.0):
    return random(*shape, seed=seed, scale=scale, dtype=torch.float32)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def cu_of(lengths):
    """cu_seqlens of packed sequences."""
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def block_rows(slots):
    """State slots [S, ...] copied into wider rows of a NaN-filled buffer, as in a cache: stride(0) exceeds a slot."""
    size = slots[0].numel()
    rows = torch.full((slots.shape[0], size + 24), float("nan")).to(slots.dtype)
    state = rows[:, 8 : 8 + size].unflatten(1, slots.shape[1:])
    return state.copy_(slots)


def strided(x, padding=3, fill=float("nan")):
    """The same rows in a wider buffer."""
    wide = torch.full((x.shape[0], x.shape[1] + padding + 5), fill).to(x.dtype)
    view = wide[:, padding : padding + x.shape[1]]
    view.copy_(x)
    return view


@contextmanager
def poisoned():
    """torch.empty yields NaN (integers: 0x55...), so an element that a kernel forgets shows."""
    plain = torch.empty

    def empty(*arguments, **options):
        t = plain(*arguments, **options)
        if t.device.type == "cpu":
            t.fill_(float("nan") if t.is_floating_point() else 0x55555555 if t.element_size() > 2 else 0x55)
        return t

    torch.empty = empty
    try:
        yield
    finally:
        torch.empty = plain


@contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def recorded(module, name):
    """The values that the kernel `name` of an operator module returns (the number of threads used), as they come."""
    plain, returned = getattr(module, name), []

    def call(*arguments):
        returned.append(plain(*arguments))
        return returned[-1]

    setattr(module, name, call)
    try:
        yield returned
    finally:
        setattr(module, name, plain)


def outputs(op):
    """The results of op(), under poison, as a list of tensors."""
    with poisoned():
        out = op()
    return [out] if isinstance(out, torch.Tensor) else list(out)


def assert_same(got, wanted):
    assert len(got) == len(wanted)
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert same_bits(a.contiguous(), b.contiguous()), f"result {i} differs"


def assert_same_on_every_isa(op):
    """op() has one result on all instruction sets; returns it."""
    wanted = None
    for isa in native.available_isas():
        with native.use_isa(isa):
            got = outputs(op)
        wanted = wanted or got
        assert_same(got, wanted)
    return wanted


def assert_same_with_threads(op, module, kernel_name):
    """op() has one result with 1 and with 2 threads, and really used 2."""
    with threads(1), recorded(module, kernel_name) as used:
        wanted = outputs(op)
    assert used == [1]
    with threads(2), recorded(module, kernel_name) as used:
        assert_same(outputs(op), wanted)
    assert used == [2]


@contextmanager
def flushing_denormals():
    """A host that has set the FTZ and DAZ flags; every x86-64 with SSE3 has them."""
    assert torch.set_flush_denormal(True)
    try:
        assert (torch.full((1,), 1e-39) * 1.0).item() == 0.0, "the flag has no effect: the test would show nothing"
        yield
    finally:
        torch.set_flush_denormal(False)


def assert_rows_are_independent(op, count=130):
    """op(rows) for a slice of `count` rows: each M from 1 to count at the front, at the back, and each row alone.

    The whole is computed with two threads, the parts with one.
    """
    with threads(2):
        whole = outputs(lambda: op(slice(0, count)))
    with threads(1):
        for m in range(1, count + 1):
            assert_same(outputs(lambda m=m: op(slice(0, m))), [t[:m] for t in whole])
            assert_same(outputs(lambda m=m: op(slice(count - m, count))), [t[count - m :] for t in whole])
            assert_same(outputs(lambda m=m: op(slice(m - 1, m))), [t[m - 1 : m] for t in whole])


def relative_error(got, wanted):
    """Norm of the difference to a float64 reference over the reference's norm."""
    got, wanted = got.double(), wanted.double()
    return ((got - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()
