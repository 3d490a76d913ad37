"""Gives each part of a batch its slice of the full batch's random draws, so that results differ only if samples are mixed.

A run over the full batch records every draw in order. The k-th draw of a part gets its rows of the k-th record. Draws outside
torch (layer drop with `random.random()`) have no rows; each part repeats them. Not covered: operators that draw inside a fused
kernel (attention with dropout on accelerators); `unsliced` lists those that ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.engine.random_state import HostRandom


class Draws:
    """The random draws of one run over a full batch.

    With `by_operations`, attention runs as single operations, whose dropout can be sliced; else it runs as usual. `drew` tells
    whether there were any.
    """

    def __init__(self, *, by_operations: bool = False) -> None:
        self.recorded: list[torch.Tensor] = []
        self.unsliced: list[str] = []
        self.drew = False
        self._host = HostRandom.capture()
        self._by_operations = by_operations

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the draws of a run over the full batch."""
        self._host = HostRandom.capture()
        with self._attention(), _Recording(self):
            yield
        self.drew = bool(self.recorded or self.unsliced) or not self._host.is_in_force()

    @contextmanager
    def sliced(self, start: int, stop: int, whole: int) -> Iterator[None]:
        """Run the part `start:stop` of `whole` samples with its rows of the recorded draws."""
        self._host.restore()
        with self._attention(), _Slicing(self, start, stop, whole):
            yield

    @contextmanager
    def reversed(self, whole: int) -> Iterator[None]:
        """Run the same `whole` samples in reverse order, with their draws in reverse order."""
        self._host.restore()
        with self._attention(), _Slicing(self, 0, whole, whole, backwards=True):
            yield

    def _attention(self) -> AbstractContextManager[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.MATH) if self._by_operations else nullcontext()  # pyright: ignore[reportReturnType]


class _Recording(TorchDispatchMode):
    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports dynamo (a second) to skip this class

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs):
            if "attention" in str(func):
                self._draws.unsliced.append(str(func))
            elif func is _DROPOUT:
                self._draws.recorded.append(out[1].clone())
            elif isinstance(out, torch.Tensor):
                self._draws.recorded.append(out.detach().clone())
            else:
                self._draws.unsliced.append(str(func))
        return out


class _Slicing(TorchDispatchMode):
    def __init__(self, draws: Draws, start: int, stop: int, whole: int, *, backwards: bool = False) -> None:
        super().__init__()
        self._draws, self._start, self._stop, self._whole, self._backwards = draws, start, stop, whole, backwards
        self._next = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if "attention" in str(func):
            return func(*args, **kwargs)
        if func is _DROPOUT:
            x, p = args[0], args[1]
            mask = self._take(x.shape)
            if mask is None:
                return func(*args, **kwargs)
            return x * mask * (0.0 if p >= 1.0 else 1.0 / (1.0 - p)), mask
        out = func(*args, **kwargs)
        drawn = self._take(out.shape) if isinstance(out, torch.Tensor) else None
        if drawn is not None:
            out.copy_(drawn)
        return out

    def _take(self, shape: torch.Size) -> torch.Tensor | None:
        """The rows of the next recorded draw for a tensor of this shape; None if unknown."""
        if self._next >= len(self._draws.recorded):
            return None
        whole = self._draws.recorded[self._next]
        self._next += 1
        if whole.shape == shape:
            return self._turned(whole) if self._backwards else whole
        part = self._stop - self._start
        for dim, (big, small) in enumerate(zip(whole.shape, shape)):
            if big * part == small * self._whole and (big != small or part == self._whole):
                rows = whole.narrow(dim, self._start * (big // self._whole), small)
                return self._cropped(rows, shape, dim)
        self._draws.unsliced.append(f"a draw of shape {tuple(whole.shape)}")
        return None

    def _cropped(self, rows: torch.Tensor, shape: torch.Size, dim: int) -> torch.Tensor | None:
        """`rows` without padding at the end of the other dimensions, which a part collated on its own lacks."""
        if rows.dim() != len(shape) or any(have < want for have, want in zip(rows.shape, shape)):
            self._draws.unsliced.append(f"a draw of shape {tuple(rows.shape)}")
            return None
        return rows[tuple(slice(0, size) for size in shape)]

    def _turned(self, whole: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(whole.shape):
            if size % self._whole == 0:
                parts = whole.unflatten(dim, (self._whole, size // self._whole))
                return parts.flip(dim).flatten(dim, dim + 1)
        return whole


_DROPOUT = torch.ops.aten.native_dropout.default


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    # Attention kernels carry the tag with or without dropout.
    return "attention" not in str(func) or _dropout_of(func, args, kwargs or {}) > 0.0


def _dropout_of(func: Any, args: Any, kwargs: Any) -> float:
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    return float(given.get("dropout_p", 0.0))
