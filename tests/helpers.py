"""What tests of the engine share: plans written down instead of searched for, and scripts run with and without memfit."""

from __future__ import annotations

import copy
from collections import UserList
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Sampler
from zoo.plain import Gradients, gradients_of, relative_error

import memfit
from memfit import Plan, Run
from memfit.engine.planning_scope import is_planning
from memfit.planning.plan import Cost
from memfit.tracing.build_profile import model_facts

Script = Callable[..., Any]
"""A training script's lines: called with the model and a batch, it leaves gradients behind."""


def fixed_plan(
    model: nn.Module, optimizer: Optimizer, share: int, micro_batch: int, *, target_batch: int | None = None, **fields: Any
) -> Plan:
    """A plan to pass to `wrap(plan=)`, so that nothing is profiled or searched; `fields` are further ones of Plan."""
    facts = model_facts(model, optimizer)
    free = Cost(peak=0, upper=0)
    given: dict[str, Any] = {
        "mode": "accumulate",
        "target_batch": target_batch,
        "share": share,
        "micro_batch": micro_batch,
        "accumulation": -(-share // micro_batch),
        "precision": "off",
        "checkpoint": (),
        "shard": "off",
        "offload": "off",
        "predicted": free,
        "asked": free,
        "limit": 1 << 34,
        "margin": 0,
        "held": 0,
        "device": "cpu",
        "model": facts.name,
        "optimizer": facts.optimizer,
        "fingerprint": facts.fingerprint,
    }
    return Plan(**(given | fields))


def wrapped(
    model: nn.Module,
    micro_batch: int,
    *,
    share: int = 12,
    optimizer: Optimizer | None = None,
    loader: Any = None,
    fields: dict[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """`memfit.wrap` of the model with a fixed plan; `fields` are the plan's, `settings` those of `wrap`."""
    optimizer = optimizer or SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = fixed_plan(model, optimizer, share, micro_batch, target_batch=settings.get("target_batch"), **(fields or {}))
    return memfit.wrap(model, optimizer, loader, plan=plan, **settings)


def cut_gradients(model: nn.Module, script: Script, *batch: Any, micro_batch: int = 5, **settings: Any) -> Gradients:
    """The gradients that `script(model, *batch)` leaves on a wrapped copy of the model."""
    model = copy.deepcopy(model)
    run = wrapped(model, micro_batch, **settings)
    script(model, *batch)
    run.undo()
    return gradients_of(model)


def plain_gradients(model: nn.Module, script: Script, *batch: Any) -> Gradients:
    """The same without memfit."""
    model = copy.deepcopy(model)
    script(model, *batch)
    return gradients_of(model)


def assert_transparent(
    model: nn.Module, script: Script, *batch: Any, tolerance: float = 1e-12, micro_batch: int = 5, **settings: Any
) -> None:
    """`script` leaves the same gradients with memfit as without."""
    got = cut_gradients(model, script, *batch, micro_batch=micro_batch, **settings)
    want = plain_gradients(model, script, *batch)
    assert any(gradient is not None and gradient.any() for gradient in want.values())
    assert relative_error(got, want) <= tolerance


class Aside(SimpleNamespace, Sampler[Any]):
    """Notes of a test that memfit neither puts back nor composes: it does not look into samplers. (Whatever else a forward
    leaves is as one forward over the whole batch would have left it.)"""


class Notes(UserList[Any], Sampler[Any]):
    """A list of such notes."""


class Forwards:
    """How many samples each forward of a module's inner layer saw in training, and whether gradients were recorded."""

    def __init__(self, layer: nn.Module) -> None:
        self._notes = notes = Aside(sizes=[], recording=[])

        def seen(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if not is_planning():
                notes.sizes.append(len(output))
                notes.recording.append(torch.is_grad_enabled())

        layer.register_forward_hook(seen)

    @property
    def sizes(self) -> list[int]:
        return self._notes.sizes

    @property
    def recording(self) -> list[bool]:
        return self._notes.recording


def mlp(*, inputs: int = 7, width: int = 8, outputs: int = 4, dropout: float = 0.0, seed: int = 0) -> nn.Sequential:
    """A small net in float64, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = nn.Linear(inputs, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, outputs)
    return nn.Sequential(*layers).double()


def points(n: int = 12, *, inputs: int = 7, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Samples for `mlp` and their classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, classes, (n,), generator=generator)


def unseen(out: Tensor) -> Tensor:
    """The same tensor by a way that memfit does not see through: what is computed from it runs by replay."""
    return out.flip(0).flip(0)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """The lines of the simplest script there is."""
    F.cross_entropy(model(x), y).backward()
