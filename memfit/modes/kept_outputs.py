"""Which values an accumulation pass keeps for what the script may read after the loss."""

from __future__ import annotations

from memfit.capture.call import Call
from memfit.capture.consumers import Consumer
from memfit.capture.expression import leaves_in
from memfit.capture.lazy_tensor import LazyTensor
from memfit.modes.call_plans import OWN_LOSS
from memfit.planning.plan import Plan

KEPT_VALUES = 16 << 20
"""Minimum bytes of output values kept from the accumulation pass, for metrics read after the loss."""


def worth_keeping(call: Call, consumer: Consumer, plan: Plan) -> frozenset[int]:
    """Returns the outputs to keep: those that the script still holds, smallest first, as far as they fit beside the plan's
    peak. Not a loss that is being computed."""
    numbers = set(map(id, waiting_losses(call)))  # the pass sums these up
    standins = [standin for each in call.calls for standin in each.standins if isinstance(standin, LazyTensor)]
    leaves = {leaf for standin in standins if id(standin) not in numbers for leaf in standin.leaves}
    held = {call.offsets[number] + leaf for number, leaf in leaves if number in call.offsets}
    held -= {call.outputs.loss} if consumer is OWN_LOSS else set()
    size = {i: call.outputs.leaves[i].bytes_for(call.samples) for i in held}
    left, kept = max(KEPT_VALUES, plan.room // 2), set()  # parts and joined outputs are allocated together
    for i in sorted(held, key=size.__getitem__):
        left -= size[i]
        kept |= {i} if left >= 0 else set()
    return frozenset(kept)


def waiting_losses(call: Call) -> list[LazyTensor]:
    """Returns deferred losses of the call, or parts of them, that may be read after the pass that computes the gradients."""
    found = [standin for each in call.calls for standin in each.standins if isinstance(standin, LazyTensor)]
    numbers = [standin for standin in dict.fromkeys(found) if standin.is_loss_that_waits]
    return [each for each in numbers if all(leaf[0] in call.offsets for term in each.terms for leaf in leaves_in(term.node))]
