"""The demo, really, in small: the order of what it says, a limit that holds, and what it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_cli import ENVIRONMENT, assert_three_parts, refused

from memfit import UsageError
from memfit._units import parse_bytes
from memfit.demo.limit import can_limit
from memfit.demo.model import ByteGPT, Shape, next_byte_loss
from memfit.demo.text import LibraryText

SMALL = """
import sys
from memfit.demo.model import Shape
from memfit.demo.show import run_demo
from memfit.demo.task import Demo

shape = Shape(length=64, width=32, heads=2, blocks=4)
sys.exit(run_demo(Demo(budget=512 << 20, steps=4, report="out.html", target=2048, shape=shape)))
"""
LABELS = ("asked", "needs", "without memfit", "with memfit", "plan", "training", "measured", "verified", "report")


@pytest.mark.slow
@pytest.mark.skipif(not can_limit(torch.device("cpu")), reason="this system cannot limit a process")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit is the device's there")
def test_the_demo(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr)
    text = done.stdout
    assert [line[:16].strip() for line in text.splitlines() if line[:1] != " "] == list(LABELS)
    assert "can't allocate memory" in text
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", text)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.2
    measured = re.search(r"peak (.+) of the (.+) allowed, 0 out-of-memory errors", text)
    assert measured is not None and parse_bytes(measured[1]) <= parse_bytes(measured[2])
    assert "gradient equals the whole batch's" in text
    assert (tmp_path / "out.html").stat().st_size > 1000


def test_its_model_learns_what_follows_what() -> None:
    torch.manual_seed(0)
    model = ByteGPT(Shape(length=8, width=16, heads=2, blocks=1))
    text = torch.randint(0, 256, (4, 8))
    assert model(text).shape == (4, 8, 256)
    changed = text.clone()
    changed[:, 5:] = 0
    assert torch.allclose(model(text)[:, :5], model(changed)[:, :5], atol=1e-6)  # nothing is seen before its time
    assert abs(next_byte_loss(model, (text, text)).item() - torch.tensor(256.0).log().item()) < 0.2


def test_its_text_is_that_of_the_library(tmp_path: Path) -> None:
    text = LibraryText(64)
    here, following = text[3]
    assert torch.equal(here[1:], following[:-1])
    assert len(text) * 64 > 1 << 20
    with pytest.raises(UsageError, match="source text of Python's standard library"):
        LibraryText(64, root=tmp_path)


def test_what_it_refuses_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, said in (
        (["--report", "missing/out.html"], "its folder does not exist"),
        (["--report", "out.txt"], "end the name in .html"),
        (["--steps", "0"], "it has to be at least 1"),
        (["--budget", "6"], "did you mean '6GiB'?"),
        (["--budget", "much"], "not a number followed by a unit"),
    ):
        assert_three_parts(refused(["demo", *arguments], monkeypatch, tmp_path), said)
