"""Memory that runs out once, at random allocations of planning and of three steps, on the simulated device.

    python -m tests.simcuda --capacity 4GiB benchmarks/faults_cuda.py [--count 2000] [--seed 0]

Per loss, mode and `micro_batch`: allocations that failed; runs that trained on, to the parameters of one without; runs in
which what failed was the script's own (a whole batch's backward, the optimizer), which plain PyTorch raises as well; and
faults: other parameters, errors that plain PyTorch would not raise, memory that is left once all is deleted.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict

from common import ROOT, save, sys, table

sys.path.insert(0, str(ROOT / "tests" / "simulated"))

from injected import faults, sampled  # noqa: E402


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--count", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0)
    wanted = arguments.parse_args()
    counts, found = defaultdict[str, Counter[str]](Counter), list[str]()
    for want, got in sampled(wanted.count, seed=wanted.seed):
        wrong = list(faults(want, got))
        found += wrong
        for row in (", ".join(map(str, got.case)), "all"):
            counts[row].update(failed=1, faults=bool(wrong))
            counts[row]["script's own" if got.error else "trained on"] += not wrong
    names = ("failed", "trained on", "script's own", "faults")
    rows = [(name, *(count[each] for each in names)) for name, count in counts.items()]
    print(table(f"{wanted.count} allocations that fail", ("loss, mode, micro_batch", *names), rows))
    print("\n".join(found))
    save("faults_cuda", {"seed": wanted.seed, "rows": rows, "found": found})
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
