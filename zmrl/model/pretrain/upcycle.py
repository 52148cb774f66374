"""From a dense stand-in with `num_experts_per_token` experts to all experts, without changing the function.

The E experts of a layer are E / k groups of k, each group a copy of the dense model's k experts. The router rows of a
group are equal, one random direction for each group, so a token's top k are the k experts of the group that it likes
best, with equal weights: what the dense model computed with its untrained router of zeros. Training breaks the tie.
(The idea of starting a mixture from copies of a dense model: Komatsuzaki et al., Sparse Upcycling, 2022.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from zmrl.model.config import K3Config
from zmrl.model.initialise import initial_tensors
from zmrl.model.reference import KimiK31ForCausalLM


def dense_config(config: K3Config) -> K3Config:
    """`config` with so many experts that a token chooses all of them.

    Raises ValueError unless the experts are whole groups of that many.
    """
    k = config.num_experts_per_token
    if config.num_experts % k:
        raise ValueError(f"{config.num_experts} experts are no whole groups of {k}; pre-training needs whole groups")
    return dataclasses.replace(config, num_experts=k)


def dense_model(config: K3Config, seed: int) -> KimiK31ForCausalLM:
    """The dense stand-in of `config`, initialised; its routers are zeros and do not train: equal weights."""
    model = KimiK31ForCausalLM(dense_config(config)).initialise(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.requires_grad_(False).zero_()
    return model


def upcycle(dense: dict[str, Tensor], config: K3Config, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(module name, FP32 tensor) of the whole model from the dense one's, experts `....experts.N.w1.weight` and on."""
    k = config.num_experts_per_token
    for name, initial in initial_tensors(config, seed):
        if ".experts." in name:
            before, _, rest = name.partition(".experts.")
            expert, _, matrix = rest.partition(".")
            yield name, dense[f"{before}.experts.{int(expert) % k}.{matrix}"]
        elif name.endswith("gate.weight"):
            yield name, initial[::k].repeat_interleave(k, dim=0)
        elif name.endswith("e_score_correction_bias"):
            yield name, torch.zeros_like(initial)
        else:
            yield name, dense[name]
