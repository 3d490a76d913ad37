"""Saves and loads the state of a run, made of tensors, numbers, strings, lists and dictionaries. Any number of ranks can load
it.

A loaded state is read and checked in full before anything changes. Not covered: what the script owns (schedulers, a
GradScaler, samplers with their own generators), random draws in loader workers, and the draws of ranks missing from the state.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from memfit._errors import UsageError
from memfit.engine.random_state import RandomState
from memfit.loading.draws import draw_seed, mixed
from memfit.loading.loader import EffectiveLoader
from memfit.loading.position import LoaderPosition
from memfit.ranks.ranks import Ranks
from memfit.reporting.stderr import tell
from memfit.runtime.core import Core

VERSION = 1
"""Version of the states that this code writes. Later versions are refused."""
LOADING = "loading the state of a run"
T = TypeVar("T")


@dataclass(frozen=True)
class StateSource:
    """What a state is taken from and loaded into."""

    model: nn.Module
    """The trained model without its wrapper."""
    optimizer: Optimizer
    loader: Any
    core: Core | None
    """None if memfit is switched off."""

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that train together; None if there is only one."""
        return None if self.core is None else self.core.team.ranks

    @property
    def rank(self) -> int:
        """The current rank."""
        return 0 if self.ranks is None else self.ranks.rank

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next((p.device for p in self.model.parameters()), torch.device("cpu"))

    def tell(self, message: str) -> None:
        """Tell the user about a difference to the saved run."""
        (tell if self.core is None else self.core.tell)(message)


@dataclass(frozen=True)
class Read:
    """A state after reading and checks."""

    steps: int
    scale: tuple[float, int]
    """The loss scale, and the number of batches since it changed."""
    position: LoaderPosition | None
    model: dict[str, Any] | None
    """None, like the two below, if the script loads it itself."""
    optimizer: dict[str, Any] | None
    random: dict[int, RandomState] | None
    """States of the random number generators, by rank."""


def written(held: StateSource, steps: int, position: LoaderPosition | None, *, whole: bool) -> dict[str, Any]:
    """Return the current state; without `whole`, only what no script saves itself."""
    core = held.core
    scale = (1.0, 0) if core is None else core.accumulator.scale.state
    found: dict[str, Any] = {
        "version": VERSION,
        "fingerprint": fingerprint(held.model),
        "target_batch": None if core is None else core.settings.target_batch,
        "processes": 1 if held.ranks is None else held.ranks.size,
        "steps": steps,
        "scale": {"scale": scale[0], "good": scale[1]},
        "loader": None if position is None else position.written(),
    }
    if whole:
        own = RandomState.capture(held.device).written()
        found |= {"model": held.model.state_dict(), "optimizer": held.optimizer.state_dict(), "random": {held.rank: own}}
    return found


def fingerprint(model: nn.Module) -> str:
    """Return a hash of the names, shapes and dtypes of the model's parameters, which identifies the model."""
    told = [f"{name} {tuple(p.shape)} {p.dtype}" for name, p in model.named_parameters()]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def load(held: StateSource, state: Any) -> int:
    """Load a state on every rank or on none, and return the number of steps done. Raises UsageError, or RankFailed if another
    rank could not load it."""
    try:
        found = read(held, state)
    except BaseException as error:
        if held.ranks is not None:
            held.ranks.failed(error)
        raise
    if held.ranks is not None:
        _check_alike(held.ranks, found)
    if found.model is not None and found.optimizer is not None:
        held.model.load_state_dict(found.model)
        held.optimizer.load_state_dict(found.optimizer)
    if held.core is not None:
        held.core.steps = found.steps
        held.core.accumulator.scale.state = found.scale
    _go_to(held, found.position)
    if found.random:
        _draw_on(held, found.random, found.steps)
    return found.steps


def read(held: StateSource, state: Any) -> Read:
    """Read `state` and check that it fits. Changes nothing. Raises UsageError."""
    _check_kind(state)
    whole = "model" in state or "optimizer" in state or "random" in state
    names = ("fingerprint", "target_batch", "steps", "scale", "loader", *(("model", "optimizer", "random") if whole else ()))
    missing = [name for name in names if name not in state]
    if missing:
        raise _damaged(f"it has no {' and no '.join(map(repr, missing))}")
    _check_model(held, state["fingerprint"], state.get("model"))
    _check_target(held, state["target_batch"])
    position = _part("loader", lambda: None if state["loader"] is None else LoaderPosition.read(state["loader"]))
    _check_position(held, position)
    return Read(
        steps=_part("steps", lambda: _whole_number(state["steps"])),
        scale=_part("scale", lambda: (float(state["scale"]["scale"]), _whole_number(state["scale"]["good"]))),
        position=position,
        model=state["model"] if whole else None,
        optimizer=_part("optimizer", lambda: _checked(held.optimizer, state["optimizer"])) if whole else None,
        random=_part("random", lambda: {_whole_number(r): RandomState.read(s) for r, s in state["random"].items()})
        if whole
        else None,
    )


def _check_kind(state: Any) -> None:
    if not isinstance(state, Mapping):
        raise UsageError(
            LOADING,
            found=f"a {type(state).__name__}, not a run.state_dict()",
            next_move="read the file first: run.load_state_dict(torch.load(path, weights_only=True))",
        )
    version = state.get("version")
    if type(version) is not int:
        raise _damaged("it has no version" if version is None else f"its version is {version!r}")
    if version > VERSION:
        raise UsageError(
            LOADING,
            found=f"it was saved by a newer memfit (version {version}; this one reads up to {VERSION})",
            next_move="install the memfit that saved it; state['model'] and state['optimizer'] load without it",
        )


def _check_model(held: StateSource, told: Any, model: Any) -> None:
    if told != fingerprint(held.model):
        difference = _difference(held.model, model) or "its parameters have other names, shapes or dtypes"
        raise UsageError(
            LOADING,
            found=f"it is another model's: {difference}",
            next_move="build the model as it was when the state was saved",
        )
    if model is None:
        return
    difference = _difference(held.model, model)
    if difference is not None:
        raise _damaged(difference)


def _difference(model: nn.Module, state: Any) -> str | None:
    """The first difference between a model's state and this model."""
    if not isinstance(state, Mapping):
        return None if state is None else f"'model' is a {type(state).__name__}"
    own = model.state_dict()
    for name in (*own, *state):
        if name not in state or name not in own:
            return f"{name} is only {'here' if name in own else 'there'}"
        here, there = own[name], state[name]
        if isinstance(here, torch.Tensor) and (not isinstance(there, torch.Tensor) or _look(here) != _look(there)):
            return f"{name} is {_look(there)} there, {_look(here)} here"
    return None


def _look(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


def _check_target(held: StateSource, target: Any) -> None:
    if held.core is None or held.core.settings.target_batch == target:
        return
    raise UsageError(
        f"{LOADING} into one with target_batch={held.core.settings.target_batch}",
        found=f"it was saved with target_batch={target}",
        next_move=f"pass target_batch={target} to memfit.wrap; or, to continue differently, load "
        "state['model'] and state['optimizer'] alone",
    )


def _check_position(held: StateSource, position: LoaderPosition | None) -> None:
    if position is None or not isinstance(held.loader, EffectiveLoader):
        return
    differ = held.loader.misplaced(position)
    if differ is not None:
        there, here = differ
        raise UsageError(
            LOADING,
            found=f"its loader had {there}, and this one has {here}",
            next_move="give it the same data set, and the same target_batch= on any number of processes; or load "
            "state['model'] and state['optimizer'] alone",
        )


def _checked(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's state. Raises UsageError if it is another optimizer's."""
    groups, own = state["param_groups"], optimizer.param_groups
    sizes, here = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if sizes != here:
        raise _others(f"groups of {sizes} parameters there, of {here} here")
    unknown = set(groups[0]) - set(own[0]), set(optimizer.defaults) - set(groups[0])
    if all(unknown):  # schedulers and later versions of torch add options, but not both
        raise _others(f"it has {min(unknown[0])!r} and no {min(unknown[1])!r}, which {type(optimizer).__name__} has")
    places = {place for group in groups for place in group["params"]}
    strange = [place for place in state["state"] if place not in places]
    if strange:
        raise ValueError(f"a state for parameter {strange[0]}, which is in none of its groups")
    return dict(state)


def _others(what: str) -> UsageError:
    return UsageError(
        LOADING,
        found=f"it is another optimizer's: {what}",
        next_move="build the optimizer as it was; or load state['model'] alone",
    )


def _check_alike(ranks: Ranks, found: Read) -> None:
    """Raise UsageError on every rank if they load different states."""
    place = None if found.position is None else (found.position.epoch, found.position.index, found.position.seed)
    told = ranks.gather((found.steps, place, found.model is None), LOADING)
    if len(set(told)) > 1:
        raise UsageError(
            f"{LOADING} on {ranks.size} processes",
            found="they differ: saved after " + ", ".join(f"{t[0]} steps on rank {i}" for i, t in enumerate(told)),
            next_move="load the same file on every process, or files that were saved at the same step",
        )


def _go_to(held: StateSource, position: LoaderPosition | None) -> None:
    if not isinstance(held.loader, EffectiveLoader):
        held.tell("the state has no loader position, or this run has no DataLoader: the data start over")
        return
    if position is None:
        held.tell("the state has no loader position: the data start over")
        return
    why = held.loader.lost(position)
    if why is not None and position.index:
        held.tell(f"the {position.index} batches done in epoch {position.epoch} are not skipped, it starts over: {why}")
    held.loader.go_to(position)


def _draw_on(held: StateSource, states: dict[int, RandomState], steps: int) -> None:
    """Continue the random draws; without a saved state of this rank, from a seed that no other rank has."""
    own = states.get(held.rank)
    if own is not None:
        own.restore(held.device)
        return
    twin = torch.Generator()
    twin.set_state(next(iter(states.values())).cpu)
    seed = mixed(draw_seed(twin), steps, held.rank)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    if held.core is not None:
        held.core.note(
            "note",
            f"random draws of this process continue from a new seed: the state holds only those of rank {next(iter(states))} "
            "(if every process saves and loads its own, all continue)",
        )


def _part(name: str, read: Callable[[], T]) -> T:
    """The result of `read`. Errors in it mean that the state is damaged."""
    try:
        return read()
    except UsageError:
        raise
    except Exception as error:
        raise _damaged(f"{name!r} in it cannot be read ({type(error).__name__}: {error})") from error


def _whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _damaged(what: str) -> UsageError:
    return UsageError(
        LOADING,
        found=f"it is damaged: {what}",
        next_move="load one saved earlier; nothing of this one was used",
    )
