"""The gallery: scripts in the shapes that people have, run as they are and with the one line, and what they said compared."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked
import torch
from processes import environments

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ROOT / "tests" / "scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "common")
LINE = re.compile(r"^( *)#: ", re.MULTILINE)
STARTER = """
import functools, runpy, sys
import memfit
settings = eval(sys.argv.pop(1))
memfit.wrap = functools.partial(memfit.wrap, **settings)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class Ran:
    """A run of a script."""

    losses: list[float]
    """By step; of several processes, those of the first."""
    states: list[dict[str, torch.Tensor]]
    """The checkpoint it left."""
    out: str
    err: str


def lines_of(name: str) -> list[str]:
    """The lines that wrapping adds to a script."""
    return [line.strip() for line in (SCRIPTS / f"{name}.py").read_text().splitlines() if line.strip().startswith("#: ")]


def plain(name: str, folder: Path, *options: str) -> Ran:
    """The script as it is."""
    return _ran(folder, [str(SCRIPTS / f"{name}.py")], options)


def wrapped(name: str, folder: Path, *options: str, processes: int = 1, **settings: Any) -> Ran:
    """The script with the one line; `settings` are those of `memfit.wrap` beside what the line says."""
    script = folder / f"{name}.py"
    script.write_text(LINE.sub(r"\1", (SCRIPTS / f"{name}.py").read_text()))
    starter = folder / "starter.py"
    starter.write_text(STARTER)
    return _ran(folder, [str(starter), repr(settings), str(script)], options, processes)


def losses_apart(ours: Ran, theirs: Ran) -> float:
    """The largest relative difference of two runs' losses."""
    assert len(ours.losses) == len(theirs.losses), (ours.losses, theirs.losses, ours.err)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(ours.losses, theirs.losses))


def parameters_apart(ours: Ran, theirs: Ran) -> float:
    """The relative difference of all their parameters together."""
    a, b = (torch.cat([v.double().flatten() for s in ran.states for v in s.values()]) for ran in (ours, theirs))
    return float((a - b).norm() / b.norm())


def _ran(folder: Path, command: list[str], options: tuple[str, ...], processes: int = 1) -> Ran:
    out = folder / "checkpoint.pt"
    out.unlink(missing_ok=True)
    path = os.pathsep.join(map(str, (ROOT, SCRIPTS)))
    environment = {"PYTHONPATH": path, "MEMFIT_PROGRESS": "off"}
    ranks = [environment | each for each in environments(processes)] if processes > 1 else [environment]
    done = forked.run([*command, *options, "--out", str(out)], folder=folder, environments=ranks)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    losses: dict[int, float] = {}
    for step, loss in re.findall(r"^step (\d+) loss (\S+)$", done.stdout, re.MULTILINE):
        losses.setdefault(int(step), float(loss))
    return Ran(list(losses.values()), torch.load(out), done.stdout, done.stderr)


if __name__ == "__main__":  # python tests/gallery.py NAME [MICRO_BATCH]: what comparing says, for those who write scripts
    import tempfile

    name, micro = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    with tempfile.TemporaryDirectory() as place:
        for dtype in ("float32", "float64"):
            kept = plain(name, Path(place), "--dtype", dtype)
            ran = wrapped(name, Path(place), "--dtype", dtype, micro_batch=micro)
            whole = wrapped(name, Path(place), "--dtype", dtype, micro_batch="off")
            two = wrapped(name, Path(place), "--dtype", dtype, micro_batch=micro, processes=2)
            print(dtype, "losses", kept.losses)
            for how, its in (("cut", ran), ("whole", whole)):
                losses, parameters = losses_apart(its, kept), parameters_apart(its, kept)
                print(f"  {how}: losses {losses:.1e}, parameters {parameters:.1e} apart")
            print(f"  two processes: parameters {parameters_apart(two, kept):.1e} apart")
        print(kept.out, ran.err, two.err, sep="\n")
