"""Random draws for runs over copies of one sample: all copies draw the same, so that nothing but their number tells runs apart.

The k-th draw of a run has the rows that the first copy drew in the k-th draw of a recorded run. Integers (positions, classes,
permutations) are the least possible. Not covered: Python's and NumPy's generators, and draws inside fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

MOST_OPERATIONS = 200_000
"""Operations after which a run is stopped: a loop that ends once two samples differ does not end where all are copies."""
_DROPOUT = torch.ops.aten.native_dropout.default
_PERMUTATION = torch.ops.aten.randperm


class AlikeDraws:
    """The draws of a run over `samples` copies, for runs over other numbers of them."""

    def __init__(self, samples: int) -> None:
        self._samples = samples
        self._recorded: list[torch.Tensor] = []
        self._dims: dict[int, int] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the run that is recorded."""
        self._recorded = []
        with _Answering(self._record):
            yield

    @contextmanager
    def given(self, samples: int) -> Iterator[None]:
        """Context of a run over this number of copies."""
        numbers = iter(range(len(self._recorded)))

        def rows(drawn: torch.Tensor) -> torch.Tensor:
            number = next(numbers, None)
            return drawn if number is None else self._rows(number, drawn, samples)

        with _Answering(rows):
            yield

    def _record(self, drawn: torch.Tensor) -> torch.Tensor:
        self._recorded.append(drawn.detach().clone())
        return drawn

    def _rows(self, number: int, drawn: torch.Tensor, samples: int) -> torch.Tensor:
        """Return what the first copy drew, for each of `samples` copies; without a dimension of copies, what was drawn."""
        recorded = self._recorded[number]
        if recorded.dim() != drawn.dim():
            return drawn
        for dim, (there, size) in enumerate(zip(recorded.shape, drawn.shape)):
            if there != size and there * samples == size * self._samples:
                self._dims[number] = dim
        dim = self._dims.get(number)
        if dim is not None and recorded.shape[dim] % self._samples == 0:
            recorded = torch.cat([recorded.narrow(dim, 0, recorded.shape[dim] // self._samples)] * samples, dim)
        return recorded if recorded.shape == drawn.shape else drawn


class _Answering(TorchDispatchMode):
    """Replaces what random operators draw by what `answer` returns for it."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer, self._operations = answer, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo, which takes a second, to exclude this class from it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._operations += 1
        if self._operations > MOST_OPERATIONS:
            raise RuntimeError(f"{MOST_OPERATIONS} operations on copies of one sample: the loop may not end")
        out = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in str(func):
            return out
        if func is _DROPOUT:
            mask = self._answer(out[1])
            return args[0] * mask * (0.0 if args[1] >= 1.0 else 1.0 / (1.0 - args[1])), mask
        if not isinstance(out, torch.Tensor):
            return out
        if func.overloadpacket is _PERMUTATION:
            return out.copy_(torch.arange(len(out), dtype=out.dtype, device=out.device))
        if not out.is_floating_point():
            return out.fill_(_least(func, args, kwargs))
        return out.copy_(self._answer(out))


def _least(func: Any, args: Any, kwargs: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    return int(given.get("low", given.get("from", 0)) or 0)
