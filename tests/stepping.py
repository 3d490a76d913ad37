"""What tests of step mode share: the total gradient of one step with memfit, and of the whole batch without."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from helpers import Notes, fixed_plan
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader
from zoo.plain import Gradients, gradients_of, relative_error

import memfit
from memfit import Run

LossFn = Callable[[nn.Module, Any], Tensor]


class Seen:
    """`before_step` that keeps the gradients it was called with."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradients: list[Gradients] = []

    def __call__(self) -> None:
        self.gradients.append(gradients_of(self.model))


class PieceSizes:
    """How many samples each real forward of a model had; `recording[i]` says whether gradients were recorded."""

    def __init__(self, layer: nn.Module) -> None:
        self.sizes = Notes()
        layer.register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_fake(args[0]):
            self.sizes.append(len(args[0]))


def is_fake(tensor: Tensor) -> bool:
    """Whether the tensor is one of those that stand for data while planning."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def stepper(
    model: nn.Module, loss_fn: LossFn, cut: int | None = 5, *, share: int = 12, loader: Any = None, **settings: Any
) -> tuple[Run, Seen]:
    """A run in step mode by a fixed plan with micro-batches of `cut` samples (None: by a plan that memfit makes), and
    what its steps hand over."""
    optimizer = settings.pop("optimizer", None) or sgd(model)
    seen = Seen(model)
    if cut is not None:
        settings["plan"] = fixed_plan(model, optimizer, share, cut, target_batch=settings.get("target_batch"))
    return memfit.wrap(model, optimizer, loader, loss_fn=loss_fn, before_step=seen, **settings), seen


def sgd(model: nn.Module, lr: float = 0.1) -> Optimizer:
    """The plainest optimizer over what trains."""
    return SGD([p for p in model.parameters() if p.requires_grad], lr=lr)


def plain(model: nn.Module, loss_fn: LossFn, batch: Any) -> tuple[float, Gradients]:
    """Loss and gradients of the whole batch on a copy, by PyTorch alone."""
    model = copy.deepcopy(model)
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model, batch)
    loss.backward()
    return float(loss.detach()), gradients_of(model)


def error_of_step(model: nn.Module, loss_fn: LossFn, batch: Any, cut: int | None = 5, **settings: Any) -> float:
    """The relative error of one step's gradient and loss on a copy of the model."""
    loss, want = plain(model, loss_fn, batch)
    run, seen = stepper(copy.deepcopy(model), loss_fn, cut, **settings)
    got = float(run.step(batch))
    assert len(seen.gradients) == 1
    assert any(g is not None and g.any() for g in want.values())
    return max(relative_error(seen.gradients[0], want), abs(got - loss) / abs(loss))


def error_of_steps(model: nn.Module, loss_fn: LossFn, batches: list[Any], cut: int = 5) -> float:
    """The relative error of the parameters after steps over these batches."""
    wanted, found = copy.deepcopy(model), copy.deepcopy(model)
    run, optimizer = memfit.wrap(found, sgd(found), micro_batch=cut, loss_fn=loss_fn), sgd(wanted)
    for batch in batches:
        optimizer.zero_grad()
        loss_fn(wanted, batch).backward()
        optimizer.step()
        run.step(batch)
    return relative_error(dict(found.named_parameters()), dict(wanted.named_parameters()))


def ragged_loader(samples: list[Any], batch_size: int, collate: Callable[[list[Any]], Any], **options: Any) -> DataLoader:
    """A loader in the order of the samples."""
    return DataLoader(samples, batch_size=batch_size, collate_fn=collate, **options)  # type: ignore[arg-type]


def same_random_state(before: Tensor) -> bool:
    """Whether torch's generator stands where it stood."""
    return torch.equal(before, torch.get_rng_state())
