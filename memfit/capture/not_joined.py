"""Stands in for what a model returns that memfit cannot join from micro-batches."""

from __future__ import annotations

from typing import Any

from memfit._errors import Refused
from memfit.batches.tree import flat

NUMBERS = ("int", "float", "bool", "complex", "str", "NoneType")
"""Types of outputs that hide no tensors."""


class NotJoined:
    """Placeholder for an output object that memfit cannot join from micro-batches. Using it raises `error`."""

    def __init__(self, name: str, kind: str, error: Refused | None = None) -> None:
        self.__dict__.update(_memfit_name=name, _memfit_kind=kind, _memfit_error=error or _not_joined(name, kind))

    def __repr__(self) -> str:
        return f"<{self._memfit_name}: a {self._memfit_kind}, not joined from micro-batches>"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self._memfit_error

    def _refuse(self, *args: Any) -> Any:
        raise self._memfit_error

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise next(leaf._memfit_error for leaf in flat((args, kwargs or {})) if isinstance(leaf, cls))

    __getitem__ = __iter__ = __len__ = __float__ = __int__ = __index__ = __bool__ = __format__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __divmod__ = __round__ = __abs__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __invert__ = __matmul__ = __rmatmul__ = __array__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __contains__ = __str__ = __complex__ = __trunc__ = _refuse
    __hash__ = object.__hash__
    __array_ufunc__ = None  # operators of arrays come to the ones above


def _not_joined(name: str, kind: str) -> Refused:
    if kind in (*NUMBERS, "Tensor"):
        found = f"it is a {kind} computed from all samples together, and those of the micro-batches do not add up to it"
        next_move = "return it with one entry per sample, or compute it outside the model"
    else:
        found = f"it is a {kind}, and memfit joins tensors only"
        next_move = "switch it off in the model (for example use_cache=False), or read it under torch.no_grad()"
    return Refused(f"using {name} of a batch that ran in micro-batches", found=found, next_move=next_move)
