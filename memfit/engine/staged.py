"""Staged gradients: the gradients of an effective batch before the user's backward receives them.

During an effective batch, *aliases* replace the module's parameters (same storage, own `.grad`). Micro-batches accumulate
layer by layer, without a second set of gradients and without calling the user's hooks. Autograd then receives the total
through `hand_over`. Not covered: parameters that a forward reads from outside their module (closures, plain lists);
`check_nothing_escaped` finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from memfit._errors import Refused
from memfit.engine.gradients import is_sparse, set_gradients
from memfit.engine.modules import modules_of, parameters_in


@dataclass(frozen=True)
class ParameterSlot:
    """One place in a module that holds a parameter (tied weights have several)."""

    module: nn.Module
    """The module that owns the entry."""
    name: str
    """The parameter's name within that module."""


class Staging:
    """The aliases of a model's parameters, and the gradients that accumulate in them.

    `outside` lists trained parameters that belong to no module of the model (a loss's own weights). Their own `.grad` is set
    aside while gradients are staged in it. `leaves` are those of the current batch.
    """

    def __init__(self, model: nn.Module, outside: Iterable[torch.Tensor] = ()) -> None:
        self.model = model
        self.outside = list(outside)
        self.leaves: list[torch.Tensor] = []
        self.parts: Parts | None = None
        """The sharded parameters (FSDP2); None if parameters are not sharded."""
        self._aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._wide: dict[int, torch.Tensor] = {}
        self._depth = 0

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that receive gradients, without duplicates: the model's, then the outside ones."""
        if self.parts is not None:
            return [p for p in (*self.parts.parameters, *self.outside) if p.requires_grad]
        found = parameters_in(modules_of(self.model))
        if self.outside:
            found = list({id(p): p for p in (*found, *self.outside)}.values())
        return [p for p in found if p.requires_grad]

    def stage_also(self, parameters: Iterable[torch.Tensor]) -> None:
        """Stage these parameters too, which belong to no module but receive gradients through the model."""
        self.outside += [p for p in parameters if not self._is_outside(p)]

    @contextmanager
    def also(self, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
        """Also stage these tensors of a batch that require gradients."""
        if not leaves:
            yield
            return
        before, self.outside = self.outside, [*self.outside, *leaves]
        self.leaves = list(leaves)
        try:
            yield
        finally:
            self.outside, self.leaves = before, []

    @property
    def versions(self) -> int:
        """A number that grows when a parameter is written in place."""
        return sum(p._version for p in self.model.parameters() if not p.is_inference())

    def holds_only(self, known: dict[int, Any]) -> bool:
        """Whether every parameter in the model is in `known` (by id). False inside `functional_call`."""
        if self.parts is not None:
            return True  # sharded and unsharded parameters take turns there
        return all(id(p) in known for p in parameters_in(modules_of(self.model)))

    def is_swapped(self) -> bool:
        """Whether a pass is running. No code of the script runs between a forward and its backward."""
        return self._depth > 0

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Replace the model's parameters by aliases. The originals come back, even after an error. Re-entrant."""
        if self._depth:
            yield
            return
        if self.parts is not None:
            with self._in_parts(self.parts):
                yield
            return
        modules, changed = modules_of(self.model), []
        set_aside = [(p, p.grad) for p in self.outside]
        self._depth += 1
        try:
            for p in self.outside:
                p.grad = None
            self._put_aliases(modules, changed)
            yield
        finally:
            self._depth -= 1
            for entries, name, original in reversed(changed):
                alias = self._alias_of(original)
                if alias is not None and name in entries and entries[name] is alias:
                    _follow(original, alias)
                entries[name] = original
            refresh_flat_weights(modules)
            for p, grad in set_aside:
                self._gather_outside(p)
                p.grad = grad

    @contextmanager
    def _in_parts(self, parts: Parts) -> Iterator[None]:
        """Accumulate in the sharded parameters' own `.grad`, whose previous values are set aside. Training gradients stay in
        `gathered` until `take_parts`, as other ranks may still add to them."""
        before = [p.grad for p in parts.parameters]
        known = parts.gathered if parts.counting else None
        set_gradients(parts.parameters, known or [None] * len(before))
        parts.gathered = None if parts.counting else parts.gathered
        self._depth, parts.live = 1, parts.counting
        try:
            yield
            if parts.counting:
                parts.gathered = [p.grad for p in parts.parameters]
        finally:
            self._depth, parts.live = 0, False
            set_gradients(parts.parameters, before)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Mark gradients of sharded parameters as training gradients, not those of a proof."""
        if self.parts is None:
            yield
            return
        before, self.parts.counting = self.parts.counting, True
        try:
            yield
        finally:
            self.parts.counting = before

    def relative_to(self, weight: float) -> float:
        """Return the remaining factor of a total with this weight: its inverse for sharded gradients, which are weighted
        before their reduce-scatter."""
        return 1.0 if self.parts is None or not weight else 1.0 / weight

    def take_parts(self) -> list[torch.Tensor | None]:
        """Move out the gradients of sharded parameters, after all ranks have added theirs."""
        assert self.parts is not None
        gathered, self.parts.gathered = self.parts.gathered or [], None
        return [grad for p, grad in zip(self.parts.parameters, gathered) if p.requires_grad]

    def alias(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the tensor that replaces `parameter` in the module: same storage, own gradient."""
        known = self._alias_of(parameter)
        if known is not None and _still_stands_for(known, parameter):
            return known
        if known is not None and _may_stand_for(known, parameter):  # its data was replaced; graphs may refer to this alias
            known.data = parameter.detach()
            return known
        alias = _make_alias(parameter)
        self._aliases[id(parameter)] = (parameter, alias)
        return alias

    def accumulate_in_float32(self, parameters: Sequence[torch.Tensor] | None = None) -> None:
        """Until `take`, accumulate gradients of half precision parameters (None: all) in separate float32 buffers."""
        for p in () if self.parts is not None else self.parameters() if parameters is None else parameters:
            if p.dtype in (torch.float16, torch.bfloat16) and not self._is_outside(p):
                alias = self.alias(p)
                if not hasattr(alias, "_memfit_widens"):
                    alias._memfit_widens = alias.register_post_accumulate_grad_hook(self._widen)  # type: ignore[attr-defined]

    def take(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Move out the gradients in the order of `parameters`. None if no micro-batch reached the parameter, or if other ranks
        may still add to its gradient."""
        if self.parts is not None:
            return [None] * len(parameters) if self.parts.counting else [p.grad for p in parameters]
        return [self._take_one(p) for p in parameters]

    def fill(self) -> None:
        """Add zero gradients for parameters in the model that no micro-batch has reached."""
        for p in () if self.parts is None else self.parts.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad
        for parameter, alias in self._aliases.values():
            if alias.grad is None and id(alias) not in self._wide and alias.requires_grad:
                alias.grad = torch.zeros_like(parameter)

    def discard(self) -> None:
        """Drop all staged gradients."""
        if self.parts is not None and self._depth:
            set_gradients(self.parts.parameters, [None] * len(self.parts.parameters))
        for _p, alias in self._aliases.values():
            alias.grad = None
        for p in self.outside if self._depth else ():  # their own gradients are set aside
            p.grad = None
        self._wide.clear()

    def staged_bytes(self) -> int:
        """Return the bytes of the staged gradients."""
        grads = [alias.grad for _, alias in self._aliases.values() if alias.grad is not None]
        if self.parts is not None:
            grads = [p.grad.to_local() for p in self.parts.parameters if p.grad is not None]  # type: ignore[attr-defined]
        return sum(_gradient_bytes(g) for g in (*grads, *self._wide.values()))

    def _put_aliases(self, modules: Iterable[nn.Module], changed: list[tuple[dict[str, Any], str, Any]]) -> None:
        for module in modules:
            entries, sparse = module._parameters, is_sparse(module)
            for name, original in entries.items():
                if original is not None and original.requires_grad:
                    changed.append((entries, name, original))
                    entries[name] = alias = self.alias(original)  # pyright: ignore[reportArgumentType]
                    if sparse and not hasattr(alias, "_memfit_merges"):
                        alias._memfit_merges = alias.register_post_accumulate_grad_hook(_merge_rows)  # type: ignore[attr-defined]
        refresh_flat_weights(modules)
        if len(self._aliases) > len(changed):  # parameters were replaced: drop references to the old ones
            used = {id(original) for _, _, original in changed}
            self._aliases = {key: pair for key, pair in self._aliases.items() if key in used}

    def _alias_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        known = self._aliases.get(id(parameter))
        return None if known is None else known[1]

    def _is_outside(self, parameter: torch.Tensor) -> bool:
        return any(parameter is p for p in self.outside)

    def _widen(self, alias: torch.Tensor) -> None:
        grad, alias.grad = alias.grad, None
        if grad is None:
            return
        wide = self._wide.get(id(alias))
        if wide is None:
            self._wide[id(alias)] = grad.float()
        else:
            wide.add_(grad)

    def _gather_outside(self, outside: torch.Tensor) -> None:
        if outside.grad is not None:
            gathered = self._wide.pop(id(outside), None)
            self._wide[id(outside)] = outside.grad if gathered is None else gathered.add_(outside.grad)

    def _take_one(self, parameter: torch.Tensor) -> torch.Tensor | None:
        alias = self._alias_of(parameter)
        wide = self._wide.pop(id(parameter if alias is None else alias), None)
        if wide is not None or alias is None:
            return wide
        grad, alias.grad = alias.grad, None
        return grad


class Parts(Protocol):
    """The sharded parameters of a model (FSDP2)."""

    parameters: list[Any]
    """This rank's shards, in the model's order."""
    counting: bool
    """Whether passes compute training gradients."""
    live: bool
    """Whether training gradients accumulate in the parameters now."""
    gathered: list[torch.Tensor | None] | None
    """Training gradients so far, until all ranks have added theirs."""


def check_nothing_escaped(
    parameters: Sequence[torch.Tensor], before: Sequence[torch.Tensor | None], model: nn.Module
) -> None:
    """Raise Refused if an original parameter got a gradient while its alias replaced it in the module."""
    for p, grad in zip(parameters, before):
        if p.grad is not grad:
            name = next((name for name, q in model.named_parameters() if q is p), "a parameter")
            raise Refused(
                "staging the gradients of micro-batches",
                found=f"{name} is used by the forward through a reference outside the module that owns it",
                next_move="read it as an attribute of its module (self.weight) instead of keeping it in a list or closure",
            )


def _make_alias(tensor: torch.Tensor) -> torch.Tensor:
    twin = tensor.detach()
    alias = nn.Parameter(twin) if type(tensor) is nn.Parameter else twin.requires_grad_()
    alias.__dict__.update({k: v for k, v in tensor.__dict__.items() if not k.startswith("_memfit")})  # pyright: ignore[reportAttributeAccessIssue]
    return alias


def _merge_rows(alias: torch.Tensor) -> None:
    """Sum duplicate rows of a sparse gradient: torch appends the rows of each micro-batch."""
    if alias.grad is not None and alias.grad.is_sparse:
        alias.grad = alias.grad.coalesce()


def _gradient_bytes(gradient: torch.Tensor) -> int:
    if gradient.is_sparse:
        return gradient._indices().untyped_storage().nbytes() + gradient._values().untyped_storage().nbytes()
    return gradient.untyped_storage().nbytes()


def _still_stands_for(alias: torch.Tensor, parameter: torch.Tensor) -> bool:
    return (
        alias.untyped_storage()._cdata == parameter.untyped_storage()._cdata
        and alias.dtype == parameter.dtype
        and alias.shape == parameter.shape
        and alias.storage_offset() == parameter.storage_offset()
    )


def _may_stand_for(alias: torch.Tensor, parameter: torch.Tensor) -> bool:
    return alias.dtype == parameter.dtype and alias.shape == parameter.shape and alias.device == parameter.device


def _follow(parameter: torch.Tensor, alias: torch.Tensor) -> None:
    """Give the parameter the data that a forward assigned to its alias (`self.weight.data = renorm(...)`)."""
    if not _still_stands_for(alias, parameter):
        parameter.data = alias.detach()


def refresh_flat_weights(modules: Iterable[nn.Module]) -> None:
    """Update the lists of parameters that RNN modules keep (`_flat_weights`). Otherwise a forward rebuilds them, which looks
    like a side effect."""
    for module in modules:
        names = module.__dict__.get("_flat_weights_names")
        if names is None:
            continue
        module._flat_weights = found = [getattr(module, name, None) for name in names]  # type: ignore[assignment]
        if "_flat_weight_refs" in module.__dict__:
            module._flat_weight_refs = [None if w is None else weakref.ref(w) for w in found]  # type: ignore[assignment]
