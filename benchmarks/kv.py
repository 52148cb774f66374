"""What the formats of the cache and its kept states cost: `python -m benchmarks.kv [bytes] [layer] [decode] [states]`.

bytes   read by one layer for a decoded token, as the kernels count them at the sizes of K3.1 Pro, against dense MLA
layer   time of the indexer and of attention for a decoded token in one layer, by context, at the sizes of a preset
decode  tokens per second of an engine of `nano` per format, against BF16 latents and FP8 keys, at several contexts
states  what the retention interval of KDA states costs `nano`: bytes kept, steps and time of a prefill

Times are CPU times of one thread, compared in one process, in turns: a figure is the median of ratios within a turn.
Without a name: all four.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor

from zmrl.batch_invariant.native import bytes_read
from zmrl.batch_invariant.ops.indexer import index_select, index_store
from zmrl.batch_invariant.ops.latents import LatentFormat, latent_store
from zmrl.batch_invariant.ops.mla import MlaDims, mla_attention
from zmrl.batch_invariant.ops.panels import LANES
from zmrl.model.cache_format import CACHE_FORMATS, DEFAULT_CACHE_FORMAT, CacheFormat
from zmrl.model.cache_layout import CacheLayout
from zmrl.model.checkpoint import resolve_model
from zmrl.model.config import PRESETS, K3Config
from zmrl.rollout.engine import engine_args, quiet_environment

FP8 = CacheFormat("fp8", "fp8")
PAGE = 256
"""Tokens of a block of `Layer`."""


class Layer:
    """Indexer and attention of one MLA layer with random weights, for one new token behind a context."""

    def __init__(self, config: K3Config, formats: CacheFormat, stored: int) -> None:
        """stored: positions with pages of their own; longer contexts go through the same pages again."""
        self.config, self.formats, self.stored = config, formats, stored
        heads, dim, pe = config.index_n_heads, config.index_head_dim, config.qk_rope_head_dim
        assert heads is not None and dim is not None and config.index_topk is not None
        self.topk, self.latents = config.index_topk, LatentFormat(formats.latent, 1.0)
        rank, nope, v = config.kv_lora_rank, config.qk_nope_head_dim, config.v_head_dim
        self.dims = MlaDims(config.num_attention_heads, nope, pe, rank, v)
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        blocks = stored // PAGE
        self.latent_pages = torch.zeros(blocks, PAGE * formats.latent_bytes(config), dtype=torch.uint8)
        self.index_pages = torch.zeros(blocks, PAGE * formats.index_bytes(config), dtype=torch.uint8)
        slots, norm = torch.arange(stored), (torch.ones(dim), torch.zeros(dim), 1e-6)
        latent_store(random(stored, rank + pe).bfloat16(), self.latent_pages, slots, PAGE, rank, self.latents)
        index_store(random(stored, dim).bfloat16(), *norm, False, self.index_pages, slots, PAGE, formats.index)
        self.q = random(1, self.dims.heads * (nope + pe)).bfloat16()
        self.index_q, self.index_w = random(1, heads * dim).bfloat16(), random(1, heads)
        self.kv_b = random(self.dims.heads * (nope + v) // LANES, rank, LANES).bfloat16() * rank**-0.5

    def at(self, context: int) -> tuple[Tensor, Tensor, Tensor]:
        """block_table, cu_seqlens and positions of a token that is the last of `context`."""
        table = torch.arange(-(-context // PAGE), dtype=torch.int32) % (self.stored // PAGE)
        return table[None], torch.tensor([0, 1], dtype=torch.int32), torch.tensor([context - 1], dtype=torch.int32)

    def select(self, where: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        queries = (self.index_q, self.index_w, False)
        return index_select(*queries, self.index_pages, *where, self.topk, PAGE, None, self.formats.index)

    def attend(self, where: tuple[Tensor, Tensor, Tensor], selected: Tensor | None) -> Tensor:
        sizes = (self.kv_b, self.dims)
        return mla_attention(self.q, None, self.latent_pages, *where, selected, PAGE, *sizes, latents=self.latents)


def seconds(call: Callable[[], object]) -> float:
    """CPU time of this process, which works with one thread: waiting for a core of a shared machine is not counted."""
    start = time.process_time()
    call()
    return time.process_time() - start


def by_turns(calls: Sequence[Callable[[], object]], turns: int) -> list[tuple[float, float]]:
    """(median seconds, median ratio of the first's time to this one's) of each call."""
    for call in calls:
        call()
    times = [[seconds(call) for call in calls] for _ in range(turns)]
    return [
        (statistics.median(t[i] for t in times), statistics.median(t[0] / t[i] for t in times))
        for i in range(len(calls))
    ]


def print_bytes(contexts: Sequence[int]) -> None:
    """Counted by the kernels, one layer of K3.1 Pro; dense MLA reads every latent of the same format."""
    config = PRESETS["k31-pro"]
    print("\nbytes that one layer of k31-pro reads for a decoded token, counted; share of dense MLA in the same format")
    print(f"{'':24}" + "".join(f"{f'{context:,} tokens':>28}" for context in contexts))
    for formats in CACHE_FORMATS:
        layer, line = Layer(config, formats, 4096), ""
        for context in contexts:
            where = layer.at(context)
            bytes_read()
            layer.attend(where, layer.select(where))
            found = bytes_read()
            assert found["index"] == context * formats.index_bytes(config) * (context > layer.topk)
            assert found["latent"] == min(context, layer.topk) * formats.latent_bytes(config)
            total, dense = sum(found.values()), context * formats.latent_bytes(config)
            line += f"{total:>18,}{total / dense:>10.1%}"
        print(f"{formats.latent:>8} + {formats.index:<13}{line}", flush=True)


def print_layer(preset: str, contexts: Sequence[int], turns: int) -> None:
    config = PRESETS[preset]
    first = f"milliseconds at {contexts[0]:,} tokens"
    print(f"\none layer of {preset} for a decoded token: {first}, then times as long at others")
    print(f"{'':34}" + "".join(f"{f'{context:,}':>10}" for context in contexts))
    for formats in (DEFAULT_CACHE_FORMAT, FP8, CacheFormat("nvfp4", "mxfp4")):
        layer = Layer(config, formats, max(contexts))
        places = [layer.at(context) for context in contexts]
        calls = {
            "indexer": [partial(layer.select, where) for where in places],
            "attention": [partial(layer.attend, where, layer.select(where)) for where in places],
        }
        for name, each in calls.items():
            found = by_turns(each, turns)
            cells = f"{found[0][0] * 1e3:>10.2f}" + "".join(f"{1 / ratio:>10.2f}" for _, ratio in found[1:])
            print(f"{formats.latent:>8} + {formats.index:<13}{name:<10}{cells}", flush=True)


class Engine:
    """vLLM in this process with requests that decode."""

    def __init__(self, formats: CacheFormat, context: int, batch: int, **more: object) -> None:
        quiet_environment()
        from vllm import LLM

        from zmrl.rollout.plugin import register

        register()
        sizes = {"max_model_len": context, "max_num_seqs": batch, "kv_cache_memory_bytes": 128 << 20}
        self.llm = LLM(**engine_args(resolve_model("nano"), cache_format=formats, **sizes, **more))
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.numbers = iter(range(10**9))

    def add(self, ids: list[int], tokens: int) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
        self.engine.add_request(str(next(self.numbers)), {"prompt_token_ids": ids}, params)

    def run(self, while_prefilling: bool = False) -> int:
        """Steps until all requests are done, or until all decode; how many steps."""
        count = 0
        while self.engine.has_unfinished_requests():
            requests = self.scheduler.requests.values()
            if while_prefilling and all(r.num_computed_tokens >= r.num_prompt_tokens for r in requests):
                break
            self.engine.step()
            count += 1
        return count


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def print_decode(contexts: Sequence[int], batch: int, turns: int) -> None:
    config = PRESETS["nano"]
    layers, first = len(config.linear_attn_config.full_attn_layers), CACHE_FORMATS.index(DEFAULT_CACHE_FORMAT)
    order = [CACHE_FORMATS[first], *CACHE_FORMATS[:first], *CACHE_FORMATS[first + 1 :]]
    print(
        f"\nan engine of nano, {batch} requests with one prompt: tokens per CPU second, and how many times {order[0]}'s"
    )
    print(f"{'':24}" + "".join(f"{f'{context:,} tokens':>22}" for context in contexts))
    engines = [Engine(formats, max(contexts), batch) for formats in order]
    columns, bytes_of = [], []
    for context in contexts:
        answer = turns + batch + 3  # vLLM lets requests with one beginning start in turn, a step apart
        ids = prompt(context - answer, context)
        for engine in engines:
            engine.add(ids, 1)
            engine.run()
            for _ in range(batch):
                engine.add(ids, answer)
            engine.run(while_prefilling=True)
        found = by_turns([engine.engine.step for engine in engines], turns)
        columns.append([f"{batch / each:,.0f} {ratio:6.2f}" for each, ratio in found])
        for engine, formats in zip(engines, order, strict=True):
            requests = engine.scheduler.requests.values()
            count, held = len(requests), layers * sum(r.num_tokens for r in requests)
            bytes_read()  # the counters are those of the process
            engine.engine.step()
            seen = bytes_read()
            assert seen["index"] == held * formats.index_bytes(config)
            assert seen["latent"] == count * layers * config.index_topk * formats.latent_bytes(config)
            total, dense = sum(seen.values()), held * formats.latent_bytes(config)
            bytes_of.append(f"{total // count:>13,}{total / dense:>9.1%}")
            engine.run()
    for i, formats in enumerate(order):
        cells = "".join(f"{column[i]:>22}" for column in columns)
        print(f"{formats.latent:>8} + {formats.index:<13}{cells}", flush=True)
    print("bytes read per decoded token, counted by the kernels; share of dense MLA in the same format")
    for i, formats in enumerate(order):
        cells = "".join(bytes_of[i :: len(order)])
        print(f"{formats.latent:>8} + {formats.index:<13}{cells}", flush=True)


def print_states(length: int, turns: int) -> None:
    engine = Engine(DEFAULT_CACHE_FORMAT, length + 64, 8, block_size=64)
    config, coordinator = engine.scheduler.cache_config, engine.scheduler.kv_cache_manager.coordinator
    pool = coordinator.block_pool
    row = CacheLayout(PRESETS["nano"], DEFAULT_CACHE_FORMAT, 64).row_bytes
    ids, held = prompt(length, 3), {}

    def prefill(interval: int | None) -> None:
        assert engine.llm.reset_prefix_cache()
        config.prefix_cache_retention_interval = coordinator.retention_interval = interval
        before = pool.get_num_free_blocks()
        engine.add(ids, 1)
        steps = engine.run()
        cached = sum(block.block_hash is not None for block in pool.blocks)
        assert pool.get_num_free_blocks() == before
        held[interval] = (cached - length // 64, steps)

    intervals = (0, None, 2048, 512, 64)
    found = by_turns([partial(prefill, interval) for interval in intervals], turns)
    print(f"\nprefill of {length:,} tokens of nano in blocks of 64, at most 2,048 a step")
    print("interval      steps  rows of states      bytes kept   tokens per CPU second, times the speed of 0")
    for interval, (each, ratio) in zip(intervals, found, strict=True):
        rows, steps = held[interval]
        line = f"{rows:>14,}{rows * row:>16,}{length / each:>11,.0f}{ratio:>12.2f}"
        print(f"{interval!s:<10}{steps:>9}{line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="bytes, layer, decode or states")
    parser.add_argument("--preset", choices=[n for n, c in PRESETS.items() if c.has_indexer], default="k31-pro")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = {
        "bytes": lambda: print_bytes((32 << 10, 128 << 10, 1 << 20)),
        "layer": lambda: print_layer(given.preset, (4096, 8192, 16384, 32768), given.turns),
        "decode": lambda: print_decode(given.contexts, given.batch, given.turns),
        "states": lambda: print_states(8192, given.turns),
    }
    unknown = [name for name in given.parts if name not in parts]
    if unknown:
        parser.error(f"unknown part {unknown[0]}; there are {', '.join(parts)}")
    for name in given.parts or parts:
        parts[name]()


if __name__ == "__main__":
    main()
