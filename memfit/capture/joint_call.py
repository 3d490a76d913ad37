"""Joins several calls that one loss needs into one: each micro-batch runs its part of all of them.

Not covered: calls of different numbers of samples, and calls of different models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memfit.batches.cut import Layout
from memfit.capture.call import Call, Tree
from memfit.capture.outputs import Outputs


def joint(calls: Sequence[Call]) -> Call:
    """Return a call that makes all of these in order; its output is the tuple of theirs."""

    def plain(*trees: Tree) -> tuple[Any, ...]:
        found = []
        for call, given in zip(calls, trees):
            call.begun()
            found.append(call.watched(given))
        return tuple(found)

    first = calls[0]
    tree = tuple(call.tree for call in calls), {}
    layout = Layout(tuple(axis for call in calls for axis in call.layout.axes), first.samples)
    leaves = tuple(leaf for call in calls for leaf in call.outputs.leaves)
    outputs = Outputs(tuple(call.outputs.tree for call in calls), leaves)
    made = Call(first.model, plain, tree, layout, outputs, first.device, autocast=first.autocast)
    made.key = ("joint", *(call.key for call in calls))
    made.host_draws = first.host_draws
    made.composition = max((call.composition for call in calls), key=lambda each: (bool(each.moved), each.may_move))
    made.copies = any(call.copies for call in calls)
    made.several, made.offsets, offset = tuple(calls), {}, 0
    for call in calls:
        made.offsets[call.number] = offset
        offset += len(call.outputs.leaves)
    return made
