"""The largest micro-batch that memfit admits against the largest that a loop by hand runs, on a CUDA device of several sizes.

    python -m tests.simcuda --capacity 4GiB benchmarks/admitted_cuda.py [--capacities 6] [family ...]
    python benchmarks/admitted_cuda.py --size bench [family ...]        # on a real GPU

`torch.cuda.set_per_process_memory_fraction` makes the device smaller. Its sizes lie evenly between what one sample and what
`--most` samples take. The loop by hand runs three steps of two micro-batches, in the device less the margin that memfit keeps.
memfit admits a size if `wrap(..., micro_batch=size)` makes a plan, and its three steps run. Both begin with an empty cache.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from common import FAMILIES, child, json, save, sys, table

STEPS, PIECES = 3, 2


def run_family(name: str, wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """All cases of a family; one process."""
    device = Device()
    low, high = (device.reserved_by(name, wanted.size, n) for n in (1, wanted.most))
    cases = []
    for k in range(wanted.capacities):
        capacity = device.with_margin(int(low + (k + 0.37) / wanted.capacities * (high - low)))
        margin = device.margin(capacity)
        actual = largest(wanted.most, partial(device.runs, name, wanted.size, capacity - margin))
        for mode in ("step", "script"):
            tried: dict[int, str] = {}
            admitted = largest(wanted.most, partial(device.admits, name, wanted.size, capacity, tried, mode == "script"))
            case: dict[str, Any] = {"family": name, "mode": mode, "capacity": capacity, "margin": margin}
            case |= {"actual": actual, "admitted": admitted}
            case["over"] = max(0, device.peaks.get(admitted, 0) - (capacity - margin))
            case["errors"] = [text for text in tried.values() if text and not text.startswith("DoesNotFit")]
            cases.append(case)
            print(*case.values(), file=sys.stderr, flush=True)
    return cases


class Device:
    """One device, of which a process may have a part."""

    def __init__(self) -> None:
        import torch

        self._cuda, self._total = torch.cuda, torch.cuda.mem_get_info()[1]
        self.peaks: dict[int, int] = {}
        """What steps with memfit reserved at most after the first one, by micro-batch, in the latest case."""

    def margin(self, capacity: int) -> int:
        """What memfit keeps free of a device of that size."""
        import memfit

        self._allow(capacity)
        return memfit.probe().margin

    def with_margin(self, left: int) -> int:
        """The size of a device of which that much is left beside the margin, which grows with it."""
        capacity = left
        for _ in range(8):
            capacity = left + self.margin(capacity)
        return capacity

    def reserved_by(self, name: str, size: str, n: int) -> int:
        """What a loop by hand reserves at most."""
        self._begin(self._total)
        self._cuda.reset_peak_memory_stats()
        by_hand(name, size, n)
        return self._cuda.max_memory_reserved()

    def runs(self, name: str, size: str, capacity: int, n: int) -> bool:
        """Whether a loop by hand runs there."""
        import torch

        self._begin(capacity)
        try:
            by_hand(name, size, n)
        except torch.OutOfMemoryError:
            return False
        return True

    def admits(self, name: str, size: str, capacity: int, errors: dict[int, str], script: bool, n: int) -> bool:
        """Whether memfit runs this size there; if not, why is put into `errors`."""
        self._begin(capacity)
        try:
            events = wrapped(name, size, n, script=script)
            self.peaks[n] = self._cuda.max_memory_reserved()
            errors[n] = ", ".join(event for event in events if event == "out of memory")
        except Exception as error:
            errors[n] = f"{type(error).__name__}: {error}".splitlines()[0]
        return not errors[n]

    def _begin(self, capacity: int) -> None:
        import torch

        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        self._cuda.empty_cache()
        self._allow(capacity)

    def _allow(self, capacity: int) -> None:
        self._cuda.set_per_process_memory_fraction(min(1.0, (capacity + 1) / self._total))


def by_hand(name: str, size: str, n: int) -> None:
    """Three steps of two micro-batches."""
    from zoo import FAMILIES as ZOO, first_batch

    family, model, optimizer = built(name, size)
    pieces = [moved(first_batch(family, n, size=size, seed=seed)) for seed in range(PIECES)]
    for _ in range(STEPS):
        optimizer.zero_grad()
        for piece in pieces:
            (ZOO[name].loss(model, piece) / PIECES).backward()
        optimizer.step()


def wrapped(name: str, size: str, n: int, *, script: bool) -> list[str]:
    """As many steps with memfit; the kinds of what happened."""
    import torch
    from torch.utils.data import DataLoader

    import memfit

    family, model, optimizer = built(name, size)
    target = PIECES * n
    loader = DataLoader(family.dataset(size=size, n=STEPS * target), batch_size=target, collate_fn=family.collate)
    fixed: dict[str, Any] = {"micro_batch": n, "checkpoint": "off", "precision": "off"}
    loss_fn = None if script else family.loss
    run = memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, target_batch=target, **fixed)
    for i, batch in enumerate(run.loader):
        if i == 1:
            torch.cuda.reset_peak_memory_stats()
        if script:
            optimizer.zero_grad()
            family.script_loss(model, moved(batch)).backward()
            optimizer.step()
        else:
            run.step(batch)
    kinds = [event.kind for event in run.events]
    run.undo()
    return kinds


def built(name: str, size: str) -> tuple[Any, Any, Any]:
    import torch
    from zoo import FAMILIES as ZOO

    model = ZOO[name].build(size).cuda()
    return ZOO[name], model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def moved(batch: Any) -> Any:
    from memfit.batches.tree import map_leaves

    return map_leaves(lambda leaf: leaf.cuda() if hasattr(leaf, "cuda") else leaf, batch)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest size up to `most` that fits, where all below it do; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def main(wanted: argparse.Namespace) -> None:
    """One process per family, a table, a dated result."""
    cases: list[dict[str, Any]] = []
    for name in wanted.families or FAMILIES:
        options = ["--size", wanted.size, "--most", str(wanted.most), "--capacities", str(wanted.capacities)]
        found = child("admitted_cuda.py", ["--family", name, *options], pinned=False, timeout=7200)
        cases += found.get("cases", [{"family": name, **found}])
        print(name, *(f"{c['admitted']}/{c['actual']}" for c in found.get("cases", ())), found.get("error", ""), flush=True)
    told = [case for case in cases if "actual" in case]
    bounded = [case for case in told if 0 < case["actual"] < wanted.most]
    header = ("family", "mode", "capacity", "margin", "actual", "admitted", "over", "errors")
    print(table("largest micro-batch", header, [[case[column] for column in header] for case in told]))
    summary = {
        "cases": len(told),
        "bounded": len(bounded),  # those in which memory decides
        "equal": sum(c["admitted"] == c["actual"] for c in bounded) / max(1, len(bounded)),
        "within one tenth": sum(0 <= c["actual"] - c["admitted"] <= c["actual"] / 10 for c in bounded) / max(1, len(bounded)),
        "above": sum(c["admitted"] > c["actual"] for c in told),
        "into the margin": sum(c["over"] > 0 for c in told),
        "refused though it runs": sum(c["admitted"] == 0 < c["actual"] for c in told),
    }
    print(json.dumps(summary, indent=1))
    print(save("admitted_cuda", {"cases": cases, "summary": summary, "size": wanted.size}))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--family", help=argparse.SUPPRESS)
    parser.add_argument("--size", default="tiny", choices=("tiny", "bench"))
    parser.add_argument("--most", type=int, default=256, help="the largest micro-batch to look at")
    parser.add_argument("--capacities", type=int, default=6)
    return parser.parse_args()


if __name__ == "__main__":
    wanted = parsed()
    if wanted.family:
        print(json.dumps({"cases": run_family(wanted.family, wanted)}))
    else:
        main(wanted)
