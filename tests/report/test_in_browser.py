"""The report in a real browser: headless Chromium lays out every plot. Debian's package `chromium` brings one."""

import html
import json
import re
import shutil
import subprocess

import pytest

from tests.report.runs import write_run
from zmrl.report.page import render
from zmrl.report.read import read_runs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)

WRAPPER = """<!DOCTYPE html>
<iframe id="report" style="width: 1400px; height: 3000px" srcdoc="{page}"></iframe>
<pre id="found"></pre>
<script>
document.getElementById("report").onload = function () {{
    const inner = this.contentDocument, found = {{}};
    for (const figure of inner.querySelectorAll("figure")) {{
        const frame = figure.getBoundingClientRect();
        found[figure.id] = [...figure.querySelectorAll("path")].map(path => {{
            const box = path.getBoundingClientRect(), style = inner.defaultView.getComputedStyle(path);
            return {{
                length: path.getTotalLength(), width: box.width, height: box.height,
                inside: box.left >= frame.left && box.right <= frame.right
                    && box.top >= frame.top && box.bottom <= frame.bottom,
                stroke: style.stroke, fill: style.fill,
            }};
        }});
    }}
    document.getElementById("found").textContent = JSON.stringify(found);
}};
</script>
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium; install Debian's package chromium to look at the report")
def test_chromium_draws_every_plot(tmp_path):
    """A page around the report measures it: the report itself allows no script."""
    page = render(read_runs([write_run(tmp_path / "run")]))
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(WRAPPER.format(page=html.escape(page)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", "--dump-dom", wrapper.as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="found">(.*?)</pre>', result.stdout)
    assert match, result.stderr
    figures = json.loads(html.unescape(match[1]))
    assert len(figures) == 11
    for name, paths in figures.items():
        assert len(paths) == (5 if name.startswith("seconds") else 1), name
        for path in paths:
            assert path["length"] > 100 and path["width"] > 100 and path["inside"], (name, path)
            assert "none" not in (path["fill"] if name.startswith("seconds") else path["stroke"]), (name, path)
