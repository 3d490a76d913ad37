"""Scripts on two processes, each with its share of every batch, held against one process with whole batches."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from processes import Failed, Hang, Processes
from torch import Tensor
from torch.utils._pytree import tree_map

from fuzz import running
from fuzz.grammar import SIMPLEST, Choices, drawn, others, settled, the
from fuzz.outcomes import (
    CRASHED,
    DIFFERENT,
    FREE,
    INEXACT,
    INVALID,
    REFUSED,
    TOLERANCE,
    TWICE,
    UNSTEADY,
    Outcome,
    normal,
    words,
)
from fuzz.pool import Found
from fuzz.script import source_of, steps_by_itself
from fuzz.shrinking import shrunk
from fuzz.snapshot import Snapshot, apart

SHARES = ("half", "third", "most", "one")
"""How many samples of a batch the first process has: half, a third, all but one, or one."""
LEVELS = ("optimizer", "gradients", "parameters")
"""What may be held in parts."""
SAID = ("each process computes it on its own share", "each process computes the loss of its own samples", "received gradients outside")
"""Said where processes compute something else than one would."""
LEFT = re.compile(r"(second_optimizer|optimizer|beside)\b|.*_parameters\b")
"""What is compared: what each process prints, counts and caches of its own share is its own."""
_ALIKE = {"fault": "none", "between": "none", "evaluation": "none", "state": "none", "target": "none", "logging": "item"}
"""Dimensions that are of each process's own samples, or draw from its own generators. (Faults among processes: `faults.py`.)"""
_BESIDE = {"optimizer": ("noisy", "slow_weights"), "parts": ("averaged",), "calls": ("teacher",)}
"""What computes with parameters and plain tensors at once: torch refuses that of parameters in parts."""


def in_parts(choices: Choices) -> Choices:
    """The choices without what cannot be computed of parameters that are held in parts."""
    mixing = [name for name, options in _BESIDE.items() if choices[name] in options]
    summing = [name for name in ("loss", "terms", "arithmetic") if "model.parameters()" in str(the(choices, name).lines)]
    return settled({**choices, **{name: SIMPLEST[name] for name in (*mixing, *summing)}})


def shared(choices: Choices) -> Choices | None:
    """The choices without what is of each process's own; None where one process and two are not meant to be the same."""
    found = settled({**choices, **_ALIKE})
    if int(found["samples"]) % int(found["batch"]) == 1:
        found = settled({**found, "batch": "8"})
    text = source_of(found)
    loop = text[text.index("for epoch") :]
    own = re.search(r"rand|flip|roll|len\(x\)|len\(y\)|len\(out\)|BATCH|step|next\(", loop.replace("step += 1", "").replace("optimizer.step()", ""))
    batches = any(tag in the(found, "loader").tags for tag in ("get_batch",)) or found["loader"] in ("global_shuffle", "function")
    outside = the(found, "outside")
    state = outside.holds and not outside.lines.get("params")
    decides = any({"decides", "fixed", "mixes", "positions", "batchnorm"} & the(found, name).tags for name in ("twist", "loss"))
    bare = found["parts"] == "weights_replaced" or found["gradients"] != "none"  # what nobody adds up over processes
    return None if own or batches or state or decides or bare or "drop" in text else found


def shared_source(choices: Choices, *, step: bool, level: str = "off") -> str:
    """The script, which takes its share of each batch where memfit's lines are. The first process alone looks at outputs."""
    source = source_of(choices, step=step).replace("#: run = memfit.wrap(model, optimizer, loader, ", "#: run = memfit.wrap(model, optimizer, ")
    source = source.replace("[optimizer, second_optimizer], loader, ", "[optimizer, second_optimizer], ")
    source = re.sub(r"^#: (model, .*), loader = run$", r"#: \1, _ = run", source, flags=re.MULTILINE)
    looks = the(choices, "metrics").lines.get("metrics", "").strip()
    if looks and "\n" not in looks:
        source = source.replace(f" {looks}\n", f" if rank == 0: {looks}\n")
    source = source.replace("NAMES = ", "rank = 0  #-\nNAMES = ", 1)
    if level != "off":
        source = source.replace("micro_batch=", f'shard="{level}", micro_batch=', 1)
        source += "\nleft = {name: getattr(p, 'full_tensor', p.detach)().detach().clone() for name, p in model.named_parameters()}\n"
    return re.sub(r"^( +)(for batch in .*:)$", r"\1\2\n\1    #: batch = share(batch)", source, flags=re.MULTILINE)


def share_of(seed: int) -> str:
    """How the batches of a seed are shared, and what is held in parts: "third", "third, parameters"."""
    draw = random.Random(f"shares of {seed}")
    shares, level = draw.choice(SHARES), draw.choice(("off",) * 6 + LEVELS)
    return shares if level == "off" else f"{shares}, {level}"


def outcome_of_shares(processes: Processes, choices: Choices, *, step: bool, shares: str) -> Outcome:
    """Run a script plain in one process, and with memfit's lines in two, and compare. Raises Hang, Failed."""
    shares, _, level = shares.partition(", ")
    source = shared_source(choices, step=step, level=level or "off")
    want = running.plain(source)
    if want.error is not None:
        return Outcome(INVALID, words(want.error), want.trace[-1500:])
    found = processes.run(ran, source, shares)
    error = next((each for each in found if each["error"] and "another process" not in each["error"] and "RankFailed" not in each["error"]), None)
    error = error or next((each for each in found if each["error"]), None)
    if error is not None:
        kind = REFUSED if error["refused"] else CRASHED
        return Outcome(kind, normal(error["error"]), "\n".join(each["error"] + "\n" + each["trace"][-2500:] for each in found))
    mine = _kept(want.left)
    far: dict[str, float] = {}
    for each in found:
        far |= {path: value for path, value in apart(mine, each["left"]).items() if value > TOLERANCE}
    if step:
        far = {path: value for path, value in far.items() if not path.endswith(".grad")}
    if not far:
        return Outcome(TWICE if any("two passes" in said for said in found[0]["said"]) else FREE)
    if all(any(some in said for said in each["said"] for some in SAID) for each in found):
        return Outcome(INEXACT, "said")
    drift = running.drift(source, want, _kept)
    if all(value <= 10 * drift.get(path, 0.0) for path, value in far.items()):
        return Outcome(UNSTEADY)
    listed = sorted(far.items())[:12]
    return Outcome(DIFFERENT, "shares", "\n".join([shares, *(f"{path}: {value:.1e}" for path, value in listed), *found[0]["said"]]))


def ran(source: str, shares: str) -> dict[str, Any]:
    """On one of the processes: what the script leaves behind, how it failed, and what memfit said."""
    from memfit import MemfitError

    rank = int(os.environ["RANK"])
    os.environ["MEMFIT_PROGRESS"] = "off"

    def share(batch: Any) -> Any:
        sizes = [len(leaf) for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
        samples = sizes[0]
        first = {"half": (samples + 1) // 2, "third": max(1, samples // 3), "most": samples - 1, "one": 1}[shares]
        part = slice(0, first) if rank == 0 else slice(first, samples)
        return tree_map(lambda leaf: leaf[part] if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch)

    found = running.with_memfit(source, share=share, rank=rank)
    error = found.error
    return {
        "left": _kept(found.left),
        "error": "" if error is None else words(error),
        "refused": isinstance(error, MemfitError),
        "trace": found.trace,
        "said": [f"{kind}: {message}" for kind, message in found.events],
    }


def _kept(left: Snapshot) -> Snapshot:
    """What is compared; where something is held in parts, that which the script has put together."""
    whole = {path: value for path, value in left.items() if path.startswith("left[")}
    return whole or {path: value for path, value in left.items() if LEFT.match(path)}


class Pair:
    """Two processes that run seeds, made anew after one in which a script failed."""

    def __init__(self) -> None:
        self._processes: Processes | None = None

    def outcome(self, choices: Choices, *, step: bool, shares: str) -> Outcome:
        """What a script comes to; hanging and ending processes are crashes."""
        self._processes = self._processes or Processes(2)
        try:
            found = outcome_of_shares(self._processes, choices, step=step, shares=shares)
        except (Hang, Failed) as error:
            found = Outcome(CRASHED, "it hangs" if isinstance(error, Hang) else "a process fails", str(error)[-3000:])
        if found.kind in (CRASHED, REFUSED):
            self.end()
        return found

    def end(self) -> None:
        """Stop them."""
        if self._processes is not None:
            self._processes.end()
            self._processes = None


def found_in_pairs(seeds: Iterable[int], *, shrink: bool) -> Iterator[Found]:
    """Run seeds on two processes and yield what they come to; with `shrink`, findings with the smallest script that comes to
    the same."""
    pair = Pair()
    for seed in seeds:
        choices, shares = shared(drawn(seed)), share_of(seed)
        choices = in_parts(choices) if choices is not None and "," in shares else choices
        for step in () if choices is None else (False, True) if steps_by_itself(choices) else (False,):
            run = partial(_outcome, pair, step, shares)
            found = run(choices)
            if found.bad and shrink:
                made, found = shrunk(choices, found, step=step, run=run)
                found = replace(found, detail=f"{found.detail}\n{others(made)}\n{shared_source(made, step=step)}")
            yield Found(seed, f"{'step' if step else 'script'} ({shares})", found.kind, found.what, found.detail)
    pair.end()


def _outcome(pair: Pair, step: bool, shares: str, choices: Choices) -> Outcome:
    return pair.outcome(choices, step=step, shares=shares) if shared(choices) == choices else Outcome(INVALID)
