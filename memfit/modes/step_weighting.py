"""How step mode weights its micro-batches: given by the user, or inferred and proven repeatedly on a few samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit._errors import MemfitError, Refused, UsageError, first_line
from memfit.capture.earlier_graphs import refuse_earlier_graphs
from memfit.capture.size_looks import FEW
from memfit.distributed.reduction import OF_SHARES
from memfit.engine.asked_numbers import Notes
from memfit.engine.branches import Act
from memfit.engine.compose_state import Composition
from memfit.engine.places import Place
from memfit.engine.random_state import random_state_kept
from memfit.engine.recovery import on_fewer, surviving
from memfit.engine.suspended_autocast import without_autocast
from memfit.engine.version_checks import Keys
from memfit.engine.weighting import BY_SAMPLES, BY_TERM, Weighting
from memfit.engine.work import Work, loss_of
from memfit.equivalence.findings import Findings
from memfit.equivalence.infer_weighting import DECIDES, infer_weighting
from memfit.equivalence.measured_loss import PROBED
from memfit.equivalence.proof_samples import Marks, entries_of
from memfit.equivalence.proofs import PROOF_SAMPLES, comparable, parts_of
from memfit.equivalence.tolerances import LOOSE, Deviation, note_loose
from memfit.equivalence.weighting_codes import agree
from memfit.hardware.exhausted import is_out_of_memory
from memfit.levers.checkpoint import checkpointed
from memfit.levers.recomputed import moved_in_blocks
from memfit.modes.ask_numbers import asked_by
from memfit.modes.ordered_batch import Ordered
from memfit.modes.step_looks import LossLooks, say_on_few
from memfit.modes.step_workload import Tasks
from memfit.modes.user_weight import counted_by
from memfit.planning.checkpointed import most_fitting
from memfit.profiling.profile import Profile
from memfit.runtime.core import KEPT_SAMPLES, Core, MadeReference
from memfit.runtime.faults import is_fault, strict
from memfit.tracing.failures import is_ours

PROVE_AGAIN = 4
"""A proof is repeated at the next batch, then whenever the number of steps has grown by this factor."""
IN_TWO = "the model runs in two passes, or in one where the loss is made of sums and means that memfit follows"
PROVE_WITHIN = 256
"""Maximum number of steps between proofs of an inferred weighting, each of which costs a step or two of computation."""


class Weigher:
    """Finds the weighting of a loss. Attributes: `weighting` (None: unknown), `mute` (whether it is unknown because the
    samples had zero loss), `together` (whether the loss needs all samples together instead), `findings` (what its proofs show
    of state and branches)."""

    def __init__(self, core: Core, tasks: Tasks) -> None:
        self.weighting: Weighting | None = None
        self.together = False
        self.findings = Findings()
        self._core, self._tasks, self._looks = core, tasks, LossLooks(core, tasks)
        by_hand = core.settings.weight
        self._stated = by_hand and Weighting("count", "by weight=", count=counted_by(by_hand, core.device))
        self._alone: Weighting | None = None
        self._proven_ragged = self.mute = False
        self._prove_at = 0

    @property
    def composition(self) -> Composition:
        """How the state that the loss moves is composed over micro-batches."""
        return self.findings.composition

    @property
    def known(self) -> bool:
        """Whether the weighting is given or proven."""
        return self.weighting is not None or self._stated is not None

    def of(self, batch: Ordered) -> Weighting:
        """Return the weighting of this batch's micro-batches."""
        return self.weighting or self._stated or (self._alone if batch.samples < 2 else None) or BY_SAMPLES

    def decide(self, batch: Ordered, share: int) -> Profile | None:
        """Ensure a weighting for effective batches of `share` samples like these. Returns the profile made for that, if any."""
        if self.together:
            return None
        with random_state_kept(self._core.device):  # a collate function may draw, from NumPy's generator too
            if self.weighting is None or (batch.ragged and not self._proven_ragged):
                return self._weigh_or_whole(batch, share)  # only samples of different sizes get different padding in parts
            due = self._core.steps >= self._prove_at and (self._inferred or self.composition.moved)
            if due or self._has_new_pairs(batch):
                self._prove_again(batch)
            self._look_by_size(batch, max(share, batch.samples))
        return None

    def _has_new_pairs(self, batch: Ordered) -> bool:
        """Whether the batch has samples of one class or group, where no proof has had some in both parts. (Several processes
        prove together, and each sees its own samples.)"""
        alone = batch.tree is not None and self._core.team.alone
        return alone and self.findings.has_new_pairs(batch.tree, batch.samples)

    @property
    def _inferred(self) -> bool:
        """Whether the weighting rests on a proof alone. That of one known mean is checked in every micro-batch."""
        return self._stated is None and self.weighting is not None and self.weighting.kind != "term"

    def _weigh_or_whole(self, batch: Ordered, share: int) -> Profile | None:
        """Like `_weigh`. A loss that fails on a few samples but not on all needs them together."""
        try:
            return self._weigh(batch, share)
        except Exception as error:
            if isinstance(error, MemfitError) or is_out_of_memory(error) or is_ours(error):
                raise
            failed = self._looks.failure(batch, share)
            if failed is not None and type(failed.__cause__) is type(error):
                raise  # fails for any number of samples
            if not self._core.team.alone:
                say_on_few(error)
                raise
            said = first_line(error)
        self.run_together(f"it cannot be computed on a few: {said}")
        return None

    def _weigh(self, batch: Ordered, share: int, before: Weighting | None = None) -> Profile | None:
        """Prove a weighting on a few samples, chosen to tell `before` from its rivals. Returns the profile made to know how
        many fit."""
        core = self._core
        self._proven_ragged = self._proven_ragged or batch.ragged
        if not self._prove_at:
            try:
                self._looks.keep_installed(batch)
            except Refused as refused:
                self.run_together(refused.found)
                return None
        self._look_alone(batch)
        if self.together:
            return None
        if batch.samples < 2 * core.least:
            if self._stated is None and not core.team.alone and batch.samples and self._looks.is_one_mean(batch):
                self._alone = BY_TERM  # its weight among the ranks is seen without a proof
            return None  # one micro-batch needs no weighting; the next batch decides
        profile = self._tasks.profile(batch, share)
        few, blocks = self._provable(batch, profile)
        if few < 2 * core.least:
            self._weigh_unproven(batch)
        else:
            with checkpointed(core.model, blocks), core.memory.sparing_kernels():
                self._weigh_by_proof(batch, few, before)
                self._confirm(batch, few, before)
        self._looks.looked_at = 0
        self._look_by_size(batch, max(share, batch.samples))
        if not self.together:
            self._remember(batch)
        return profile

    def _look_by_size(self, batch: Ordered, samples: int) -> None:
        """Check whether the loss of this many samples is computed like that of few."""
        decides = None if self.weighting is None else self._looks.size_that_decides(batch, samples)
        if decides is not None:
            self.run_together(f"it acts differently on {decides} samples than on few")

    def _look_alone(self, batch: Ordered) -> None:
        """Check whether the loss of a single sample can be computed. If not and the user fixed micro_batch=1, the model runs
        alone, and is refused there if it cannot run one."""
        core = self._core
        why = None if core.least > 1 or batch.samples < 2 else self._looks.why_not_alone(batch)
        if why is not None and core.in_force.prescribed == 1:
            self.run_together(f"it cannot be computed on one sample: {why}")
        elif why is not None:
            core.forbid_single_samples(why)

    def asks(self, batch: Ordered, places: Mapping[Hashable, Place]) -> Mapping[Hashable, Notes]:
        """Return what the loss asks of the numbers at these places, on few samples."""
        core, few = self._core, min(FEW, batch.samples)
        work = self._tasks.work(batch.piece, batch.samples, "off", on_copies=True)
        with core.staging.swapped(), random_state_kept(core.device):
            return asked_by(partial(loss_of, work, few), places, core.model, core.device)

    def refuse_earlier_graphs(self, batch: Ordered) -> None:
        """Raise Refused if the loss uses a tensor with a graph that the script computed before."""
        core, few = self._core, min(FEW, batch.samples)
        work = self._tasks.work(batch.piece, batch.samples, "off", on_copies=True)
        refuse_earlier_graphs(core.model, core.device, lambda: ([loss_of(work, few)], []))

    def agrees_with(self, known: Weigher, batch: Ordered) -> bool | None:
        """Infer the weighting on a few samples of a batch, and return whether it is that of `known`. None: too few to tell."""
        few = self._few(batch)
        if few < 2 * self._core.least:
            return None
        with self._core.memory.sparing_kernels(), random_state_kept(self._core.device):
            self._weigh_on(batch, few, None)
        if self.together or self.weighting is None or known.weighting is None:
            return not self.together
        return agree(self.weighting, known.weighting) and self.composition.agrees_with(known.composition)

    def _few(self, batch: Ordered) -> int:
        """Return how many samples a proof may have that is repeated on a later batch."""
        core = self._core
        if core.plan is None:
            return 0
        largest = core.in_force.limit(core.plan)
        most = min(PROOF_SAMPLES, batch.samples, max(largest, PROOF_SAMPLES if core.profile else 2 * core.least))
        if core.profile is not None:
            room = core.memory.budget().room - 2 * min(PROBED, core.profile.model.gradient_bytes)
            most, _ = most_fitting(core.profile, most, room, (core.plan.checkpoint,))
        return most

    def _prove_again(self, batch: Ordered) -> None:
        """Prove an inferred weighting again on samples of a later batch."""
        core, most, before = self._core, self._few(batch), self.weighting

        def unrepeated(text: str) -> None:
            self.weighting = before
            core.events.add(core.steps, "out of memory", f"the proof of micro-batch weights was not repeated ({text})")

        if most >= 2 * core.least:
            with core.memory.sparing_kernels():
                surviving(lambda: self._weigh_on(batch, most, None, again=before), core.device, unrepeated)

    def _weigh_by_proof(self, batch: Ordered, few: int, before: Weighting | None) -> None:
        core = self._core
        surviving(
            lambda: on_fewer(lambda n: self._weigh_on(batch, n, before), few, core.device, core.proof_ran_out),
            core.device,
            lambda text: self._weigh_unproven(batch),
        )

    def _confirm(self, batch: Ordered, few: int, before: Weighting | None) -> None:
        """Prove a weighting on other samples of its first batch: numbers such as the part of a mask that is set may agree by
        chance. An error of the loss on these tells nothing. (Several processes have other samples each.)"""
        proven, composition, prove_at = self.weighting, self.composition, self._prove_at
        if not self._inferred or before is not None or batch.in_order or batch.samples <= few or not self._core.team.alone:
            return
        try:
            self._weigh_on(batch, few, None, again=proven, others=True)
        except Exception as error:
            if strict() and is_fault(error):
                raise
            self.weighting, self.findings.composition = proven, composition
        if self.composition.keys <= composition.keys:  # these samples may move nothing
            self.findings.composition = composition
        self._prove_at = prove_at
        if proven is not None and self.weighting is not None:  # terms that were idle in one of both may sum otherwise later
            self.weighting = replace(proven, branching=self.weighting.branching)

    def _weigh_on(
        self, batch: Ordered, few: int, before: Weighting | None, *, again: Weighting | None = None, others: bool = False
    ) -> None:
        """`again`: the weighting proven on an earlier batch, or with `others` on other samples of this one. A loss that is not
        finite does not contradict it."""
        core = self._core
        parts = parts_of(few, core.least)
        pieces = batch.others(few) if others else self._spread(batch, parts, before)
        work = self._tasks.work(pieces, few, "off", on_copies=True)
        within = PROVE_WITHIN if self._inferred else sys.maxsize
        self._prove_at = core.steps + (1 if again is None else max(1, min((PROVE_AGAIN - 1) * core.steps, within)))
        self.mute = False

        def double(start: int, stop: int) -> Work:
            return self._tasks.work(batch.twice(start, stop), 2 * (stop - start), "off", on_copies=True)

        twice = None if batch.in_order else double
        infer = partial(infer_weighting, work, parts, core.staging, core.model, decides=True, double=twice)
        self.weighting, deviation, moves = infer()
        if self.weighting is not None and deviation.limit >= LOOSE and (exact := without_autocast(infer)) is not None:
            self.weighting, deviation, moves = exact
        other = self.findings.add(moves.composition, self.weighting.branching if self.weighting else None, core.model)
        if self.weighting is not None:
            self.weighting = replace(self.weighting, branching=self.findings.branching)
        moved_in_blocks(core.model, self.composition)
        self._tasks.watch(work)
        self.findings.apart.proven(entries_of(pieces(0, few), few), parts[0])
        if self._stated is not None:
            self.weighting = self._stated  # taken as given; only the composition of state is proven
        elif self.weighting is not None and again is None:
            note_loose(deviation.limit, core.note)
        if self.weighting is not None and moves.deviation is not None and not self._accepts(moves.deviation):
            self.run_together(f"it updates state per call, differently in parts than as a whole: {moves.deviation.where}")
        elif other is not None:
            self.run_together(f"it updates state per call, depending on values of the samples: {other}")
        elif self.composition.trained:
            self.run_together(f"the forward writes {self.composition.trained[0].label}, which it may read beside its samples")
        elif self._stated is not None and moves.decides is not None:
            self.run_together(f"{DECIDES} ({moves.decides})")
        elif self._stated is not None:
            return
        elif self.weighting is not None and self.weighting.doubt is not None:
            self.run_together(self.weighting.doubt)
        elif self.weighting is not None and again is not None and not agree(again, self.weighting):
            self.run_together(f"its parts weigh {self.weighting.label}, and those of an earlier batch {again.label}")
        elif self.weighting is None and deviation.agrees:
            self.weighting, self.mute = again, again is None  # a mask removed all of them
        elif self.weighting is None:
            if again is not None and not math.isfinite(deviation.relative):
                self.weighting = again
                return
            if math.isnan(deviation.relative):
                self._refuse_not_finite(work, few)
            unsure = again is not None and core.steps
            late = "; steps since the last proof may have trained on gradients that are off by as much" if unsure else ""
            self.run_together(f"its parts differ from the whole by {deviation.relative:.2g}{late}")

    def _spread(self, batch: Ordered, parts: Sequence[int], before: Weighting | None) -> Callable[[int, int], Any]:
        """Return samples for a proof. `before`: the weighting that failed."""
        core, found = self._core, self.findings
        if not found.differing:
            return batch.spread(parts) if before is None else batch.spread(parts, before.rivals, before.count)
        some = self._tasks.work(batch.piece, batch.samples, "off", on_copies=True)
        aside = partial(comparable, core.model, core.device)

        def of_sample(sample: Any) -> Marks:
            work = self._tasks.work(lambda start, stop: sample, 1, "off", on_copies=True)
            return marks_of(partial(loss_of, work, 1))

        with core.staging.swapped():
            marks_of = found.marks_of(partial(loss_of, some, sum(parts)), aside, core.device)
            with aside():
                return batch.spread(parts, marks_of=of_sample)

    def _accepts(self, deviation: Deviation) -> bool:
        return deviation.where in self._core.settings.allow_inexact

    def _weigh_unproven(self, batch: Ordered) -> None:
        """Two samples do not fit at once. Only a loss that is one known mean needs no proof."""
        if self._stated is None and not self._looks.is_one_mean(batch):
            self.run_together("two samples do not fit at once, so another way could not be proven")
            return
        self.weighting = self._stated or BY_TERM
        self._core.note("note", "two samples do not fit at once, so it is unproven that samples do not mix")

    def weigh_again(self, batch: Ordered, doubted: bool, differing: Collection[Act] = ()) -> None:
        """Prove a failed weighting again, on samples that tell its rivals apart, or that do what not all of its
        micro-batches did."""
        before, moves = self.weighting, self._moves
        if before is None and self._alone is not None:
            self._alone = None
            return
        self.findings.differing = differing
        if not doubted and before is not None:
            with random_state_kept(self._core.device):
                self._weigh(batch, batch.samples, before)
        self.findings.differing = ()
        if doubted or (self.weighting == before and self._moves == moves):
            self.run_together("its weighting did not hold for a later batch")

    @property
    def _moves(self) -> tuple[Keys, Keys]:
        """Which places move, and which of them are steady."""
        return self.composition.keys, self.composition.steady

    def run_together(self, why: str) -> None:
        self.weighting, self.together = None, True
        self._core.reference = None  # the old reference does not hold; both passes record their own
        if self._core.team.alone:
            self._core.note("note", f"the loss needs all samples together ({why}): {IN_TWO}")
        else:
            self._core.team.loss_is_whole(True)
            self._core.tell(
                f"the loss needs all samples together ({why}): {IN_TWO}; what of it is not made of those, {OF_SHARES}"
            )

    def _refuse_not_finite(self, work: Work, samples: int) -> None:
        core = self._core
        with comparable(core.model, core.device), torch.no_grad():
            inputs, _ = work.inputs(0, samples, None)
            value = float(work.loss(work.forward(inputs)))
        if not math.isfinite(value):
            raise UsageError(
                "planning with this loss_fn and data",
                found=f"the loss of {samples} samples is {value}",
                next_move="make it finite first: check these samples, and divisions by and logarithms of zero",
            )

    def _provable(self, batch: Ordered, profile: Profile | None) -> tuple[int, tuple[str, ...]]:
        """Return (number of samples for a proof that fit at once, blocks to checkpoint for it)."""
        most = min(PROOF_SAMPLES, batch.samples)
        if profile is None:  # a plan made elsewhere knows what fits
            plan = self._core.plan
            return (most if plan is None else min(most, max(2 * self._core.least, plan.micro_batch))), ()
        kept = 2 * min(PROBED, profile.model.gradient_bytes)
        room = self._core.memory.budget().room - kept
        return most_fitting(profile, most, room, ((), profile.blocks))

    def _remember(self, batch: Ordered) -> None:
        """Keep a few samples for verification."""
        few = batch.few(KEPT_SAMPLES)

        def make(samples: int, backwards: bool) -> Work:
            ordered = few.backwards(samples) if backwards else few
            work = self._tasks.work(ordered.piece, samples, "off")
            work.composition = self.composition.afresh()
            return work

        weighting = self.weighting or BY_SAMPLES
        self._core.reference = MadeReference(few.samples, weighting, make, reversible=not batch.in_order)
