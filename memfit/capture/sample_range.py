"""Some samples on their way from the model's outputs to the loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memfit.capture.expression import Node

Leaf = tuple[int, int]
"""A call's number, and the index of a leaf of its output."""


class SampleRange:
    """The model's outputs for them, by output leaf, and what was computed from those.
    `in_script`: all of them, in a graph that the script keeps and that saves the script's own tensors."""

    def __init__(
        self, outputs: Mapping[Leaf, Any], start: int, stop: int, shared: Collection[int] = (), *, in_script: bool = False
    ) -> None:
        self.outputs, self.start, self.stop, self._shared, self.in_script = outputs, start, stop, shared, in_script
        self._values: dict[int, Any] = {}

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.stop - self.start

    def value(self, node: Node) -> Any:
        """Return the value of a node for these samples. Nodes whose ids are in `shared` are computed once and kept."""
        found = self._values.get(id(node))
        if found is None:
            found = node.of(self)
            if id(node) in self._shared:
                self._values[id(node)] = found
        return found

    def put(self, node: Node, value: Any) -> None:
        """Set the value of `node`."""
        self._values[id(node)] = value
