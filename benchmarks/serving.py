"""Our endpoint against stock vLLM with a dense model of like active size: `python -m benchmarks.serving [--repeats N]`.

Client: vLLM's own (`vllm bench serve`: random prompts of 64 ids, answers of 48 tokens, streamed). Both servers are up
during the whole run and take turns; a line gives the medians of ours and the median of the paired ratios (above 1 we
are faster). The stock server runs a Llama with random weights: same vocabulary, width and depth as nano, MLPs sized to
nano's active parameters, vLLM's own kernels, which are not batch-invariant.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zmrl.model.checkpoint import resolve_model
from zmrl.model.config import K3Config, get_config

CLIENTS = (1, 8, 32)
PROMPT, ANSWER = 64, 48
START_SECONDS = 300

CLIENT = """
import argparse, sys
from zmrl.rollout.plugin import register
register()  # the tokenizer
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args(sys.argv[1:]))
"""


def write_dense_model(path: Path, tokenizer: Path, config: K3Config) -> int:
    """A Llama configuration with nano's tokenizer; weights are vLLM's dummies. Returns its number of parameters."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    fixed = 2 * config.vocab_size * hidden + layers * 4 * hidden**2
    intermediate = round((config.active_parameters() - fixed) / (3 * layers * hidden) / 16) * 16
    path.mkdir()
    for file in tokenizer.glob("*token*"):
        shutil.copy(file, path)
    shutil.copy(tokenizer / "byte_vocab.json", path)
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (path / "config.json").write_text(json.dumps(content))
    return fixed + layers * 3 * hidden * intermediate


@contextmanager
def server(command: list[str], log: Path) -> Iterator[str]:
    """A server as a process, ready; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as output:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)
    address = f"http://127.0.0.1:{port}"
    try:
        _wait(address, process, log)
        yield address
    finally:
        process.terminate()
        process.wait(120)


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise SystemExit(f"a server did not come up:\n{log.read_text()[-3000:]}")


def measure(address: str, model: str, tokenizer: Path, clients: int, requests: int, scratch: Path) -> dict[str, Any]:
    """vLLM's client once; its figures."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    settings = {
        "backend": "openai", "base-url": address, "endpoint": "/v1/completions", "model": model,
        "tokenizer": str(tokenizer), "dataset-name": "random", "random-input-len": PROMPT, "random-output-len": ANSWER,
        "num-prompts": requests, "max-concurrency": clients, "temperature": 1.0, "seed": 1,
        "result-dir": str(scratch), "result-filename": result.name,
    }  # fmt: skip
    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-c", CLIENT, *options, "--ignore-eos", "--save-result", "--disable-tqdm"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"})
    if done.returncode or not result.exists():
        raise SystemExit(f"the client failed:\n{done.stdout[-1500:]}\n{done.stderr[-3000:]}")
    figures = json.loads(result.read_text())
    if figures["completed"] != requests:
        raise SystemExit(f"{requests - figures['completed']} of {requests} requests failed at {address}")
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs for each number of clients")
    parser.add_argument("--requests", type=int, default=64, help="requests of a run with several clients; 1 client: 16")
    options = parser.parse_args()
    nano = resolve_model("nano")
    config = get_config(nano)
    with tempfile.TemporaryDirectory(prefix="zmrl-bench-") as folder:
        scratch = Path(folder)
        parameters = write_dense_model(scratch / "dense", nano, config)
        print(f"active parameters: ours {config.active_parameters():,}, stock {parameters:,}", flush=True)
        limits = ["--max-model-len", "1024", "--max-num-seqs", "64"]
        ours = [sys.executable, "-m", "zmrl.serving", str(nano), "--served-model-name", "nano", *limits]
        stock = [str(Path(sys.executable).with_name("vllm")), "serve", str(scratch / "dense"), *limits]
        stock += ["--served-model-name", "dense", "--load-format", "dummy", "--dtype", "bfloat16"]
        stock += ["--host", "127.0.0.1", "--kv-cache-memory-bytes", str(512 << 20)]
        with server(ours, scratch / "ours.log") as first, server(stock, scratch / "stock.log") as second:
            for clients in CLIENTS:
                requests = 16 if clients == 1 else options.requests
                pairs = [
                    [
                        measure(first, "nano", nano, clients, requests, scratch),
                        measure(second, "dense", nano, clients, requests, scratch),
                    ]
                    for _ in range(options.repeats)
                ]
                print(_line(clients, pairs), flush=True)


def _line(clients: int, pairs: list[list[dict[str, Any]]]) -> str:
    rate = statistics.median(mine["output_throughput"] for mine, _ in pairs)
    first = statistics.median(mine["median_ttft_ms"] for mine, _ in pairs)
    rates = statistics.median(mine["output_throughput"] / other["output_throughput"] for mine, other in pairs)
    firsts = statistics.median(other["median_ttft_ms"] / mine["median_ttft_ms"] for mine, other in pairs)
    return (
        f"{clients:>2} clients: {rate:7.1f} tokens/s, {rates:.2f} times stock's; "
        f"first token after {first:6.0f} ms, {firsts:.2f} times as fast"
    )


if __name__ == "__main__":
    main()
