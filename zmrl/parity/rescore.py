"""The trainer side of the parity command: Megatron scores every distinct sample once.

`python -m zmrl.parity.rescore JOB ROLLOUT RESULT`, a process of its own since the CPU shim of megatron-core is global.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from zmrl.model.cache_format import CacheFormat
from zmrl.parity.settings import sample_key
from zmrl.trainer.megatron.host import MegatronHost


def main(job_path: str, rollout_path: str, result_path: str) -> None:
    job, runs = (json.loads(Path(path).read_text()) for path in (job_path, rollout_path))
    samples = {sample_key(s): s for run in runs for s in run["samples"]}
    cache_format = CacheFormat(job["latent_format"], job["index_format"])
    host = MegatronHost(job["model"], job["rank"], job["alpha"], None, 0, cache_format)
    identities: dict[str, Any] = {}
    scores: dict[str, Any] = {}
    for adapter in [None, *job["adapters"]]:
        if adapter is not None:
            host.load_adapter(job["adapters"][adapter])
        identity = host.identity()
        identities[adapter or ""] = identity
        for temperature in sorted({s["temperature"] for s in samples.values()}):
            chosen = [
                (key, s) for key, s in samples.items() if s["adapter"] == adapter and s["temperature"] == temperature
            ]
            batch = [torch.tensor(s["prompt_ids"] + s["token_ids"]) for _, s in chosen]
            starts = [len(s["prompt_ids"]) for _, s in chosen]
            found = host.forward(batch, starts, temperature, adapter=adapter is not None) if chosen else []
            for (key, _), score in zip(chosen, found, strict=True):
                bits = score.log_probs.view(torch.int32).tolist()
                scores[key] = {"log_prob_bits": bits, "digests": score.digests.tolist()}
    Path(result_path).write_text(json.dumps({"identities": identities, "scores": scores}))


if __name__ == "__main__":
    main(*sys.argv[1:])
