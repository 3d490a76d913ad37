"""Detects a loss that branches on what the model computed: which samples count, what it divides by, where it stops.

Such a loss may add up from its parts on the samples of a proof, and no longer once the model has learned: a threshold that
nothing reaches yet, a limit that every part exceeds, a number of samples to take that no part has. This module watches the
functions that the loss calls outside the model's forward, and compares what they do to the sample dimension at other numbers of
samples. Not covered: decisions in Python (`if loss.item() > 1`), inside the model, and in custom kernels; masks made of
positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.batches.tree import tensors
from memfit.capture.size_dependence import Taken, taken, told_by_positions

COMPARING = frozenset(
    "gt ge lt le eq ne greater greater_equal less less_equal isclose argmax argmin topk sign sgn signbit heaviside".split()
)
"""Functions whose results are decisions if the model computed their arguments."""
ORDERING = frozenset("topk sort argsort msort kthvalue median nanmedian quantile".split())
"""Functions that sort; on a vector, they sort samples."""
PICKING = frozenset("nonzero argwhere masked_select".split())
"""Functions whose results have one entry per selected element."""
INDEXING = frozenset("getitem index_select take masked_select index gather".split())
"""Functions that select entries by an index."""
READING = frozenset("item int float bool index tolist".split())
"""Functions that turn a tensor into a Python number; what is done with that is not seen."""
LIMITING = frozenset(
    "relu relu6 clamp clamp_min clamp_max clip minimum maximum max min where hardtanh threshold abs absolute fabs sign sgn "
    "copysign heaviside fmax fmin amax amin aminmax leaky_relu rrelu prelu elu selu celu softplus hardsigmoid hardswish "
    "hardshrink softshrink round floor ceil trunc fix frac fmod remainder norm vector_norm linalg_norm linalg_vector_norm "
    "dist l1_loss smooth_l1_loss huber_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss "
    "multilabel_margin_loss".split()
)
"""Functions whose gradient vanishes or changes beyond a limit, and that may be linear on either side of it."""

class Decides(TorchFunctionMode):
    """Function mode that finds decisions. `how` says the first way in which a result with a gradient depends on one, or None.

    `limited` counts calls of functions with limits, by their argument shapes; `taken` holds what was taken by position.
    `told_by` compares both with runs at other numbers of samples.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.how: str | None = None
        self.limited: Counter[tuple[Any, ...]] = Counter()
        self.taken: set[Taken] = set()
        self._model, self._inside = model, 0
        self._hooks: list[Any] = []
        self._read = self._used = False
        self._computed, self._decided, self._picked, self._constant = (WeakTensorKeyDictionary() for _ in range(4))

    def __enter__(self) -> Decides:
        self._hooks = [self._model.register_forward_pre_hook(self._entered), self._model.register_forward_hook(self._left)]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self._hooks:
            hook.remove()

    def _entered(self, module: nn.Module, args: Any) -> None:
        self._inside += 1

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._inside -= 1
        for tensor in tensors(output):
            self._computed[tensor] = True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._inside:
            given, made = tensors((args, kwargs or {})), tensors(result)
            name = func.__name__.strip("_")
            if given:
                self.taken.update(taken(name, args, kwargs or {}))
                self._look_at_limits(name, given, made)
                if self.how is None:
                    self._look(name, given, made)
        return result

    def _look_at_limits(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Results of parameters alone (penalties, a clamped temperature) are skipped: they are the same in every part."""
        constant = all(isinstance(t, nn.Parameter) or t in self._constant or not (t.requires_grad or t.dim()) for t in given)
        if constant:
            for tensor in made:
                self._constant[tensor] = True
            return
        for tensor in made:
            self._constant.pop(tensor, None)  # written in place
        if name in LIMITING and any(t.requires_grad for t in made):
            self.limited[(name, *(tuple(t.shape) for t in given))] += 1

    def _look(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        computed = any(t.requires_grad or t in self._computed for t in given)
        made = given[:1] if name == "setitem" else made
        decided = [t for t in given if t in self._decided]
        picked = any(t in self._picked for t in given)
        with_gradient = any(t.requires_grad for t in made)
        self._used |= with_gradient and bool(decided)
        self._read |= name in READING and bool(decided)
        if with_gradient:
            self.how = self._way(name, given, decided, picked)
        if self.how is None and self._used and self._read:  # a metric reads decisions, too, but does not weight the loss
            self.how = "it reads a number off what the model decided"
        ordered = computed and name in ORDERING and given[0].dim() == 1
        for tensor in made:
            if computed:
                self._computed[tensor] = True
            if decided or (computed and name in COMPARING):
                self._decided[tensor] = True
            if picked or ordered or (decided and name in PICKING):
                self._picked[tensor] = True

    @staticmethod
    def _way(name: str, given: list[torch.Tensor], decided: list[torch.Tensor], picked: bool) -> str | None:
        if name in INDEXING and (picked or any(t.dtype is torch.bool for t in decided)):
            return "it picks samples by what the model computed"
        if name in ORDERING and given[0].dim() == 1:
            return "it orders samples by what the model computed"
        if any(t.dim() == 0 and not t.requires_grad for t in decided):
            return "it weighs by a count of what the model computed"
        return None


def told_by(looks: Sequence[tuple[int, Decides]]) -> str | None:
    """Return how a loss of any kind decides, judged from runs at different numbers of samples, or None. The first run has the
    samples of all others together."""
    (samples, whole), *parts = looks
    if not any(count < samples for count, _ in parts):
        return None
    for limited, times in whole.limited.items():  # per-sample work changes shapes or number of calls
        if all(part.limited[limited] == times for count, part in parts if count < samples):
            return "it limits what was summed over samples"
    by_position = told_by_positions(samples, whole.taken, [(count, part.taken) for count, part in parts])
    return "it takes samples by their position in the batch" if by_position else None
