"""report.html: every plot has its curves, hostile answers stay text, damage is one line with exit code 2."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.report.runs import HOSTILE, sample, step, validation, write_run
from zmrl.report.__main__ import main
from zmrl.report.plot import ticks
from zmrl.trainer.logs import RunFiles

PLOTS = {"reward", "mean", "greedy", "work", "terse", "kl", "different", "entropy", "length", "gradient", "seconds-1"}
VALIDATION_PLOTS = {"mean", "greedy", "work", "terse"}


class Page(HTMLParser):
    """The plots of a page, its text, and everything that could act or fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.paths: dict[str, list[dict]] = {}
        self.text: list[str] = []
        self.tags: set[str] = set()
        self.active: list[str] = []
        self._figure = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.add(tag)
        if tag == "figure":
            self._figure = values["id"]
            self.paths[self._figure] = []
        if tag == "path":
            self.paths[self._figure].append(values)
        self.active += [f"{tag} {name}={value}" for name, value in attributes if name.startswith("on")]
        self.active += [f"{tag} {name}={value}" for name, value in attributes if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text.append(data)


def report(*folders: Path, out: Path | None = None) -> Page:
    out = out or folders[0] / "report.html"
    assert main([*map(str, folders), "--out", str(out)]) == 0
    return Page(out.read_text())


def places(path: dict) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path["d"])]


def test_every_plot_is_drawn_with_a_point_for_every_measurement(tmp_path):
    page = report(write_run(tmp_path / "run", steps=6))
    assert set(page.paths) == PLOTS
    for name, paths in page.paths.items():
        if name.startswith("seconds"):
            assert len(paths) == 5  # rollout, check, train, sync, the rest
            assert all(len(places(path)) == 2 * 6 for path in paths)
            continue
        (path,) = paths
        assert len(places(path)) == int(path["data-points"]) == (2 if name in VALIDATION_PLOTS else 6), name
        assert all(0 <= x <= 480 and 0 <= y <= 260 for x, y in places(path))
    heights = [y for _, y in places(page.paths["reward"][0])]
    assert heights == sorted(heights, reverse=True) and len(set(heights)) == 6  # the reward rises


def test_a_changed_measurement_changes_the_plot(tmp_path):
    before = report(write_run(tmp_path / "a")).paths
    after = report(write_run(tmp_path / "b", kl_k3=1e-9)).paths
    assert [name for name in PLOTS if before[name] != after[name]] == ["kl"]


def test_a_gap_is_not_drawn_over(tmp_path):
    folder = write_run(tmp_path / "run", steps=2)
    files = RunFiles(folder)
    (folder / "outcome.json").unlink()
    files.step(step(3, verdict="VOID", grad_norm=None, kl_k3=float("nan")))
    files.step(step(4))
    (path,) = report(folder).paths["gradient"]
    assert len(places(path)) == 3 and path["d"].count("M") == 2
    assert len(places(report(folder).paths["kl"][0])) == 3


def test_two_runs_are_curves_of_the_same_plots(tmp_path):
    zero, control = write_run(tmp_path / "zero"), write_run(tmp_path / "control", steps=4, verdict="DIFFERENT")
    page = report(zero, control, out=tmp_path / "both.html")
    assert set(page.paths) == PLOTS | {"seconds-2"}
    lengths = [[len(places(path)) for path in page.paths[name]] for name in ("reward", "mean")]
    assert lengths == [[6, 4], [2, 2]]
    assert len({path["stroke"] for path in page.paths["reward"]}) == 2
    text = "".join(page.text)
    assert "zero" in text and "control" in text


def test_hostile_answers_are_shown_and_stay_text(tmp_path):
    page = report(write_run(tmp_path / "run"))
    assert HOSTILE.replace("\x00", "") in "".join(page.text).replace("\x00", "").replace("\ufffd", "")
    assert not page.tags & {"script", "img", "iframe", "link", "object", "base"}
    assert page.active == []


def test_the_page_names_the_run_and_no_folder_of_its_machine(tmp_path):
    folder = write_run(tmp_path / "run")
    text = "".join(report(folder).text)
    assert "digest-of-the-model" in text and "id-of-the-kernels" in text and "torch 2.13.0" in text
    assert str(tmp_path) not in (folder / "report.html").read_text()
    assert "secret" not in text


def test_the_first_mismatch_and_the_verdicts_are_counted(tmp_path):
    folder = write_run(tmp_path / "run", steps=3)
    files = RunFiles(folder)
    (folder / "outcome.json").unlink()
    files.step(step(4, verdict="DIFFERENT", tokens_different=7))
    files.mismatch({"step": 4, "verdict": "DIFFERENT", "reasons": ["7 of 200 <differ>"]})
    text = "".join(report(folder).text)
    assert "step 4: DIFFERENT: 7 of 200 <differ>" in text
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", (folder / "report.html").read_text().partition("</table>")[0])
    assert cells == ["run", "in progress, or killed", "4 of 3", "3", "1", "0", "800", "7", "0"]


def test_a_run_that_has_just_started_and_one_without_validation_have_a_report(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    files = RunFiles(folder)
    files.run({"recipe": {"validation": {"every": 0}}})
    page = report(folder)
    assert set(page.paths) == PLOTS and not any(page.paths.values())
    files.step(step(1))
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write('{"step": 2, "verd')  # being written
    page = report(folder)
    assert len(places(page.paths["reward"][0])) == 1 and not page.paths["mean"]
    assert all(float(x) > 0 for path in page.paths["seconds-1"] for x, _ in places(path))


def test_lines_of_an_older_version_lack_only_their_own_curves(tmp_path):
    folder = write_run(tmp_path / "run", steps=1)
    for name in ("steps.jsonl", "val.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        newer = ("entropy", "terse_share", "accuracy_given_work", "greedy_accuracy")
        text = "".join(json.dumps({k: v for k, v in line.items() if k not in newer}) + "\n" for line in lines)
        (folder / name).write_text(text)
    (folder / "samples.jsonl").unlink()
    page = report(folder)
    assert {name for name, paths in page.paths.items() if not paths} == {"entropy", "greedy", "work", "terse"}


def _cut_line(folder):
    (folder / "steps.jsonl").write_text((folder / "steps.jsonl").read_text().replace('"verdict"', '"verd', 1))


def _twice(folder):
    lines = (folder / "steps.jsonl").read_text().splitlines(keepends=True)
    (folder / "steps.jsonl").write_text("".join([*lines, lines[-1]]))


def _wrong_type(folder):
    (folder / "val.jsonl").write_text(json.dumps(validation(0, mean_at_k="<b>0.5</b>")) + "\n")


def _no_object(folder):
    (folder / "samples.jsonl").write_text("[]\n")


def _unknown_verdict(folder):
    (folder / "steps.jsonl").write_text(json.dumps(step(1, verdict="FINE")) + "\n")


def _not_text(folder):
    (folder / "steps.jsonl").write_bytes(b"\xff\xfe\n")


@pytest.mark.parametrize(
    "damage, words",
    [
        (_cut_line, "steps.jsonl, line 1, is damaged"),
        (_twice, "steps.jsonl, line 7, is damaged (step 6 follows step 6)"),
        (_wrong_type, "val.jsonl, line 1, is damaged (mean_at_k is '<b>0.5</b>')"),
        (_no_object, "samples.jsonl, line 1, is damaged (no JSON object)"),
        (_unknown_verdict, "verdict 'FINE' is unknown"),
        (_not_text, "steps.jsonl is damaged"),
        (lambda folder: (folder / "run.json").write_text("{"), "run.json is damaged"),
        (lambda folder: (folder / "run.json").unlink(), "run.json is missing"),
        (lambda folder: (folder / "steps.jsonl").unlink(), "steps.jsonl is missing, but the run has finished"),
        (lambda folder: (folder / "val.jsonl").unlink(), "val.jsonl is missing, but the run has finished"),
    ],
)
def test_damage_is_one_line_with_exit_code_2_and_no_report(tmp_path, capsys, damage, words):
    folder = write_run(tmp_path / "run")
    damage(folder)
    assert main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("error: ") and error.count("\n") == 1
    assert not (folder / "report.html").exists()


def test_bad_arguments_are_one_line_with_exit_code_2(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main([str(tmp_path / "absent")]) == 2
    assert main([str(folder), str(folder)]) == 2
    assert main([str(folder), "--out", str(tmp_path / "no" / "folder.html")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [e.split()[-1] for e in errors] == ["run", "FILE", "--out"] and all(e.startswith("error: ") for e in errors)


def test_a_long_run_keeps_a_small_report(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    files = RunFiles(folder)
    files.run({"recipe": {}})
    for number in range(1, 501):
        files._append("steps.jsonl", step(number))
        files._append("samples.jsonl", *[sample(number, key=f"key {i}") for i in range(4)])
    page = report(folder)
    assert len(places(page.paths["reward"][0])) == 500
    assert "".join(page.text).count("key 3") == 10
    assert (folder / "report.html").stat().st_size < 300_000


def test_ticks_are_round_and_within():
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert ticks(1, 6, whole=True) == [1, 2, 3, 4, 5, 6]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert ticks(-2e-9, 3e-9) == pytest.approx([-2e-9, -1e-9, 0, 1e-9, 2e-9, 3e-9])
    assert ticks(0.4, 0.6, whole=True)


def test_the_command_needs_no_torch(tmp_path):
    folder = write_run(tmp_path / "run")
    code = f"import sys; from zmrl.report.__main__ import main; main([{str(folder)!r}]); print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "False", result.stderr
