"""A deferred training call of the model: it has not run yet, or ran in micro-batches without keeping its activations."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
from torch import nn

from memfit._errors import Refused
from memfit.batches.cut import Layout, cutter
from memfit.batches.entries import Entries
from memfit.batches.shapes import Shapes, shapes_per_sample
from memfit.batches.split import Split, part_of_split
from memfit.batches.tree import copied_tensors, flat, tensors, with_new_containers
from memfit.capture.input_gradients import InputGradients
from memfit.capture.outputs import Outputs, otherwise
from memfit.capture.shared_outputs import SharedOutputs
from memfit.engine.branches import Act
from memfit.engine.call_attributes import CallAttributes, Since
from memfit.engine.call_context import (
    Autocast,
    autocast_now,
    autocasting,
    modes_as,
    modes_of,
    requires_of,
    requiring_as,
    restore_tensors,
)
from memfit.engine.compose_state import Composition
from memfit.engine.gradients import is_sharded
from memfit.engine.modules import modules_of, parameters_in
from memfit.engine.random_state import HostDraws, RandomState, are_generators_known, remember_generators
from memfit.engine.version_checks import Keys, Unchanged, key_of

Tree = tuple[tuple[Any, ...], dict[str, Any]]
_NUMBERS = itertools.count()
_CUTS = "running a call in micro-batches when its loss is computed"


class Call:
    """Holds the arguments and context of a call, how it is cut, and what is known of its outputs.

    The first pass fixes `pieces`, the micro-batch sizes, and the random state of each; later passes repeat both exactly.
    `receivers` are what gradients of the outputs flow into, once the call has outputs. `gathered` tells whether such gradients
    have been computed, `pending` how many losses computed theirs and still wait for their backward. `several` are the calls of
    a joint call. `offsets` maps the `number` of each of its `calls` to where that call's outputs begin in its own. `begins` is
    the joint call's micro-batch that this call is about to run in. `whole` is the output if the call ran whole after all,
    `activate` puts the plan that it ran by in force again. `composition` says how the state that the forward moves is
    composed. `host_draws` tells whether calls draw from Python's or NumPy's generators. `noted` holds what expression nodes
    summed to over the samples (by id: the node, its sum), `noted_loss` the model's own loss while another one was computed,
    `summed` those whose gradients are part of a loss that was computed. `shared` compares the outputs that the micro-batches of
    a pass have in common.
    With `copies`, micro-batches are copies: a model that writes into its input then leaves the batch alone.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: Callable[..., Any],
        tree: Tree,
        layout: Layout,
        outputs: Outputs,
        device: torch.device,
        *,
        autocast: Sequence[Autocast] | None = None,
        split: Split | None = None,
    ) -> None:
        self.model, self.plain, self.tree, self.layout, self.outputs, self.device = (
            model, plain, tree, layout, outputs, device,
        )  # fmt: skip
        self.samples, self.split, self.whole_piece = layout.samples, split, False
        self.number = next(_NUMBERS)
        self.several: tuple[Call, ...] = ()
        self.shared: SharedOutputs | None = None
        self.offsets = {self.number: 0}
        self.key: tuple[Any, ...] = ()
        self.autocast = autocast_now((device.type, "cpu")) if autocast is None else tuple(autocast)
        modules = modules_of(model)
        self.modes, self.requires = modes_of(modules), requires_of(modules)
        self.copies = self.gathered = False
        self.pending = 0
        self.receivers: Sequence[torch.Tensor] | None = None
        self.pieces: tuple[int, ...] = ()
        self.random: list[RandomState] = []
        self.begins: int | None = None
        self.whole: list[Any] | None = None
        self.activate: Callable[[], object] | None = None
        self.composition = Composition()
        self.proven_for: frozenset[Act] = frozenset()
        self.host_draws = HostDraws(lambda: None)
        self.values: list[torch.Tensor | None] | None = None
        self.kept: dict[int, tuple[list[Any], dict[int, torch.Tensor]]] = {}
        self.inputs = InputGradients(tree, layout)
        self.noted: dict[int, tuple[Any, torch.Tensor]] = {}
        self.noted_loss: torch.Tensor | None = None
        self.summed: dict[int, Any] = {}
        self.standins: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
        written = (*tensors(tree), *(() if is_sharded(model) else (p for p, _ in self.requires)))
        self._written = written
        self.note_now()
        self.attributes: CallAttributes | None = None
        self._before_writes: Tree | None = None
        self._cut: Callable[[int, int], Tree] | None = None
        self._as_called = False
        self._since: Since | None = None

    @cached_property
    def shapes(self) -> Shapes:
        """The shapes per sample of its arguments."""
        return shapes_per_sample(self.tree, self.layout, self.samples)

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of a joint call, or just this one."""
        return self.several or (self,)

    @property
    def waits(self) -> bool:
        """Whether its forward has not run yet."""
        return not self.pieces and self.values is None and self.whole is None

    def check_unchanged(self) -> None:
        """Raise autograd's own error if an input or a parameter was modified since the call, as far as the host sees, and
        Refused if a parameter was replaced. A repeated pass starts from the state of the first one, so places that the forward
        itself moves may differ."""
        for each in self.calls:
            each._check_places()
            each._unchanged.check(_CUTS, each._moved)

    @property
    def is_unchanged(self) -> bool:
        """Whether `check_unchanged` passes."""
        try:
            self.check_unchanged()
        except Refused:
            return False
        return True

    def compare(self) -> None:
        """Start to compare inputs and parameters on an accelerator with what they were at the call. Raise autograd's own error
        if an earlier comparison found one modified."""
        for each in self.calls:
            each._unchanged.compare(_CUTS, each._moved)

    def detach_from_script(self, attributes: CallAttributes) -> None:
        """Record what its passes run with, as the script goes on: the containers of its arguments, the model's `attributes` at
        the call, and the generators that it may draw from."""
        self.tree, self._cut = with_new_containers(self.tree), None
        remember_generators(flat(self.tree))
        if are_generators_known():  # a script may make a new one at each step
            remember_generators(value for module in modules_of(self.model) for value in vars(module).values())
        self.attributes = attributes

    @property
    def _moved(self) -> Keys:
        """The places that its forward moved."""
        return self.composition.keys if self.pieces else frozenset()

    def _check_places(self) -> None:
        """Raise Refused if the model's parameters were replaced: the new ones would get the gradients."""
        there = () if is_sharded(self.model) else parameters_in(modules_of(self.model))
        if there and [id(p) for p in there] != [id(p) for p, _ in self.requires]:
            raise Refused(
                "running a call in micro-batches when its loss is computed",
                found="parameters of the model were replaced since the call",
                next_move='compute the loss and run its backward first, or pass micro_batch="off"',
            )

    def check_handed_over(self, unused: Sequence[torch.Tensor]) -> None:
        """Raise autograd's own error if an input or a parameter was written through `.data` before backward. Those `unused` by
        the loss may be."""
        for each in self.calls:
            each._unchanged.check_handed_over(each._moved | {key_of(tensor) for tensor in unused})

    def note_now(self) -> None:
        """Record the inputs and parameters as they are: they must not change from now on."""
        self._unchanged = Unchanged(self._written)

    @contextmanager
    def writing_arguments(self) -> Iterator[None]:
        """Context of a pass that writes into the script's arguments, as the call would have. Later passes get copies of what
        they were."""
        self._before_writes = kept = copied_tensors(self.tree)
        self.copies = False
        try:
            yield
        finally:
            self.tree, self.copies, self._before_writes, self._cut = kept, True, None, None
            self._written = (*tensors(kept), *(() if is_sharded(self.model) else (p for p, _ in self.requires)))
            self.note_now()

    @property
    def writing(self) -> bool:
        """Whether the current pass writes into the script's arguments."""
        return self._before_writes is not None

    def undo_writes(self) -> None:
        """Restore the script's arguments before another attempt of a pass that writes into them. What it wrote elsewhere, the
        script did not write."""
        for each in self.calls:
            if each.attributes is not None:
                each.attributes.contents.accept_writes()
        if self._before_writes is not None:
            restore_tensors(list(zip(tensors(self.tree), tensors(self._before_writes))))
            self.note_now()

    def accept(self, written: Keys) -> None:
        """Accept what a first pass over another call wrote at these places."""
        self._unchanged.accept(written)

    def ran(self) -> Keys:
        """Mark a first pass as done. Return the places it moved: its forwards may write inputs and parameters themselves."""
        found = self.composition.keys
        for each in (self, *self.several):
            if written := each._unchanged.written:
                found |= written
                each.note_now()
        return found

    def begin(self, pieces: Sequence[int]) -> bool:
        """Fix how the call is cut. Return True for the first pass over it, False if an earlier pass is repeated."""
        if self.pieces:
            return False
        for each in (self, *self.several):
            each.pieces, each.random = tuple(pieces), []
            each.shared = SharedOutputs(each.outputs) if len(pieces) > 1 and each.outputs.watched else None
        return True

    def note(self, node: Any, value: torch.Tensor) -> None:
        """Remember the value of a sum over the samples."""
        for each in self.calls:
            each.noted[id(node)] = node, value.detach()

    def forget_pass(self) -> None:
        """Undo `begin`: the pass failed and another one takes its place."""
        for each in (self, *self.several):
            each.pieces, each.random, each.kept, each.begins, each.values = (), [], {}, None, None
            each.noted, each.summed, each.noted_loss, each.shared = {}, {}, None, None

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Context manager for a pass: parameters require gradients and modules have their modes as when the call was made, and
        in forwards what the script has changed since is undone. Raises Refused if parameters were replaced, or buffers
        written."""
        for each in self.calls:
            each._check_places()
            if each.attributes is not None:
                each.attributes.contents.check(_CUTS, each.composition.keys)
        before = self._as_called, [each._since for each in self.calls]
        self._as_called = True
        for each in self.calls:
            moved = self.composition.keys | each.composition.keys
            each._since = None if each.attributes is None else each.attributes.since(moved)
        try:
            with requiring_as(self.requires), modes_as(self.modes):
                yield
        finally:
            self._as_called = before[0]
            for each, since in zip(self.calls, before[1]):
                each._since = since

    def output(self, tree: Tree | None = None) -> Any:
        """Run the model on these arguments (None: the call's own) in the call's modes and autocast and the current grad
        mode."""
        args, kwargs = self.tree if tree is None else tree
        since = nullcontext() if self._since is None else self._since.undone()
        with nullcontext() if self._as_called else modes_as(self.modes), autocasting(self.autocast), since:
            return self.plain(*args, **kwargs)

    def watched(self, tree: Tree) -> Any:
        """Return `output`. Raises BatchDependent if limits of what samples make are not as in other micro-batches."""
        with nullcontext() if self.shared is None else self.shared.watching():
            return self.output(tree)

    def check_limits(self) -> None:
        """Read what `watched` compared on an accelerator since the pass began. Raises BatchDependent as it does."""
        for each in (self, *self.several):
            if each.shared is not None:
                each.shared.check_limits()

    def run(self, tree: Tree) -> list[Any]:
        """Return the leaves of `output`."""
        return flat(self.output(tree))

    def checked(self, tree: Tree) -> list[Any]:
        """Return the leaves of `output`. Raises Otherwise if they do not match what is known of the call's output. (What a call
        that ran whole returns is the script's own affair.)"""
        if self.whole is not None:
            return self.run(tree)
        entries = Entries(tree) if self.attributes is not None and not _are_tensors(tree) else None
        output = self.watched(tree)
        if entries is not None and entries.changed():
            raise otherwise("new entries in the containers that it is given")
        found = flat(output)
        self.outputs.check(output, found)
        if self.shared is not None:
            self.shared.check(found)
        return found

    def arguments(self, start: int, stop: int) -> Tree:
        """Return the arguments of one micro-batch; those that require gradients are leaf tensors of their own."""
        if self.whole_piece:
            return self.tree
        if self.split is not None and self.whole is None:
            return self._split(start, stop)
        piece = self.samples_of(start, stop)
        piece = copied_tensors(piece) if self.copies else piece
        return self.inputs.own(piece, start) if self.inputs.wanted else piece

    def samples_of(self, start: int, stop: int) -> Tree:
        """Return views of these samples, for inspection."""
        if self.whole_piece:
            return self.tree
        if self.whole is not None:  # as it ran
            return with_new_containers(self.tree)
        if self.split is not None:
            with torch.no_grad():
                return part_of_split(self.split, self.tree, start, stop, self.samples)
        if self._cut is None:
            self._cut = cutter(self.tree, self.layout)
        return self._cut(start, stop)

    def _split(self, start: int, stop: int) -> Tree:
        """`arguments` with `split`: gradients flow through the user's function into leaf tensors of the whole batch."""
        assert self.split is not None
        if not self.inputs.wanted or not torch.is_grad_enabled():
            return part_of_split(self.split, self.tree, start, stop, self.samples)
        own = self.inputs.own(self.tree, 0)
        piece = part_of_split(self.split, own, start, stop, self.samples)
        leaves_of_own = {id(tensor) for tensor in tensors(own)}
        if not any(tensor.grad_fn is not None or id(tensor) in leaves_of_own for tensor in tensors(piece)):
            raise Refused(
                "gradients for the model's inputs with split=",
                found="the batches that split= returned have no graph back to the batch it was given",
                next_move="cut with operations that autograd follows, such as torch.split and indexing",
            )
        return piece

    def run_whole(self) -> None:
        """Run the call as the script wrote it: its outputs are tensors with a graph of their own. Gradients that arrive by
        another way have a second pass, which repeats it in one piece."""
        for each in self.calls:
            each.check_unchanged()
            each.compare()
            if each.whole is None:
                begun, tree = RandomState.begin(each.device, host=each.host_draws.kept), with_new_containers(each.tree)
                each.tree = copied_tensors(each.tree) if each.copies else each.tree  # the forward writes into it
                each.composition.begin_whole()
                with each.as_called(), torch.enable_grad():
                    each.whole = each.run(tree)
                each.values = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in each.whole]
                each.pieces, each.random, each.activate = (each.samples,), [begun], self.activate

    def past_hooks(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Return gradients of the outputs as they leave hooks that the script registered on those of a call that ran whole."""
        found = list(gradients)
        for i, (leaf, gradient) in enumerate(zip(self.whole or (), gradients)):
            if gradient is not None and leaf.requires_grad:
                (found[i],) = torch.autograd.grad(leaf, leaf, gradient)
        return tuple(found)

    def draw_from(self, index: int) -> None:
        """Restore the random state at the start of micro-batch `index`, or record it on the first pass."""
        if index < len(self.random):
            self.random[index].restore(self.device)
            return
        self.random.append(RandomState.begin(self.device, host=self.host_draws.kept))
        for each in self.several:
            each.begins = index

    def begun(self) -> None:
        """Record the random state right before this call's forward in a joint call, so that it can also be repeated alone."""
        if self.begins is not None:
            self.draw_from(self.begins)
            self.begins = None

    def drawing_again(self) -> AbstractContextManager[None]:
        """Return the context manager for a repeated pass: it restores the current random state on exit."""
        for each in (self, *self.several):
            if each.shared is not None:
                each.shared.repeat()
        return self.host_draws.repeated(self.device, self.random)


def _are_tensors(tree: Tree) -> bool:
    args, kwargs = tree
    return all(isinstance(item, torch.Tensor) for item in (*args, *kwargs.values()))
