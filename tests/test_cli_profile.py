"""`memfit profile`: what it prints and saves, and what it does with bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_cli import assert_three_parts, functions, memfit, refused
from typer.testing import CliRunner

from memfit.cli.commands import app


def profiled(arguments: list[str], monkeypatch: pytest.MonkeyPatch, cwd: Path) -> str:
    """What `memfit profile` prints, in this process."""
    import sys

    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "path", sys.path[:])
    done = CliRunner().invoke(app, ["profile", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_it_prints_summary_explanation_and_tree(tmp_path: Path) -> None:
    done = memfit("profile", f"{functions(tmp_path)}:make", cwd=tmp_path)
    assert "memfit profile of Linear" in done.stdout
    assert "a step with micro-batches of 16" in done.stdout  # the loader's
    assert "reached" in done.stdout and "by module" in done.stdout and "largest" in done.stdout
    assert "module  " in done.stdout and "FLOPs" in done.stdout
    assert "profiling made.py:make" in done.stderr


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{functions(tmp_path)}:own_loss"
    shown = profiled([target, "--micro-batch", "3", "--device", "a100-40gb", "--precision", "bfloat16"], monkeypatch, tmp_path)
    assert "micro-batches of 3" in shown and "bfloat16" in shown and "reserved" in shown and "modelled" in shown
    assert "  layer  Linear" in shown
    checkpointed = profiled([target, "--checkpoint", "layer", "--device", "24GiB", "--depth", "1"], monkeypatch, tmp_path)
    assert "micro-batches of 16" in checkpointed


def test_what_the_scripts_loop_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{functions(tmp_path)}:own_loss"
    loop = ["--max-grad-norm", "1.0", "--clip-grad-value", "0.5", "--zero-grad", "before forward", "--plain-loop"]
    shown = profiled([target, "--device", "24GiB", *loop, "--evaluation", "1000000"], monkeypatch, tmp_path)
    assert "gradients clipped to a norm of 1, gradients clipped at 0.5, zero_grad before forward" in shown
    assert "with batches of 1000000: more than the training step" in shown
    assert "later micro-batch" not in shown


@pytest.mark.parametrize("suffix", ["html", "json", "md"])
def test_it_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    profiled([f"{functions(tmp_path)}:make", "--device", "a100-40gb", "--save", f"out.{suffix}"], monkeypatch, tmp_path)
    text = (tmp_path / f"out.{suffix}").read_text()
    if suffix == "json":
        assert json.loads(text)["card"] == "a100-40gb"
    else:
        assert text.lstrip().lower().startswith("<!doctype html" if suffix == "html" else "# memfit")


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{functions(tmp_path)}:make"
    for arguments, said in (
        ([target, "--micro-batch", "0"], "micro_batch=0"),
        ([target, "--micro-batch", "-2"], "micro_batch=-2"),
        ([target, "--depth", "0"], "it has to be at least 1"),
        ([target, "--device", "a100"], "a100-80gb"),
        ([target, "--precision", "int4"], "memfit does not know it"),
        ([target, "--zero-grad", "sometimes"], "before backward"),
        ([target, "--max-grad-norm", "-1"], "it is no number above zero"),
        ([target, "--evaluation", "0"], "at least one sample"),
        ([target, "--checkpoint", "nothing"], "no block 'nothing'"),
        (["made.py"], "it names no function"),
        (["absent.py:make"], "there is no such file"),
        (["made.py:number"], "it returned a value of type int"),
        (["made.py:no_loss"], "it returned no loss_fn"),
    ):
        assert_three_parts(refused(["profile", *arguments], monkeypatch, tmp_path), said)


def test_what_cannot_be_saved_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = f"{functions(tmp_path)}:make"
    monkeypatch.chdir(tmp_path)
    for path, said in (("out.txt", "names no format"), ("missing/out.html", "No such file"), (".", "names no format")):
        done = CliRunner().invoke(app, ["profile", target, "--device", "a100-40gb", "--save", path])
        assert done.exit_code == 2 and not done.stdout
        assert_three_parts(done.stderr, path, said)


def test_a_profile_is_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiled([f"{functions(tmp_path)}:make", "--device", "a100-40gb", "--save", "out.json"], monkeypatch, tmp_path)
    assert_three_parts(refused(["report", "out.json"], monkeypatch, tmp_path), "neither a plan")


def test_exceptions_of_the_model_surface_as_themselves(tmp_path: Path) -> None:
    done = memfit("profile", f"{functions(tmp_path)}:raising_loss", cwd=tmp_path, code=1)
    assert done.stderr.splitlines()[-1] == "RuntimeError: in my loss"
    assert "memfit/cli" not in done.stderr
