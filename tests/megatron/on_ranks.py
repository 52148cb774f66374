"""Runs updates of `MegatronHost` on one of several processes: `python -m tests.megatron.on_ranks RANK SIZE FOLDER`.

FOLDER/layouts.json lists the layouts (`test_trainer_ranks.Case`), FOLDER/model and FOLDER/skewed are bases. Writes what
the rank ends with to FOLDER/RANK.json.
"""

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from tests.megatron import hosts
from zmrl.parallel.layout import Layout
from zmrl.trainer.checkpoints import TrainerCheckpointError
from zmrl.trainer.megatron.host import MegatronHost

STEPS = 3
LENGTHS = ((5, 9), (3, 0), (20, 12), (1, 1), (7, 30), (9, 2), (2, 17), (15, 6), (4, 4), (6, 0), (3, 11), (8, 8))
"""12 samples: shards of one and of two."""


def make_host(base, layout, seed=7):
    host = MegatronHost(base, hosts.RANK, hosts.ALPHA, hosts.SETTINGS, seed, layout=layout)
    generator = torch.Generator().manual_seed(2)
    for item in host.module.master_slices():
        item.write(torch.randn(item.shape, generator=generator) * 0.05)
    host.module.refresh()
    return host


def update(host, step, micro_batch_samples):
    """micro_batch_samples: of each copy. Returns the norm, and a digest of each of this rank's scores."""
    batch, starts = hosts.make_batch(step, LENGTHS)
    data = host.ranks.data
    own = range(data.rank * len(batch) // data.size, (data.rank + 1) * len(batch) // data.size)

    def loss(log_probs, entropy, samples):
        return hosts.loss_function(log_probs, entropy, [own[sample] for sample in samples])

    mine = [batch[i] for i in own], [starts[i] for i in own]
    expected = host.forward(*mine, 1.0, micro_batch_samples=(5, 2)[data.rank])
    metrics, scored = host.forward_backward(*mine, 1.0, loss, micro_batch_samples[data.rank])
    assert [own[i] for i in range(len(own))] == [sample for found in metrics for sample in found["samples"]]
    assert hosts.same_scores(expected, scored)
    norm = host.optimizer_step()
    host.zero_grad()
    return norm, [hashlib.sha256(hosts.bits(s.log_probs).numpy().tobytes()).hexdigest() for s in scored]


def run(base, layout, micro_batch_samples, folder):
    host = make_host(base, layout)
    out = {"norms": [], "scores": []}
    for step in range(STEPS):
        norm, scores = update(host, step, micro_batch_samples)
        out["norms"].append(norm)
        out["scores"].append(scores)
        if step == 0:
            host.save_checkpoint(folder / "step", {"step": 1})
    out["identity"] = host.identity()
    digests = host.tensor_digests(adapter=True)
    out["tensors"] = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
    host.save_adapter(folder / "adapter")
    dist.barrier()
    resumed = make_host(base, layout, seed=99)
    assert resumed.load_checkpoint(folder / "step") == {"step": 1}
    out["resumed norms"] = [update(resumed, step, micro_batch_samples)[0] for step in range(1, STEPS)]
    out["resumed"] = resumed.identity()
    model = host.ranks.model
    groups = {id(group): group for group in (host.ranks.data, model.tensor, model.expert)}.values()
    out["sent"] = dict(+sum((group.sent for group in groups), Counter()))
    out["without tokens"] = model.expert.events["forwards without tokens"]
    out["data rank"] = host.ranks.data.rank
    return out


def take_over(base, folder):
    """Goes on from a checkpoint that a world of another size has written, laid out for this one's data parallelism;
    then tries to load it with the model, or the experts, shared out. Returns the identity after all steps, and what
    was said to that."""
    size = dist.get_world_size()
    host = make_host(base, Layout(data=size), seed=99)
    host.load_checkpoint(folder / "other")
    for step in range(1, STEPS):
        update(host, step, [3] * size)
    refused = []
    for sizes in ({"tensor": size}, {"data": size, "expert": size}) if size > 1 else ():
        parallel_state.destroy_model_parallel()
        try:
            make_host(base, Layout(**sizes)).load_checkpoint(folder / "other")
        except TrainerCheckpointError as error:
            refused.append(str(error))
    return host.identity(), refused


def main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), size), rank=rank, world_size=size)
    results = []
    for number, (sizes, micro_batch_samples, base) in enumerate(json.loads((folder / "layouts.json").read_text())):
        own = folder / f"layout{number}"
        own.mkdir(exist_ok=True)
        results.append(run(folder / base, Layout(**sizes), micro_batch_samples, own))
        parallel_state.destroy_model_parallel()
    if (folder / "other").exists():
        results.append(take_over(folder / "model", folder))
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
