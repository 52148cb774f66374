"""Routed experts as the contract says them, in numpy: every chain element by element."""

import math

import numpy as np
import torch

from tests.batch_invariant import chains
from tests.batch_invariant.chains import bf16, chain, floats, fma
from tests.batch_invariant.exactness import (
    dot_lanes,
    elementary,
)
from zmrl.batch_invariant.ops.experts import Bf16ExpertWeights, ExpertWeights, experts
from zmrl.batch_invariant.ops.lora import ExpertLoraBuffers
from zmrl.batch_invariant.ops.panels import pack_mxfp4, pack_panels

SCALE = 0.7


SITU, SILU = (4.0, 25.0), (math.inf, math.inf)


class Moe:
    """`count` experts of latent width L and width I of random MXFP4 or BF16 weights and `slots` adapters of rank r."""

    def __init__(
        self,
        count,
        latent=64,
        width=32,
        topk=2,
        rank=16,
        slots=2,
        seed=0,
        scales=(123, 126),
        quantised=True,
        betas=SITU,
    ):
        g = torch.Generator().manual_seed(seed)
        self.count, self.latent, self.width, self.topk, self.rank = count, latent, width, topk, rank
        self.betas = betas
        self.w, buffers = [], []
        for n, k in ((width, latent), (width, latent), (latent, width)):
            if not quantised:
                weight = torch.randn(count, n, k, generator=g).div(k**0.5).bfloat16()
                self.w.append(floats(weight))
                buffers.append(pack_panels(weight))
                continue
            packed = torch.randint(0, 256, (count, n, k // 2), generator=g, dtype=torch.uint8)
            scale = torch.randint(*scales, (count, n, k // 32), generator=g, dtype=torch.uint8)
            self.w.append(chains.dequantise(packed, scale))
            buffers += pack_mxfp4(packed, scale)
        self.weights = ExpertWeights(*buffers) if quantised else Bf16ExpertWeights(*buffers)
        shapes = [(width, latent), (width, latent), (latent, width)]
        self.a = [torch.randn(slots, count, rank, k, generator=g).div(k**0.5).bfloat16() for n, k in shapes]
        self.b = [torch.randn(slots, count, n, rank, generator=g).div(rank**0.5).bfloat16() for n, k in shapes]
        pairs = zip(self.a, self.b, strict=True)
        self.lora = ExpertLoraBuffers(*(pack_panels(m) for pair in pairs for m in pair), scale=SCALE)

    def tokens(self, t, seed=1):
        """z, ids, weights, slots of t tokens."""
        g = torch.Generator().manual_seed(seed)
        z = torch.randn(t, self.latent, generator=g).bfloat16()
        ids = torch.rand(t, self.count, generator=g).argsort(1)[:, : self.topk].sort(1)[0].int()
        weights = torch.rand(t, self.topk, generator=g)
        slots = torch.randint(-1, self.lora.a1.shape[0], (t,), generator=g, dtype=torch.int32)
        return z, ids, weights, slots

    def gradients(self):
        self.lora.gradients = tuple(torch.zeros(b.shape[1:]) for b in self.lora.tensors)
        return self.lora.gradients

    def __call__(self, z, ids, weights, slots=None):
        lora = None if slots is None else self.lora
        return experts(z, ids, weights, self.weights, *self.betas, lora=lora, slots=slots)

    def backward(self, du, z, ids, weights, slots=None):
        """dz, dweights; adapter gradients continue."""
        z, weights = z.detach().requires_grad_(), weights.detach().requires_grad_()
        self(z, ids, weights, slots).backward(du)
        return z.grad, weights.grad


def output_gradient(t, latent, seed=3):
    return torch.randn(t, latent, generator=torch.Generator().manual_seed(seed)).bfloat16()


def capped(x, beta):
    """(beta*tanh(x/beta), the derivative of that), (x, 1) where beta is infinite."""
    one = np.float32(1)
    if math.isinf(beta):
        return x, one
    t = elementary("tanh", x / np.float32(beta))
    return np.float32(beta) * t, fma(0 - t, t, one)


def activation(g, u, betas):
    """The activation, multiplied left to right."""
    gate = capped(g, betas[0])[0] * elementary("sigmoid", g)
    if math.isinf(betas[1]):
        return gate * u
    linear = np.float32(betas[1])
    return gate * linear * elementary("tanh", u / linear)


class Oracle:
    """One token through one expert, forward and backward, in the contract's order."""

    def __init__(self, moe, e, slot, z):
        self.w = [w[e] for w in moe.w]
        self.ab = (
            None if slot < 0 else [(floats(a[slot, e]), floats(b[slot, e])) for a, b in zip(moe.a, moe.b, strict=True)]
        )
        self.scale = np.float32(SCALE)
        self.z = z
        (g, self.t1), (u, self.t3) = self.project(0, z), self.project(1, z)
        self.g, self.u = bf16(g), bf16(u)
        self.betas = moe.betas
        self.h = bf16(activation(self.g, self.u, self.betas))
        self.r, self.t2 = self.project(2, self.h)

    def project(self, i, x):
        base = chain(x, self.w[i].T)
        if self.ab is None:
            return base, None
        a, b = self.ab[i]
        t = bf16(chain(x, a.T))
        return fma(self.scale, chain(t, b.T), base), t

    def into_rank(self, i, dy):
        return None if self.ab is None else self.scale * chain(dy, self.ab[i][1])

    def continued(self, i, dt, c):
        return c if dt is None else chain(dt, self.ab[i][0], c)

    def backward(self, weight, du, grads):
        """dz, dweight; grads: [(A, B)] of this expert and slot 0, or None."""
        dweight = dot_lanes(du, self.r)
        dr = weight * du
        dt2 = self.into_rank(2, dr)
        dh = self.continued(2, dt2, chain(dr, self.w[2]))
        s, (bt, slope), (bv, linear_slope) = (
            elementary("sigmoid", self.g),
            capped(self.g, self.betas[0]),
            capped(self.u, self.betas[1]),
        )
        dg = dh * (s * fma(bt, np.float32(1) - s, slope) * bv)
        dup = dh * (bt * s * linear_slope)
        dt1, dt3 = self.into_rank(0, dg), self.into_rank(1, dup)
        dz = self.continued(0, dt1, chain(dg, self.w[0]))
        dz = self.continued(1, dt3, chain(dup, self.w[1], dz))
        if grads is not None and self.ab is not None:
            steps = ((self.z, self.t1, dt1, dg), (self.z, self.t3, dt3, dup), (self.h, self.t2, dt2, dr))
            for i, (x, t, dt, dy) in enumerate(steps):
                grads[i][0][:] = fma(dt.T, x, grads[i][0])
                grads[i][1][:] = fma((self.scale * dy).T, t, grads[i][1])
        return dz, dweight
