"""What was served is scored again by the trainer's host: EQUAL as it was served, and never when it was changed."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.harness import DEFAULTS, PROMPT, Served, bits
from zmrl.serving.verify import main, verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(server: Served, root: Path) -> list[dict[str, Any]]:
    """Lines of: a group of 2; streamed; whole; a stop string; a grammar; two adapters; one that changes afterwards."""
    for name in ("kept", "changing"):
        shutil.copytree(root / "2", root / f"transcript-{name}")
        answer = server.post("/v1/load_lora_adapter", lora_name=name, lora_path=f"transcript-{name}")
        assert answer.status_code == 200
    before = len(server.lines())
    answer = server.complete(n=2, seed=3, temperature=0.7, top_p=0.9)
    with server.http.stream("POST", "/v1/completions", json=DEFAULTS | {"seed": 3, "stream": True}) as stream:
        stream.read()
    text = server.complete(seed=8, max_tokens=30)["choices"][0]["text"]
    letter = next(c for c in text[4:] if c.isascii())
    server.complete(seed=8, max_tokens=30, stop=[letter], logprobs=None)
    server.complete(temperature=0, structured_outputs={"choice": ["yes", "no"]}, ignore_eos=False)
    for model in ("first", "kept", "changing"):
        server.complete(model=model, seed=3)
    for name in ("kept", "changing"):
        assert server.post("/v1/unload_lora_adapter", lora_name=name).status_code == 200
    shutil.rmtree(root / "transcript-changing")
    shutil.copytree(root / "1", root / "transcript-changing")
    lines = server.lines()[before:]
    assert [(tuple(line["token_ids"])) for line in lines[:2]] == [ids for ids, _ in bits(answer)]
    return lines


def test_a_line_says_everything(served: list[dict[str, Any]], checkpoint: Path) -> None:
    assert len(served) == 9 and [line["choice"] for line in served[:2]] == [0, 1]
    for line in served:
        assert line["prompt_ids"] == PROMPT and line["model"] == str(checkpoint)
        assert len(line["token_ids"]) == len(line["log_prob_bits"]) == len(line["digests"]) > 0
        assert line["logprobs_mode"] == "raw_logprobs"
        assert line["identity"].keys() == {"model_digest", "kernel_id", "function_config", "isa"}
    assert [line["adapter"] and line["adapter"]["name"] for line in served[-4:]] == [None, "first", "kept", "changing"]
    assert served[0]["seed"] == 3 and served[0]["temperature"] == 0.7


def _flip(name: str, index: int) -> Callable[[dict[str, Any]], None]:
    def change(line: dict[str, Any]) -> None:
        line[name][index] ^= 1

    return change


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str, str]] = {
    "log-prob bit": (_flip("log_prob_bits", 3), "DIFFERENT", "1 of 12 log-probs and 0 rows differ"),
    "row digest bit": (_flip("digests", 3), "DIFFERENT", "0 of 12 log-probs and 1 rows differ"),
    "token": (_flip("token_ids", 0), "DIFFERENT", "log-probs and"),
    "prompt": (_flip("prompt_ids", 5), "DIFFERENT", "12 rows differ"),
    "no digests": (lambda line: line.update(digests=None), "VOID", "0 row digests for 12 tokens"),
    "digests gone": (lambda line: line.pop("digests"), "VOID", "0 row digests"),
    "one digest missing": (lambda line: line["digests"].pop(), "VOID", "11 row digests"),
    "log-prob missing": (lambda line: line["log_prob_bits"].pop(), "VOID", "11 log-probs for 12 tokens"),
    "model digest": (lambda line: line["identity"].update(model_digest="0" * 16), "VOID", "model_digest"),
    "kernel": (lambda line: line["identity"].update(kernel_id="0"), "VOID", "kernel_id"),
    "function": (lambda line: line["identity"]["function_config"].update(index_topk=1), "VOID", "index_topk"),
    "format": (lambda line: line["identity"]["function_config"].update(latent_format="fp3"), "VOID", "'fp3' is"),
    "identity gone": (lambda line: line.pop("identity"), "VOID", "identity is missing"),
    "mode": (lambda line: line.update(logprobs_mode="processed_logprobs"), "VOID", "logprobs_mode"),
    "nothing": (lambda line: line.update(token_ids=[], log_prob_bits=[], digests=[]), "VOID", "empty"),
    "no such token": (lambda line: line["token_ids"].__setitem__(0, 10**6), "VOID", "tokens that the model"),
    "nan": (lambda line: line["log_prob_bits"].__setitem__(0, 0x7FC00000), "VOID", "not finite"),
    "no checkpoint": (lambda line: line.update(model="/nowhere"), "VOID", "/nowhere"),
    "adapter gone": (lambda line: line.pop("adapter"), "VOID", "adapter is missing"),
}


def test_served_is_equal_and_changed_is_not(served: list[dict[str, Any]], root: Path) -> None:
    """One run of the trainer's host over all."""
    lines = [json.dumps(line).encode() for line in served]
    for change, _, _ in CHANGES.values():
        changed = copy.deepcopy(served[2])
        change(changed)
        lines.append(json.dumps(changed).encode())
    adapted = copy.deepcopy(served[-3])
    adapted["adapter"]["digest"] = "0" * 16
    other = copy.deepcopy(served[-3])
    other["adapter"]["path"] = str(root / "transcript-kept")
    gone = copy.deepcopy(served[-3])
    gone["adapter"]["path"] = str(root / "gone")
    lines += [json.dumps(line).encode() for line in (adapted, other, gone)]
    lines += [lines[0][:-20], b"[]", b"\xff", b"[" * 100_000]
    verdicts = verify(lines)
    assert len(verdicts) == len(lines)
    assert [verdict for verdict, _ in verdicts[:9]] == ["EQUAL"] * 8 + ["VOID"], verdicts[:9]
    assert "adapter_digest" in verdicts[8][1], "the directory has changed since it was served"
    for (name, (_, expected, reason)), (verdict, what) in zip(CHANGES.items(), verdicts[9:], strict=False):
        assert verdict == expected and reason in what, (name, verdict, what)
    rest = verdicts[9 + len(CHANGES) :]
    assert [verdict for verdict, _ in rest] == ["VOID"] * 7
    for (_, what), reason in zip(
        rest, ("adapter", "adapter", "is missing", "not JSON", "object", "JSON", "JSON"), strict=True
    ):
        assert reason in what


@pytest.mark.parametrize(
    "verdicts, code", [("EE", 0), ("ED", 3), ("EV", 4), ("VD", 3), ("", 4)], ids=lambda value: str(value)
)
def test_exit_codes(
    verdicts: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"E": "EQUAL", "D": "DIFFERENT", "V": "VOID"}
    monkeypatch.setattr("zmrl.serving.verify.verify", lambda *_: [(names[v], "why") for v in verdicts])
    file = tmp_path / "t.jsonl"
    file.write_text("x\n" * len(verdicts))
    assert main([str(file)]) == code
    assert len(capsys.readouterr().out.splitlines()) == len(verdicts) + 1
    assert main([str(tmp_path / "none")]) == 2 and main([str(file), "--model", "none"]) == 2


def test_a_full_disk_fails_the_request_and_tears_no_other_line(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    transcript, write = server.engine.transcript, os.write
    before = len(server.lines())

    def half(file: int, data: bytes) -> int:
        return write(file, data[: len(data) // 2]) if file == transcript._file else write(file, data)

    def full(file: int, data: bytes) -> int:
        if file == transcript._file:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    for broken in (half, full):
        with monkeypatch.context() as patch:
            patch.setattr("zmrl.serving.transcript.os.write", broken)
            answer = server.post("/v1/completions", **DEFAULTS)
            assert answer.status_code == 500 and "transcript cannot be written" in answer.text
    server.reference()
    assert server.options.transcript is not None
    torn, whole = server.options.transcript.read_text().splitlines()[before:]
    assert json.loads(whole)["digests"] and not torn.endswith("}")
    kept = [*server.options.transcript.read_text().splitlines()[:before], whole]
    server.options.transcript.write_text("".join(line + "\n" for line in kept))
