"""What a script computes from outputs that have not run yet: kept as operations that run again for any micro-batch.

Every operation knows where the samples lie in its result, so that what goes into it besides can be cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from memfit.batches.cut import Axis
from memfit.engine.context import Autocast, autocasting
from memfit.engine.handover import ALMOST, Factor
from memfit.engine.terms import told
from memfit.engine.unchanged import Unchanged
from memfit.training.stated import EITHER, NOTHING

Divisor = int | float | torch.Tensor | None
"""What a sum over the batch is divided by; None: by nothing."""
Leaf = tuple[int, int]
"""A call's number, and the index of a leaf of its output."""


class Part:
    """Some samples on their way to the loss: what the model returned for them, by output leaf, and what was computed since."""

    def __init__(self, outputs: Mapping[Leaf, Any], start: int, stop: int, shared: Collection[int] = ()) -> None:
        self.outputs, self.start, self.stop, self._shared = outputs, start, stop, shared
        self._values: dict[int, Any] = {}

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.stop - self.start

    def value(self, node: Node) -> Any:
        """What an operation gives for these samples; computed once for those (ids) that are `shared`, which are kept."""
        found = self._values.get(id(node))
        if found is None:
            found = node.of(self)
            if id(node) in self._shared:
                self._values[id(node)] = found
        return found

    def put(self, node: Node, value: Any) -> None:
        """Let this be what `node` gives."""
        self._values[id(node)] = value


class Node(Protocol):
    """Something that has a value for every part of the batch."""

    def of(self, part: Part) -> Any:
        """Its value."""
        ...

    def parts(self) -> Iterator[Node]:
        """What it is computed from."""
        ...

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Node:
        """The same with other tensors of the batch."""
        ...


@dataclass(frozen=True, eq=False)
class Output:
    """A leaf of what a call of the model returns."""

    leaf: Leaf

    def of(self, part: Part) -> Any:
        return part.outputs[self.leaf]

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Node:
        return self


SMALL = 1 << 18
"""Bytes of a tensor that is copied."""


def _is_small(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not tensor.requires_grad and tensor.numel() * tensor.element_size() <= SMALL


@dataclass(frozen=True, eq=False)
class Cut:
    """A tensor of the script's that has its samples along `axis`; None: the same for all of them. Of a small one
    there is a copy: the script may write to its own before what it is part of is computed. Where a larger one was written to,
    or one through `.data` (plain backwards would compute with what is there then), torch's own error says so."""

    tensor: torch.Tensor
    axis: Axis | None
    unchanged: Unchanged = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unchanged", Unchanged((self.tensor,), copied=_is_small(self.tensor)))
        if self.unchanged.copied:
            object.__setattr__(self, "tensor", self.tensor.clone())

    def of(self, part: Part) -> torch.Tensor:
        if part.start == 0:
            self.unchanged.check("computes losses in micro-batches when they are wanted")
        return self.tensor if self.axis is None else self.axis.narrow(self.tensor, part.start, part.stop)

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Node:
        return change(self)


@dataclass(frozen=True, eq=False)
class Sized:
    """An argument that depends on the number of samples: sizes of views."""

    of_samples: Callable[[int], Any]

    def of(self, part: Part) -> Any:
        return self.of_samples(part.samples)

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Node:
        return self


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: a torch function whose arguments are constants and nodes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    axis: Axis | None
    """Where the samples lie in the result; None: it adds up over them."""
    autocast: tuple[Autocast, ...] = ()
    """The autocast states it was called under."""
    records: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients flow through it."""

    def of(self, part: Part) -> Any:
        arguments, keywords = self._filled(part)
        with autocasting(self.autocast), nullcontext() if self.records else torch.no_grad():
            return self.function(*arguments, **keywords)

    def told(self, part: Part) -> Any:
        """`of` for a loss of torch.nn.functional, as whoever looks for known means wants it computed."""
        arguments, keywords = self._filled(part)
        with autocasting(self.autocast):
            return told(self.function, arguments, keywords)

    def _filled(self, part: Part) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for these samples."""
        places, names = self._varying
        keywords = {**self.keywords, **{name: _of(self.keywords[name], part) for name in names}} if names else self.keywords
        if not places:
            return self.arguments, keywords
        return tuple([_of(argument, part) if i in places else argument for i, argument in enumerate(self.arguments)]), keywords

    @cached_property
    def _varying(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """Which of its arguments depend on the samples."""
        places = frozenset(i for i, argument in enumerate(self.arguments) if any(_nodes((argument,))))
        return places, tuple(name for name, argument in self.keywords.items() if any(_nodes((argument,))))

    def parts(self) -> Iterator[Node]:
        return iter(self._parts)

    @cached_property
    def leaves(self) -> frozenset[Leaf]:
        """The output leaves that it is computed from."""
        return frozenset().union(*map(leaves_in, self._parts))

    @cached_property
    def _parts(self) -> tuple[Node, ...]:
        return tuple(_nodes((*self.arguments, *self.keywords.values())))

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Node:
        arguments = tuple(_mapped(argument, change, known) for argument in self.arguments)
        keywords = {name: _mapped(argument, change, known) for name, argument in self.keywords.items()}
        return replace(self, arguments=arguments, keywords=keywords)


@dataclass(frozen=True, eq=False)
class Term:
    """What a micro-batch adds to a number of the whole batch: `coefficient * node / count`."""

    node: Node
    """A sum over samples."""
    count: Divisor = None
    """What the whole batch's sum is divided by; None: by nothing, which a mean over one sample is not."""
    coefficient: float = 1.0
    known: Step | None = None
    """The loss of torch.nn.functional that it is a multiple of, if of one alone."""

    def of(self, part: Part) -> torch.Tensor:
        return self.of_sum(part.value(self.node))

    def of_sum(self, value: torch.Tensor) -> torch.Tensor:
        """What it comes to where the sum of `node` is this."""
        count = 1 if self.count is None else self.count
        if isinstance(count, torch.Tensor):
            # Neither a count of integers (divided in float32) nor a half precision's range limits it.
            count = count.to(torch.promote_types(value.dtype, torch.float32))
            return value * (self.coefficient / count).to(value.dtype)
        scale = self.coefficient / count if count else float("nan")
        return value if scale == 1.0 else value * scale

    def parts(self) -> Iterator[Node]:
        yield self.node

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Term:
        other = change(Cut(self.count, None)) if isinstance(self.count, torch.Tensor) else None
        count = other.tensor if isinstance(other, Cut) else self.count
        return replace(self, node=mapped(self.node, change, known), count=count)

    def counting(self, samples: int) -> tuple[float, Term]:
        """(what it divides by that depends on the batch of so many samples, the same without that). NOTHING for plain sums,
        EITHER for one of a single sample, which may be a mean as well."""
        count, coefficient = self.count, self.coefficient
        if count is None:
            if abs(abs(coefficient) * samples - 1.0) >= ALMOST:
                return NOTHING, self
            if samples == 1:
                return EITHER, self
            count, coefficient = samples, coefficient * samples
        return float(count), replace(self, count=None, coefficient=coefficient)

    def without_coefficient(self) -> Term:
        """The same for a process whose part may have nothing to count, which then comes to nothing."""
        count = self.count
        if isinstance(count, torch.Tensor):
            count = torch.where(count == 0, torch.ones_like(count), count)
        return replace(self, coefficient=1.0, count=count or 1 if isinstance(count, (int, float)) else count)

    def over(self, count: torch.Tensor) -> Term:
        """The same, divided by that."""
        return replace(self, count=count if self.count is None else self.count * count, known=None)

    def times(self, factor: float) -> Term:
        """The same, that many times."""
        return replace(self, coefficient=self.coefficient * factor)


@dataclass(frozen=True, eq=False)
class Sum:
    """Terms added up."""

    terms: tuple[Term, ...]

    def of(self, part: Part) -> torch.Tensor:
        total = part.value(self.terms[0])
        for term in self.terms[1:]:
            total = total + part.value(term)
        return total

    def parts(self) -> Iterator[Node]:
        return iter(self.terms)

    def mapped(self, change: Callable[[Cut], Node], known: dict[int, Node]) -> Sum:
        return Sum(tuple(mapped(term, change, known) for term in self.terms))  # type: ignore[misc]


def as_factor(count: int | float | torch.Tensor) -> Factor:
    """A count as what a mean weighs: a number where it is on the host."""
    return float(count) if not isinstance(count, torch.Tensor) or count.device.type == "cpu" else count


_KINDS = {Step, Cut, Output, Sized, Term, Sum}


def is_node(value: Any) -> bool:
    """Whether an argument has a value of its own for every part of the batch."""
    return type(value) in _KINDS


def mapped(node: Any, change: Callable[[Cut], Node], known: dict[int, Node]) -> Any:
    """The same operations on other tensors of the batch; what several of them use stays one."""
    if id(node) not in known:
        known[id(node)] = node.mapped(change, known)
    return known[id(node)]


def all_nodes(node: Node) -> Iterator[Node]:
    """The node and all it is computed from, each once."""
    open_, seen = [node], set[int]()
    while open_:
        following = open_.pop()
        if id(following) not in seen:
            seen.add(id(following))
            yield following
            open_.extend(following.parts())


def used_again(node: Node) -> frozenset[int]:
    """The ids of what several operations use."""
    seen, again = set[int](), set[int]()
    for each in all_nodes(node):
        for part in each.parts():
            (again if id(part) in seen else seen).add(id(part))
    return frozenset(again)


def leaves_in(node: Node) -> frozenset[Leaf]:
    """The output leaves that it is computed from."""
    if isinstance(node, Step):
        return node.leaves
    return frozenset([node.leaf]) if isinstance(node, Output) else frozenset().union(*map(leaves_in, node.parts()))


def name_of(node: Node) -> str:
    """The operations in words, the same for the same way."""
    if isinstance(node, Output):
        return f"output {node.leaf[1]}"
    if isinstance(node, Step):
        inside = ", ".join(name_of(part) for part in node.parts() if not isinstance(part, (Cut, Sized)))
        return f"{getattr(node.function, '__name__', 'operation')}({inside})"
    return "+".join(name_of(part) for part in node.parts())


def look_of(node: Node, known: Mapping[int, Any], samples: int) -> Hashable:
    """What two operations share whose results look alike; `known` are those of (ids of) nodes that were made before."""
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, Cut):
        return tuple(node.tensor.shape), node.tensor.dtype, node.tensor.device
    if isinstance(node, Sized):
        return node.of_samples(samples)
    if isinstance(node, Step):
        look = (_look(node.arguments, known, samples), _look(list(node.keywords.items()), known, samples))
        return _of_function(node.function), look, node.autocast
    return type(node), tuple(look_of(part, known, samples) for part in node.parts())


def _look(argument: Any, known: Mapping[int, Any], samples: int) -> Hashable:
    if is_node(argument):
        return look_of(argument, known, samples)
    if type(argument) in (tuple, list):
        return tuple(_look(item, known, samples) for item in argument)
    return float if type(argument) is float else repr(argument)  # (a scale that changes at every step)


def _of_function(function: Any) -> Hashable:
    """Partials are equal to themselves alone."""
    if isinstance(function, partial):
        return _of_function(function.func), repr((function.args, function.keywords))
    return function


def narrow_firsts(node: Node, samples: int, *, backwards: bool) -> Node:
    """The same on copies of the first `samples` samples of its tensors, in the opposite order if `backwards`."""

    def first(cut: Cut) -> Node:
        if cut.axis is None:
            return cut
        kept = cut.axis.narrow(cut.tensor, 0, samples)
        return replace(cut, tensor=cut.axis.reversed(kept) if backwards else kept.clone())

    return mapped(node, first, {})


def twinned(node: Node, twin: Callable[[torch.Tensor, Axis | None], torch.Tensor]) -> tuple[Node, Sequence[torch.Tensor]]:
    """The same on twins of its tensors, and these twins."""
    made: list[torch.Tensor] = []

    def twin_of(cut: Cut) -> Node:
        made.append(twin(cut.tensor, cut.axis))
        return replace(cut, tensor=made[-1])

    return mapped(node, twin_of, {}), made


def _of(argument: Any, part: Part) -> Any:
    if is_node(argument):
        return part.value(argument)
    return type(argument)(_of(item, part) for item in argument) if type(argument) in (tuple, list) else argument


def _mapped(argument: Any, change: Callable[[Cut], Node], known: dict[int, Node]) -> Any:
    if is_node(argument):
        return mapped(argument, change, known)
    nested = type(argument) in (tuple, list)
    return type(argument)(_mapped(item, change, known) for item in argument) if nested else argument


def _nodes(arguments: Any) -> Iterator[Node]:
    for argument in arguments:
        if is_node(argument):
            yield argument
        elif type(argument) in (tuple, list):
            yield from _nodes(argument)
