"""How many random scripts it takes to find a fault: silent faults of the past are put back, one at a time.

    python benchmarks/fuzz_worth.py [--most 2000] [--first 600000] [--workers 2] [--only NAME ...] [--save]

`--save` writes each row when it is known, beside the rows of other faults that were written on the same day.

Each fault is one function of memfit replaced by what it was before the fault was mended, or by nothing where a check was
missing. A fault is found when a script differs from plain PyTorch or crashes. The seeds begin at `--first`, the same for all.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from common import ROOT, result_of_today, save, table

sys.path[:0] = [str(ROOT / "tests")]


def main() -> None:
    """Read the arguments and run."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--most", type=int, default=2000, help="scripts to try per fault")
    arguments.add_argument("--first", type=int, default=600_000, help="the first seed")
    arguments.add_argument("--workers", type=int, default=1)
    arguments.add_argument("--only", nargs="*", choices=[*FAULTS])
    arguments.add_argument("--save", action="store_true", help="write each row into a dated result")
    given = arguments.parse_args()
    names = given.only or [*FAULTS]
    context = multiprocessing.get_context("spawn")
    rows = []
    with ProcessPoolExecutor(given.workers, context, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(tried, name, given.first, given.most) for name in names]):
            rows.append(done.result())
            print(rows[-1], flush=True)
            if given.save:
                _saved_with(rows[-1], given.most)
    rows.sort(key=lambda row: names.index(row["fault"]))
    print(table("faults put back", [*rows[0]], [[*row.values()] for row in rows]))


def _saved_with(row: dict[str, Any], most: int) -> None:
    before = [one for one in result_of_today("fuzz_worth").get("rows", ()) if one["fault"] != row["fault"]]
    save("fuzz_worth", {"most": most, "rows": [*before, row]})


def tried(name: str, first: int, most: int) -> dict[str, Any]:
    """How many scripts it takes to see a fault."""
    import torch
    from fuzz.grammar import drawn
    from fuzz.outcomes import CRASHED, DIFFERENT
    from fuzz.pool import outcomes_of

    torch.set_num_threads(1)
    with put_back(name):
        for seed in range(first, first + most):
            for mode, one in outcomes_of(drawn(seed)):
                if one.kind in (DIFFERENT, CRASHED):
                    seen = f"{one.kind}: {one.what}"
                    return {"fault": name, "scripts": seed - first + 1, "seed": seed, "mode": mode, "seen as": seen}
    return {"fault": name, "scripts": None, "seed": None, "mode": "", "seen as": "not found"}


@contextmanager
def put_back(name: str) -> Iterator[None]:
    """Inside, memfit has the fault."""
    import memfit
    import memfit.modes.script_mode
    import memfit.modes.step_mode
    import memfit.modes.step_weighting  # noqa: F401

    undo: list[Callable[[], None]] = []
    for where, attribute, replacement in FAULTS[name]():
        for holder in _holders(where, attribute):
            undo.append(_set(holder, attribute, replacement))
    try:
        yield
    finally:
        for each in reversed(undo):
            each()


def _holders(where: Any, attribute: str) -> list[Any]:
    """The class, or the module and all that imported the function from it."""
    if isinstance(where, type):
        return [where]
    own = getattr(where, attribute)
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("memfit.")]
    return [module for module in modules if getattr(module, attribute, None) is own]


def _set(holder: Any, attribute: str, value: Any) -> Callable[[], None]:
    before = holder.__dict__[attribute]
    setattr(holder, attribute, value)
    return lambda: setattr(holder, attribute, before)


Patch = Iterator[tuple[Any, str, Any]]
"""(a class or a module, a name in it, what is to be there)."""


def in_place_on_a_loss_that_waits() -> Patch:
    """`loss.div_(4)`: answered as if it had happened."""
    from memfit.capture import lazy_functions

    def rewritten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return isinstance(args[0], lazy_functions.LazyTensor) and args[0].scalar is not None

    yield lazy_functions, "_rewritten", rewritten


def in_place_on_a_plain_tensor() -> Patch:
    """`total += out.detach().mean()`: computed out of place."""
    from memfit.capture import lazy_functions

    answer = lazy_functions._answer

    def out_of_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in lazy_functions.OUT_OF_PLACE and not isinstance(args[0], lazy_functions.LazyTensor):
            func = lazy_functions.OUT_OF_PLACE[func]
        return answer(func, args, kwargs)

    yield lazy_functions, "_answer", out_of_place


def data_written_before_the_loss() -> Patch:
    """`p.data.mul_(0.9)` between forward and loss: not looked for."""
    from memfit.engine.version_checks import Unchanged

    yield Unchanged, "check", lambda self, when, moved=frozenset(): None
    yield Unchanged, "check_data", lambda self, when, moved=frozenset(): None


def planning_leaves_lists_and_counters() -> Patch:
    """What planning does to attributes, lists and closures is not put back."""
    from memfit.engine.undo_state import UndoState

    undo = UndoState.undo

    def iterators_alone(self: UndoState, *, iterators: bool = True) -> None:
        self._undo.clear()
        undo(self, iterators=iterators)

    yield UndoState, "undo", iterators_alone


def planning_leaves_tensors() -> Patch:
    """What planning writes into tensors is not put back."""
    from memfit.tracing import write_guard as guard

    yield guard.UndoLog, "undo", lambda self: None


def every_micro_batch_moves_state() -> Patch:
    """State that a forward moves is not composed: each micro-batch moves it once more."""
    from memfit.engine.compose_state import Composition

    yield Composition, "before_micro_batch", lambda self: None
    yield Composition, "after_micro_batch", lambda self, samples: None


def moving_state_is_not_seen() -> Patch:
    """Nothing is said to move."""
    from memfit.equivalence import side_effects

    yield side_effects, "composition_of", lambda *args, **kwargs: side_effects.STILL


def second_pass_moves_state() -> Patch:
    """A second pass moves state as the first one did."""
    from memfit.engine.compose_state import Composition

    yield Composition, "repeated", lambda self: self.afresh()


def values_that_decide() -> Patch:
    """A comparison of the batch's values on the host is not seen to decide."""
    from memfit.equivalence import host_reads

    yield host_reads, "decided", lambda *args, **kwargs: None
    yield host_reads, "may_branch", lambda *args, **kwargs: False


def branches_of_micro_batches() -> Patch:
    """What micro-batches decide otherwise than others is not compared."""
    from memfit.equivalence import host_reads

    yield host_reads, "may_branch", lambda *args, **kwargs: False


def numbers_that_decide() -> Patch:
    """`out[:64]`, `chunk(4)`: positions and numbers of samples are not seen to decide."""
    from memfit.capture import size_dependence
    from memfit.capture.size_looks import SizeLooks

    yield size_dependence, "told_by_positions", lambda *args, **kwargs: False
    yield SizeLooks, "first_that_decides", lambda *args, **kwargs: None


def numbers_that_decide_beside_a_mask() -> Patch:
    """`h[:8]` where fake tensors cannot run the forward: trusted."""
    from memfit.capture.size_looks import SizeLooks

    yield SizeLooks, "_on_copies", lambda *args: None


def losses_that_decide() -> Patch:
    """A loss that picks samples by what the model computed is not seen to."""
    from memfit.equivalence import loss_branches

    yield loss_branches, "told_by", lambda looks: None


def hooks_on_saved_tensors() -> Patch:
    """Hooks on what the loss saves for backward: not looked for."""
    from memfit.capture import lazy_functions

    yield lazy_functions, "_watching_saved_tensors", lambda: False


def means_by_samples() -> Patch:
    """A mean over valid labels is weighted by samples."""
    from memfit.batches import weights

    def entries(tensor: Any, value: int) -> int:
        return tensor.numel()

    yield weights, "entries_other_than", entries


def divisors_that_changed() -> Patch:
    """What a loss divides by is not held against the weights that were inferred."""
    from memfit.engine import divisors

    yield divisors, "off_by", lambda *args: 0.0


def draws_of_their_own() -> Patch:
    """A repeated forward draws other random numbers."""
    from memfit.engine.random_state import RandomState

    yield RandomState, "restore", lambda self, device: None


def attributes_of_later() -> Patch:
    """A deferred call runs with the attributes and hooks that the model has by then."""
    from memfit.engine.call_attributes import CallAttributes

    yield CallAttributes, "since", lambda self, moved: None


def contents_of_later() -> Patch:
    """It runs with what lies inside attributes by then."""
    from memfit.engine.call_contents import CallContents

    yield CallContents, "_look_into", lambda self, values: None


def globals_of_later() -> Patch:
    """It runs with the globals and class attributes of then."""
    from memfit.engine.forward_reads import CodeWalk

    yield CodeWalk, "run", lambda self: None


def arguments_of_later() -> Patch:
    """It runs with the entries that its arguments have by then."""
    import memfit.capture.call  # noqa: F401
    from memfit.batches import tree

    yield tree, "with_new_containers", lambda given, copies=None: given


def entries_are_lost() -> Patch:
    """What a forward sets in its arguments does not reach the script."""
    from memfit.capture.argument_entries import ArgumentEntries

    yield ArgumentEntries, "put", lambda self, value, arguments: None


def one_tensor_is_two() -> Patch:
    """A tensor that is given twice is two in micro-batches."""
    import memfit.batches.cut  # noqa: F401
    from memfit.batches import tree

    yield tree, "first_same", lambda found: list(range(len(found)))


def outputs_of_another_model_are_detached() -> Patch:
    """The output of another wrapped model carries no gradient into it."""
    from memfit.modes import script_mode

    computed = script_mode._computed
    yield script_mode, "_computed", lambda leaf: computed(leaf).detach()


FAULTS: dict[str, Callable[[], Patch]] = {
    fault.__name__.replace("_", " "): fault
    for fault in (
        in_place_on_a_loss_that_waits, in_place_on_a_plain_tensor, data_written_before_the_loss,
        planning_leaves_lists_and_counters, planning_leaves_tensors,
        every_micro_batch_moves_state, moving_state_is_not_seen, second_pass_moves_state,
        values_that_decide, branches_of_micro_batches, numbers_that_decide, numbers_that_decide_beside_a_mask,
        losses_that_decide, hooks_on_saved_tensors, means_by_samples, divisors_that_changed,
        draws_of_their_own, attributes_of_later, contents_of_later, globals_of_later,
        arguments_of_later, entries_are_lost, one_tensor_is_two, outputs_of_another_model_are_detached,
    )
}  # fmt: skip


if __name__ == "__main__":
    main()
