"""What needs a GPU, on one that is simulated in host memory (tests/simcuda): tests/gpu, and those of the simulation itself.

They run in one process of their own, as a device is there from a process's beginning or not at all. A failure is shown here
with the file that it is in; to run a file by itself:

    python -m tests.simcuda --devices 2 -m pytest tests/gpu/test_laws_gpu.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from simcuda.build import built, compiler

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/simulated", "tests/gpu")
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))
COMMAND = (sys.executable, "-m", "tests.simcuda", "--devices", "2", "--capacity", "8GiB")
WRITTEN_FOR = "2.13"
PATIENCE = {"not slow": 600, "slow": 3600}

Failures = dict[str, list[str]]


@pytest.fixture(scope="module")
def device() -> None:
    """Builds it, once for a version of torch and of its source."""
    if torch.__version__ < WRITTEN_FOR:
        pytest.skip(f"the simulated device is written for torch {WRITTEN_FOR}")
    if compiler() is None:
        assert not os.environ.get("CI"), "no C++ compiler, and CI runs these tests"
        pytest.skip("no C++ compiler")
    built()


@pytest.fixture(scope="module", params=["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def failures(request: pytest.FixtureRequest, device: None, tmp_path_factory: pytest.TempPathFactory) -> Failures:
    """What failed, by file."""
    report = tmp_path_factory.mktemp("simulated") / "report.xml"
    arguments = ("-m", request.param, f"--junitxml={report}", "-p", "no:cacheprovider", "--durations=0", "--durations-min=2")
    command = [*COMMAND, "-m", "pytest", *FOLDERS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE[request.param], cwd=ROOT, check=False)
    assert done.returncode in (0, 1), done.stdout[-4000:] + done.stderr[-4000:]
    found = read(report)
    return found if request.param == "not slow" else {path.stem: [] for path in FILES} | found  # (some have no slow tests)


def read(report: Path) -> Failures:
    """Failures and errors in pytest's XML, by the name of their module; modules without any are there as well."""
    found: Failures = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").split(".")[-1]
        found[module] += [f"{case.get('name')}\n{each.text}" for each in case if each.tag in ("failure", "error")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_the_simulated_device(path: Path, failures: Failures) -> None:
    assert path.stem in failures, "nothing of this file ran"
    assert not failures[path.stem], "\n\n".join(failures[path.stem])


@pytest.mark.slow
def test_two_processes_that_need_it_build_it_once(tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    program = "from simcuda.build import built; path = built(); print(path, path.stat().st_ino)"
    environ = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT / "tests")}
    running = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environ) for _ in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in running]
    assert said[0] == said[1] != "" and Path(said[0].split()[0]).is_relative_to(tmp_path)


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from simcuda.build import NoCompiler

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(NoCompiler, match=r"install g\+\+ or clang\+\+"):
        built()


def test_a_report_with_failures_is_read(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    cases = '<testcase classname="gpu.test_a" name="one"/>\n<testcase classname="gpu.test_b" name="two"><failure>said</failure>'
    report.write_text(f"<testsuites><testsuite>{cases}</testcase></testsuite></testsuites>")
    assert read(report) == {"test_a": [], "test_b": ["two\nsaid"]}
