"""The cost of each module of a model in a step, nested like the modules; identical modules in a row form one entry.

Modules are identical if classes and numbers of parameters are, children included. A pure function over a Profile. The figures
of a module include its children. What a module, the loss or the optimizer does outside any other module is an entry of its own,
so that entries add up. Not covered: memory outside tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from memfit._errors import UsageError
from memfit.profiling.describe import LOOSE, tree_lines
from memfit.profiling.roofline import in_micro_batch, operation_seconds
from memfit.profiling.seconds import measured_sizes, timing_at
from memfit.profiling.timeline import CATEGORIES, Timeline

if TYPE_CHECKING:
    from memfit.profiling.profile import Profile

ITSELF = "(itself)"
"""The entry for what a module does outside its children."""
ADDED = ("parameters", "trainable", "kept", "flops_forward", "flops_backward", "forward_seconds", "seconds")
"""Figures of a module that are the sum of its children's; bytes at the peak are, too."""
_LISTS = ("ModuleList", "ModuleDict")
Measured = tuple[float, float, dict[str, float]]
"""(seconds of a micro-batch, of its forward, of the forward by block)"""


@dataclass(frozen=True)
class ModuleCost:
    """The cost of one module, or of several identical ones, in one micro-batch."""

    name: str
    """Its name within its parent; "0 to 11" for several."""
    path: str
    """Its dotted name, with "0-11" for several; "" for the model."""
    kind: str
    """Its class; "" if unknown."""
    alike: int
    """Number of identical modules in this entry; all figures are for these together."""
    parameters: int
    """Elements in their parameters."""
    trainable: int
    """Elements that receive gradients."""
    kept: int
    """Bytes that their forward saves for backward."""
    transient: int
    """Most bytes at once that they allocate and free while computing, over the step."""
    flops_forward: float | None
    """FLOPs of the forward; None if not counted."""
    flops_backward: float | None
    """FLOPs of the backward, recomputation included; None if not counted."""
    forward_seconds: float | None
    """Seconds of the forward; None if unknown."""
    seconds: float | None
    """Seconds of forward and backward; None if unknown."""
    holds: tuple[tuple[str, int], ...]
    """(category, bytes) that they hold at the peak of the step."""
    differ: frozenset[str] = frozenset()
    """Figures that differ between the modules of this entry."""
    children: tuple[ModuleCost, ...] = ()
    """The modules inside, and an entry for what is outside them."""

    @property
    def at_peak(self) -> int:
        """Bytes that they hold at the peak of the step."""
        return sum(size for _, size in self.holds)

    @property
    def flops(self) -> float | None:
        """FLOPs of forward and backward; None if not counted."""
        return None if self.flops_forward is None else self.flops_forward + (self.flops_backward or 0.0)

    def held(self, category: str) -> int:
        """Returns the bytes of that category at the peak of the step."""
        return dict(self.holds).get(category, 0)

    def flat(self, depth: int | None = None, at: int = 0) -> Iterator[tuple[int, ModuleCost]]:
        """Yields (levels down, entry) for this entry and those inside it, down to `depth` levels below."""
        yield at, self
        if depth is None or at < depth:
            for child in self.children:
                yield from child.flat(depth, at + 1)


@dataclass(frozen=True)
class ModuleTree:
    """The cost of a model's modules in one micro-batch."""

    samples: int
    """Samples per micro-batch."""
    root: ModuleCost
    """The whole model, with the loss and the optimizer."""
    seconds_are: str
    """measured, modelled, which other sizes they come from, or "" if none are known."""
    unknown: str = ""
    """Why memory figures are missing; "" if they are not."""

    def __str__(self) -> str:

        return "\n".join(tree_lines(self))


def module_tree(profile: Profile, micro_batch: int, *, accumulates: bool = True) -> ModuleTree:
    """Returns the tree for micro-batches of `micro_batch` samples. Raises UsageError for an invalid number of samples."""
    check_samples(micro_batch)
    figures = _Figures.of(profile, micro_batch, accumulates)
    top = _nested(profile, figures)
    top.add_up(figures)
    root = _entry([top], profile.model.name, "", figures)
    timed = figures.timing is not None or figures.by_operation
    ran = micro_batch in measured_sizes(profile.timings)
    how = "" if not timed else "modelled" if profile.card is not None else "measured" if ran else _from_others(profile)
    return ModuleTree(micro_batch, root, how, unfollowed(profile))


def _from_others(profile: Profile) -> str:
    return f"not measured at that size: from micro-batches of {', '.join(map(str, measured_sizes(profile.timings)))}"


def check_samples(micro_batch: object, name: str = "micro_batch", what: str = "a micro-batch") -> None:
    """Raises UsageError unless this is a whole number of samples from 1; `name` is the argument, `what` is made of samples."""
    if isinstance(micro_batch, bool) or not isinstance(micro_batch, int):
        found = f"it is of type {type(micro_batch).__name__}"
    elif micro_batch < 1:
        found = f"{what} has at least one sample"
    elif micro_batch >= 1 << 40:
        found = "no machine counts that many"
    else:
        return
    raise UsageError(f"{name}={micro_batch!r}", found=found, next_move="pass a whole number, for example 32")


def unfollowed(profile: Profile) -> str:
    """Returns why a profile does not tell what lies in the peak; "" if it does."""
    if profile.timeline is not None:
        return ""
    if profile.source == "measured":
        return (
            "no tensor was tracked: the model cannot be traced, so micro-batches were run and measured whole; what lies "
            "in the peak, and whose it is, is unknown"
        )
    return (
        "each size was traced by itself, because the model computes differently for other sizes, or the sample has fewer than "
        "5 samples; what lies in the peak at this one is unknown"
    )


# ---- figures by owner


@dataclass
class _Figures:
    """The cost of each owner by itself, one row per owner."""

    owners: dict[str, int]
    """Row of each owner, by name."""
    sums: np.ndarray
    """(owners, ADDED and categories at the peak)."""
    transient: tuple[np.ndarray, np.ndarray]
    """(owner, bytes allocated or freed) of each event of a transient."""
    parameters: dict[str, tuple[str, int, int]]
    """(class, elements, trainable elements) of each module."""
    timing: Measured | None
    """What was timed on this machine, if anything."""
    counted: bool
    """Whether operations were counted."""
    by_operation: bool
    """Whether the seconds of each operation are known."""

    @staticmethod
    def of(profile: Profile, samples: int, accumulates: bool) -> _Figures:
        timeline = profile.traced_at(samples)
        modules = {facts.name: (facts.kind, facts.parameters, facts.trainable) for facts in profile.modules}
        names = () if timeline is None else timeline.owners
        computing = () if timeline is None or timeline.operations is None else timeline.operations.owners
        owners = {name: row for row, name in enumerate(dict.fromkeys(("", *modules, *names, *computing)))}
        sums = np.zeros((len(owners), len(ADDED) + len(CATEGORIES)))
        for name, (_, elements, trained) in modules.items():
            sums[owners[name], :2] = elements, trained
        empty = np.zeros(0, dtype=np.int64)
        figures = _Figures(owners, sums, (empty, empty), modules, _measured(profile, samples), False, False)
        if timeline is not None:
            figures.remember(timeline, samples, accumulates)
            figures.count(timeline, profile, samples)
        return figures

    def remember(self, timeline: Timeline, samples: int, accumulates: bool) -> None:
        """Adds the bytes kept for backward, at the peak, and of transients."""
        row = np.array([self.owners[name] for name in timeline.owners], dtype=np.int64)
        sizes = np.rint(timeline.sizes(samples))
        kept = kept_by_forward(timeline)
        np.add.at(self.sums[:, ADDED.index("kept")], row[timeline.owner[kept]], sizes[kept])
        alive = timeline.alive(timeline.peak_event(samples, accumulates=accumulates))
        np.add.at(self.sums, (row[timeline.owner[alive]], len(ADDED) + timeline.category[alive]), sizes[alive])
        about = timeline.event[timeline.category[timeline.event] == CATEGORIES.index("transient")]
        born = timeline.birth[timeline.category[timeline.event] == CATEGORIES.index("transient")]
        self.transient = row[timeline.owner[about]], np.where(born, sizes[about], -sizes[about])

    def count(self, timeline: Timeline, profile: Profile, samples: int) -> None:
        """Adds FLOPs, and seconds if those of single operations are known."""
        operations = timeline.operations
        if operations is None:
            return
        self.counted = True
        row = np.array([self.owners[name] for name in operations.owners], dtype=np.int64)[operations.owner]
        inside = in_micro_batch(timeline)
        backward = next((p.start for p in reversed(timeline.phases) if p.name == "backward"), len(timeline.event) + 1)
        forward = inside & (operations.event < backward)
        flops = operations.flops_at(samples)
        columns = [("flops_forward", forward, flops), ("flops_backward", inside & ~forward, flops)]
        if profile.card is not None and profile.card.bandwidth:
            self.by_operation = True
            seconds = operation_seconds(timeline, profile.card, samples)
            columns += [("forward_seconds", forward, seconds), ("seconds", inside, seconds)]
        for name, chosen, values in columns:
            np.add.at(self.sums[:, ADDED.index(name)], row[chosen], values[chosen])

    def most_transient(self, rows: set[int]) -> int:
        """Returns the most transient bytes at the same time for these owners."""
        owner, change = self.transient
        mine = np.zeros(len(self.owners), dtype=bool)
        mine[list(rows)] = True
        return int(np.cumsum(change[mine[owner]]).max(initial=0.0))


def kept_by_forward(timeline: Timeline) -> np.ndarray:
    """Returns a mask of the allocations that the forward of the last traced micro-batch saves for backward."""
    born, died = timeline.lifetimes()
    start = timeline.window[-1] if timeline.window else 0
    ends = (b.start for a, b in zip(timeline.phases, timeline.phases[1:]) if a.name == "forward" and a.start >= start)
    end = next(ends, len(timeline.event))
    return (timeline.category == CATEGORIES.index("kept")) & (born >= start) & (born < end) & (died >= end)


def _measured(profile: Profile, samples: int) -> Measured | None:
    """Seconds timed on this machine, at that size."""
    if not profile.timings or profile.card is not None:
        return None
    timing = timing_at(profile.timings, samples)
    return timing.seconds, timing.forward, {name: max(0.0, seconds) for name, seconds in timing.blocks}


# ---- modules, nested


@dataclass
class _Node:
    """One module, before identical modules are merged."""

    name: str
    path: str
    kind: str = ""
    children: list[_Node] = field(default_factory=list)
    rows: set[int] = field(default_factory=set)
    """Owners of this module and its children."""
    own: np.ndarray = field(default_factory=lambda: np.zeros(0))
    total: np.ndarray = field(default_factory=lambda: np.zeros(0))
    form: tuple[object, ...] = ()
    """What has to be equal in identical modules."""

    def add_up(self, figures: _Figures) -> None:
        row = figures.owners.get(self.path)
        self.rows = set() if row is None else {row}
        self.own = figures.sums[row] if row is not None else np.zeros(figures.sums.shape[1])
        self.total = self.own.copy()
        for child in self.children:
            child.add_up(figures)
            self.rows |= child.rows
            self.total += child.total
        self.form = (self.kind, self.own[0], self.own[1], tuple((child.name, child.form) for child in self.children))


def _nested(profile: Profile, figures: _Figures) -> _Node:
    """All modules, nested. Modules that are not listed (parents of an owner) are added."""
    top = _Node("", "", figures.parameters.get("", ("", 0, 0))[0] or profile.model.name)
    known = {"": top}
    for name in figures.owners:
        parts = name.split(".") if name else []
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path not in known:
                known[path] = _Node(parts[depth - 1], path, figures.parameters.get(path, ("", 0, 0))[0])
                known[".".join(parts[: depth - 1])].children.append(known[path])
    return top


def _entry(members: Sequence[_Node], name: str, path: str, figures: _Figures) -> ModuleCost:
    """Merges identical modules into one entry."""
    first, count = members[0], len(members)
    children = tuple(_children(members, path, figures)) if first.children else ()
    rows = {figures.owners[m.path] for m in members if m.path in figures.owners}
    own = _figured(np.sum([m.own for m in members], axis=0), rows, figures)
    if children and any(own[key] for key in own if not key.endswith("seconds")):
        outside = ITSELF if path else LOOSE
        children = (*children, ModuleCost(name=outside, path=path, kind="", alike=count, **own))
    totals = np.stack([m.total for m in members])
    found = _figured(totals.sum(axis=0), set().union(*(m.rows for m in members)), figures)
    if figures.timing is not None:
        found |= _measured_of(members, figures.timing)
    differ = _differing(totals)
    return ModuleCost(name=name, path=path, kind=first.kind, alike=count, differ=differ, children=children, **found)


def _figured(sums: np.ndarray, rows: set[int], figures: _Figures) -> dict[str, Any]:
    """The figures of an entry, by field name."""
    found: dict[str, Any] = dict(zip(ADDED, sums.tolist()))
    found |= {key: int(found[key]) for key in ("parameters", "trainable", "kept")}
    if not figures.counted:
        found |= dict.fromkeys(("flops_forward", "flops_backward"))
    if not figures.by_operation:
        found |= dict.fromkeys(("forward_seconds", "seconds"))
    holds = tuple((kind, int(size)) for kind, size in zip(CATEGORIES, sums[len(ADDED) :]) if size > 0)
    return {**found, "transient": figures.most_transient(rows), "holds": holds}


def _measured_of(members: Sequence[_Node], timing: Measured) -> dict[str, float]:
    """Seconds timed for these modules: of the whole model, or of the forwards of blocks."""
    seconds, forward, blocks = timing
    if members[0].path == "":
        return {"forward_seconds": forward, "seconds": seconds}
    known = [blocks[m.path] for m in members if m.path in blocks]
    return {"forward_seconds": sum(known)} if len(known) == len(members) else {}


def _differing(totals: np.ndarray) -> frozenset[str]:
    """Figures that differ between modules."""
    at_peak = totals[:, len(ADDED) :].sum(axis=1)
    added = dict(zip(ADDED, totals.T))
    columns = {**added, "at_peak": at_peak, "flops": added["flops_forward"] + added["flops_backward"]}
    return frozenset(name for name, values in columns.items() if (values != values[0]).any())


def _children(members: Sequence[_Node], path: str, figures: _Figures) -> Iterator[ModuleCost]:
    """The entries inside identical modules; identical children in a row form one entry."""
    for start, stop in _runs(members[0].children):
        inside = [member.children[i] for member in members for i in range(start, stop)]
        first, last = members[0].children[start], members[0].children[stop - 1]
        name = first.name if first is last else f"{first.name} to {last.name}"
        below = _joined(path, first.name if first is last else f"{first.name}-{last.name}")
        entry = _entry(inside, name, below, figures)
        yield _without_list(entry, first)


def _without_list(entry: ModuleCost, first: _Node) -> ModuleCost:
    """Replaces a list of identical modules with its children, under their names: a list computes nothing itself."""
    if first.kind not in _LISTS or len(entry.children) != 1:
        return entry
    (only,) = entry.children
    begin, to, end = only.name.partition(" to ")
    name = f"{entry.name}.{begin} to {entry.name}.{end}" if to and " to " not in entry.name else f"{entry.name}.{only.name}"
    return replace(only, name=name)


def _runs(nodes: Sequence[_Node]) -> Iterator[tuple[int, int]]:
    """(start, stop) of identical modules numbered in a row; others individually."""
    start = 0
    for stop in range(1, len(nodes) + 1):
        if stop == len(nodes) or not _follows(nodes[stop - 1], nodes[stop]):
            yield start, stop
            start = stop


def _follows(one: _Node, other: _Node) -> bool:
    numbers = one.name.isdecimal() and other.name.isdecimal()
    return numbers and int(other.name) == int(one.name) + 1 and one.form == other.form


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def together(names: Sequence[str]) -> str:
    """Merges dotted names that differ in numbers: "h.0-11.mlp"; "*" for numbers that are not consecutive."""
    parts = itertools.zip_longest(*(name.split(".") for name in names), fillvalue="")
    return ".".join(_in_a_row(list(dict.fromkeys(part))) for part in parts)


def _in_a_row(part: Sequence[str]) -> str:
    if len(part) == 1:
        return part[0]
    numbers = sorted(int(one) for one in part if one.isdecimal())
    whole = len(numbers) == len(part) == numbers[-1] - numbers[0] + 1 if numbers else False
    return f"{numbers[0]}-{numbers[-1]}" if whole else "*"
