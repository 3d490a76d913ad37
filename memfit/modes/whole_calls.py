"""Runs calls whole that cannot be cut, if they fit or their memory cannot be predicted.

A batch that fits needs no cutting, so an obstacle to cutting is no error. If the whole is known not to fit, the obstacle is
raised. Not covered: several ranks, which must agree on a loss's weighting.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memfit._errors import MemfitError, Refused, first_line
from memfit.autotune.active_plan import Planned
from memfit.autotune.task import LOSS_BOUND, Task
from memfit.batches.cut import Layout
from memfit.batches.tree import flat, leaves, tensors
from memfit.capture.call import Call, Tree
from memfit.capture.earlier_graphs import EarlierGraph
from memfit.capture.infer_layout import fake_outputs, twins_of
from memfit.capture.outputs import Outputs
from memfit.capture.workloads import CallWork
from memfit.engine.weighting import BY_SAMPLES
from memfit.engine.work import Work
from memfit.hardware.exhausted import is_out_of_memory
from memfit.planning.plan import Plan
from memfit.planning.search import Demand, search
from memfit.profiling.profile import Profile
from memfit.runtime.core import Core
from memfit.runtime.faults import report_fault
from memfit.tracing.trace import MakeWork

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Uncut:
    """A kind of call that runs whole."""

    sizes: Sizes
    """Elements per tensor, up to which the decision holds."""

    def covers(self, sizes: Sizes) -> bool:
        """Whether a call with tensors of these sizes is no larger."""
        return len(sizes) == len(self.sizes) and all(a <= b for a, b in zip(sizes, self.sizes))


class UncutCalls:
    """Tracks one model's kinds of calls that run whole because they cannot be cut."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._known: dict[Hashable, Uncut] = {}
        core.on_forget.append(self._known.clear)

    def covers(self, key: Hashable, tree: Tree) -> bool:
        """Whether such a call is known to run whole."""
        known = self._known.get(key)
        return known is not None and known.covers(_sizes(tree))

    def accept(self, key: Hashable, plain: Callable[..., Any], tree: Tree, samples: int | None, error: Exception) -> bool:
        """Decides whether a call that could not be cut because of `error` runs whole from now on."""
        if not self._may(error):
            return False
        if self._is_prescribed(samples):
            self._explain(samples, error)
            return False
        unknown = isinstance(error, EarlierGraph)
        fits, plan = (True, None) if unknown else self._fits(_whole_call(self._core, plain, tree), samples)
        if not fits:
            return False
        self._known[key] = Uncut(_sizes(tree))
        self._say(error, plan)
        return True

    def _may(self, error: Exception) -> bool:
        wants_cut = self._core.settings.precision not in ("auto", "off", "float32")
        if is_out_of_memory(error) or not self._core.team.alone or wants_cut:
            return False
        return isinstance(error, Refused) or not isinstance(error, MemfitError)

    def _is_prescribed(self, samples: int | None) -> bool:
        prescribed = self._core.in_force.prescribed
        return prescribed is not None and (samples is None or prescribed < samples)

    def _explain(self, samples: int | None, error: Exception) -> None:
        """Add a note to the model's own error: a prescribed micro-batch is kept or refused."""
        if hasattr(error, "add_note") and not isinstance(error, MemfitError):  # Python 3.11
            error.add_note(  # type: ignore[attr-defined]
                f"memfit: raised on a few of a batch's {samples or ''} samples, to be cut into micro-batches of "
                f"{self._core.in_force.prescribed} as asked; without micro_batch= a batch that fits runs whole"
            )

    def _fits(self, call: Call, samples: int | None) -> tuple[bool, Plan | None]:
        """Return (whether the whole may run, its plan if it could be traced)."""
        core = self._core
        if core.in_force.fixed is not None:
            return True, None
        try:
            profile = core.planner.traced_whole(_task(call, core, 0))
            output = _output_bytes(call)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return True, None  # run it without knowing, like plain PyTorch
        demand = Demand(1, micro_batch=1, standing_per_sample=LOSS_BOUND * output)
        try:
            plan = search([profile], core.memory.budget(), demand)
        except MemfitError:
            return False, None
        if core.plan is None and samples is not None:
            self._adopt(plan, profile, samples)
        return True, plan

    def _adopt(self, plan: Plan, profile: Profile, samples: int) -> None:
        """Adopt a plan of the whole as one piece, counted in samples."""
        self._core.in_force.adopt(Planned(replace(plan, share=samples, micro_batch=samples), None))

    def _say(self, error: Exception, plan: Plan | None) -> None:
        core = self._core
        why = error.found if isinstance(error, MemfitError) else first_line(error)
        unknown = "" if plan is not None or core.in_force.fixed is not None else ", and its memory could not be predicted"
        core.tell(f"a batch runs whole, as the script wrote it, because it cannot be cut{unknown}: {why}")
        report_fault(core, error)


def _whole_call(core: Core, plain: Callable[..., Any], tree: Tree) -> Call:
    """Return the call as one piece, whatever its samples are."""
    layout = Layout(tuple(None for _ in leaves(tree)), 1)
    call = Call(core.model, plain, tree, layout, Outputs(None, ()), core.device)
    call.whole_piece = True
    return call


def _task(call: Call, core: Core, standing: int) -> Task:
    def make_work(precision: str) -> MakeWork:
        def build(twin: Callable[[torch.Tensor], torch.Tensor], samples: int) -> Work:
            tree = twins_of(call.tree, twin)
            made = _whole_call(core, call.plain, tree)
            return WholeWork(made, 0, precision=precision, draws=False, borrowed=tensors(tree))

        return build

    return Task(make_work, lambda precision: WholeWork(call, 0, draws=False), BY_SAMPLES, 1, Demand(1, standing=standing))


def _output_bytes(call: Call) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(fake_outputs(call, 1)) if t.requires_grad)


def _sizes(tree: Tree) -> Sizes:
    return tuple(tensor.numel() for tensor in tensors(tree))


class WholeWork(CallWork):
    """Work of a call as one piece. All differentiable outputs count, as if they were summed."""

    def loss(self, outputs: Any) -> torch.Tensor:
        arguments, _, _ = outputs
        found = [value for value in flat(self.call.output(arguments)) if isinstance(value, torch.Tensor)]
        return torch.stack([value.sum().float() for value in found if value.requires_grad]).sum()
