"""Proves on a few samples that a kind of training call may be cut, and refuses by name if not.

Not covered: what the few samples do not show. Proofs are repeated on later batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from memfit._errors import Refused
from memfit._units import format_bytes
from memfit.batches.cut import cut, shares_samples
from memfit.batches.shapes import Shapes
from memfit.capture.call import Call
from memfit.capture.call_copies import chosen_samples, first_samples
from memfit.capture.find_side_outputs import look_for_side_doors
from memfit.capture.infer_layout import size_that_decides
from memfit.capture.size_dependence import SIZE
from memfit.capture.size_looks import FEW, SizeLooks
from memfit.capture.workloads import CallWork
from memfit.distributed.reduction import OF_SHARES
from memfit.engine.asked_numbers import Notes
from memfit.engine.places import Place
from memfit.engine.recovery import on_fewer, surviving
from memfit.engine.suspended_autocast import without_autocast
from memfit.engine.weighting import BY_SAMPLES
from memfit.equivalence.backward_proof import backward_deviation
from memfit.equivalence.infer_weighting import infer_weighting
from memfit.equivalence.measured_loss import PROBED
from memfit.equivalence.proof_samples import Marks, entries_of, marks_of, most_telling, pairs_in, spaced
from memfit.equivalence.proofs import PROOF_SAMPLES, comparable, frozen_norms, joined_outputs, mixing_module, parts_of
from memfit.equivalence.single_sample import call_alone
from memfit.equivalence.tolerances import LOOSE, Deviation, note_loose
from memfit.levers.checkpoint import checkpointed
from memfit.levers.recomputed import moved_in_blocks
from memfit.modes.ask_numbers import asked_by
from memfit.modes.call_kind import CallKind
from memfit.planning.checkpointed import most_fitting
from memfit.runtime.core import Core

T = TypeVar("T")
OUTPUTS_HELD = 2
"""Number of times that outputs are held while parts and whole are compared: the parts' and the joined ones."""


class Prover:
    """Proves one model's calls."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def look_at_single_samples(self, call: Call) -> None:
        """Finds out whether the model can run a single sample. Raises Refused if single samples were prescribed."""
        if self._core.least > 1:
            return
        with self._core.staging.swapped():  # no hook of the user's fires
            why = call_alone(call)
        if why is not None:
            self._core.forbid_single_samples(why)

    def prove(self, kind: CallKind, call: Call, shapes: Shapes) -> Deviation | None:
        """Proves that the call may be cut this way. Returns None if so, else the deviation of its parts from the whole."""
        few, blocks = self._provable(kind, call)
        with checkpointed(self._core.model, blocks), self._core.memory.sparing_kernels():
            return self._on_fewer(lambda n: self._prove_on(self._chosen(call, n, kind), kind, call, shapes), few)

    def weigh_again(self, kind: CallKind, call: Call) -> Deviation | None:
        """Infers the weighting of the call's own loss again. Returns the deviation of its parts if no weighting holds."""
        few, blocks = self._provable(kind, call)
        with checkpointed(self._core.model, blocks), self._core.memory.sparing_kernels():
            return self._on_fewer(lambda n: self._infer(kind, self._chosen(call, n), call), few)

    def asks(self, call: Call, places: Mapping[Hashable, Place]) -> Mapping[Hashable, Notes]:
        """Returns what the forward asks of the numbers at these places, on few samples."""
        few = frozen_norms(self._chosen(call, min(FEW, call.samples)))
        return asked_by(lambda: few.run(few.arguments(0, few.samples)), places, few.model, few.device)

    def mixes(self, call: Call, deviation: Deviation) -> Refused:
        """Returns the error for a call whose parts differ from the whole."""
        core = self._core
        if deviation.by == "moving":
            return self._moves_state(call, deviation)
        if deviation.by in ("backward", "inner"):
            return self._differs_in_backward(call, deviation)
        if deviation.by != "mixing":
            return self._decides(call, deviation)
        proof = self._chosen(call, min(PROOF_SAMPLES, call.samples))
        allowed = core.settings.allow_inexact
        mixing = partial(mixing_module, proof, self._sizes(proof), allowed)
        found = surviving(lambda: without_autocast(mixing) or mixing(), core.device, lambda text: None)
        names = [deviation.where, *deviation.others] if found is None else [found.where]
        found = found or deviation
        what, also = f"{found.where} mixes samples", ""
        if _is_time_first(dict(core.model.named_modules()).get(found.where)):
            what = f"{found.where} is recurrent with time first, and mixes samples, assumed to lie along time"
            also = "say how many samples there are (pass the DataLoader that yields them), "
        why = ""
        if math.isnan(found.relative):
            why = ": a masked mean is 0/0 where the mask leaves nothing"
            also = "divide by max(count, 1) in the model, pass loss_fn= with weight= for each denominator, "
        return Refused(
            f"cutting a batch of {call.samples} into micro-batches, as {self._why()}",
            found=f"{what}: its value for {proof.samples} samples together differs by {found.relative:.2g} from that for the "
            f"same samples in two parts{why}",
            next_move=f"{also}accept that with allow_inexact={names!r}, compute what needs all samples together "
            "outside the model, or give it a budget in which the batch runs whole",
        )

    def _moves_state(self, call: Call, deviation: Deviation) -> Refused:
        names = [deviation.where, *deviation.others]
        return Refused(
            f"cutting a batch of {call.samples} into micro-batches, as {self._why()}",
            found=f"the forward updates state at every call, differently in parts than as a whole: {deviation.where}",
            next_move=f"accept that with allow_inexact={names!r}, update it outside the forward, or give it a budget in which "
            "the batch runs whole",
        )

    def _differs_in_backward(self, call: Call, deviation: Deviation) -> Refused:
        inner = f"the forward runs a backward of its own, as every micro-batch would: it gives {deviation.where} a gradient"
        mixed = (
            "the backward of the forward mixes samples, or depends on their number: the gradient of "
            f"{deviation.where} for a few samples together differs by {deviation.relative:.2g} from that for the same samples "
            "in two parts"
        )
        return Refused(
            f"cutting a batch of {call.samples} into micro-batches, as {self._why()}",
            found=inner if deviation.by == "inner" else mixed,
            next_move="look for an autograd.Function, a hook, a detach() or a backward() in the forward that uses all samples; "
            f"accept the difference with allow_inexact={[deviation.where]!r}, or give it a budget in which the batch runs "
            "whole",
        )

    def _decides(self, call: Call, deviation: Deviation) -> Refused:
        by_values = f"the forward branches on values of the batch, which may differ in a part of it: {deviation.where}"
        by_size = f"the forward branches on {SIZE}: it acts differently on {call.samples} than on few, or takes some of "
        return Refused(
            f"cutting a batch of {call.samples} into micro-batches, as {self._why()}",
            found=by_values if deviation.by == "reading" else f"{by_size}them by their position",
            next_move=f"accept that with allow_inexact={[deviation.where]!r}, branch outside the forward, or give it a "
            "budget in which the batch runs whole",
        )

    def _on_fewer(self, attempt: Callable[[int], Deviation | None], few: int) -> Deviation | None:
        return on_fewer(attempt, few, self._core.device, self._core.proof_ran_out)

    def by_size(self, kind: CallKind, call: Call) -> list[Deviation]:
        """Returns a deviation if the forward acts differently on this number of samples than on few."""
        if call.samples <= kind.alike:
            return []
        core, in_all = self._core, self._core.samples_of_all(call.samples)
        looks = SizeLooks(core.model, core.device, lambda: core.memory.budget().room)
        decides = size_that_decides(call, looks, call.samples, in_all)
        if decides == call.samples:
            return [Deviation(SIZE, 1.0, 0.0, by="counting")]
        if decides is not None:
            core.tell(f"the forward acts differently on {in_all} samples than on few: {OF_SHARES}")
        kind.alike = call.samples
        return []

    # ---- choosing samples

    def _provable(self, kind: CallKind, call: Call) -> tuple[int, tuple[str, ...]]:
        """Return (number of samples whose proof fits in memory, blocks to checkpoint for it)."""
        core, most = self._core, min(PROOF_SAMPLES, call.samples)
        if kind.bound is None:
            return most, ()
        room = core.memory.budget().room - 2 * min(PROBED, kind.bound.model.gradient_bytes)
        each = OUTPUTS_HELD * call.outputs.bytes_per_sample
        applied = () if core.plan is None else core.plan.checkpoint
        few, blocks = most_fitting(kind.bound, most, room, (applied,) if applied else ((), kind.bound.blocks), each)
        few, blocks = (few, blocks) if few else (min(2, most), kind.bound.blocks)
        return few, () if applied else blocks

    def _sizes(self, proof: Call) -> tuple[int, ...]:
        return parts_of(proof.samples, self._core.least)

    def _chosen(self, call: Call, few: int, kind: CallKind | None = None) -> Call:
        """Return a call on copies of the `few` most telling samples (more if the parts need more). If micro-batches of its
        `kind` differed in what they do, some of these samples do that, and some do not."""
        few = max(few, min(2 * self._core.least, call.samples))
        if call.split is not None or not call.layout.cuts:
            return first_samples(call, few)
        there = spaced(call.samples, pairs_in(entries_of(call.tree, call.samples)).values())
        if kind is not None and kind.findings.differing:
            marks = self._act_marks(kind, call, there, few)
        else:
            marks = [marks_of(cut(call.tree, call.layout, i, i + 1)) for i in there]
        return chosen_samples(call, [there[i] for i in most_telling(marks, parts_of(few, self._core.least))])

    def _act_marks(self, kind: CallKind, call: Call, there: Sequence[int], few: int) -> list[Marks]:
        """Return what of that in which micro-batches differed these samples do, as marks."""
        aside, some = partial(comparable, call.model, call.device), frozen_norms(chosen_samples(call, there[:few]))
        with self._core.staging.swapped(), torch.enable_grad():
            marks_of = kind.findings.marks_of(partial(some.run, some.arguments(0, few)), aside, call.device)
            with aside():
                alone = [frozen_norms(chosen_samples(call, [i])) for i in there]
                return [marks_of(partial(each.run, each.arguments(0, 1))) for each in alone]

    def has_new_pairs(self, kind: CallKind, call: Call) -> bool:
        """Whether the call has samples of one class or group, where no proof has had some in both parts. (Several processes
        prove together, and each sees its own samples.)"""
        alone = call.split is None and self._core.team.alone
        return alone and kind.findings.has_new_pairs(call.tree, call.samples)

    # ---- proofs

    def _prove_on(self, proof: Call, kind: CallKind, call: Call, shapes: Shapes) -> Deviation | None:
        core, sizes = self._core, self._sizes(proof)
        outputs, deviations, composition = joined_outputs(proof, sizes)
        loose = max((each.limit for each in deviations if each.limit >= LOOSE), default=0.0)
        if (exact := self._exactly(deviations, lambda: joined_outputs(proof, sizes))) is not None:
            deviations = [each for each in deviations if not each.agrees] + exact[1]
            composition = exact[2] if exact[2].keys == composition.keys else composition
        other = kind.findings.add(composition, outputs.branching, core.model)
        outputs = replace(outputs, branching=kind.findings.branching)
        deviations += [] if other is None else [Deviation(other, 1.0, 0.0, by="moving")]
        moved_in_blocks(core.model, kind.composition)
        deviations += self.by_size(kind, call)
        apart = [deviation for deviation in deviations if not deviation.agrees]
        refused = [deviation for deviation in apart if not self._is_allowed(deviation, proof)]
        if refused:
            return replace(refused[0], others=tuple(deviation.where for deviation in refused[1:]))
        for deviation in apart:
            self._accept(deviation)
        if kind.proven is None:
            note_loose(max((each.limit for each in deviations if each.agrees), default=0.0), core.note)
        kind.outputs[shapes] = call.outputs = proof.outputs = outputs
        entrances = look_for_side_doors(proof, proof.samples)
        core.staging.stage_also(entrances.parameters)
        kind.writes_input = call.copies = entrances.writes_input
        kind.findings.apart.proven(entries_of(proof.tree, proof.samples), sizes[0])
        if entrances.watches:
            core.tell("hooks of tensors inside the forward, and gradients that it retains, are those of one micro-batch")
        if len(sizes) < 2:
            return None  # runs as one piece; a larger call is proven
        kind.prove_at, kind.mute = core.steps + 1, False
        limit = max((each.limit for each in deviations), default=0.0)
        staging, accepted = core.staging, [each.where for each in apart]
        found = self._infer(kind, proof, call)
        if found is None:
            agrees = partial(backward_deviation, proof, sizes, staging)
            found = agrees(kind.composition.afresh(), max(limit, loose), accepted)
            if found is None and loose:
                found = without_autocast(lambda: agrees(kind.composition.afresh(), limit, accepted))
        if found is not None:
            if not self._is_allowed(found, proof):
                return found
            self._accept(found)
        if kind.mute:
            outputs = kind.outputs[shapes] = call.outputs = outputs.with_alike_loss()
        kind.proven = outputs
        return None

    def _exactly(self, deviations: Sequence[Deviation], prove: Callable[[], T]) -> T | None:
        """Return what a proof finds without autocast, if it allowed much under autocast; None if it did not, or cannot run."""
        return without_autocast(prove) if any(each.limit >= LOOSE for each in deviations) else None

    def _infer(self, kind: CallKind, proof: Call, call: Call) -> Deviation | None:
        """Infers the weighting of the call's own loss, if it has one."""
        if proof.outputs.loss is None:
            return None
        work = CallWork(frozen_norms(proof), proof.outputs.loss, draws=False)
        core, sizes = self._core, self._sizes(proof)
        infer = partial(infer_weighting, work, sizes, core.staging, core.model)
        weighting, deviation, moves = infer()
        if weighting is not None and (exact := self._exactly([deviation], infer)) is not None:
            weighting, deviation, moves = exact
        if weighting is None and deviation.agrees:
            kind.prove_at, kind.mute = self._core.steps, True  # the next call is proven again
            return moves.deviation
        kind.weighting = weighting or BY_SAMPLES
        if kind.weighting.alike and shares_samples(call.tree, call.layout):  # every micro-batch would run all samples
            return Deviation("the loss", math.inf, deviation.limit)
        if kind.proven is None and deviation.agrees:
            note_loose(deviation.limit, self._core.note)
        return deviation if weighting is None else moves.deviation

    def _is_allowed(self, deviation: Deviation, proof: Call) -> bool:
        """Whether the user accepted this deviation by its own name, or by the names of the modules it comes from."""
        allowed, sizes = self._core.settings.allow_inexact, self._sizes(proof)
        if any(deviation.where == name or deviation.where.startswith(f"{name}.") for name in allowed):
            return True
        if not allowed or deviation.by in ("backward", "inner"):
            return False
        mixes = without_autocast(lambda: (mixing_module(proof, sizes, ()), mixing_module(proof, sizes, allowed)))
        mixes = mixes or (mixing_module(proof, sizes, ()), mixing_module(proof, sizes, allowed))
        return mixes[0] is not None and mixes[1] is None

    def _accept(self, deviation: Deviation) -> None:
        self._core.note(
            "not equal",
            f"{deviation.where} differs by {deviation.relative:.2g} between the whole batch and its parts; accepted by "
            "allow_inexact",
        )

    def _why(self) -> str:
        micro_batch, budget = self._core.settings.micro_batch, self._core.memory.budget().limit
        return f"{format_bytes(budget)} require" if micro_batch is None else f"micro_batch={micro_batch} asks"


def _is_time_first(module: nn.Module | None) -> bool:
    return isinstance(module, nn.RNNBase) and not module.batch_first
