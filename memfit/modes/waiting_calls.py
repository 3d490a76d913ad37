"""The calls of a model that wait to run, or whose outputs may be used again: who runs first, what the others take over."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memfit.capture.call import Call
from memfit.capture.lazy_tensor import LazyTensor
from memfit.engine.call_attributes import CallAttributes
from memfit.engine.call_context import outside_transforms, without_inference_mode, without_saved_tensors_hooks
from memfit.engine.forward_reads import ForwardReads
from memfit.engine.modules import modules_of
from memfit.engine.user_line import line_of_script
from memfit.modes.awaited_state import AwaitedState
from memfit.runtime.core import Core


class WaitingCalls:
    """Calls run when their outputs are used. Side effects of forwards happen in the order of the calls all the same, and each
    call runs with the state that the script had at the call.

    `calls`: those that wait or may be used again; `busy`: memfit itself runs the model; `reads`: what forwards read outside of
    their modules. `compute_values(call)` runs a call for its outputs."""

    def __init__(self, core: Core, compute_values: Callable[[Call], None]) -> None:
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self.busy = False
        self.reads = ForwardReads()
        self._core, self._compute_values = core, compute_values
        self._lines = {""}
        self._with_state: list[Call] = []  # waits even if the script drops its output
        self._awaited = AwaitedState(core.model, self._run_for_state, lambda: self.busy)

    # ---- contexts in which memfit runs the model

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not intercept calls of the model, as memfit makes them itself."""
        # A script may read an output, which runs the model, in either of these.
        with self.going_through(), outside_transforms(), without_inference_mode():
            yield

    @contextmanager
    def going_through(self) -> Iterator[None]:
        """Context in which calls of the model go through. What is written there, the script has not written."""
        before, self.busy = self.busy, True
        waiting = [call for call in self.calls if call.attributes is not None and not before]
        found = [call.attributes.contents for call in waiting if call.attributes is not None]
        for call, contents in zip(waiting, found):
            contents.look(call.composition.keys)
        try:
            yield
        finally:
            self.busy = before
            for contents in found:
                contents.accept_writes()

    @contextmanager
    def in_pass(self, call: Call) -> Iterator[None]:
        """Context for micro-batches of a call. The script's hooks for saved tensors (a checkpoint around a loss counts them)
        do not see theirs, which are not part of the script's graph."""
        with self.aside(), call.as_called(), without_saved_tensors_hooks():
            try:
                with self.telling_others(call):
                    yield
            except BaseException:
                self._with_state.clear()  # what failed is not run again because somebody reads what it left
                self._awaited.release()
                raise
        self.await_state()

    @contextmanager
    def telling_others(self, call: Call) -> Iterator[None]:
        """Context in which a call runs: others that wait take over what it leaves in attributes."""
        others = [other for other in self.calls if other.attributes is not None and other not in call.calls]
        before = CallAttributes(modules_of(call.model), self.reads) if others else None
        yield
        written = before.written() if before is not None else []
        for other in others if written else ():
            assert other.attributes is not None
            other.attributes.accept(written)

    # ---- side effects in the order of the calls

    def await_state(self, call: Call | None = None) -> None:
        """Watch what the calls that wait will leave on modules, so that the script reads no older state. A `call` that leaves
        state elsewhere, where nobody can watch it, runs now."""
        if call is not None and call.composition.moved:
            self._with_state.append(call)
        self._with_state = [each for each in self._with_state if each.waits]
        if self._awaited.watch(each.composition.moved for each in self._with_state) or call is None:
            return
        self._core.tell("the forward leaves state outside of the model's modules: it runs at the call, and again for gradients")
        with self.aside():
            self._compute_values(call)

    def release_state(self) -> None:
        """Stop watching, as the model is about to run."""
        self._awaited.release()

    def run_counters(self) -> None:
        """Run the forwards that move counters, which may decide what the next one does."""
        if any(call.composition.expected is not None and call.waits for call in self.calls):
            with self.aside():
                self.run_earlier()

    def run_earlier(self, first: float = math.inf) -> None:
        """Run the forwards of calls before `first` that have side effects."""
        for earlier in sorted(self.calls, key=lambda each: each.number):
            if earlier.number < first and earlier.waits and earlier.composition.moved:
                self.run(earlier)

    def run_before(self, call: Call) -> None:
        """Run earlier forwards with side effects first, as these run in the order of their calls."""
        if call.composition.moved:
            self.run_earlier(min(each.number for each in call.calls))

    def run(self, call: Call, why: str = "values of an output") -> None:
        """Compute the outputs of a call if nothing has. Tell the user which line needs them, as the forward runs once more for
        gradients."""
        if call.values is None:
            self._say_where(call, why)
            self._compute_values(call)

    def ran(self, call: Call) -> None:
        """Note the end of a pass. Its forwards may have written inputs and parameters."""
        if written := call.ran():
            for other in list(self.calls):
                other.accept(written)
        first = min(each.number for each in call.calls)
        for other in self.calls if call.composition.moved else ():
            if other.number < first and not other.waits:
                other.composition.add_later(call.composition)

    def end(self) -> None:
        """Forget all calls, as an optimizer step begins, after those have run which need the parameters before the step."""
        for call in list(self.calls):
            if not call.pieces and call.values is None and any(isinstance(s, LazyTensor) for s in call.standins):
                self.run(call)
        self.run_earlier()
        self.calls = weakref.WeakSet()
        self.await_state()

    def _run_for_state(self) -> None:
        for call in self._with_state:
            self._say_where(call, "state that the forward leaves")
        with self.aside():
            self.run_earlier()

    def _say_where(self, call: Call, what: str) -> None:
        line = line_of_script()
        if not call.samples or line in self._lines or self._core.settings.rank:
            return
        self._lines.add(line)
        when = "after" if call.gathered else "before"
        self._core.note("note", f"{line} reads {what} {when} its loss ran: the forward runs again for them")
