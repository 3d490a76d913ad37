"""What becomes of a script's call whose first pass in micro-batches failed: proven and run again, run whole, or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from memfit.capture.call import Call
from memfit.engine.batch_dependent import BatchDependent
from memfit.engine.random_state import RandomState
from memfit.modes.call_kinds import CallKinds
from memfit.runtime.core import Core


class FailedPasses:
    """Decides on passes that failed before the handover. `aside` gives contexts for what memfit runs itself; `run_whole(call)`
    runs a call as the script wrote it."""

    def __init__(
        self,
        core: Core,
        kinds: CallKinds,
        aside: Callable[[], AbstractContextManager[None]],
        run_whole: Callable[[Call], None],
    ) -> None:
        self._core, self._kinds, self._aside, self._run_whole = core, kinds, aside, run_whole

    def after(self, call: Call, error: BaseException, *, ran: bool) -> Literal["again", "whole"] | None:
        """Return "again" if the pass may be repeated: a proof shows that what only some micro-batches did changes nothing, or
        how it is composed. Return "whole" if the call has run as the script wrote it, which raises the script's own errors.
        Return None if `error` has to be raised. `ran`: whether its micro-batches finished, so that no state was restored."""
        begun = call.random[:1]
        call.forget_pass()
        if self._may_differ(call, error, begun):
            return "again"
        if not self._kinds.runs_whole_after(call, error) or (ran and (call.composition.moved or self._core.buffers.written)):
            return None
        self._undo(call, begun)
        self._run_whole(call)
        return "whole"

    def _may_differ(self, call: Call, error: BaseException, begun: Sequence[RandomState]) -> bool:
        if not isinstance(error, BatchDependent) or error.differing <= call.proven_for or len(call.calls) > 1:
            return False
        call.proven_for |= error.differing
        if self._core.staging.parts is not None:  # proofs of sharded parameters need all ranks
            return False
        self._undo(call, begun)
        call.gathered = False
        with self._aside():
            return self._kinds.may_differ(call, error.differing)

    def _undo(self, call: Call, begun: Sequence[RandomState]) -> None:
        """Drop what the pass gathered and wrote. `begun`: the random state at its start, if it started."""
        self._core.staging.discard()
        for state in begun:
            state.restore(self._core.device)
        call.undo_writes()
