"""Adapters over HTTP: the trainer's bits, clear refusals, nothing stale, and failures that stay alone."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rollout.harness import PlainModel, text
from tests.serving.harness import DEFAULTS, PROMPT, Served, bits, plain_bits, use_adapter
from zmrl.lora.peft_io import CONFIG_FILE, WEIGHTS_FILE
from zmrl.model.checkpoint import load_reference

pytestmark = pytest.mark.slow
EXPERT = "base_model.model.model.layers.2.block_sparse_moe.experts.63.w2.lora_A.weight"


@pytest.fixture(autouse=True)
def only_the_first(server: Served) -> Iterator[None]:
    yield
    server.unload_all_but_first()


def load(server: Served, name: str, path: str | Path, **more: Any) -> Any:
    return server.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def test_base_and_adapters_in_one_batch_have_the_trainers_bits(server: Served, plain: PlainModel, root: Path) -> None:
    assert load(server, "second", "2").json()["lora_name"] == "second"
    jobs = [(model, seed) for seed in range(4) for model in ("base", "first", "second")]
    server.worker("zmrl_counters", True)
    with ThreadPoolExecutor(len(jobs)) as pool:
        found = list(pool.map(lambda job: bits(server.complete(model=job[0], seed=job[1], max_tokens=24)), jobs))
    most = server.worker("zmrl_counters")["max_adapters"]
    assert most == 2, f"VOID: {most} adapters in a batch"
    for model, directory in (("base", None), ("first", "1"), ("second", "2")):
        if directory is not None:
            use_adapter(plain, root / directory)
        for (name, _), (answer,) in zip(jobs, found, strict=True):
            if name == model:
                assert answer == plain_bits(plain, answer[0], slot=None if directory is None else 0)
    assert found[0] != found[1] != found[2], "the adapters change nothing"


def test_a_directory_that_peft_wrote(server: Served, plain: PlainModel, root: Path, checkpoint: Path) -> None:
    """Loaded by `peft` into the reference model, changed, and saved by it."""
    wrapped = peft.PeftModel.from_pretrained(load_reference(checkpoint), root / "1")
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.neg_()
    wrapped.save_pretrained(str(root / "peft"))
    assert load(server, "by-peft", "peft").status_code == 200
    use_adapter(plain, root / "peft")
    (found,) = bits(server.complete(model="by-peft", seed=3))
    assert found == plain_bits(plain, found[0], slot=0) and found != bits(server.complete(model="first", seed=3))[0]


def test_a_reload_under_its_name_meets_no_old_blocks(server: Served, root: Path) -> None:
    """vllm#42125: also from the same path with other contents."""
    prompt = list(text(200, 5))
    path = root / "changing"
    shutil.copytree(root / "1", path)
    assert load(server, "x", path).status_code == 200
    old = bits(server.complete(model="x", prompt=prompt, seed=1))
    assert bits(server.complete(model="first", prompt=prompt, seed=1)) == old
    used = server.gauge('vllm:prefix_cache_hits_total{engine="0",model_name="base"}')
    assert bits(server.complete(model="x", prompt=prompt, seed=1)) == old
    hits = server.gauge('vllm:prefix_cache_hits_total{engine="0",model_name="base"}')
    assert hits > used, "VOID: the first adapter left no blocks"
    shutil.rmtree(path)
    shutil.copytree(root / "2", path)
    answer = load(server, "x", path)
    assert answer.status_code == 400 and "in use" in answer.json()["error"]["message"]
    assert load(server, "x", path, load_inplace=True).status_code == 200
    new = bits(server.complete(model="x", prompt=prompt, seed=1))
    assert server.gauge('vllm:prefix_cache_hits_total{engine="0",model_name="base"}') == hits
    assert load(server, "y", "2").status_code == 200
    assert new == bits(server.complete(model="y", prompt=prompt, seed=1)) != old
    assert server.post("/v1/unload_lora_adapter", lora_name="x").status_code == 200
    assert load(server, "x", "1").status_code == 200
    assert bits(server.complete(model="x", prompt=prompt, seed=1)) == old


def test_an_adapter_stays_until_its_last_request_ends(server: Served, root: Path) -> None:
    assert load(server, "leaving", "2").status_code == 200
    body = DEFAULTS | {"model": "leaving", "max_tokens": 200, "seed": 2}
    whole = server.complete(**body)["choices"][0]["token_ids"]
    ids: list[int] = []
    with server.http.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for number, line in enumerate(answer.iter_lines()):
            if number == 4:
                assert server.post("/v1/unload_lora_adapter", lora_name="leaving").status_code == 200
                assert server.gauge("zmrl_adapters_loaded") == 2
                missing = server.post("/v1/completions", **(DEFAULTS | {"model": "leaving"}))
                assert missing.status_code == 404
            if line.startswith("data: {"):
                ids += [t for c in json.loads(line[6:])["choices"] for t in c["token_ids"]]
    assert ids == whole
    server.call(server.engine.settled())
    assert server.gauge("zmrl_adapters_loaded") == 1
    assert server.worker("zmrl_identity")["adapter_digests"].keys() == {"first"}


def _tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], Any]:
    def apply(path: Path) -> None:
        tensors = load_file(path / WEIGHTS_FILE)
        change(tensors)
        save_file(tensors, path / WEIGHTS_FILE)

    return apply


def _settings(**changes: Any) -> Callable[[Path], Any]:
    def apply(path: Path) -> None:
        file = path / CONFIG_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return apply


def _pickle(path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(path / "the pickle ran"),)

    torch.save(Runs(), path / "adapter_model.bin")
    (path / WEIGHTS_FILE).unlink()


def _link_out(file: str) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        outside = path.parents[1] / f"outside-{file}"
        shutil.copy(path / file, outside)
        (path / file).unlink()
        (path / file).symlink_to(outside)

    return apply


def _pipe(path: Path) -> None:
    (path / CONFIG_FILE).unlink()
    os.mkfifo(path / CONFIG_FILE)


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (_pickle, "only safetensors is read"),
    "weights link out": (_link_out(WEIGHTS_FILE), "leads out of --lora-root"),
    "config links out": (_link_out(CONFIG_FILE), "leads out of --lora-root"),
    "pipe": (_pipe, "is no regular file"),
    "shape": (_tensors(lambda t: t.update({EXPERT: t[EXPERT][:, :-1].contiguous()})), "experts.63.w2"),
    "nan": (_tensors(lambda t: t[EXPERT][0, :1].fill_(float("nan"))), "holds NaN or infinity"),
    "expert missing": (_tensors(lambda t: t.pop(EXPERT)), "experts.63.w2.lora_A.weight is missing"),
    "rank": (_settings(r=16), "rank 16"),
    "alpha": (_settings(lora_alpha=64), "alpha 64"),
    "not safetensors": (lambda path: (path / WEIGHTS_FILE).write_bytes(b"\0" * 100), "cannot be read"),
    "no config": (lambda path: (path / CONFIG_FILE).unlink(), "adapter_config.json is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_directory_is_refused_and_the_server_serves_on(server: Served, root: Path, fault: str) -> None:
    """TensorRT-LLM#13391 among them: a pickle is not opened, a link is not followed out."""
    before = server.reference()
    path = root / fault.replace(" ", "-")
    shutil.copytree(root / "1", path)
    damage, reason = FAULTS[fault]
    damage(path)
    answer = load(server, "bad", path)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert not (path / "the pickle ran").exists()
    assert server.post("/v1/completions", **(DEFAULTS | {"model": "bad"})).status_code == 404
    assert server.reference() == before


@pytest.mark.parametrize(
    "name, path, reason",
    [
        ("bad", "../{outside}", "leads out"),
        ("bad", "/etc", "leads out"),
        ("bad", "link", "leads out"),
        ("bad", "nothing", "no directory"),
        ("bad", "", "no path"),
        ("bad", "a\0b", "no path"),
        ("bad", "a" * 300, "no directory"),
        ("first", "2", "in use"),
        ("base", "2", "name of the model"),
        ("a b", "2", "letters, digits"),
        ("", "2", "letters, digits"),
    ],
)
def test_a_bad_name_or_path_is_refused(server: Served, root: Path, name: str, path: str, reason: str) -> None:
    outside = root.parent / "outside"
    if not outside.exists():
        shutil.copytree(root / "2", outside)
        (root / "link").symlink_to(outside)
    answer = load(server, name, path.format(outside=outside.name))
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text


def test_no_more_than_max_loras_at_a_time(server: Served) -> None:
    assert load(server, "b", "2").status_code == 200 and load(server, "c", "2").status_code == 200
    answer = load(server, "d", "2")
    assert answer.status_code == 400 and "--max-loras" in answer.json()["error"]["message"]
    assert server.post("/v1/unload_lora_adapter", lora_name="nobody").status_code == 404


def test_an_adapter_that_overflows_fails_its_requests_only(server: Served) -> None:
    before = server.reference()
    assert load(server, "huge", "huge").status_code == 200  # its values are finite
    results: dict[str, Any] = {}

    def ask(name: str) -> None:
        results[name] = server.post("/v1/completions", **(DEFAULTS | {"model": name, "seed": 11}))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("base", "huge", "first")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["huge"].status_code == 500 and "NaN" in results["huge"].json()["error"]["message"]
    assert bits(results["base"].json()) == before and results["first"].status_code == 200
    with server.http.stream("POST", "/v1/completions", json=DEFAULTS | {"model": "huge", "stream": True}) as answer:
        assert "NaN" in "".join(answer.iter_lines())
    assert server.reference() == before


def test_many_loads_leave_nothing_behind(server: Served) -> None:
    for _ in range(6):
        assert load(server, "again", "2", load_inplace=True).status_code == 200
        server.complete(model="again", prompt=PROMPT[:8], max_tokens=1)
    assert server.post("/v1/unload_lora_adapter", lora_name="again").status_code == 200
    server.call(server.engine.settled())
    assert server.gauge("zmrl_adapters_loaded") == 1 and len(server.engine.retired) == 0
