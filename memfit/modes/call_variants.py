"""Tells calls of one signature apart by the numbers that their forward branches on: attributes, globals, counters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from memfit.batches.shapes import samples_by, shapes_per_sample
from memfit.capture.call import Tree
from memfit.capture.earlier_graphs import refuse_earlier_graphs_of
from memfit.capture.infer_layout import outputs_of
from memfit.engine.asked_numbers import Expected, Notes, is_asked_of
from memfit.engine.call_attributes import Attributes
from memfit.engine.read_numbers import Variants
from memfit.engine.recovery import surviving
from memfit.modes.call_kind import CallKind
from memfit.modes.call_proofs import Prover
from memfit.modes.call_signatures import Recognised, Signatures
from memfit.runtime.core import Core
from memfit.runtime.faults import is_fault, strict


class CallVariants:
    """The kinds of calls that have one signature and do different things. Attribute: `attributes`, the model's at the call."""

    attributes: Attributes

    def __init__(self, core: Core, signatures: Signatures, prover: Prover) -> None:
        self._core, self._signatures, self._prover = core, signatures, prover
        self._variants: defaultdict[Hashable, Variants] = defaultdict(Variants)

    def clear(self) -> None:
        """Forget what calls were told apart by."""
        self._variants.clear()

    def current(self, name: str, tree: Tree, hint: int | None, plain: Callable[..., Any] | None = None) -> Recognised:
        """Return a call's kind and its number of samples, under the numbers that the forward may branch on. `plain` is run to
        tell what new ones change."""
        found = self._signatures.recognise(name, tree, hint)
        kind = found.kind
        if kind is not None and kind.is_known_whole(found.samples or 0, found.shapes):
            return found
        variants = self._variants[found.key]
        moved = frozenset[tuple[Any, ...]]() if kind is None else kind.composition.keys
        numbers = self.attributes.numbers(moved)
        if plain is not None and found.samples and kind is not None and kind.proven is not None:
            if wanted := variants.unasked(numbers):
                variants.learn(wanted, self._asked(kind, plain, tree, found, wanted))
                numbers = self.attributes.numbers(moved)
        variant = variants.of(numbers)
        if variant is None and plain is not None:
            variant = variants.choose(numbers, lambda each: self._does_the_same(found, each, plain, tree))
        key = _of_variant(found.key, variant or 0)
        if key == found.key:
            return found
        kind = self._signatures.kinds.get(key)
        samples = _samples_of(kind, found, tree)
        return Recognised(key, kind, samples, () if kind is None else shapes_per_sample(tree, kind.layout, samples))

    def look_at_state(self, kind: CallKind) -> None:
        """Have a kind proven again if the script has replaced what its forward moves something in."""
        if kind.composition.moved and kind.composition.is_elsewhere(self.attributes.numbers(kind.composition.keys).held):
            kind.proven = None

    def _asked(
        self, kind: CallKind, plain: Callable[..., Any], tree: Tree, found: Recognised, wanted: Iterable[Hashable]
    ) -> Mapping[Hashable, Notes]:
        """Return what the forward asks of the numbers at these places."""
        assert found.samples
        places = self.attributes.places(wanted)
        call = self._signatures.call_of(kind, plain, tree, found.samples, found.shapes)
        self.attributes.forget()
        return self._prover.asks(call, places)

    def expected(self, key: tuple[Any, ...], kind: CallKind) -> Expected | None:
        """Return what calls that wait, and move the same counters, may not have changed when this one runs. None if it moves no
        counter that decides something, as far as it has been asked."""
        if not kind.composition.moved:
            return None
        variants, moved = self._variants[_without_variant(key)], self.attributes.numbers(kind.composition.keys).moved
        questions = {place: asked for place, asked in variants.questions.items() if place in moved}
        unknown = any(is_asked_of(value) and not variants.has_asked(place) for place, value in moved.items())
        return Expected(self.attributes.places(questions), questions) if questions or unknown else None

    def _does_the_same(
        self, found: Recognised, variant: int, plain: Callable[..., Any], tree: Tree
    ) -> bool | None:
        """Return whether calls of this variant return the same outputs under other numbers, and may be cut alike. None: a call
        of one sample does not tell."""
        kind = self._signatures.kinds.get(_of_variant(found.key, variant))
        samples = _samples_of(kind, found, tree)
        if kind is None or kind.proven is None or not samples:
            return True
        if samples < 2:
            return None
        shapes = shapes_per_sample(tree, kind.layout, samples)
        call, graphs = self._signatures.call_of(kind, plain, tree, samples, shapes), self.attributes.have_graphs()
        self.attributes.forget()
        known, trial = kind.proven, replace(kind, outputs={}, alike=0, planned={}, findings=replace(kind.findings))

        def same() -> bool:
            if graphs:
                refuse_earlier_graphs_of(call)  # (a proof would run their backward)
            settled = outputs_of(call).settled_like(known)
            call.outputs = kind.outputs_of(call, shapes)
            if settled is None or not settled.looks_like(call.outputs):
                return False
            return self._prover.prove(trial, call, shapes) is None and kind.agrees_with(trial, shapes)

        try:
            return surviving(same, self._core.device, partial(not_repeated, self._core))
        except Exception as error:
            if strict() and is_fault(error):
                raise
            return False


def not_repeated(core: Core, text: str) -> Literal[True]:
    """Note that a proof ran out of memory."""
    core.events.add(core.steps, "out of memory", f"the proof that samples do not mix was not repeated ({text})")
    return True


def _samples_of(kind: CallKind | None, found: Recognised, tree: Tree) -> int | None:
    """How many samples a call of this kind has."""
    return found.samples if kind is None or not kind.layout.cuts else samples_by(tree, kind.layout)


def _of_variant(key: tuple[Any, ...], variant: int) -> tuple[Any, ...]:
    return (*key, "variant", variant) if variant else key


def _without_variant(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[:-2] if key[-2:-1] == ("variant",) else key
