"""What consumes the output of a training call: its own loss, a known loss outside, or something not known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memfit.training.call import Call
from memfit.training.route import Step
from memfit.training.works import CallWork, KnownLossEnd, OutputsWork

Twin = Callable[[torch.Tensor], torch.Tensor]


class Consumer(Protocol):
    """Turns a call into work."""

    @property
    def name(self) -> str:
        """What plans are remembered by."""
        ...

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        """The work of a call; `borrowed` as CallWork has it."""
        ...

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        """The same for a twin of the call's first `samples` samples, and the twins it made."""
        ...

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        """The same for a copy of the call's first samples, in the opposite order if `backwards`."""
        ...


@dataclass(frozen=True)
class OwnLoss:
    """The model returns its loss; or it returns none, and all its outputs are summed as a bound."""

    name: str = "own loss"

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        if call.outputs.loss is None:
            return OutputsWork(call, precision=precision, draws=False, borrowed=borrowed)
        return CallWork(call, call.outputs.loss, precision=precision, draws=False, borrowed=borrowed)

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        return self, ()

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        return self


@dataclass(frozen=True)
class AllOutputs(OwnLoss):
    """A loss that is not known: gradients arrive for all outputs."""

    name: str = "replay"

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        return OutputsWork(call, precision=precision, draws=False, borrowed=borrowed)


@dataclass(frozen=True)
class KnownLoss:
    """A loss of torch.nn.functional outside the model."""

    name: str
    leaf: int
    """The output leaf it is computed from."""
    steps: tuple[Step, ...]
    """The way there."""
    end: KnownLossEnd
    """The loss itself."""

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        return CallWork(
            call, self.leaf, self.steps, self.end, precision=precision, draws=False, borrowed=borrowed
        )

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        end, made = self.end.twin(twin, samples)
        return replace(self, end=end), made

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        return replace(self, end=self.end.first(samples, backwards=backwards))
