"""Describes what a script's own training loop does around forward and backward, as far as memory depends on it. Pure values.

Not covered: evaluation loops that keep the outputs of all batches, which grow with the data set and not with a batch; and
whatever a script keeps besides its batch, its outputs and its loss.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from memfit._errors import UsageError

AFTER_STEP, BEFORE_FORWARD, BEFORE_BACKWARD, TO_ZERO = "after step", "before forward", "before backward", "to zero"
ZERO_GRAD = (AFTER_STEP, BEFORE_FORWARD, BEFORE_BACKWARD, TO_ZERO)
"""When gradients are freed: right after the step; once the next batch is loaded; after its forward; or never, because they are
set to zero and kept (`set_to_none=False`)."""


@dataclass(frozen=True)
class Loop:
    """A training loop, as far as it was described; the defaults describe memfit's own step."""

    max_grad_norm: float | None = None
    """Norm that gradients are clipped to (`torch.nn.utils.clip_grad_norm_`); None: no clipping."""
    clip_grad_value: float | None = None
    """Value that gradients are clipped at (`torch.nn.utils.clip_grad_value_`); None: no clipping."""
    evaluation: int | None = None
    """Samples per evaluation batch; None: no evaluation is traced."""
    zero_grad: str = AFTER_STEP
    """When gradients are freed: one of ZERO_GRAD."""
    plain: bool = False
    """Whether the loop runs without memfit: its variables stay bound, and gradients accumulate in the parameters."""

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.max_grad_norm is not None or self.clip_grad_value is not None

    @property
    def gradients_stay(self) -> bool:
        """Whether gradients still exist after the step."""
        return self.zero_grad != AFTER_STEP

    def __str__(self) -> str:
        told = [
            "its variables stay bound, gradients add up in the parameters" if self.plain else "",
            f"gradients clipped to a norm of {self.max_grad_norm:g}" if self.max_grad_norm is not None else "",
            f"gradients clipped at {self.clip_grad_value:g}" if self.clip_grad_value is not None else "",
            f"zero_grad {self.zero_grad}" if self.gradients_stay else "",
        ]
        return ", ".join(filter(None, told))

    @staticmethod
    def checked(
        *,
        max_grad_norm: Any = None,
        clip_grad_value: Any = None,
        evaluation: Any = None,
        zero_grad: Any = AFTER_STEP,
        plain: Any = False,
    ) -> Loop:
        """Returns the loop that these user arguments describe. Raises UsageError for invalid ones."""
        for name, value in (("max_grad_norm", max_grad_norm), ("clip_grad_value", clip_grad_value)):
            _check_limit(name, value)
        if evaluation is not None and (type(evaluation) is not int or not 0 < evaluation < 1 << 40):
            found = "it is no whole number"
            if type(evaluation) is int:
                found = "a batch has at least one sample" if evaluation < 1 else "no machine counts that many"
            next_move = "pass the samples of an evaluation batch, or omit it"
            raise UsageError(f"evaluation={evaluation!r}", found=found, next_move=next_move)
        if not isinstance(zero_grad, str) or zero_grad not in ZERO_GRAD:
            known = ", ".join(map(repr, ZERO_GRAD))
            raise UsageError(f"zero_grad={zero_grad!r}", found="memfit does not know it", next_move=f"use one of {known}")
        if type(plain) is not bool:
            raise UsageError(f"plain_loop={plain!r}", found="it is neither True nor False", next_move="pass one of these")
        return Loop(max_grad_norm, clip_grad_value, evaluation, zero_grad, plain)


def _check_limit(name: str, value: Any) -> None:
    """Checks for a finite or infinite number above zero, or None. Raises UsageError."""
    if value is None:
        return
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if number and (0 < value <= sys.float_info.max or value == math.inf):  # NaN is neither
        return
    found = "gradients would all be zero" if number and value == 0 else "it is no number above zero"
    found = "no gradient comes near it" if number and value > sys.float_info.max else found
    shown = str(value)[:40] if number else repr(value)
    raise UsageError(f"{name}={shown}", found=found, next_move="pass a number above zero, or None for no clipping")


MEMFITS = Loop()
"""The loop of memfit's own steps."""
