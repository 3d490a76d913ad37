"""`memfit snapshot`: a recorded snapshot against the simulated allocator."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
from test_snapshot import a_step
from typer.testing import CliRunner

from memfit.cli.commands import app


def told(path: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["snapshot", str(path)])
    return done.exit_code, done.output


def test_a_snapshot_that_the_rules_explain(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(a_step().content()))
    code, said = told(path)
    assert code == 0 and "device 0: identical" in said and "recorded and replayed" in said


def test_one_they_do_not_explain_has_exit_code_1(tmp_path: Path) -> None:
    content = a_step().content()
    trace = next(trace for trace in content["device_traces"] if trace)
    large = next(entry for entry in trace if entry["action"] == "segment_alloc")
    large["size"] += 2 << 20
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    code, said = told(path)
    assert code == 1 and "device 0: differs" in said and "first difference" in said


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("data", [b"", b"no pickle", pickle.dumps(Evil()), pickle.dumps({"segments": []})[:-1]])
def test_what_is_no_snapshot_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(data)
    code, said = told(path)
    assert code == 2 and "next:" in said


def test_a_snapshot_without_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps({**a_step().content(), "device_traces": [[]]}))
    code, said = told(path)
    assert code in (1, 2) and "_record_memory_history" in said
