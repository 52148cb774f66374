"""Small hosts, batches and losses for the checks of `MegatronHost`."""

import dataclasses

import torch

from zmrl.model.checkpoint import export_tensors, write_checkpoint
from zmrl.model.config import PRESETS
from zmrl.model.initialise import initial_tensors
from zmrl.trainer.megatron.host import MegatronHost
from zmrl.trainer.megatron.optimizer import OptimizerSettings

RANK, ALPHA = 16, 32
CONFIG = dataclasses.replace(PRESETS["nano"], num_experts=24, num_experts_per_token=4, index_topk=8)
SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_grad=0.5, warmup_steps=2, total_steps=8)
Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = Q_A.replace("lora_A", "lora_B")


def write_base(path, seed=5, skewed=False):
    """A checkpoint; skewed: its router sends every token to experts 0 to 5, and none to the others."""
    tensors = dict(initial_tensors(CONFIG, seed))
    biases = [name for name in tensors if name.endswith("e_score_correction_bias")]
    assert biases
    for name in biases if skewed else ():
        tensors[name][:6] += 10
    write_checkpoint(path, export_tensors(CONFIG, tensors.items()), CONFIG)


def make_host(base, settings=SETTINGS, adapter_scale=0.05, rank=RANK, alpha=ALPHA):
    """A host whose adapter is not zero, so that its scores differ from the base's."""
    host = MegatronHost(base, rank, alpha, settings, seed=7)
    generator = torch.Generator().manual_seed(2)
    for item in host.module.master_slices():
        item.write(torch.randn(item.shape, generator=generator) * adapter_scale)
    host.module.refresh()
    return host


def make_batch(
    seed=0, lengths=((5, 9), (3, 0), (20, 12), (1, 1), (7, 30), (9, 2), (2, 17), (15, 6), (4, 4), (6, 0), (3, 11))
):
    generator = torch.Generator().manual_seed(seed)
    batch = [torch.randint(0, 256, (prompt + response,), generator=generator) for prompt, response in lengths]
    return batch, [prompt for prompt, _ in lengths]


BATCH, STARTS = make_batch()


def weights(sample, count):
    """Advantages of a sample's tokens."""
    return torch.randn(count, generator=torch.Generator().manual_seed(100 + sample))


def loss_function(log_probs, entropy, samples):
    total = torch.zeros(())
    for logp, ent, sample in zip(log_probs, entropy, samples, strict=True):
        total = total - (weights(sample, len(logp)) * logp).sum() / 90 - 0.01 * ent.sum() / 90
    return total, {"samples": samples, "loss": float(total)}


def bits(tensor):
    return tensor.contiguous().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    )


def same_scores(a, b):
    pairs = zip(a, b, strict=True)
    return all(
        torch.equal(bits(getattr(x, f)), bits(getattr(y, f)))
        for x, y in pairs
        for f in ("log_probs", "digests", "entropy")
    )


def run_updates(host, steps, micro_batch_samples, first=0):
    norms = []
    for step in range(first, first + steps):
        batch, starts = make_batch(seed=step)
        host.forward_backward(batch, starts, 1.0, loss_function, micro_batch_samples)
        norms.append(host.optimizer_step())
        host.zero_grad()
    return norms
