"""`vllm serve` with the plugin, as processes: front end, engine core, worker."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.harness import RANK, PlainModel, Prompt, Sample, random_adapter, text
from zmrl.lora.peft_io import write_adapter

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]


class Server:
    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                content = answer.read().decode()
                return answer.status, json.loads(content) if content.startswith("{") else content
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def is_up(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=5):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


@pytest.fixture(scope="module")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    environment = os.environ | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm), "serve", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "nano", "--kv-cache-memory-bytes", str(128 << 20)]
    command += ["--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "2"]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    found = Server(f"http://127.0.0.1:{port}")
    deadline = time.monotonic() + 600
    while not found.is_up():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
        time.sleep(1)
    yield found
    process.terminate()
    process.wait(60)


def test_a_served_completion_has_the_bits_of_the_plain_model(server: Server, checkpoint: Path, tmp_path: Path) -> None:
    plain = PlainModel(checkpoint)
    plain.model.create_lora(1, RANK, RANK)
    buffers = random_adapter(plain.model, 1)
    for key, tensor in buffers.items():
        plain.model.lora_buffers()[key][0].copy_(tensor)
    tensors = {item.name: item.read() for item in plain.model.lora_slices(buffers)}
    write_adapter(tmp_path / "adapter", tensors, plain.model.config, RANK, RANK, "nano")

    status, answer = server.ask("/v1/load_lora_adapter", lora_name="missing", lora_path=str(tmp_path / "none"))
    assert status >= 400 and "adapter_config.json is missing" in answer
    status, _ = server.ask("/v1/load_lora_adapter", lora_name="tuned", lora_path=str(tmp_path / "adapter"))
    assert status == 200
    prompt = Prompt(text(100, 3), seed=4, max_tokens=30)
    for model, slot in (("nano", None), ("tuned", 0)):
        status, answer = server.ask(
            "/v1/completions",
            model=model,
            prompt=list(prompt.ids),
            max_tokens=prompt.max_tokens,
            temperature=0.7,
            seed=prompt.seed,
            logprobs=0,
            return_token_ids=True,
            ignore_eos=True,
        )
        assert status == 200, answer
        choice = answer["choices"][0]
        sample = Sample(prompt, choice["token_ids"], None, [], 0)  # type: ignore[arg-type]
        expected = plain.score(sample, slot).logp  # raw: temperature 1, whatever the sampling
        assert [float(x) for x in expected] == choice["logprobs"]["token_logprobs"]
    assert server.ask("/v1/completions", model="nano", prompt=[1, 2, 99999], max_tokens=1)[0] == 400
    assert server.is_up()
