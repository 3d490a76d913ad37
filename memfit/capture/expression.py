"""Deferred expressions: what a script computes from lazy tensors, kept as operations that rerun for any micro-batch.

Every operation knows the sample dimension of its result, so that its other inputs can be cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch

from memfit.batches.cut import Axis
from memfit.capture.sample_range import Leaf, SampleRange
from memfit.engine.call_context import Autocast, autocasting
from memfit.engine.handover import ALMOST, Factor
from memfit.engine.known_means import told
from memfit.engine.version_checks import Unchanged

Divisor = int | float | torch.Tensor | None
"""Denominator of a sum over the batch; None: the sum is not divided."""
NOTHING, EITHER = -2.0, -1.0
"""Codes for a sum's divisor: none; or, for one sample, none or the number of samples."""


class Node(Protocol):
    """Something that has a value for every part of the batch."""

    def of(self, part: SampleRange) -> Any:
        """Return its value for this part."""
        ...

    def parts(self) -> Iterator[Node]:
        """Yield the nodes it is computed from."""
        ...

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Node:
        """Return the same node with its batch tensors replaced by `change`."""
        ...


@dataclass(frozen=True, eq=False)
class Output:
    """A leaf of the output of a model call."""

    leaf: Leaf

    def of(self, part: SampleRange) -> Any:
        return part.outputs[self.leaf]

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Node:
        return self


_LATER = "computing a loss in micro-batches once it is read"
SMALL = 1 << 18
"""Bytes up to which a tensor is copied."""


def _is_small(tensor: torch.Tensor) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and not tensor.requires_grad and tensor.numel() * tensor.element_size() <= SMALL


@dataclass(frozen=True, eq=False)
class BatchTensor:
    """A tensor of the script with its samples along `axis`; None: the same for all samples. A small one is copied: the script
    may write to it before the expression runs. If a larger one was written to, or any one through `.data`, autograd's own error
    is raised (plain backward would compute with the new values)."""

    tensor: torch.Tensor
    axis: Axis | None
    unchanged: Unchanged = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "unchanged", Unchanged((self.tensor,), copied=_is_small(self.tensor)))
        if self.unchanged.copied:
            object.__setattr__(self, "tensor", self.tensor.clone())

    def of(self, part: SampleRange) -> torch.Tensor:
        if part.start == 0:
            self.unchanged.check(_LATER)
            self.unchanged.compare(_LATER)
        if part.in_script and self.unchanged.copied and self.unchanged.tensors and not self.unchanged.written:
            return self.unchanged.tensors[0]
        return self.tensor if self.axis is None else self.axis.narrow(self.tensor, part.start, part.stop)

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Node:
        return change(self)


@dataclass(frozen=True, eq=False)
class Sized:
    """An argument that depends on the number of samples: sizes of views."""

    of_samples: Callable[[int], Any]

    def of(self, part: SampleRange) -> Any:
        return self.of_samples(part.samples)

    def parts(self) -> Iterator[Node]:
        return iter(())

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Node:
        return self


@dataclass(frozen=True, eq=False)
class Step:
    """One operation: a torch function whose arguments are constants and nodes."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    axis: Axis | None
    """The sample axis of the result; None: the result adds up over samples."""
    autocast: tuple[Autocast, ...] = ()
    """The autocast states at the call."""
    records: bool = field(default_factory=torch.is_grad_enabled)
    """Whether gradients flow through it."""

    def of(self, part: SampleRange) -> Any:
        arguments, keywords = self._filled(part)
        with autocasting(self.autocast), nullcontext() if self.records else torch.no_grad():
            return self.function(*arguments, **keywords)

    def told(self, part: SampleRange) -> Any:
        """`of` for a loss of torch.nn.functional, computed as an active `terms.Terms` needs it, which looks for known means."""
        arguments, keywords = self._filled(part)
        with autocasting(self.autocast):
            return told(self.function, arguments, keywords)

    def _filled(self, part: SampleRange) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for these samples."""
        places, names = self._varying
        keywords = {**self.keywords, **{name: _of(self.keywords[name], part) for name in names}} if names else self.keywords
        if not places:
            return self.arguments, keywords
        return tuple([_of(argument, part) if i in places else argument for i, argument in enumerate(self.arguments)]), keywords

    @cached_property
    def _varying(self) -> tuple[frozenset[int], tuple[str, ...]]:
        """The arguments that depend on the samples: (positions, keywords)."""
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

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Node:
        arguments = tuple(_mapped(argument, change, known) for argument in self.arguments)
        keywords = {name: _mapped(argument, change, known) for name, argument in self.keywords.items()}
        return replace(self, arguments=arguments, keywords=keywords)


@dataclass(frozen=True, eq=False)
class Term:
    """What a micro-batch adds to a scalar of the whole batch: `coefficient * node / count`."""

    node: Node
    """A sum over samples."""
    count: Divisor = None
    """Denominator of the whole batch's sum; None: the sum is not divided, unlike a mean over one sample."""
    coefficient: float = 1.0
    known: Step | None = None
    """The loss of torch.nn.functional that it is a multiple of, if it is a multiple of only one."""

    def of(self, part: SampleRange) -> torch.Tensor:
        return self.of_sum(part.value(self.node))

    def of_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Return the term's value, given the sum of `node`."""
        count = 1 if self.count is None else self.count
        if isinstance(count, torch.Tensor):
            # At least float32, and float64 for float64: integer counts divide in float32, and half precision may overflow.
            count = count.to(torch.promote_types(value.dtype, torch.float32))
            return value * (self.coefficient / count).to(value.dtype)
        scale = self.coefficient / count if count else float("nan")
        return value if scale == 1.0 else value * scale

    def parts(self) -> Iterator[Node]:
        yield self.node

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Term:
        other = change(BatchTensor(self.count, None)) if isinstance(self.count, torch.Tensor) else None
        count = other.tensor if isinstance(other, BatchTensor) else self.count
        return replace(self, node=mapped(self.node, change, known), count=count)

    def counting(self, samples: int) -> tuple[float, Term]:
        """Return (the denominator for a batch of that many samples, the term without it). The denominator is NOTHING for plain
        sums, and EITHER for a plain sum of a single sample, which may be a mean as well."""
        count, coefficient = self.count, self.coefficient
        if count is None:
            if abs(abs(coefficient) * samples - 1.0) >= ALMOST:
                return NOTHING, self
            if samples == 1:
                return EITHER, self
            count, coefficient = samples, coefficient * samples
        return float(count), replace(self, count=None, coefficient=coefficient)

    def without_coefficient(self) -> Term:
        """Return the term with coefficient 1, and 1 for a zero denominator: a rank with nothing to count contributes zero."""
        count = self.count
        if isinstance(count, torch.Tensor):
            count = torch.where(count == 0, torch.ones_like(count), count)
        return replace(self, coefficient=1.0, count=count or 1 if isinstance(count, (int, float)) else count)

    def over(self, count: torch.Tensor) -> Term:
        """Return the term divided by `count`."""
        return replace(self, count=count if self.count is None else self.count * count, known=None)

    def times(self, factor: float) -> Term:
        """Return the term multiplied by `factor`."""
        return replace(self, coefficient=self.coefficient * factor)


@dataclass(frozen=True, eq=False)
class Sum:
    """A sum of terms."""

    terms: tuple[Term, ...]

    def of(self, part: SampleRange) -> torch.Tensor:
        total = part.value(self.terms[0])
        for term in self.terms[1:]:
            total = total + part.value(term)
        return total

    def parts(self) -> Iterator[Node]:
        return iter(self.terms)

    def mapped(self, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Sum:
        return Sum(tuple(mapped(term, change, known) for term in self.terms))  # type: ignore[misc]


def as_factor(count: int | float | torch.Tensor) -> Factor:
    """Return a denominator as a weight: a float if it is on the host, else the tensor."""
    return float(count) if not isinstance(count, torch.Tensor) or count.device.type == "cpu" else count


_KINDS = {Step, BatchTensor, Output, Sized, Term, Sum}


def is_node(value: Any) -> bool:
    """Return whether an argument has its own value for every part of the batch."""
    return type(value) in _KINDS


def mapped(node: Any, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Any:
    """Return the same operations on other batch tensors. What several of them share stays shared."""
    if id(node) not in known:
        known[id(node)] = node.mapped(change, known)
    return known[id(node)]


def all_nodes(node: Node) -> Iterator[Node]:
    """Yield the node and all nodes it is computed from, each once."""
    open_, seen = [node], set[int]()
    while open_:
        following = open_.pop()
        if id(following) not in seen:
            seen.add(id(following))
            yield following
            open_.extend(following.parts())


def used_again(node: Node) -> frozenset[int]:
    """Return the ids of nodes that several operations use."""
    seen, again = set[int](), set[int]()
    for each in all_nodes(node):
        for part in each.parts():
            (again if id(part) in seen else seen).add(id(part))
    return frozenset(again)


def leaves_in(node: Node) -> frozenset[Leaf]:
    """Return the output leaves that a node is computed from."""
    if isinstance(node, Step):
        return node.leaves
    return frozenset([node.leaf]) if isinstance(node, Output) else frozenset().union(*map(leaves_in, node.parts()))


def name_of(node: Node) -> str:
    """Return the operations in words; the same computation has the same name."""
    if isinstance(node, Output):
        return f"output {node.leaf[1]}"
    if isinstance(node, Step):
        inside = ", ".join(name_of(part) for part in node.parts() if not isinstance(part, (BatchTensor, Sized)))
        return f"{getattr(node.function, '__name__', 'operation')}({inside})"
    return "+".join(name_of(part) for part in node.parts())


def look_of(node: Node, known: Mapping[int, Any], samples: int) -> Hashable:
    """Return a key that two operations share if their results look alike. `known` has the keys of earlier nodes, by id."""
    if id(node) in known:
        return known[id(node)]
    if isinstance(node, BatchTensor):
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
    return float if type(argument) is float else repr(argument)  # (a scale may change at every step)


def _of_function(function: Any) -> Hashable:
    """Return a key for a function: of a partial its contents, as it equals only itself."""
    if isinstance(function, partial):
        return _of_function(function.func), repr((function.args, function.keywords))
    return function


def narrow_firsts(node: Node, samples: int, *, backwards: bool) -> Node:
    """Return the node on copies of its tensors' first `samples` samples, in reverse order if `backwards`."""

    def first(cut: BatchTensor) -> Node:
        if cut.axis is None:
            return cut
        kept = cut.axis.narrow(cut.tensor, 0, samples)
        return replace(cut, tensor=cut.axis.reversed(kept) if backwards else kept.clone())

    return mapped(node, first, {})


def twinned(node: Node, twin: Callable[[torch.Tensor, Axis | None], torch.Tensor]) -> tuple[Node, Sequence[torch.Tensor]]:
    """Return the node on twins (fake tensors) of its tensors, and these twins."""
    made: list[torch.Tensor] = []

    def twin_of(cut: BatchTensor) -> Node:
        made.append(twin(cut.tensor, cut.axis))
        return replace(cut, tensor=made[-1])

    return mapped(node, twin_of, {}), made


def _of(argument: Any, part: SampleRange) -> Any:
    if is_node(argument):
        return part.value(argument)
    return type(argument)(_of(item, part) for item in argument) if type(argument) in (tuple, list) else argument


def _mapped(argument: Any, change: Callable[[BatchTensor], Node], known: dict[int, Node]) -> Any:
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
