"""Consumers of a training call's output: its own loss, a known loss outside the model, or an unknown one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from memfit.batches.cut import Axis
from memfit.capture.call import Call
from memfit.capture.expression import BatchTensor, Node, all_nodes, narrow_firsts, twinned
from memfit.capture.infer_layout import twin_of_part
from memfit.capture.sample_range import SampleRange
from memfit.capture.workloads import CallWork, ExpressionWork, OutputsWork
from memfit.engine.version_checks import Unchanged

Twin = Callable[[torch.Tensor], torch.Tensor]


class Consumer(Protocol):
    """Turns a call into the work that computes its loss."""

    @property
    def name(self) -> str:
        """The key that plans are stored under."""
        ...

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        """Return the work of a call; `borrowed` is passed to CallWork."""
        ...

    def twin(self, twin: Twin, samples: int) -> tuple[Consumer, Sequence[torch.Tensor]]:
        """Return this consumer for a twin of the call's first `samples` samples, and the twins (fake tensors) it made."""
        ...

    def first(self, samples: int, *, backwards: bool) -> Consumer:
        """Return this consumer for a copy of the call's first samples, in reverse order if `backwards`."""
        ...

    def of_whole(self, call: Call) -> torch.Tensor:
        """Return the loss of a call that ran whole."""
        ...

    @property
    def labels(self) -> Sequence[Unchanged]:
        """Records that tell whether the script's own tensors in the loss, such as labels, are unchanged."""
        ...


@dataclass(frozen=True)
class OwnLoss:
    """The loss that the model returns. If it returns none, the sum of all outputs serves as a bound."""

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
    """An unknown loss: gradients arrive for all outputs."""

    name: str = "replay"

    def work(self, call: Call, precision: str, borrowed: Sequence[torch.Tensor] = ()) -> CallWork:
        return OutputsWork(call, precision=precision, draws=False, borrowed=borrowed)


@dataclass(frozen=True)
class Expression:
    """A loss that the script computes from the output: a loss of torch.nn.functional, or a sum of terms."""

    name: str
    node: Node
    """The node that computes the loss."""
    offsets: Mapping[int, int]
    """Maps the `number` of each call it uses to where that call's outputs begin."""

    @property
    def labels(self) -> Sequence[Unchanged]:
        return [node.unchanged for node in all_nodes(self.node) if isinstance(node, BatchTensor)]

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
        return SampleRange(leaves, 0, call.samples, in_script=True).value(self.node)
