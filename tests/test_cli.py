"""The command line, in processes of its own: what it prints, its exit codes, and what it does with bad input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers import fixed_plan, mlp
from torch.optim import SGD
from typer.testing import CliRunner

from memfit import Plan, __version__
from memfit._units import format_bytes
from memfit.cli.commands import app

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120", "NO_COLOR": "1"}

SCRIPT = """
import sys
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
import memfit

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
{before}
model, optimizer, loader = memfit.wrap(model, optimizer, DataLoader(data, batch_size=16{loader}){wrap})
print("arguments", sys.argv[1:], __name__)
try:
    for x, y in loader:
        {inside}
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        print("STEPPED")
except {caught}:
    print("CAUGHT")
"""

FUNCTIONS = """
import torch, torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

class Mixing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.mixed = torch.nn.Linear(8, 4), False

    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(0) if self.mixed else x

class OwnLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}

def parts(model, keyed=False):
    x, y = torch.randn(64, 8), torch.randint(0, 4, (64,))
    data = [{"x": a, "labels": b} for a, b in zip(x, y)] if keyed else TensorDataset(x, y)
    return model, torch.optim.AdamW(model.parameters()), DataLoader(data, batch_size=16)

def make():
    return *parts(torch.nn.Linear(8, 4)), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])

def changes_its_mind():
    def loss_fn(model, batch):
        # The whole mixes its samples; the parts that proofs run on do not, nor what is looked at on tensors without data.
        model.mixed = len(batch[0]) > 8 and type(batch[0]) is torch.Tensor
        return F.cross_entropy(model(batch[0]), batch[1])
    return *parts(Mixing()), loss_fn

def no_loss():
    return parts(torch.nn.Linear(8, 4))

def own_loss():
    return parts(OwnLoss(), keyed=True)

def number():
    return 3

def pair():
    return 1, 2

def raises():
    raise RuntimeError("of my own")

def raising_loss():
    def loss_fn(model, batch):
        raise RuntimeError("in my loss")
    return *parts(torch.nn.Linear(8, 4)), loss_fn

constant = 3
"""


def memfit(*arguments: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command line in `cwd`; it has to end with that exit code."""
    command = [sys.executable, "-m", "memfit", *arguments]
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


def refused(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, cwd: Path) -> str:
    """What the command line says in this process where it refuses its input; nothing is printed on stdout."""
    monkeypatch.chdir(cwd)
    monkeypatch.setattr(sys, "path", sys.path[:])
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    assert not done.stdout
    return done.stderr


def script(
    at: Path,
    *,
    before: str = "",
    loader: str = "",
    wrap: str = ", target_batch=32",
    inside: str = "pass",
    caught: str = "Exception",
) -> str:
    """Write a training script with these lines in it; its name."""
    text = SCRIPT.format(before=before, loader=loader, wrap=wrap, inside=inside, caught=caught)
    (at / "train.py").write_text(text)
    return "train.py"


def functions(at: Path) -> str:
    (at / "made.py").write_text(FUNCTIONS)
    return "made.py"


def assert_three_parts(stderr: str, *said: str) -> None:
    """An error as memfit prints it: what was asked, what was found, what to do next; no traceback."""
    assert "Traceback" not in stderr
    assert "\n  found: " in stderr and "\n  next:  " in stderr
    for words in said:
        assert words in stderr, stderr


# ---- plan, of scripts


def test_a_script_runs_until_its_plan_and_no_further(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path), "--", "--lr", "3", cwd=tmp_path)
    assert "arguments ['--lr', '3'] __main__" in done.stdout
    assert "STEPPED" not in done.stdout and "CAUGHT" not in done.stdout
    assert "32 whole" in done.stdout
    assert "; measured" not in done.stdout  # nothing was trained
    assert "running train.py" in done.stderr


@pytest.mark.slow
def test_in_step_mode_it_stops_inside_wrap(tmp_path: Path) -> None:
    wrap = ", loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])"
    done = memfit("plan", script(tmp_path, wrap=wrap), cwd=tmp_path)
    assert "arguments" not in done.stdout
    assert "with memfit" in done.stdout


@pytest.mark.slow
def test_the_folder_of_the_script_is_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "beside.py").write_text("HERE = 7\n")
    script(tmp_path / "inner", before="import beside; print('beside', beside.HERE)")
    assert "beside 7" in memfit("plan", "inner/train.py", cwd=tmp_path).stdout


@pytest.mark.slow
def test_options_override_what_the_script_passes(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path), "--target-batch", "48", "--budget", "100MiB", cwd=tmp_path)
    assert "48 whole" in done.stdout
    assert "of 100 MiB" in done.stdout


@pytest.mark.slow
def test_even_a_script_that_catches_everything_gets_its_plan_printed(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path, caught="BaseException"), cwd=tmp_path)
    assert "CAUGHT" in done.stdout and "32 whole" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "closing",
    ["sys.stdout.close()", "sys.stderr.close()", "sys.stdout = sys.stderr = None", "sys.stdout.close(); sys.stderr.close()"],
)
def test_a_script_that_closes_its_streams_gets_its_plan_printed(tmp_path: Path, closing: str) -> None:
    done = memfit("plan", script(tmp_path, before=f"print = lambda *_: None; {closing}"), cwd=tmp_path)
    assert "with memfit" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_what_is_saved_lies_where_it_was_said_although_the_script_changes_the_directory(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    done = memfit("plan", script(tmp_path, before="import os; os.chdir('elsewhere')"), "--save", "plan.json", cwd=tmp_path)
    assert "the plan is in plan.json" in done.stderr
    assert (tmp_path / "plan.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.slow
def test_workers_are_gone_afterwards(tmp_path: Path) -> None:
    init = "open(f'worker{i}', 'w').write(str(__import__('os').getpid()))"
    loader = f", num_workers=2, persistent_workers=True, worker_init_fn=lambda i: {init}"
    memfit("plan", script(tmp_path, loader=loader), cwd=tmp_path)
    workers = [int(file.read_text()) for file in tmp_path.glob("worker*")]
    assert len(workers) == 2
    for pid in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_script_without_wrap(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('did things')\n")
    done = memfit("plan", "train.py", cwd=tmp_path, code=2)
    assert "did things" in done.stdout
    assert_three_parts(done.stderr, "plan of train.py", "without calling memfit.wrap", "memfit.wrap(model, optimizer")


@pytest.mark.slow
def test_a_script_that_never_trains(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path, inside="break"), cwd=tmp_path, code=2)
    assert_three_parts(done.stderr, "it called memfit.wrap, but ended before the model was called to train")


@pytest.mark.slow
def test_a_script_with_memfit_switched_off(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path, wrap=", enabled=False"), cwd=tmp_path, code=2)
    assert_three_parts(done.stderr, "switched off")
    assert "STEPPED" not in done.stdout


@pytest.mark.slow
def test_exceptions_of_the_script_surface_as_themselves(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path, before="raise KeyError('mine')"), cwd=tmp_path, code=1)
    lines = done.stderr.splitlines()
    at = lines.index("Traceback (most recent call last):")
    assert 'File "train.py", line 10, in <module>' in lines[at + 1]
    assert lines[-1] == "KeyError: 'mine'"
    assert "memfit/cli" not in done.stderr


@pytest.mark.slow
def test_exceptions_of_the_model_end_in_the_users_frame(tmp_path: Path) -> None:
    before = "def broken(self, x): raise KeyError('mine')\ntorch.nn.ReLU.forward = broken"
    wrap = ", loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])"
    done = memfit("plan", script(tmp_path, before=before, wrap=wrap), cwd=tmp_path, code=1)
    frames = [line for line in done.stderr.splitlines() if line.startswith("  File ")]
    assert "train.py" in frames[0] and 'train.py", line 10, in broken' in frames[-1]
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"


@pytest.mark.slow
def test_a_syntax_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x = = 1\n")
    done = memfit("plan", "train.py", cwd=tmp_path, code=1)
    assert "SyntaxError" in done.stderr and "memfit/cli" not in done.stderr


@pytest.mark.slow
def test_the_scripts_own_exit_code_passes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)\n")
    memfit("plan", "train.py", cwd=tmp_path, code=7)


@pytest.mark.slow
def test_errors_of_wrap_are_printed_in_three_parts(tmp_path: Path) -> None:
    done = memfit("plan", script(tmp_path, caught="KeyError"), "--budget", "1MiB", cwd=tmp_path, code=2)
    assert_three_parts(done.stderr, "1.00 MiB")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT to another process")
def test_ctrl_c_ends_quietly(tmp_path: Path) -> None:
    before = "print('ready', flush=True); import time; time.sleep(60)"
    command = [sys.executable, "-m", "memfit", "plan", script(tmp_path, before=before)]
    settings: dict[str, Any] = {"cwd": tmp_path, "env": ENVIRONMENT, "stdout": -1, "stderr": -1, "text": True}
    # Started in the background of a shell, the tests themselves ignore SIGINT, and children inherit that.
    with subprocess.Popen(command, **settings, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert process.stderr.read().strip() == "memfit: running train.py only until there is a plan"


# ---- what is saved and exported


def test_save_export_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = memfit("plan", script(tmp_path), "--save", "plan.json", "--export", "transformers", cwd=tmp_path)
    assert "per_device_train_batch_size=32" in done.stdout
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.target_batch == 32
    assert plan.words_for_peak() in plan.summary()
    assert format_bytes(plan.predicted.peak + plan.held).split()[0] in plan.summary()  # on the scale of the limit beside it
    shown = reported(["plan.json", "--save", "out.html"], monkeypatch, tmp_path)
    assert "32 whole" in shown and "as plan.json says" in shown
    assert (tmp_path / "out.html").read_text().lstrip().lower().startswith("<!doctype html")
    reported(["plan.json", "--save", "out.json"], monkeypatch, tmp_path)
    assert "32 whole" in reported(["out.json"], monkeypatch, tmp_path)


@pytest.mark.parametrize("path", ["missing/plan.json", "/", ".", "folder", f"{'x' * 300}.json", "train.py/plan.json"])
def test_what_cannot_be_saved_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "train.py").write_text("raise AssertionError('it ran')")
    found = CliRunner().invoke(app, ["plan", "train.py", "--save", path])
    assert found.exit_code == 2, found.output
    assert_three_parts(found.stderr, f"writing the plan {path!r}")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "train.py"]


def test_a_report_that_cannot_be_saved_is_printed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text(handmade_plan().to_json())
    for path, said in (("missing/out.html", "No such file"), ("out.txt", "names no format"), ("/", "names no format")):
        monkeypatch.chdir(tmp_path)
        found = CliRunner().invoke(app, ["report", "plan.json", "--save", path])
        assert found.exit_code == 2
        assert "with memfit" in found.stdout
        assert_three_parts(found.stderr, path, said)


def handmade_plan() -> Plan:
    model = mlp()
    return fixed_plan(model, SGD(model.parameters()), share=32, micro_batch=32)


def reported(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, cwd: Path) -> str:
    """What `memfit report` prints, in this process."""
    monkeypatch.chdir(cwd)
    monkeypatch.setenv("COLUMNS", "128")
    done = CliRunner().invoke(app, ["report", *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{not json", "it is not JSON"),
        ('{"a": 1}', "neither a plan nor a report"),
        ("[1]", "neither a plan nor a report"),
        ('{"micro_batch": 1}', "is missing"),
        ('{"micro_batch": 1, "version": 99}', "it has version 99"),
        ('{"report": "memfit", "version": 99}', "it has version 99"),
        ('{"report": "another tool"}', "not a report"),
        (None, "No such file"),
    ],
)
def test_files_that_are_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "plan.json").write_text(text)
    assert_three_parts(refused(["report", "plan.json"], monkeypatch, tmp_path), "plan.json", said)


# ---- functions


@pytest.mark.parametrize("name", ["make", pytest.param("own_loss", marks=pytest.mark.slow)])
def test_plans_and_verifies_what_a_function_returns(tmp_path: Path, name: str) -> None:
    target = f"{functions(tmp_path)}:{name}"
    assert "16 whole" in memfit("plan", target, "--budget", "200MiB", cwd=tmp_path).stdout
    assert "gradient equals the whole batch's" in memfit("verify", target, "--target-batch", "32", cwd=tmp_path).stdout


@pytest.mark.slow
def test_a_verification_that_fails_has_exit_code_1(tmp_path: Path) -> None:
    done = memfit("verify", f"{functions(tmp_path)}:changes_its_mind", cwd=tmp_path, code=1)
    assert "DIFFERS" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_loss", "it returned no loss_fn"),
        ("number", "it returned a value of type int"),
        ("pair", "it returned a tuple of 2"),
        ("absent", "there is no such function in it"),
        ("constant", "it is of type int"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_functions_that_return_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str, said: str
) -> None:
    target = f"{functions(tmp_path)}:{name}"
    assert_three_parts(refused([command, target], monkeypatch, tmp_path), target, said)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "message"), [("raises", "of my own"), ("raising_loss", "in my loss")])
def test_exceptions_of_a_function_surface_as_themselves(tmp_path: Path, name: str, message: str) -> None:
    done = memfit("plan", f"{functions(tmp_path)}:{name}", cwd=tmp_path, code=1)
    assert done.stderr.splitlines()[-1] == f"RuntimeError: {message}"
    assert "memfit/cli" not in done.stderr


# ---- arguments that cannot be meant


def test_bad_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = script(tmp_path)
    for arguments, said in (
        (["plan", "absent.py"], "there is no such file"),
        (["plan", "absent.py:make"], "there is no such file"),
        (["plan", "."], "it is not a file"),
        (["verify", name], "it names no function"),
        (["plan", name, "--budget", "banana"], "not a number followed by a unit"),
        (["plan", name, "--target-batch", "0"], "it has to be at least 1"),
        (["plan", name, "--export", "nothing"], "no such tool"),
        (["probe", "--budget", "6"], "did you mean '6GiB'?"),
    ):
        assert_three_parts(refused(arguments, monkeypatch, tmp_path), said)


def test_probe(tmp_path: Path) -> None:
    assert "room" in memfit("probe", cwd=tmp_path).stdout
    assert "100 MiB" in memfit("probe", "--budget", "100MiB", cwd=tmp_path).stdout


def test_help_names_every_command(tmp_path: Path) -> None:
    shown = memfit("--help", cwd=tmp_path).stdout
    assert all(command in shown for command in ("probe", "plan", "profile", "verify", "report", "demo"))


def test_the_version_is_told() -> None:
    assert memfit("--version", cwd=Path()).stdout == f"memfit {__version__}\n"
