"""What consumes the output of a training call: its own loss, a known loss outside, or something not known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memfit.batches.cut import Axis
from memfit.engine.unchanged import Unchanged
from memfit.training.call import Call
from memfit.training.expression import Cut, Node, Part, all_nodes, narrow_firsts, twinned
from memfit.training.learn import twin_of_part
from memfit.training.works import CallWork, ExpressionWork, OutputsWork

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

    def of_whole(self, call: Call) -> torch.Tensor:
        """What it comes to for a call that ran whole."""
        ...

    @property
    def labels(self) -> Sequence[Unchanged]:
        """Whether tensors of the script's own that it is computed with are what they were."""
        ...


@dataclass(frozen=True)
class OwnLoss:
    """The model returns its loss; or it returns none, and all its outputs are summed as a bound."""

    name: str = "own loss"
    labels: Sequence[Unchanged] = ()

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        if call.outputs.loss is None:
            return OutputsWork(call, precision=precision, draws=False, borrowed=borrowed)
        return CallWork(call, call.outputs.loss, precision=precision, draws=False, borrowed=borrowed)

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        return self, ()

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        return self

    def of_whole(self, call: Call) -> torch.Tensor:
        assert call.whole is not None and call.outputs.loss is not None
        return call.whole[call.outputs.loss]


@dataclass(frozen=True)
class AllOutputs(OwnLoss):
    """A loss that is not known: gradients arrive for all outputs."""

    name: str = "replay"

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        return OutputsWork(call, precision=precision, draws=False, borrowed=borrowed)


@dataclass(frozen=True)
class Expression:
    """What the script computes from the output: a loss of torch.nn.functional, or a sum of terms."""

    name: str
    node: Node
    """The number it comes to."""
    offsets: Mapping[int, int]
    """Where the outputs of the calls that it is computed from begin, by their numbers."""

    @property
    def labels(self) -> Sequence[Unchanged]:
        return [node.unchanged for node in all_nodes(self.node) if isinstance(node, Cut)]

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        return ExpressionWork(call, self.node, self.offsets, precision=precision, draws=False, borrowed=borrowed)

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        def of(tensor: torch.Tensor, axis: Axis | None) -> torch.Tensor:
            return twin_of_part(tensor if axis is None else axis.like_first(tensor, samples), twin)

        node, made = twinned(self.node, of)
        return replace(self, node=node), made

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        return replace(self, node=narrow_firsts(self.node, samples, backwards=backwards))

    def of_whole(self, call: Call) -> torch.Tensor:
        leaves = {(c.number, i): leaf for c in call.calls if c.whole is not None for i, leaf in enumerate(c.whole)}
        return Part(leaves, 0, call.samples).value(self.node)
