"""Random faults in two and three processes over gloo: what became of each training.

    python benchmarks/faults.py [--trials 300] [--seed 0] [--shard off]

Each trial trains six steps in fresh processes, in which memory runs out (or an error is raised, or a process is killed) at
random places, on one, several or all of them. Every state on the way has to be one that a single process without faults passes
through. `met`: faults that were come to. `survived`: trials in which all processes trained every batch once. `ended`: all ended
within 15 seconds, the faulty one with its own error, the others with RankFailed; in step mode after the same number of steps
(but where the optimizer's own step failed, or a process was killed). A trial counts at each place where it had a fault.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from typing import Any

from common import save, table


def tried(seed: int, shard: str) -> dict[str, Any]:
    """One trial: what was asked and what was found."""
    from faults import PROMPT, drawn, expected_to_survive, run, wanted, wrong

    trial = drawn(seed, shard)
    want = wanted(trial)
    begun = time.perf_counter()
    found = run(trial)
    fired = [fault for outcome in found for fault, _ in outcome.fired]
    return {
        "seed": seed,
        "size": trial.size,
        "mode": trial.mode,
        "autocast": trial.autocast,
        "faults": [vars(fault) for fault in trial.faults],
        "met": [vars(fault) for fault in fired],
        "survived": expected_to_survive(trial, fired),
        "wrong": wrong(trial, found, want, PROMPT),
        "errors": [outcome.error for outcome in found],
        "seconds": round(time.perf_counter() - begun, 2),
    }


def rows_of(trials: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """(place, trials, faults met, survived, ended, hung, wrong parameters, otherwise wrong), and all of them together."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for trial in trials:
        for place in {fault["place"] for fault in trial["faults"]} | {"all"}:
            met = [fault for fault in trial["met"] if place in (fault["place"], "all")]
            count = counts[place]
            count["trials"] += 1
            count["met"] += len(met)
            hung = any("hang" in said for said in trial["wrong"])
            parameters = any("parameters" in said or "differs" in said for said in trial["wrong"])
            count["hung"] += hung
            count["parameters"] += parameters
            count["otherwise"] += bool(trial["wrong"]) and not hung and not parameters
            count["survived" if trial["survived"] else "ended"] += not trial["wrong"]
    names = ("trials", "met", "survived", "ended", "hung", "parameters", "otherwise")
    order = sorted(counts, key=lambda place: (place == "all", place))
    return [(place, *(counts[place][name] for name in names)) for place in order]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", default="off")
    asked = parser.parse_args()
    begun, trials = time.perf_counter(), []
    for seed in range(asked.seed, asked.seed + asked.trials):
        trials.append(tried(seed, asked.shard))
        if trials[-1]["wrong"]:
            print(trials[-1], flush=True)
    seconds = time.perf_counter() - begun
    header = ("place", "trials", "met", "survived", "ended", "hung", "wrong parameters", "otherwise wrong")
    faults = sum(len(trial["met"]) for trial in trials)
    print(table(f"{asked.trials} trials, {faults} faults met, {seconds:.0f} s, shard={asked.shard!r}", header, rows_of(trials)))
    save("faults", {"seed": asked.seed, "shard": asked.shard, "seconds": seconds, "trials": trials})


if __name__ == "__main__":
    main()
