"""What the invariant forms of parallel layers cost: `python -m benchmarks.parallel [--preset k31-pro] [--ranks 8]`.

Counts, not times: bytes that a rank sends per layer against the plain forms (`zmrl/parallel/costs.py`), and the work of
prefill by heads and by tokens. The products themselves have the same FLOP in both forms: slices cut a chain, and the
trees add 7 numbers per output where a collective would.
"""

import argparse

import torch

from zmrl.model.config import PRESETS, K3Config
from zmrl.parallel.costs import layer_costs, prefill_flop
from zmrl.parallel.layout import SIZES
from zmrl.parallel.prefill import PrefillShards, count_work


def print_bytes(config: K3Config, tokens: int, ranks: int, lora_rank: int) -> None:
    print(f"\nKiB that a rank sends per layer, {tokens} tokens, {ranks} ranks      plain  invariant  ratio")
    for cost in layer_costs(config, tokens, ranks, lora_rank):
        line = f"  {cost.what:<48} {cost.plain / 1024:12.1f} {cost.invariant / 1024:10.1f}"
        print(f"{line} {cost.invariant / cost.plain:6.2f}")


def print_prefill(config: K3Config, tokens: int, ranks: int) -> None:
    """The busiest rank, one MLA layer."""
    assert config.index_topk is not None
    positions, heads = torch.arange(tokens), config.num_attention_heads
    whole = count_work(positions, config.index_topk)
    shards = PrefillShards.of(torch.tensor([0, tokens]).int(), ranks)
    work = [count_work(positions[rows], config.index_topk) for rows in shards.rows]
    by_heads = prefill_flop(config, whole["positions ranked"], whole["latents read"], heads // ranks)
    flops = [prefill_flop(config, w["positions ranked"], w["latents read"], heads) for w in work]
    read = max(w["latents read"] for w in work) / whole["latents read"]
    print(
        f"  {tokens:>8} {by_heads / 1e12:12.2f} {max(flops) / 1e12:12.2f} {1 - max(flops) / by_heads:8.1%} "
        f"{max(flops) / (sum(flops) / ranks) - 1:12.4%} {read:12.4f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=[n for n, c in PRESETS.items() if c.has_indexer], default="k31-pro")
    parser.add_argument("--ranks", type=int, choices=SIZES[1:], default=8)
    parser.add_argument("--lora-rank", type=int, default=32)
    arguments = parser.parse_args()
    config = PRESETS[arguments.preset]
    for tokens in (64, 4096):
        print_bytes(config, tokens, arguments.ranks, arguments.lora_rank)
    print(f"\nprefill of one request, one MLA layer, {arguments.ranks} ranks: TFLOP of the busiest rank")
    print("    tokens     by heads    by tokens   saving   above mean  latents read, by tokens / by heads")
    for tokens in (27_000, 108_000, 340_000):
        print_prefill(config, tokens, arguments.ranks)


if __name__ == "__main__":
    main()
