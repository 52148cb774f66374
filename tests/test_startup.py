"""`--startup`: what is noted, and what is printed of it."""

import io
import json

import pytest

from zmrl import startup


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(startup, "_noted", set())


def test_a_process_notes_each_mark_once_and_only_if_asked(tmp_path, monkeypatch):
    monkeypatch.delenv(startup.FILE, raising=False)
    startup.mark("trainer", "modules imported")
    file = tmp_path / "startup.jsonl"
    monkeypatch.setenv(startup.FILE, str(file))
    for _ in range(2):
        startup.mark("trainer", "model built")
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["process"], line["what"]) == ("trainer", "model built")
    assert line["created"] < line["at"] and line["cpu"] > 0


def test_the_breakdown_is_printed_at_the_first_token(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setenv(startup.FILE, "overwritten")
    thread = startup.watch(tmp_path / "startup.jsonl", out)
    startup.mark("vLLM worker", "model loaded")
    thread.join(0.5)
    assert thread.is_alive() and not out.getvalue()
    startup.mark("vLLM worker", startup.FIRST_TOKEN)
    thread.join(10)
    assert "model loaded" in out.getvalue() and startup.FIRST_TOKEN in out.getvalue()


def test_processes_are_listed_by_their_start():
    def line(pid, process, created, what, at):
        return {"pid": pid, "process": process, "created": created, "what": what, "at": at, "cpu": 1.0}

    marks = [
        line(7, "trainer", 105.0, "imported", 110.0),
        line(9, "command", 100.0, "checked", 103.0),
        line(7, "trainer", 105.0, "built", 112.5),
    ]
    _, *lines = startup.breakdown(marks).splitlines()
    assert [text.split()[0] for text in lines] == ["0.0", "3.0", "5.0", "10.0", "12.5"]
    assert lines[0].endswith("command") and lines[-1].endswith("built")
