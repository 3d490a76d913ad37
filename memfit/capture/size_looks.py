"""Looks at what code does with more samples than a proof has: on fake tensors, and on copies of one sample where they guess.

Fake tensors guess values that are read, and fail where a shape depends on values or an operator has no shape function. A real
look takes no more samples than memory has room for if nothing was freed. Not covered: what decides beyond these, and code that
runs neither on fake tensors nor on copies of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit._errors import RankFailed
from memfit.batches.tree import tensors
from memfit.capture.size_dependence import Look, Positions, decides_by_size, differently_used, names_in
from memfit.engine.alike_draws import AlikeDraws
from memfit.engine.call_context import uncompiled
from memfit.engine.random_state import HostRandom
from memfit.hardware.exhausted import drop_frames, free_unused, is_out_of_memory
from memfit.tracing.failures import TraceFailed
from memfit.tracing.fake import ZeroArrays
from memfit.tracing.fake_twins import on_twins
from memfit.tracing.sandbox import leave_no_trace

FEW, MORE = 2, 3
"""Numbers of samples that are assumed to be treated like any other number."""
OTHER_FEW, OTHER_MORE = 4, 5
"""Two more of these: at two samples, 1 / len(x) is 0.5, which may be used elsewhere. Proofs have as many."""
Code = Callable[[], Any]
ALook = Callable[[int, Sequence[int]], Look]
"""Looks at a number of samples, after runs over others."""


class SizeLooks:
    """Looks at code of a model for several numbers of samples. `room()` returns the bytes that may be allocated."""

    def __init__(self, model: nn.Module, device: torch.device, room: Callable[[], int]) -> None:
        self._model, self._device, self._room = model, device, room

    def first_that_decides(
        self,
        fake: Callable[[Callable[[torch.Tensor], torch.Tensor], int], Code],
        real: Callable[[int], Code],
        sizes: Sequence[int],
        *,
        alike: bool,
    ) -> int | None:
        """Return the first of `sizes` (numbers of samples) for which code acts differently than for few.

        `fake(twin, samples)` returns the code to run on that many samples as fake tensors, `real(samples)` on real ones: on
        copies of one if they are `alike`, so that values decide nothing. A finding must recur after runs over as many
        samples, for which the code may have built a cache, and over few: rows that it keeps are then not in proportion.
        """
        sizes, state, guesses = [size for size in dict.fromkeys(sizes) if size > MORE], HostRandom.capture(), list[bool]()
        if not sizes:
            return None

        def on_fake(samples: int, before: Sequence[int]) -> Look:
            state.restore()
            with on_twins(self._model, self._device) as world:
                codes = [fake(world.twin, each) for each in (*before, samples)]
                with world.entered(), ZeroArrays() as arrays:
                    found = _seen(self._model, codes)
                guesses.append(arrays.made or bool(world.guesses))
            return samples, found

        try:
            found = _first(on_fake, sizes, alike)
        except TraceFailed:
            found, guesses = None, [True]
        finally:
            state.restore()
        if found is None and alike and any(guesses):
            found = self._on_copies(real, sizes)
            state.restore()
        return found

    def _on_copies(self, real: Callable[[int], Code], sizes: Sequence[int]) -> int | None:
        """Return the first of `sizes` that decides by real looks, at as many of these copies as there is room for."""
        state, draws = HostRandom.capture(), AlikeDraws(MORE)

        def look(samples: int, before: Sequence[int]) -> Look:
            state.restore()
            with leave_no_trace(self._model, self._device):
                codes = [(each, real(each)) for each in (*before, samples)]
                return samples, _seen(self._model, [partial(_run, draws.given(each), code) for each, code in codes])

        try:
            with leave_no_trace(self._model, self._device), draws.recording():
                _seen(self._model, [real(MORE)])
            most = max(sizes)
            needed = _extrapolated({samples: _allocated_in(partial(look, samples, ())) for samples in (FEW, MORE, OTHER_MORE)})
            while most > MORE + 1 and needed(most) > self._room():
                most = max(MORE + 1, most // 2)
            fitting = {min(size, most): size for size in reversed(sizes)}
            found = _first(look, sorted(fitting), True)
            return None if found is None else fitting[found]
        except RankFailed:
            raise
        except Exception as error:  # the script's own, of copies of one sample
            drop_frames(error)
            if is_out_of_memory(error):
                free_unused(self._device)
            return None


def _run(context: AbstractContextManager[None], code: Code) -> None:
    with context:
        code()


def _allocated_in(run: Code) -> int:
    with _Allocated() as counted:
        run()
    return counted.bytes


def _extrapolated(known: Mapping[int, int]) -> Callable[[int], float]:
    """Return the polynomial of degree 2 through three points: what is computed of all pairs grows with the square."""
    (a, at_a), (b, at_b), (c, at_c) = known.items()
    slope = (at_b - at_a) / (b - a)
    bend = max(0.0, ((at_c - at_b) / (c - b) - slope) / (c - a))
    return lambda samples: at_a + (samples - a) * (slope + (samples - b) * bend)


def _seen(model: nn.Module, codes: Sequence[Code]) -> Positions:
    """Return what the last of these does, after the others."""
    *before, last = codes
    with uncompiled(), torch.enable_grad():
        for each in before:
            each()
        with Positions(names_in(model)).watching() as found:
            last()
    return found


def _first(look: ALook, sizes: Sequence[int], alike: bool) -> int | None:
    found = _first_in(look, sizes, alike, lambda samples: ())
    for before in (lambda samples: (samples,)), (lambda samples: (samples, FEW)):
        found = None if found is None else _first_in(look, sizes, alike, before)
    return found


def _first_in(
    look: ALook, sizes: Sequence[int], alike: bool, before: Callable[[int], tuple[int, ...]]
) -> int | None:
    """Return the first of these sizes that decides, after runs over the numbers of samples that `before` a look are run."""

    def after(samples: int) -> Look:
        return look(samples, before(samples))

    few, more = after(FEW), after(MORE)
    for size in sizes:
        whole = after(size)
        if decides_by_size(few, more, whole):
            return size
        if alike and size > OTHER_MORE and (doubted := differently_used(few, more, whole)):
            if doubted & differently_used(after(OTHER_FEW), after(OTHER_MORE), whole):
                return size
    return None


class _Allocated(TorchDispatchMode):
    """Counts the bytes of new storages that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo, which takes a second, to exclude this class from it

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {t.untyped_storage()._cdata for t in tensors((args, kwargs or {})) if t.layout is torch.strided}
        for made in tensors(out):
            if made.layout is torch.strided and made.untyped_storage()._cdata not in known:
                self.bytes += made.untyped_storage().nbytes()
        return out
