"""Sampling from the reference model, for evaluating a pre-trained checkpoint. Not a host; not bit-reproducible."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zmrl.model.reference.common import ForwardContext
from zmrl.model.reference.model import KimiK31ForCausalLM


@torch.no_grad()
def sample(
    model: KimiK31ForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    sparse: bool = True,
) -> list[list[int]]:
    """Continue each prompt until eos or `max_new_tokens`; temperature 0 is greedy. Returns the new ids per prompt.

    All rows advance together from position 0, fed with their prompt first, so rows need no padding and one state
    serves all.
    """
    generator = torch.Generator().manual_seed(seed)
    eos = model.config.eos_token_id
    lengths = torch.tensor([len(p) for p in prompts])
    padded = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.long)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    ctx = ForwardContext(state=model.new_state(), sparse=sparse)
    out: list[list[int]] = [[] for _ in prompts]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    tokens = padded[:, 0]
    for position in range(1, padded.shape[1] + max_new_tokens):
        logits = model(tokens.unsqueeze(1), ctx)[:, -1].float()
        if temperature == 0:
            sampled = logits.argmax(-1)
        else:
            sampled = torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator).squeeze(1)
        inside = position < lengths
        tokens = torch.where(inside, padded[:, min(position, padded.shape[1] - 1)], sampled)
        for i in (~inside & ~done).nonzero().flatten().tolist():
            out[i].append(int(tokens[i]))
            done[i] = int(tokens[i]) == eos or len(out[i]) == max_new_tokens
        if done.all():
            break
    return out
