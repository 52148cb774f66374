"""Attention residuals: the bits follow the contract and depend on nothing else; gradients against float64 autograd."""

import numpy as np
import pytest
import torch

from tests.batch_invariant.chains import bf16, floats, fma
from tests.batch_invariant.exactness import (
    assert_rows_are_independent,
    assert_same,
    assert_same_on_every_isa,
    assert_same_with_threads,
    dot_lanes,
    elementary,
    flushing_denormals,
    outputs,
    random,
    relative_error,
    strided,
    sum_lanes,
)
from zmrl.batch_invariant import native
from zmrl.batch_invariant.library import OperatorError
from zmrl.batch_invariant.ops import residual
from zmrl.batch_invariant.ops.residual import attn_res_mix, residual_add

EPS = 1e-5
ops = torch.ops.zmrl
each_count = pytest.mark.parametrize("count", [2, 3, 9, 16, 17, 64])


def make(count, rows, n, seed=0):
    sources = [random(rows, n, seed=seed + j, scale=0.5 + j % 3) for j in range(count)]
    return sources, (random(n, seed=seed + 98), random(n, seed=seed + 99, scale=n**-0.5))


def oracle(sources, query):
    v, q = np.stack([floats(s) for s in sources]), floats(query[0]) * floats(query[1])
    n = np.float32(v.shape[-1])
    inv = np.float32(1) / np.sqrt(dot_lanes(v, v) / n + np.float32(EPS))
    a = (dot_lanes(v, q) * inv).T  # [rows, sources]
    e = elementary("exp", a - a.max(axis=1, keepdims=True))
    p = e / sum_lanes(e)[:, None]
    y = np.zeros(v.shape[1:], np.float32)
    for j in range(v.shape[0]):
        y = fma(p[:, j : j + 1], v[j], y)
    return bf16(y)


def reference(sources, query):
    v = torch.stack(sources)
    k = v * torch.rsqrt((v * v).mean(-1, keepdim=True) + EPS)
    p = torch.softmax((k * query[0].double() * query[1].double()).sum(-1), dim=0)
    return (p.unsqueeze(-1) * v).sum(0)


@each_count
def test_bits_are_the_contracts_on_every_isa(count):
    for n in (1, 16, 37, 128):
        sources, query = make(count, 5, n)
        (got,) = assert_same_on_every_isa(lambda sources=sources, query=query: attn_res_mix(sources, *query, EPS))
        assert np.array_equal(floats(got).view(np.int32), oracle(sources, query).view(np.int32))


def test_one_source_is_returned_itself():
    sources, query = make(1, 4, 16)
    sources[0][0, 0] = -0.0
    assert attn_res_mix(sources, *query, EPS) is sources[0]
    assert_same([ops.attn_res_mix(*query, sources, EPS)], sources)
    assert_same(ops.attn_res_mix_backward(sources[0], sources, *query, EPS), sources)


def test_a_zero_query_mixes_uniformly():
    sources, _ = make(4, 3, 32)
    got = attn_res_mix(sources, torch.ones(32).bfloat16(), torch.zeros(32).bfloat16(), EPS)
    assert_same([got], [(0.25 * torch.stack([s.double() for s in sources])).sum(0).bfloat16()])


def test_a_row_does_not_depend_on_its_batch():
    sources, query = make(5, 130, 96)
    assert_rows_are_independent(lambda rows: attn_res_mix([s[rows] for s in sources], *query, EPS))


def test_threads_and_row_strides_change_nothing():
    sources, query = make(5, 300, 256)
    assert_same_with_threads(lambda: attn_res_mix(sources, *query, EPS), residual, "_attn_res_mix")
    wide = [strided(s, padding=j) for j, s in enumerate(sources)]
    assert_same(outputs(lambda: attn_res_mix(wide, *query, EPS)), outputs(lambda: attn_res_mix(sources, *query, EPS)))


@each_count
def test_accuracy_and_gradients_against_float64(count):
    sources, query = make(count, 20, 100)
    dy = random(20, 100, seed=7)
    mine = [s.requires_grad_() for s in sources]
    y = attn_res_mix(mine, *query, EPS)
    y.backward(dy)
    exact = [s.detach().double().requires_grad_() for s in sources]
    wanted = reference(exact, query)
    wanted.backward(dy.double())
    assert relative_error(y, wanted) < 3e-3
    for a, b in zip(mine, exact, strict=True):
        assert a.grad.dtype == torch.bfloat16
        assert relative_error(a.grad, b.grad) < 4e-3


def test_gradient_bits_depend_on_nothing():
    sources, query = make(9, 300, 160)
    dy = random(300, 160, seed=7)

    def backward(rows):
        return ops.attn_res_mix_backward(dy[rows], [s[rows] for s in sources], *query, EPS)

    assert_same_on_every_isa(lambda: backward(slice(0, 7)))
    assert_rows_are_independent(backward, 30)
    assert_same_with_threads(lambda: backward(slice(0, 300)), residual, "_attn_res_mix_backward")


def test_gradient_goes_only_where_it_is_wanted():
    sources, query = make(3, 4, 16)
    sources[1].requires_grad_()
    attn_res_mix(sources, *query, EPS).float().sum().backward()
    assert sources[1].grad is not None and sources[0].grad is None
    with torch.no_grad():
        assert not attn_res_mix(sources, *query, EPS).requires_grad


def test_shapes_and_types_are_checked():
    sources, query = make(3, 4, 16)
    wrong = [
        (r"sources\[1\]", lambda: attn_res_mix([sources[0], sources[1][:3]], *query, EPS)),
        (r"sources\[1\]", lambda: attn_res_mix([sources[0], sources[1][:, :8]], *query, EPS)),
        (r"sources\[2\]", lambda: attn_res_mix([*sources[:2], sources[2].float()], *query, EPS)),
        ("sources", lambda: attn_res_mix([], *query, EPS)),
        ("sources", lambda: attn_res_mix(sources * 22, *query, EPS)),
        ("norm", lambda: attn_res_mix(sources, query[0].float(), query[1], EPS)),
        ("proj", lambda: attn_res_mix(sources, query[0], query[1][:8], EPS)),
        ("dy", lambda: ops.attn_res_mix_backward(sources[0][:2], sources, *query, EPS)),
    ]
    for name, call in wrong:
        with pytest.raises(OperatorError, match=f"^{name}: "):
            call()


def test_meta_tensors_get_their_shapes():
    x = torch.empty(5, 64, dtype=torch.bfloat16, device="meta")
    assert attn_res_mix([x, x], x[0], x[0], EPS).shape == (5, 64)


def test_additions_round_once_whatever_the_caller_does_with_denormals():
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(9, 133, generator=generator).bfloat16() * scale for scale in (1.0, 1e-3))
    tiny = torch.full((9, 133), 1e-39).bfloat16()
    wanted = [(a.double() + b.double()).float().bfloat16(), (tiny.double() + tiny.double()).float().bfloat16()]
    for isa in native.available_isas():
        with native.use_isa(isa):
            assert torch.equal(residual_add(a, b).view(torch.int16), wanted[0].view(torch.int16))
            with flushing_denormals():
                assert torch.equal(residual_add(tiny, tiny).view(torch.int16), wanted[1].view(torch.int16))
    x = a.clone().requires_grad_()
    residual_add(x, b).backward(b)
    assert torch.equal(x.grad, b)
