"""Random training scripts out of a grammar, each run plain and with memfit's line, and what they leave behind compared.

    python benchmarks/fuzz_scripts.py --seeds 0:20000 [--resume] [--shrink] [--workers 2] [--save]
    python benchmarks/fuzz_scripts.py --show SEED
    python benchmarks/fuzz_scripts.py --alone loss=vmap     # one construct, with everything else as simple as it goes
    python benchmarks/fuzz_scripts.py --seeds 0:1000 --device cuda      # on a GPU
    python benchmarks/fuzz_scripts.py --seeds 0:1000 --processes 2     # two processes with their shares, against one

A seed is a script. Results are written as they come, one JSON object a line, to `--log`; `--resume` leaves out seeds that are
there. `--shrink` makes one finding of every kind small and prints its source.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from common import ROOT, save

sys.path[:0] = [str(ROOT / "tests")]

from fuzz.grammar import Choices, alone, drawn, others  # noqa: E402
from fuzz.on_device import PLACE  # noqa: E402
from fuzz.outcomes import BAD, INVALID, REFUSED  # noqa: E402
from fuzz.pool import Found, found_in, outcomes_of  # noqa: E402
from fuzz.reporting import causes, per_thousand, small  # noqa: E402
from fuzz.script import source_of  # noqa: E402
from fuzz.sharing import found_in_pairs  # noqa: E402


def main() -> None:
    """Read the arguments and run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", default="0:1000", help="FIRST:PAST, or seeds with commas between")
    arguments.add_argument("--show", type=int, help="print a seed's script and what it comes to")
    arguments.add_argument("--alone", help="DIMENSION=OPTION: print the simplest script that has it, and what it comes to")
    arguments.add_argument("--resume", action="store_true")
    arguments.add_argument("--shrink", action="store_true")
    arguments.add_argument("--save", action="store_true", help="write a dated result")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--processes", type=int, choices=(1, 2), default=1, help="2: shares of batches on two, against one")
    arguments.add_argument("--device", help="scripts move their models and batches there")
    arguments.add_argument("--findings", type=Path, help="write the table and the findings there, too")
    arguments.add_argument("--log", type=Path, default=Path("fuzz.jsonl"))
    given = arguments.parse_args()
    if given.device:
        os.environ[PLACE] = given.device
    if given.show is not None or given.alone:
        show(drawn(given.show) if given.show is not None else alone(*given.alone.split("=")))
        return
    began = time.time()
    several = given.processes == 2
    results = partial(found_in_pairs, shrink=given.shrink) if several else partial(found_in, workers=given.workers)
    found = run(seeds_of(given.seeds), given.log, resume=given.resume, results=results)
    with contextlib.ExitStack() as files:
        places = [sys.stdout, *([files.enter_context(given.findings.open("w"))] if given.findings else [])]
        for text in report(found, shrink=given.shrink and not several):
            for place in places:
                print(text, file=place, flush=True)
    print(f"{time.time() - began:.0f} seconds")
    if given.save:
        print(save("fuzz", summary(found)))


def report(found: list[Found], *, shrink: bool) -> Iterator[str]:
    """The table, and findings by cause; with `shrink`, one of each as the smallest script that comes to the same."""
    yield per_thousand(found)
    for (kind, mode, what), group in causes(found).items():
        yield f"\n{len(group)} {kind}, {mode} mode: {what}\n  seeds {[one.seed for one in group[:8]]}"
        if shrink and kind in BAD:
            yield small(group[0])
        elif kind in BAD:
            yield group[0].detail


def seeds_of(text: str) -> list[int]:
    """The seeds that a range or a list stands for."""
    if ":" in text:
        first, past = map(int, text.split(":"))
        return list(range(first, past))
    return [int(part) for part in text.split(",")]


def run(seeds: list[int], log: Path, *, resume: bool, results: Callable[[list[int]], Iterable[Found]]) -> list[Found]:
    """Run seeds by `results`, writing each outcome to the log as it comes."""
    found = [Found(**json.loads(line)) for line in log.read_text().splitlines()] if resume and log.exists() else []
    found = [one for one in found if one.seed in set(seeds)]
    done = {one.seed for one in found}
    with log.open("a" if resume else "w") as file:
        for one in results([seed for seed in seeds if seed not in done]):
            found.append(one)
            file.write(json.dumps(one.as_dict()) + "\n")
            file.flush()
    return found


def show(choices: Choices) -> None:
    """Print a script and what it comes to."""
    print(f"choices: {others(choices)}")
    for mode, one in outcomes_of(choices):
        print(f"\n---- {mode} mode: {one.kind} {one.what}\n{one.detail}\n{source_of(choices, step=mode == 'step')}")


def summary(found: list[Found]) -> dict[str, object]:
    """What is kept of a run."""
    commit = subprocess.run(["git", "log", "-1", "--format=%h"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    groups = causes(found, (*BAD, REFUSED, INVALID))
    listed = [
        {"kind": kind, "mode": mode, "what": what, "runs": len(group), "seeds": [one.seed for one in group[:20]]}
        for (kind, mode, what), group in groups.items()
    ]
    device = os.environ.get(PLACE, "cpu")
    return {"commit": commit, "device": device, "table": per_thousand(found).splitlines(), "findings": listed}


if __name__ == "__main__":
    main()
