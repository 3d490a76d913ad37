"""What a loss function does before it is proven: what its first forward installs, whether it can do with a single sample, and
what fake tensors show of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from memfit._errors import Refused
from memfit.batches.cut import layout_from_two, like_first
from memfit.capture.infer_layout import comparable_sizes, twins_of
from memfit.capture.installed_once import InstalledOnce
from memfit.capture.size_looks import FEW, MORE, SizeLooks
from memfit.engine.call_context import uncompiled
from memfit.engine.known_means import Terms, is_only_term
from memfit.engine.recovery import surviving
from memfit.engine.weighting import BY_SAMPLES
from memfit.engine.work import Work, loss_of
from memfit.equivalence.loss_branches import Decides, told_by
from memfit.equivalence.proofs import PROOF_SAMPLES, parts_of
from memfit.equivalence.single_sample import loss_alone
from memfit.hardware.exhausted import retry_on_oom
from memfit.modes.ordered_batch import Ordered
from memfit.modes.step_workload import Tasks
from memfit.planning.search import Demand
from memfit.runtime.core import Core
from memfit.tracing.failures import TraceFailed
from memfit.tracing.fake import ZeroArrays
from memfit.tracing.fake_twins import on_twins
from memfit.tracing.sandbox import leave_no_trace


class LossLooks:
    """What a `loss_fn` does with a few samples of a batch, or with fake tensors. Attribute: `looked_at`, the largest number of
    samples that it was seen to compute like few."""

    def __init__(self, core: Core, tasks: Tasks) -> None:
        self._core, self._tasks, self.looked_at = core, tasks, 0

    def keep_installed(self, batch: Ordered) -> None:
        """Install what the first forward installs for good, such as hooks. Most install nothing: then it runs once. Raises
        Refused if it installs what cannot be kept."""
        samples, model, before = min(FEW, batch.samples), self._core.model, RemovableHandle.next_id
        installs = InstalledOnce(model)
        try:
            with self._on_twins(batch, samples) as work:
                _look(installs, work, samples)
        except TraceFailed:
            if RemovableHandle.next_id == before:
                return
            installs, work = InstalledOnce(model), self._tasks.work(batch.piece, batch.samples, "off", on_copies=True)
            with leave_no_trace(model, self._core.device), uncompiled():
                surviving(partial(_look, installs, work, samples), self._core.device, lambda text: None)
        installs.keep()

    def why_not_alone(self, batch: Ordered) -> str | None:
        """Why the loss of a single sample cannot be computed; None if it can."""
        work = self._tasks.work(batch.piece, batch.samples, "off", on_copies=True)
        with self._core.staging.swapped():  # does not call the user's hooks
            why = loss_alone(work, self._core.model, partial(self._on_twins, batch))
        self._tasks.watch(work)
        return why

    def failure(self, batch: Ordered, samples: int) -> TraceFailed | None:
        """The error of the loss of this many samples on fake tensors, or None."""
        try:
            with self._on_twins(batch, samples) as work, ZeroArrays():
                loss_of(work, samples)
        except TraceFailed as failed:
            return failed
        return None

    def is_one_mean(self, batch: Ordered) -> bool:
        """Whether the loss is one known mean and no call seems to mix samples, according to fake tensors."""
        looks: list[tuple[int, Decides]] = []
        for samples in (PROOF_SAMPLES, *parts_of(PROOF_SAMPLES, self._core.least)):
            try:
                with self._on_twins(batch, samples) as work, Terms(alone=False) as terms, Decides(self._core.model) as decides:
                    loss = loss_of(work, samples)
                    if len(terms.found) != 1 or not is_only_term(loss, terms.found[0]):
                        return False
            except TraceFailed:
                return False
            looks.append((samples, decides))
        return told_by(looks) is None

    def size_that_decides(self, batch: Ordered, samples: int) -> int | None:
        """`samples`, or those of all ranks together, if the loss behaves differently with that many than with few."""
        core = self._core
        if samples <= self.looked_at:
            return None
        sizes: Sequence[int] = (samples, core.samples_of_all(samples))
        if batch.in_order:
            first = partial(batch.piece, 0)
            sizes = comparable_sizes(first, batch.samples, sizes)
        else:
            large = batch.alike(MORE)
            try:
                layout = layout_from_two(batch.alike(FEW), FEW, large, MORE)
            except Refused:
                self.looked_at = samples
                return None
            first = partial(like_first, large, layout)

        def code(tree: Any, count: int, *, on_copies: bool = False) -> Callable[[], Any]:
            return partial(loss_of, self._tasks.work(lambda start, stop: tree, count, "off", on_copies=on_copies), count)

        def fake(twin: Callable[[torch.Tensor], torch.Tensor], count: int) -> Callable[[], Any]:
            return code(twins_of(first(count), twin), count)

        def real(count: int) -> Callable[[], Any]:
            return code(batch.piece(0, count) if batch.in_order else batch.alike(count), count, on_copies=True)

        looks = SizeLooks(core.model, core.device, lambda: core.memory.budget().room)
        found = retry_on_oom(partial(looks.first_that_decides, fake, real, sizes, alike=not batch.in_order), core.device)
        self.looked_at = samples if found is None else self.looked_at
        return found

    @contextmanager
    def _on_twins(self, batch: Ordered, samples: int) -> Iterator[Work]:
        """Context in which the loss of this many samples can be computed on fake tensors. Raises TraceFailed."""
        with on_twins(self._core.model, self._core.device) as world:
            work = self._tasks.task(batch, 0, Demand(samples), BY_SAMPLES).make_work("off")(world.twin, samples)
            with world.entered():
                yield work


def _look(installs: InstalledOnce, work: Work, samples: int) -> None:
    """Look at what the forward over `samples` samples installs. It runs again only if it registers hooks."""
    before = RemovableHandle.next_id
    installs.ran(loss_of(work, samples))
    if RemovableHandle.next_id != before:
        installs.ran(loss_of(work, samples))


def say_on_few(error: BaseException) -> None:
    """Add to an error of a `loss_fn` that it was raised on a few samples."""
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(  # type: ignore[attr-defined]
            "memfit: raised by loss_fn on a few samples of a batch, while planning; where it needs more of them at once, "
            "wrap without loss_fn and compute the loss in your own loop"
        )
