"""Runs `checks_*.py` in one process of its own and reports every check as a test.

The host joins a process group and Megatron's parallel state, which are process-global; other tests start other groups.
"""

import ast
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = sorted(Path(__file__).parent.glob("checks_*.py"))
NAMES = [
    node.name
    for file in CHECKS
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
]


@pytest.fixture(scope="module")
def failures(tmp_path_factory) -> dict[str, str]:
    """Check -> what its parametrised cases reported; absent if all of them passed."""
    report = tmp_path_factory.mktemp("megatron") / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        *map(str, CHECKS),
        f"--junitxml={report}",
    ]
    process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert report.exists(), process.stdout + process.stderr
    found: dict[str, str] = {}
    ran = set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.attrib["name"].split("[")[0]
        ran.add(name)
        for problem in (*case.iter("failure"), *case.iter("error"), *case.iter("skipped")):
            found[name] = f"{found.get(name, '')}\n{case.attrib['name']}\n{problem.text or problem.attrib}"
    for name in NAMES:
        if name not in ran:
            found[name] = f"did not run\n{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize("check", NAMES)
def test_megatron_host(check, failures):
    assert check not in failures, failures[check]
