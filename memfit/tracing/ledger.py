"""Records every storage that is allocated and freed while a dispatch mode is active, on fake or real tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.batches.tree import tensors
from memfit.kernels.fused import KERNEL
from memfit.profiling.timeline import CATEGORIES, Phase, Timeline, Visit
from memfit.tracing.fake import QUESTIONS, answered
from memfit.tracing.flop_counter import Counts


class Ledger(TorchDispatchMode):
    """Records allocations and frees of storages in order, with the running module and the phase of the step.

    `present(tensors, category)` registers existing storages, `phase(name)` begins a phase, `timeline()` returns the recording.
    Only storages on `device` count. The ledger holds weak references and keeps no storage alive. `inside(operation, arguments,
    result)` returns the bytes that a kernel holds besides these in each stage of its run. `counts` counts what is computed;
    with it, each storage is recorded with the operation that created it.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        inside: Callable[[Any, Any, Any], tuple[int, ...]] | None = None,
        counts: Counts | None = None,
    ) -> None:
        super().__init__()
        self.device, self._inside, self._counts = device.type, inside, counts
        self._index: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._references: dict[int, Any] = {}
        self._bytes: list[int] = []
        self._category: list[str | None] = []
        self._born_in: list[str] = []
        self._died_in: dict[int, str] = {}
        self._owner: list[int] = []
        self._made_by: list[str] = []
        self._running = ""
        self._event: list[int] = []
        self._birth: list[bool] = []
        self._phases: list[Phase] = [Phase("present", 0)]
        self._windows: list[int] = []
        self._owners: dict[str, int] = {"": 0}
        self._stack: list[str] = []
        self._node_owner: dict[int, str] = {}
        self._borrowed: set[int] = set()
        self._open: list[tuple[str, int, tuple[int, ...]]] = []
        self._visits: list[Visit] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports dynamo, which takes a second, to exclude this class from it

    def present(self, tensors: Iterable[torch.Tensor], category: str, owner: str | None = None) -> None:
        """Registers the storages of `tensors`, or sets the category of known ones, and the owner if one is given."""
        for tensor in tensors:
            index = self._see(tensor)
            if index is not None:
                self._category[index] = category
                if owner is not None:
                    self._owner[index] = self._numbered(owner)

    def beside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Marks those of `tensors` without a category as "other": the script itself holds them."""
        for tensor in tensors:
            index = self._see(tensor)
            if index is not None and self._category[index] is None:
                self._category[index] = "other"

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Counts the storages of `tensors` as zero bytes: they stand for memory that is counted elsewhere."""
        for tensor in tensors:
            index = self._see(tensor)
            if index is not None:
                self._bytes[index] = 0
                self._borrowed.add(index)

    def phase(self, name: str) -> None:
        """Begins a phase of the step."""
        self._phases.append(Phase(name, len(self._event)))

    def window(self) -> None:
        """Marks the start of a micro-batch."""
        self._windows.append(len(self._event))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in QUESTIONS:
            return answered(func, args)
        out = func(*args, **(kwargs or {}))
        if self._counts is not None:
            self._running = KERNEL.get() or self._counts.name(func)
        if isinstance(out, torch.Tensor):
            self._see(out)
        elif isinstance(out, (tuple, list)):
            for item in out:
                if isinstance(item, torch.Tensor):
                    self._see(item)
        if self._inside is not None:
            for size in self._inside(func, args, out):
                self._within_kernel(size)
        if self._counts is not None:
            self._counts.add(func, args, kwargs, out, len(self._event), self._owner_now())
            self._running = ""
        return out

    @contextmanager
    def naming(self, model: nn.Module, blocks: Iterable[str] = ()) -> Iterator[None]:
        """Attributes allocations in the context to the modules of `model`, by name, and records the runs through `blocks`."""
        names = {module: name for name, module in model.named_modules()}
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(lambda m, args: self._enter(names.get(m))),
            nn.modules.module.register_module_forward_hook(lambda m, args, out: self._leave(names.get(m)), always_call=True),
        ]
        for name in blocks:
            block = model.get_submodule(name)
            hooks.append(block.register_forward_pre_hook(partial(self._begin_visit, name), with_kwargs=True))
            ended = partial(self._end_visit, name)
            # Recomputation leaves a block early, with an exception, once every tensor it needs exists.
            hooks.append(block.register_forward_hook(ended, with_kwargs=True, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()
            self._open.clear()

    def restart(self) -> None:
        """Discards the recording; the next one starts with the storages that are alive now."""
        alive = sorted(self._references)
        self._event, self._birth = list(alive), [True] * len(alive)
        self._phases, self._windows, self._visits = [Phase("present", 0)], [], []
        if self._counts is not None:
            self._counts.restart()

    def timeline(self) -> Timeline:
        """Returns the recording, with all bytes as `fixed`."""
        used = sorted(set(self._event))
        position = {index: i for i, index in enumerate(used)}
        operation, names = self._makers(used)
        return Timeline(
            fixed=np.array([self._bytes[i] for i in used], dtype=np.float64),
            per_sample=np.zeros(len(used)),
            category=np.array([CATEGORIES.index(self._category_of(i)) for i in used], dtype=np.int8),
            owner=np.array([self._owner[i] for i in used], dtype=np.int32),
            event=np.array([position[i] for i in self._event], dtype=np.int32),
            birth=np.array(self._birth, dtype=bool),
            owners=tuple(self._owners),
            phases=tuple(self._phases),
            window=tuple(self._windows),
            visits=tuple(
                replace(
                    v,
                    inputs=tuple(position[i] for i in v.inputs if i in position),
                    outputs=tuple(position[i] for i in v.outputs if i in position),
                )
                for v in self._visits
            ),
            operations=None if self._counts is None else self._counts.operations(tuple(self._owners)),
            operation=operation,
            operation_names=names,
        )

    def _makers(self, used: list[int]) -> tuple[np.ndarray | None, tuple[str, ...]]:
        """The index of the operation that created each of these allocations, and the operation names."""
        if self._counts is None:
            return None, ()
        numbers: dict[str, int] = {"": 0}
        found = [numbers.setdefault(self._made_by[i], len(numbers)) for i in used]
        return np.array(found, dtype=np.int32), tuple(numbers)

    def _see(self, tensor: torch.Tensor) -> int | None:
        # A fake tensor's `.device` is a dispatched operation; its `fake_device` is an attribute.
        device = getattr(tensor, "fake_device", None) or tensor.device
        if device.type != self.device:
            return None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors: indices and values have their own storages
            return self._see_parts(tensor)
        index = self._index.get(storage)
        if index is None:
            index = self._enter_storage(storage)
        elif storage.nbytes() != self._bytes[index] and index not in self._borrowed:
            self._resized(index, storage)
        return index

    def _see_parts(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is torch.sparse_coo:
            self._see(tensor._indices())
            return self._see(tensor._values())
        return None

    def _enter_storage(self, storage: Any) -> int:
        index = len(self._bytes)
        self._bytes.append(storage.nbytes())
        self._category.append(None)
        self._born_in.append(self._phases[-1].name)
        self._owner.append(self._owner_now())
        self._made_by.append(self._running)
        self._event.append(index)
        self._birth.append(True)
        self._index[storage] = index
        self._references[index] = weakref.ref(storage, lambda _, i=index: self._gone(i))
        return index

    def _within_kernel(self, size: int) -> None:
        """Records memory that is allocated and freed within one operation, besides its arguments and results."""
        if size <= 0:
            return
        index = len(self._bytes)
        self._bytes.append(size)
        self._category.append("transient")
        self._born_in.append(self._phases[-1].name)
        self._owner.append(self._owner_now())
        self._made_by.append(self._running)
        self._event += [index, index]
        self._birth += [True, False]

    def _resized(self, index: int, storage: Any) -> None:
        self._gone(index)
        self._references.pop(index, None)
        del self._index[storage]
        self._enter_storage(storage)

    def _gone(self, index: int) -> None:
        self._references.pop(index, None)
        self._died_in[index] = self._phases[-1].name
        self._event.append(index)
        self._birth.append(False)

    def _enter(self, name: str | None) -> None:
        if name is not None:
            self._stack.append(name)

    def _leave(self, name: str | None) -> None:
        if name is not None and self._stack:
            self._stack.pop()

    def _begin_visit(self, block: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append((block, len(self._event), self._known((args, kwargs))))

    def _end_visit(self, block: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self._open:
            name, start, inputs = self._open.pop()
            if name == block:
                phase = self._phases[-1].name
                self._visits.append(Visit(block, start, len(self._event), phase, inputs, self._known(out)))
                return

    def _known(self, tree: Any) -> tuple[int, ...]:
        """The allocations of the tensors in a tree."""
        found = (self._index.get(t.untyped_storage()) for t in tensors(tree) if t.layout is torch.strided)
        return tuple(dict.fromkeys(i for i in found if i is not None))

    def _owner_now(self) -> int:
        if self._stack:
            name = self._stack[-1]
            # The first operation at a number created its node; operations without one (batch norm's counter) share the number.
            self._node_owner.setdefault(_sequence_number(), name)
        else:
            node = torch._C._current_autograd_node()
            name = "" if node is None else self._owner_of_node(node._sequence_nr())
        return self._numbered(name)

    def _numbered(self, owner: str) -> int:
        return self._owners.setdefault(owner, len(self._owners))

    def _owner_of_node(self, sequence: int) -> str:
        # Forward numbers nodes as it creates them; a node belongs to the module that ran at its number.
        return self._node_owner.get(sequence + 1, self._node_owner.get(sequence, ""))

    def _category_of(self, index: int) -> str:
        named = self._category[index]
        if named is not None:
            return named
        born, died = self._born_in[index], self._died_in.get(index)
        if born == "input":
            return "input"
        if born == "forward" and died != "forward":
            return "kept"
        if born == "optimizer" and died is None:
            return "optimizer"
        return "transient"


def _sequence_number() -> int:
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
