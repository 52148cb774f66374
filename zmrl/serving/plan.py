"""`python -m zmrl.serving.plan --model k31-pro --tp 8 --dcp 1 --kv fp8 --index fp8 --gpu-memory 288GB`.

How the cache of a deployment lies in memory and what fits into it, by arithmetic alone: no weights, no torch, no vLLM.
Assumptions are options (docs/cache.md, Planning). Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rich.console import Console
from rich.table import Table

from zmrl.batch_invariant.formats import INDEX_FORMATS, LATENT_FORMATS, FormatError
from zmrl.model.cache_format import CacheFormat
from zmrl.model.cache_layout import STATES_PER_REQUEST, CacheLayout, CacheLayoutError, plan
from zmrl.model.config import ConfigError, K3Config, get_config
from zmrl.model.names import tensor_specs
from zmrl.parallel.layout import HEADS, PREFILLS, TOKENS, Layout, LayoutError

_BYTES = {"BF16": 2, "F32": 4, "U8": 1}
_UNITS = {"": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_REPLICATED = re.compile(
    r"(embed_tokens|norm|_res_proj|\.q_a_proj|\.kv_a_proj_with_mqa|\.[fg]_a_proj|\.indexer\.\w+|\.gate"
    r"|\.routed_expert_(down|up)_proj)\.(weight|bias)$|correction_bias$"
)
"""Tensors that every rank holds: the embedding, norms, inputs of low-rank projections, indexers, routers, and the ways
into the experts' latent and back."""
MILLION = 2**20
"""Tokens of "a 1M-token request"."""


@dataclass(frozen=True)
class Capacity:
    """What fits into one rank's memory, with every rank alike."""

    layout: CacheLayout
    memory_bytes: int
    """What the server may use of a rank's memory."""
    weight_bytes: int
    workspace_bytes: int
    """Where a prefill gathers the context of one layer from the ranks that share it; 0 without context parallelism."""
    reserve_bytes: int
    context: int
    """Tokens of the requests that are counted."""

    @property
    def pool_bytes(self) -> int:
        """What is left for block rows; negative if the weights do not fit."""
        return self.memory_bytes - self.weight_bytes - self.workspace_bytes - self.reserve_bytes

    @property
    def rows(self) -> int:
        """Block rows, without the one that vLLM keeps empty."""
        return max(self.pool_bytes // self.layout.row_bytes - 1, 0)

    @property
    def requests(self) -> float:
        """Requests of `context` tokens that fit at a time, as vLLM counts them."""
        return self.rows / self.layout.request_rows(self.context)

    @property
    def tokens(self) -> int:
        """Tokens that fit at a time in such requests."""
        return int(self.requests * self.context)


def weight_bytes(config: K3Config, tensor_parallel: int, prefill: str = HEADS) -> int:
    """Bytes of a rank's share of the weights: experts, heads and MLP widths are shared, `_REPLICATED` is not, nor is
    kv_b where prefills go by tokens."""
    replicated, shared = _weights(config, prefill)
    return replicated + -(-shared // tensor_parallel)


@cache
def _weights(config: K3Config, prefill: str) -> tuple[int, int]:
    """Bytes that every rank holds, and bytes that ranks share: the full model has half a million tensors."""
    total = {True: 0, False: 0}
    for name, shape, dtype in tensor_specs(config):
        whole = _REPLICATED.search(name) is not None or (prefill == TOKENS and ".kv_b_proj." in name)
        total[whole] += math.prod(shape) * _BYTES[dtype]
    return total[True], total[False]


def capacity(
    layout: CacheLayout, memory_bytes: int, reserve_bytes: int, context: int, prefill: str = HEADS
) -> Capacity:
    """CacheLayoutError if not even one request of `context` tokens fits; it holds the numbers."""
    gathered = context * layout.token_bytes // len(layout.config.linear_attn_config.full_attn_layers)
    found = Capacity(
        layout,
        memory_bytes,
        weight_bytes(layout.config, layout.tensor_parallel, prefill),
        gathered if layout.context_parallel > 1 else 0,
        reserve_bytes,
        context,
    )
    if found.pool_bytes <= 0:
        raise CacheLayoutError(
            f"weights of {found.weight_bytes} bytes, workspace of {found.workspace_bytes} and reserve of "
            f"{reserve_bytes} leave nothing of {memory_bytes} bytes a rank; use more ranks or more memory"
        )
    layout.check_pool(found.pool_bytes, context)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console()
    if not console.is_terminal:
        console.width = 110  # a file has no width: rows stay lines
    try:
        config = get_config(options.model)
        formats = CacheFormat(options.kv, options.index)
        if options.block_size is None:
            layout = plan(config, formats, options.tp, options.dcp)
        else:
            layout = CacheLayout(config, formats, options.block_size, options.tp, options.dcp)
        if not 0 < options.utilization <= 1:
            raise CacheLayoutError(f"--utilization {options.utilization} is no share of the memory; give one up to 1")
        memory = int(_size("--gpu-memory", options.gpu_memory) * options.utilization)
        context = min(MILLION, config.max_position_embeddings)
        Layout(options.tp, options.tp, options.dcp, prefill=options.prefill).check(config)
        found = capacity(layout, memory, _size("--reserve", options.reserve), context, options.prefill)
    except (ConfigError, FormatError, CacheLayoutError, LayoutError) as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    console.print(_row_table(layout), _capacity_table(found, options.utilization))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zmrl.serving.plan", description="Plan the cache of a deployment")
    add = parser.add_argument
    add("--model", required=True, help="a preset (k31-pro, k3, tiny, nano, ...) or a checkpoint directory")
    add("--tp", type=int, default=1, help="tensor parallel ranks: they share KDA heads, experts and weights")
    add("--dcp", type=int, default=1, help="decode context parallel ranks among them: they share tokens")
    add("--prefill", choices=PREFILLS, default=HEADS, help="what the ranks share of a prefill")
    add("--kv", default="bf16", choices=LATENT_FORMATS, help="format of latents")
    add("--index", default="fp8", choices=INDEX_FORMATS, help="format of index keys")
    add("--gpu-memory", required=True, metavar="SIZE", help="memory of a rank, such as 288GB or 139GiB")
    add("--utilization", type=float, default=0.9, help="share of it that the server may use")
    add("--reserve", default="0", metavar="SIZE", help="of that, for activations, exchange buffers, a draft model")
    add("--block-size", type=int, help="tokens of a block, a power of two; default: what pads least")
    return parser


def _size(option: str, text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS:
        raise CacheLayoutError(
            f"{option} {text!r} is no size; write a number and one of {', '.join(filter(None, _UNITS))}"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _row_table(layout: CacheLayout) -> Table:
    """The block row: what a row of pages and the rows of states hold."""
    config, formats = layout.config, layout.cache_format
    layers = len(config.linear_attn_config.full_attn_layers)
    local = f" on a rank ({layout.block_size * layout.context_parallel} of a request)" * (layout.context_parallel > 1)
    table = Table(
        "row of", "holds", "bytes", "of the row", title=f"Block rows: {layout.block_size} tokens{local}, {formats}"
    )

    def add(row: str, holds: str, size: int) -> None:
        table.add_row(row, holds, f"{size:,}", f"{size / layout.row_bytes:.1%}")

    latent, index = formats.latent_bytes(config), formats.index_bytes(config)
    add("pages", f"{layers} latent pages of {layout.block_size} x {latent} B", layers * layout.block_size * latent)
    if index:
        add("", f"{layers} index pages of {layout.block_size} x {index} B", layers * layout.block_size * index)
    add("", "padding", layout.row_bytes - layout.page_bytes)
    for count in sorted(set(layout.groups), reverse=True):
        rows = layout.groups.count(count)
        states = count * layout.state_bytes
        table.add_section()
        add(f"states, {rows} a set", f"{count} KDA states of {layout.state_bytes:,} B", states)
        add("", "padding", layout.row_bytes - states)
    table.add_section()
    add("any", "one contiguous range", layout.row_bytes)
    return table


def _capacity_table(found: Capacity, utilization: float) -> Table:
    layout = found.layout
    table = Table("", "value", "what it is made of", title="What fits, on each rank")
    shared = f"{layout.token_bytes:,} on one of {layout.context_parallel} ranks" * (layout.context_parallel > 1)
    per_token = layout.token_bytes / layout.context_parallel
    table.add_row("bytes per token and rank", f"{per_token:,.0f}", shared or "latents and index keys of all MLA layers")
    sets = STATES_PER_REQUEST * sum(layout.groups)
    table.add_row("bytes of states", f"{sets * layout.state_bytes:,}", f"{STATES_PER_REQUEST} sets a request")
    if layout.groups:
        tokens = layout.kept_state_bytes / layout.row_bytes * layout.block_size * layout.context_parallel
        table.add_row("a kept prefix state", f"{layout.kept_state_bytes:,}", f"as much as {tokens:,.0f} cached tokens")
    table.add_row("padding", f"{layout.padding:.2%}", "of what a request of the full context takes")
    table.add_section()
    table.add_row("memory", f"{found.memory_bytes:,}", f"{utilization:.0%} of the rank's")
    table.add_row("weights", f"{found.weight_bytes:,}", "a rank's share")
    table.add_row("workspace", f"{found.workspace_bytes:,}", "one layer's context, gathered" if shared else "none")
    table.add_row("reserve", f"{found.reserve_bytes:,}", "--reserve")
    table.add_row("cache", f"{found.pool_bytes:,}", f"{found.rows:,} rows of {layout.row_bytes:,}")
    table.add_section()
    table.add_row("tokens", f"{found.tokens:,}", f"in requests of {found.context:,}")
    name = "1M-token requests" if found.context == MILLION else f"requests of {found.context:,}"
    rows = layout.request_rows(found.context)
    table.add_row(name, f"{found.requests:.2f}", f"{rows:,} rows each, {int(found.requests)} whole ones at a time")
    return table


if __name__ == "__main__":
    sys.exit(main())
