"""Timelines, profiles and budgets written down by hand, with numbers that can be checked with pencil and paper."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from memfit.hardware.budget import Budget
from memfit.hardware.device import Device
from memfit.planning.plan import Cost, Plan
from memfit.profiling.profile import ModelFacts, Profile
from memfit.profiling.timeline import CATEGORIES, Phase, Timeline, Visit

FACTS = ModelFacts(
    name="Net",
    parameters=25,
    trainable=25,
    parameter_bytes=100,
    gradient_bytes=100,
    optimizer="SGD",
    fingerprint="0123456789abcdef",
)


class Course:
    """A step written down event by event; allocations go by names."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sizes: list[tuple[float, float, str, str]] = []
        self._events: list[tuple[int, bool]] = []
        self._phases = [Phase("present", 0)]
        self._windows: list[int] = []
        self._visits: list[Visit] = []
        self._open: list[tuple[str, int, tuple[int, ...]]] = []

    def birth(
        self, name: str, fixed: float = 0, per_sample: float = 0, category: str = "transient", owner: str = ""
    ) -> Course:
        assert name not in self._names
        self._names.append(name)
        self._sizes.append((fixed, per_sample, category, owner))
        self._events.append((len(self._names) - 1, True))
        return self

    def death(self, *names: str) -> Course:
        self._events += [(self._names.index(name), False) for name in names]
        return self

    def phase(self, name: str) -> Course:
        self._phases.append(Phase(name, len(self._events)))
        return self

    def window(self) -> Course:
        self._windows.append(len(self._events))
        return self

    def enter(self, block: str, inputs: Iterable[str] = ()) -> Course:
        self._open.append((block, len(self._events), tuple(self._names.index(n) for n in inputs)))
        return self

    def leave(self, outputs: Iterable[str] = ()) -> Course:
        block, start, inputs = self._open.pop()
        numbers = tuple(self._names.index(n) for n in outputs)
        self._visits.append(Visit(block, start, len(self._events), self._phases[-1].name, inputs, numbers))
        return self

    def number(self, name: str) -> int:
        return self._names.index(name)

    def done(self) -> Timeline:
        owners = tuple(dict.fromkeys(["", *(owner for *_, owner in self._sizes)]))
        return Timeline(
            fixed=np.array([size[0] for size in self._sizes], dtype=np.float64),
            per_sample=np.array([size[1] for size in self._sizes], dtype=np.float64),
            category=np.array([CATEGORIES.index(size[2]) for size in self._sizes], dtype=np.int8),
            owner=np.array([owners.index(size[3]) for size in self._sizes], dtype=np.int32),
            event=np.array([index for index, _ in self._events], dtype=np.int32),
            birth=np.array([born for _, born in self._events], dtype=bool),
            owners=owners,
            phases=tuple(self._phases),
            window=tuple(self._windows),
            visits=tuple(self._visits),
        )


def two_blocks(windows: int = 2) -> Timeline:
    """Two micro-batches through blocks a and b, each saving 10 bytes per sample and passing 1 on; 100 bytes of parameters
    and of gradients.

    Per sample, the most alive is at the end of the forward: input 1, a: 10 + 1, b: 10 + 1, and a loss of 4.
    """
    course = Course().birth("weights", 100, category="parameters")
    for w in range(windows):
        course.window().phase("input").birth(f"x{w}", 0, 1, "input").phase("forward")
        course.enter("a", [f"x{w}"]).birth(f"a{w}", 0, 10, "kept", "a").birth(f"ya{w}", 0, 1, "kept", "a").leave([f"ya{w}"])
        course.enter("b", [f"ya{w}"]).birth(f"b{w}", 0, 10, "kept", "b").birth(f"yb{w}", 0, 1, "kept", "b").leave([f"yb{w}"])
        course.birth(f"loss{w}", 0, 4).death(f"loss{w}").phase("backward")
        course.birth(f"gb{w}", 0, 1, owner="b").death(f"b{w}", f"yb{w}")
        course.birth(f"ga{w}", 0, 1, owner="a").death(f"gb{w}", f"a{w}", f"ya{w}")
        if not w:
            course.birth("gradients", 100, category="gradients")
        course.death(f"ga{w}", f"x{w}")
    return course.phase("hand over").phase("optimizer").death("gradients").done()


def profile(timeline: Timeline | None, device: str = "mps", **fields: object) -> Profile:
    """A profile over a timeline. The kind "mps" has the plainest memory: the upper bound is an eighth more than tensors."""
    given = {
        "model": FACTS,
        "device": device,
        "capability": None,
        "precision": "float32",
        "precision_is_lever": False,
        "checkpoint": (),
        "timeline": timeline,
        "points": (),
    }
    return Profile(**{**given, **fields})  # type: ignore[arg-type]


def budget(room: int, *, held: int = 0, margin: int = 0, kind: str = "mps") -> Budget:
    """A budget that leaves `room` bytes."""
    device = Device(kind=kind, index=None, name="a machine", total=10**12, free=10**12, held=held)
    return Budget(room + held + margin, held, margin, "as asked", device)


def plan(**fields: object) -> Plan:
    """A plan that differs from a plain one in `fields`."""
    given = {
        "mode": "accumulate",
        "target_batch": 512,
        "share": 512,
        "micro_batch": 8,
        "accumulation": 64,
        "precision": "off",
        "checkpoint": (),
        "shard": "off",
        "offload": "off",
        "predicted": Cost(3 << 30, 4 << 30, 1.5),
        "asked": Cost(90 << 30, 99 << 30, None),
        "limit": 6 << 30,
        "margin": 1 << 28,
        "held": 0,
        "device": "EPYC",
        "model": "GPT",
        "optimizer": "AdamW",
        "fingerprint": "0123456789abcdef",
    }
    return Plan(**{**given, **fields})  # type: ignore[arg-type]
