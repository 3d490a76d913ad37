"""Chooses with all ranks what to shard (optimizer state, gradients, parameters) and applies it to a run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from memfit._errors import DoesNotFit
from memfit.levers.fsdp import FullySharded
from memfit.levers.fsdp_units import ShardLayout, unit_bytes
from memfit.levers.shard import ShardedOptimizer, largest_part
from memfit.planning.sharding import LEVELS, Standing, least_shard, levels_from
from memfit.ranks.barrier import helping
from memfit.ranks.ranks import Ranks
from memfit.runtime.core import Core
from memfit.tracing.build_profile import model_facts, state_bytes

SHARDING = "choosing what to shard"


class Sharding:
    """What of a run is sharded across `ranks`; `asked` is the argument of `wrap`.

    Attribute `level`: what is sharded now.
    """

    def __init__(self, core: Core, ranks: Ranks, asked: str) -> None:
        self.level = "off"
        self._core, self._ranks, self._asked = core, ranks, asked
        self._held: ShardedOptimizer | FullySharded | None = None
        self._plain_barrier: Callable[[], None] = lambda: None

    def begin(self, prepare: Callable[[], None], again: Callable[[], None]) -> None:
        """Apply the first level at which every rank can `prepare`; calls `again` before the next one. A lower precision comes
        last, because sharding changes no numbers. Raises DoesNotFit if nothing fits."""
        levels = levels_from(self._first(), self._asked)
        lowers = (False, True) if len(levels) > 1 and self._core.settings.precision == "auto" else (True,)
        attempts = list(product(lowers, levels))
        failed: DoesNotFit | None = None
        try:
            for attempt in attempts:
                lower, level = attempt
                self._core.allow_lower_precision(allowed=lower)
                self._hold(level)
                failed = _failing(prepare)
                if all(self._ranks.gather(failed is None, SHARDING)):
                    return
                if attempt != attempts[-1]:
                    again()
        finally:
            self._core.allow_lower_precision(allowed=True)
        if failed is not None:
            raise failed

    def failed(self, error: BaseException) -> None:
        """Tell the other ranks that this one gives up."""
        self._ranks.failed(error)

    def undo(self) -> None:
        """Stop sharding: every rank holds everything again."""
        if self._held is not None:
            self._held.undo()
            self._held = None
            self._core.train_sharded("off", self._core.optimizer)
        self._plain_barrier()
        self.level = "off"

    def _first(self) -> str:
        """The first level that leaves room on every rank."""
        if self._asked != "auto":
            return self._asked
        found = least_shard(_standing(self._core, self._ranks), self._core.memory.budget().room)
        return max(self._ranks.gather(found, SHARDING), key=LEVELS.index)

    def _hold(self, level: str) -> None:
        if level == self.level:
            return
        self.undo()
        core = self._core
        self._plain_barrier = helping(self._ranks) if level != "off" else lambda: None
        if level == "optimizer":
            self._held = ShardedOptimizer(core.optimizer, self._ranks)
            core.train_sharded(level, self._held.local)
            core.note("note", f"the optimizer's state is sharded by {self._held.engine}")
        elif level != "off":
            whole = level == "gradients"
            self._held = FullySharded(core.model, core.optimizer, self._ranks, whole_while_training=whole)
            core.train_sharded(level, core.optimizer, self._held)
            core.note("note", f"{level} are sharded by torch's FSDP2, which reduces them after each micro-batch")
        self.level = level


def _failing(prepare: Callable[[], None]) -> DoesNotFit | None:
    try:
        prepare()
    except DoesNotFit as error:
        return error
    return None


def _standing(core: Core, ranks: Ranks) -> Standing:
    facts = model_facts(core.model, core.optimizer)
    units = tuple(unit_bytes(core.model).values())
    return Standing(
        parameters=facts.parameter_bytes,
        gradients=facts.gradient_bytes,
        state=state_bytes(core.optimizer),
        gathered=ShardLayout(1 / ranks.size, units, whole_while_training=False).gathered,
        gathered_whole=ShardLayout(1 / ranks.size, units, whole_while_training=True).gathered,
        part=largest_part(core.optimizer, ranks.size),
        processes=ranks.size,
    )
