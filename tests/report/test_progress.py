"""What a person sees: a line a step, plain in a file, above a bar on a terminal."""

import io
import re
import threading
import time

import pytest
from rich.console import Console

from tests.report.runs import step, validation
from zmrl.progress import BarDisplay, Follower, PlainDisplay, clock, progress, time_left
from zmrl.recipe import Recipe
from zmrl.trainer.logs import RunFiles


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def files(tmp_path):
    return RunFiles(tmp_path)


def recipe(files, **changes):
    return Recipe(output_dir=str(files.folder), steps=4, **changes)


def test_plain_lines_where_there_is_no_terminal(files):
    out, validations = io.StringIO(), []
    with progress(recipe(files), out, lambda: validations.append(1)):
        files.validation(validation(0))
        files.step(step(1))
        time.sleep(0.3)
        files.step(step(2, verdict="DIFFERENT", tokens_different=3, kl_k3=1e-12))
    first, second, third = out.getvalue().splitlines()
    assert first.startswith("validation after step 0  builtin  mean@8 0.450  greedy 0.600  terse 0.400")
    assert second.startswith("step 1/4  reward 0.100  EQUAL 200/200  KL 0.0  grad 0.5000  seconds: rollout 3.0")
    assert second.endswith("total 10.0  check 10.0 %  20 tokens/s  0:30 left")
    assert "DIFFERENT 197/200  KL 1e-12" in third and third.endswith("0:20 left")
    assert len(validations) == 1


def test_a_bar_and_lines_above_it_on_a_terminal(files, monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    out = Terminal()
    with progress(recipe(files), out, lambda: None):
        for number in (1, 2, 3, 4):
            files.step(step(number))
        files.validation(validation(4))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "step 1/4  reward 0.100  EQUAL 200/200  KL 0.0  20 tokens/s  0:30 left\n" in shown.replace("\r", "")
    assert "━" in shown and "step 4/4" in shown and "100%" in shown
    assert "mean@8 0.450 after step 4" in shown
    assert "\x1b[32mEQUAL 200/200" in out.getvalue()


def test_a_dumb_terminal_gets_plain_lines(files, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    out = Terminal()
    with progress(recipe(files), out, lambda: None):
        files.step(step(1))
    assert "\x1b" not in out.getvalue() and out.getvalue().endswith("left\n")


def test_a_step_that_is_not_equal_is_red(files):
    out = Terminal()
    console = Console(file=out, force_terminal=True, color_system="standard", width=120)
    with BarDisplay(console, 4, 0) as display:
        display.step(step(1, verdict="VOID", reward_mean=None), 0.0)
    assert "\x1b[1;31mVOID 200/200" in out.getvalue() and "reward -" in out.getvalue()


def test_lines_that_were_there_before_are_not_shown_again(files):
    files.step(step(1))
    follower, out = Follower(files.folder, 4), io.StringIO()
    assert follower.finished == 1
    follower.show(PlainDisplay(out, 4))
    assert out.getvalue() == ""
    files.step(step(2))
    follower.show(PlainDisplay(out, 4))
    follower.show(PlainDisplay(out, 4))
    assert [line.split()[1] for line in out.getvalue().splitlines()] == ["2/4"]


def test_a_half_written_line_is_shown_when_it_is_whole(files):
    follower, out = Follower(files.folder, 4), io.StringIO()
    files.step(step(1))
    text = (files.folder / "steps.jsonl").read_text()
    for part, lines in ((text[:50], 0), (text[:-1], 0), (text, 1)):
        (files.folder / "steps.jsonl").write_text(part)
        follower.show(PlainDisplay(out, 4))
        assert out.getvalue().count("\n") == lines


def test_a_validation_follows_its_step(files):
    follower, out = Follower(files.folder, 4), io.StringIO()
    files.step(step(1))
    files.validation(validation(1))
    files.step(step(2))
    follower.show(PlainDisplay(out, 4))
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["step", "validation", "step"]


def test_everything_is_shown_when_the_run_ends_by_an_exception(files):
    out, before = io.StringIO(), threading.active_count()

    def run():
        with progress(recipe(files), out, lambda: None):
            files.step(step(1))
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        run()
    assert out.getvalue().count("\n") == 1
    assert threading.active_count() == before


def test_time_left():
    assert time_left([10.0, 20.0], 4) == 60
    assert [clock(s) for s in (0, 59.6, 245, 3845)] == ["0:00", "1:00", "4:05", "1:04:05"]
