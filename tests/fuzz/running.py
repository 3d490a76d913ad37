"""One script, run plain, with memfit, and in other ways that tell what a difference is worth."""

from __future__ import annotations

import contextlib
import functools
import io
import linecache
import os
import random
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.faulty import runs_out_of_memory
from fuzz.script import MARK
from fuzz.snapshot import Snapshot, apart, snapshot

NAME = "fuzz_script"
JITTERS = 12


@dataclass
class Ran:
    """What came of a script."""

    left: Snapshot = field(default_factory=dict)
    error: BaseException | None = None
    trace: str = ""
    events: list[tuple[str, str]] = field(default_factory=list)
    mode: str = ""
    """How memfit's last plan ran: whole, accumulate or replay; empty where it made none."""


def plain(source: str) -> Ran:
    """The script as it is."""
    return _run(source, None)


def with_memfit(source: str, **given: Any) -> Ran:
    """The script with memfit's lines; `given` are names that these use, beside `runs_out_of_memory`."""
    given = {"runs_out_of_memory": runs_out_of_memory, **given}
    lines = [line for line in source.splitlines() if not line.endswith("#-")]
    return _run(re.sub(r"^( *)#: ", r"\1", "\n".join(lines) + "\n", flags=re.MULTILINE), None, given)


def drift(source: str, ran: Ran, chosen: Callable[[Snapshot], Snapshot] = dict) -> dict[str, float]:
    """What rounding alone makes of each value that a script leaves behind: the most in some scripts whose parameters differ by
    their last digit, of which one may happen to round alike."""
    most: dict[str, float] = {}
    for seed in range(JITTERS):
        other = _run(source, functools.partial(_jitter, seed=seed))
        for path, value in apart(chosen(ran.left), chosen(other.left)).items():
            most[path] = max(most.get(path, 0.0), value)
    return most


def cut_by_hand(source: str) -> Ran:
    """The script with every forward that trains in two parts, their outputs put together: whether cutting changes it."""
    return _run(source, _halve)


def _run(source: str, change: Callable[[nn.Module], None] | None, given: Mapping[str, Any] | None = None) -> Ran:
    if change is not None:
        source = source.replace(MARK, "_change(model)", 1)
    module = types.ModuleType(NAME)
    printed: list[tuple[Any, ...]] = []
    names = vars(module)
    names |= {"print": lambda *values: printed.append(values), "_change": change, **(given or {})}
    file = f"<{NAME}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    sys.modules[NAME] = module
    ran = Ran()
    with _as_in_a_new_process():
        try:
            exec(compile(source, file, "exec"), names)
        except (Exception, SystemExit) as error:
            ran.error, ran.trace = error, traceback.format_exc()
        names.pop("_change", None)
        for name in ("memfit", *(given or {})):
            names.pop(name, None)
        if ran.error is None:
            ran.left = snapshot(names, printed)
        run = names.get("run")
        if run is not None:
            _look_at(run, ran)
            try:
                run.undo()
            except Exception as error:
                ran.error, ran.trace = ran.error or error, ran.trace or traceback.format_exc()
    sys.modules.pop(NAME, None)
    return ran


@contextlib.contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    os.environ["MEMFIT"] = "strict"
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _look_at(run: Any, ran: Ran) -> None:
    with contextlib.suppress(Exception):
        ran.events = [(event.kind, event.message) for event in run.events]
        ran.mode = run.plan.mode if run.plan is not None else ""


def _jitter(model: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_((1 + 2.3e-16 * torch.randint(-1, 2, p.shape, generator=generator).double()).to(p.device, p.dtype))


def _halve(model: nn.Module) -> None:
    forward = model.forward

    def halved(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        size = max((len(value) for each in given for value in _tensors(each) if value.dim()), default=0)
        if size < 2 or not model.training:
            return forward(*args, **kwargs)
        parts, entries = [], []
        weights = [size // 2 / size, 1 - size // 2 / size]
        for part in (slice(None, size // 2), slice(size // 2, None)):
            own, named = ([_cut(v, part, size) for v in args], {k: _cut(v, part, size) for k, v in kwargs.items()})
            parts.append(forward(*own, **named))
            entries.append((*own, *named.values()))
        for each, *cut in zip(given, *entries):  # what the forward leaves in its arguments
            each.update(_joined(cut, weights)) if isinstance(each, dict) else None
        return _joined(parts, weights)

    model.forward = halved


def _tensors(value: Any) -> Iterator[Tensor]:
    yield from (each for each in (value.values() if isinstance(value, dict) else [value]) if isinstance(each, Tensor))


def _cut(value: Any, part: slice, size: int) -> Any:
    if isinstance(value, dict):
        return {key: _cut(each, part, size) for key, each in value.items()}
    return value[part] if isinstance(value, Tensor) and value.dim() and len(value) == size else value


def _joined(parts: list[Any], weights: list[float]) -> Any:
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts) if first.dim() else sum(w * part for w, part in zip(weights, parts))
    if isinstance(first, dict):
        return {key: _joined([part[key] for part in parts], weights) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(_joined(list(column), weights) for column in zip(*parts)))
    if isinstance(first, (list, tuple)):
        return type(first)(_joined(list(column), weights) for column in zip(*parts))
    if isinstance(first, torch.distributions.Categorical):
        return type(first)(logits=torch.cat([part.logits for part in parts]))
    if isinstance(first, torch.distributions.Independent):
        means, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "stddev"))
        return torch.distributions.Independent(torch.distributions.Normal(means, scales), 1)
    if hasattr(first, "__dataclass_fields__"):
        return type(first)(**{k: _joined([getattr(part, k) for part in parts], weights) for k in first.__dataclass_fields__})
    return first
