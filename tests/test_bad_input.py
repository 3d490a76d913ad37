"""Bad input: an error in three parts with the reader's own numbers, and nothing changed, nothing half-applied."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Notes, mlp, points, wrapped
from stepping import plain, sgd, stepper
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset
from zoo.plain import relative_error

import memfit
from memfit import DoesNotFit, MemfitError, PlanFileError, Refused, UsageError


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def loader(n: int = 24, batch_size: int = 6, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*points(n)), batch_size=batch_size, **options)


class Picture:
    """Everything of a training that a failing call has to leave alone."""

    def __init__(self, model: nn.Module, optimizer: Any, loader: Any) -> None:
        self.model, self.optimizer, self.loader = model, optimizer, loader
        self.before = self._taken()

    def check(self) -> None:
        for name, value in self._taken().items():
            assert _same(value, self.before[name]), f"{name} changed"

    def _taken(self) -> dict[str, Any]:
        modules = list(self.model.modules()) if isinstance(self.model, nn.Module) else []
        own = vars(self.loader) if isinstance(self.loader, DataLoader) else {}
        hooks = [
            getattr(self.optimizer, name, None) for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        ]
        return {
            "attributes": [{key: id(value) for key, value in vars(m).items()} for m in modules],
            "hooks": [[len(v) for k, v in vars(m).items() if k.endswith("_hooks")] for m in modules],
            "parameters": [(id(p), p.requires_grad, id(p.grad)) for m in modules for p in m.parameters(False)],
            "values": [
                t.detach().clone() for m in modules for t in (*m.parameters(False), *m.buffers(False)) if _has_values(t)
            ],
            "modes": [m.training for m in modules],
            "optimizer hooks": [len(h) if h is not None else 0 for h in hooks],
            "optimizer state": len(getattr(self.optimizer, "state", ())),
            "groups": [id(g) for g in getattr(self.optimizer, "param_groups", ())],
            "loader": {key: id(value) for key, value in own.items()},
            "torch's random state": torch.get_rng_state(),
            "Python's random state": random.getstate(),
            "NumPy's random state": np.random.get_state()[1],
        }


def _has_values(tensor: Tensor) -> bool:
    return not tensor.is_meta and not isinstance(tensor, nn.parameter.UninitializedParameter)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)):
        return bool((a == b).all()) or bool(torch.isnan(torch.as_tensor(a)).any())
    if isinstance(a, list):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    return a == b


@contextmanager
def refusing(
    kind: type[BaseException], *texts: str, model: Any = None, optimizer: Any = None, loader: Any = None
) -> Iterator[None]:
    """The block raises `kind` in three parts that contain `texts`, and leaves everything as it was."""
    picture = Picture(model, optimizer, loader)
    with pytest.raises(kind) as caught:
        yield
    picture.check()
    error = caught.value
    if issubclass(kind, MemfitError):
        assert isinstance(error, MemfitError)
        assert error.asked and error.found and error.next_move
        assert all(part in str(error) for part in (error.asked, error.found, error.next_move))
        assert isinstance(error, ValueError) or isinstance(error, Refused)
    for text in texts:
        assert text in str(error), str(error)


def refuses(
    kind: type[BaseException], *texts: str, model: Any = None, optimizer: Any = None, source: Any = "", **arguments: Any
) -> None:
    """`wrap` with these arguments raises `kind` and changes nothing."""
    model = mlp() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    source = loader() if isinstance(source, str) and not source else source
    with refusing(kind, *texts, model=model, optimizer=optimizer, loader=source):
        memfit.wrap(model, optimizer, source, **arguments)


BOTH = pytest.mark.parametrize("mode", [{}, {"loss_fn": loss_fn}], ids=["script", "step"])


# ---- numbers


@BOTH
@pytest.mark.parametrize(
    ("target", "text"),
    [(0, "at least 1"), (-8, "at least 1"), (2.5, "type float"), (True, "type bool"), ("8", "type str")],
)
def test_target_batch(mode: dict[str, Any], target: Any, text: str) -> None:
    refuses(UsageError, f"target_batch={target!r}", text, target_batch=target, **mode)


@BOTH
def test_target_batch_beyond_the_data_set_with_drop_last(mode: dict[str, Any]) -> None:
    refuses(
        UsageError,
        "target_batch=25",
        "24 samples",
        "drop_last=False",
        source=loader(drop_last=True),
        target_batch=25,
        **mode,
    )


@BOTH
def test_target_batch_beyond_the_data_set_is_one_batch_per_epoch_and_said(
    mode: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = mlp()
    run = memfit.wrap(model, sgd(model), loader(), target_batch=100, **mode)
    assert [len(batch.uncollated if mode else batch[1]) for batch in run.loader] == [24]
    said = capsys.readouterr().err
    assert "target_batch=100" in said and "24 samples" in said and "one batch per epoch" in said


@BOTH
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("micro_batch", 0, "at least 1"),
        ("micro_batch", -3, "at least 1"),
        ("micro_batch", 1.5, "micro_batch=16"),
        ("micro_batch", 3.0, "for example micro_batch=3"),
        ("micro_batch", "12", "auto, off, a whole number"),
        ("micro_batch", True, "type bool"),
        ("micro_batch", None, "type NoneType"),
        ("micro_batch", torch.ones(2), "type Tensor"),
        ("micro_batch", "big", "auto, off, a whole number"),
        ("precision", "int8", "bfloat16"),
        ("precision", 16, "type int"),
        ("precision", None, "type NoneType"),
        ("precision", torch.bfloat16, 'precision="bfloat16"'),
        ("checkpoint", "some", "all"),
        ("checkpoint", ["9"], "no block '9'"),
        ("checkpoint", 3, "a list of block names"),
        ("checkpoint", True, "a list of block names"),
        ("checkpoint", {}, "a list of block names"),
        ("checkpoint", b"all", "a list of block names"),
        ("shard", "optimizer", "single process"),
        ("offload", "cpu", "keeps it off"),
        ("shard", torch.ones(2), "does not know"),
        ("methods", ("encode",), "has no method 'encode'"),
        ("methods", "encode", "methods=['encode']"),
        ("methods", None, "type NoneType"),
        ("methods", [3], "a list of names"),
        ("batchnorm", "batch", "whole"),
        ("batchnorm", None, "micro"),
        ("accumulate_in", torch.float32, "float32, param"),
        ("accumulate_in", "float64", "float32, param"),
        ("script_accumulation", 0, "script_accumulation=8 for 8"),
        ("script_accumulation", -2, "at least 1"),
        ("script_accumulation", 4.0, "for example script_accumulation=4"),
        ("script_accumulation", True, "type bool"),
        ("split", "dim 0", "type str"),
        ("split", lambda batch: [batch], "split(batch, sizes)"),
        ("plan", 7, "type int"),
        ("plan", {}, "type dict"),
        ("enabled", "no", "enabled=True or enabled=False"),
        ("enabled", None, "type NoneType"),
        ("enabled", 0, "type int"),
    ],
)
def test_levers_and_other_arguments(mode: dict[str, Any], name: str, value: Any, text: str) -> None:
    refuses(UsageError, name, text, **{name: value}, **mode)


def test_what_is_for_step_mode_alone() -> None:
    refuses(UsageError, "before_step= without loss_fn=", before_step=lambda: None)
    refuses(UsageError, "weight= without loss_fn=", weight=lambda part: 1)
    refuses(UsageError, "sample= without loss_fn=", "first training call", sample=points())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss_fn", "mse", "type str"),
        ("loss_fn", lambda batch: batch, "loss_fn(model, batch)"),
        ("loss_fn", nn.CrossEntropyLoss(), "criterion(model(batch[0]), batch[1])"),
        ("loss_fn", F.cross_entropy, "criterion(model(batch[0]), batch[1])"),
        ("before_step", 3, "type int"),
        ("before_step", nn.utils.clip_grad_norm_, "before_step()"),
        ("weight", 3, "type int"),
        ("weight", lambda: 1.0, "weight(batch)"),
        ("script_accumulation", 8, "a whole optimizer step"),
        ("sample", 3, "the batch is 3"),
        ("sample", "x", "the batch is 'x'"),
    ],
)
def test_what_step_mode_cannot_call_or_use(name: str, value: Any, text: str) -> None:
    refuses(UsageError, text, **{"loss_fn": loss_fn, name: value})


@pytest.mark.parametrize("nothing", [None, 3, "x"])
def test_a_step_over_no_batch(nothing: Any) -> None:
    model = mlp()
    run, _ = stepper(model, loss_fn)
    with refusing(UsageError, f"the batch is {nothing!r}", "run.loader", model=model):
        run.step(nothing)


def test_a_target_that_does_not_divide_into_the_scripts_iterations() -> None:
    refuses(UsageError, "target_batch=10", "multiple of 4", target_batch=10, script_accumulation=4)


# ---- budgets


@BOTH
@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (6, "did you mean '6GiB'?"),
        (6.0, "did you mean '6GiB'?"),
        (800, "did you mean '800GiB'?"),
        ("6", "followed by a unit"),
        ("six GiB", "followed by a unit"),
        ("", "followed by a unit"),
        ("6 GB of memory", "followed by a unit"),
        ("-6GiB", "followed by a unit"),
        (True, "a bool"),
        (0, "0 bytes"),
        (-1, "-1 bytes"),
        (0.0, "between 0 and 1"),
        (float("nan"), "between 0 and 1"),
        ([6], "a list"),
    ],
)
def test_budgets_that_cannot_be_meant(mode: dict[str, Any], budget: Any, text: str) -> None:
    refuses(UsageError, text, budget=budget, **mode)


def test_a_budget_below_the_parameters_says_what_would_fit() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4))  # 16 MiB of parameters
    sample = (torch.zeros(8, 1024), torch.zeros(8, dtype=torch.long))
    with refusing(
        DoesNotFit, "a batch of 8 within 24.0 MiB", "it needs", "parameters and gradients alone take", model=model
    ):
        memfit.wrap(model, SGD(model.parameters()), sample=sample, loss_fn=loss_fn, budget="24MiB")


def test_what_is_said_to_fit_does_fit() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4))
    optimizer = SGD(model.parameters())
    sample = (torch.zeros(8, 1024), torch.zeros(8, dtype=torch.long))
    with pytest.raises(DoesNotFit) as caught:
        memfit.wrap(model, optimizer, sample=sample, loss_fn=loss_fn, budget="24MiB")
    wanted = caught.value.next_move.split("budget='")[1].split("'")[0]
    # The margin grows with the budget and other things take memory meanwhile: a little more than was said.
    said = memfit._units.parse_bytes(wanted)
    run = memfit.wrap(model, optimizer, sample=sample, loss_fn=loss_fn, budget=int(said * 1.1))
    assert run.plan is not None


def test_a_budget_in_script_mode_fails_at_the_first_training_call_and_leaves_a_usable_model() -> None:
    model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4))
    run = memfit.wrap(model, SGD(model.parameters()), budget="24MiB")
    with pytest.raises(DoesNotFit, match="budget="):
        loss_fn(model, (torch.zeros(8, 1024), torch.zeros(8, dtype=torch.long))).backward()
    run.undo()
    loss_fn(model, (torch.zeros(8, 1024), torch.zeros(8, dtype=torch.long))).backward()


# ---- losses


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction="none"), "its shape is"),
        (lambda model, batch: float(loss_fn(model, batch).detach()), "type float"),
        (lambda model, batch: None, "type NoneType"),
        (lambda model, batch: (loss_fn(model, batch), 1), "type tuple"),
        (lambda model, batch: loss_fn(model, batch).detach(), "does not depend on any parameter"),
        (lambda model, batch: torch.tensor(1.0), "does not depend on any parameter"),
    ],
    ids=["vector", "float", "None", "tuple", "detached", "constant"],
)
def test_a_loss_that_is_none(bad: Callable[..., Any], text: str) -> None:
    refuses(UsageError, "a loss to run backward from", text, loss_fn=bad, target_batch=12)


def test_a_loss_that_is_not_finite_while_planning() -> None:
    refuses(
        UsageError,
        "the loss of 5 samples is nan",
        loss_fn=lambda model, batch: loss_fn(model, batch) * float("nan"),
        target_batch=12,
    )
    refuses(UsageError, "is inf", loss_fn=lambda model, batch: loss_fn(model, batch) * float("inf"), target_batch=12)


# ---- models


def test_things_that_are_no_model() -> None:
    refuses(UsageError, "type function", model=loss_fn, optimizer=sgd(mlp()))
    refuses(UsageError, "the model is of type SGD", model=sgd(mlp()), optimizer=sgd(mlp()))


@BOTH
def test_models_that_cannot_be_trained_as_they_are(mode: dict[str, Any]) -> None:
    frozen = mlp().requires_grad_(False)
    refuses(
        UsageError,
        "none of its parameters requires a gradient",
        model=frozen,
        optimizer=SGD(frozen.parameters()),
        **mode,
    )
    refuses(UsageError, "none of its parameters", model=nn.Tanh(), optimizer=SGD([nn.Parameter(torch.ones(1))]), **mode)
    lazy = nn.LazyLinear(4)
    refuses(UsageError, "no shape yet", model=lazy, optimizer=SGD(lazy.parameters()), **mode)


class Elsewhere(Tensor):
    """A tensor that says it is on another device, as far as a machine without one can have it."""

    @staticmethod
    def __new__(cls, size: int) -> Elsewhere:
        return Tensor._make_wrapper_subclass(cls, (size,), dtype=torch.float32, device="cuda:0", requires_grad=True)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.detach.default, "nothing may be computed with it"
        return cls(len(args[0]))


@BOTH
def test_a_model_on_two_devices(mode: dict[str, Any]) -> None:
    model = mlp()
    model.register_parameter("far", nn.Parameter(Elsewhere(3)))
    with pytest.raises(Refused, match="on several devices") as caught:
        memfit.wrap(model, sgd(model), loader(), **mode)
    assert "cpu and cuda:0" in caught.value.found and "model.to(" in caught.value.next_move
    assert "forward" not in vars(model)


@BOTH
def test_parameters_without_values(mode: dict[str, Any]) -> None:
    model = mlp()
    model[3] = nn.Linear(8, 4, device="meta", dtype=torch.float64)
    refuses(UsageError, "3.weight is on the meta device", "load the weights", model=model, **mode)
    plan = _plan_of_meta_model(model)
    with refusing(UsageError, "3.weight is on the meta device", model=model):
        memfit.apply(plan, model, sgd(model), loader(), **mode)


def test_profile_and_plan_take_models_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1024, 4096), nn.Linear(4096, 4))
    plan = _plan_of_meta_model(model, torch.zeros(8, 1024))
    assert plan.micro_batch == 64 and plan.predicted.seconds is None
    assert plan.predicted.peak > 2 * 4 * 1024 * 4096
    assert all(p.is_meta and p.grad is None for p in model.parameters())


def _plan_of_meta_model(model: nn.Module, x: Tensor | None = None) -> memfit.Plan:
    x = points(8)[0] if x is None else x
    profile = memfit.profile(model, sgd(model), (x, torch.zeros(8, dtype=torch.long)), loss_fn=loss_fn)
    return memfit.plan(profile, memfit.probe(budget="4GiB", device="cpu"), target_batch=64)


# ---- optimizers


@BOTH
def test_optimizers_that_are_none_or_not_this_models(mode: dict[str, Any]) -> None:
    refuses(UsageError, "holds none of the model's parameters", optimizer=sgd(mlp()), **mode)
    refuses(UsageError, "type DataLoader", optimizer=loader(), **mode)
    model = mlp()
    refuses(UsageError, "type generator", model=model, optimizer=model.parameters(), **mode)


def test_an_optimizer_over_some_of_the_parameters_is_ordinary() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    want = plain(model, loss_fn, points())[1]
    run, seen = stepper(model, loss_fn, optimizer=SGD(model[3].parameters(), lr=0.1))
    run.step(points())
    assert relative_error(seen.gradients[0], want) <= 1e-12


@BOTH
def test_optimizers_that_need_closures(mode: dict[str, Any]) -> None:
    model = mlp()
    refuses(Refused, "LBFGS", "closure", model=model, optimizer=LBFGS(model.parameters()), **mode)


OPTIMIZERS: dict[Tensor, SGD] = {}


def steps_by_global(parameter: Tensor) -> None:
    OPTIMIZERS[parameter].step()


class Stepping:
    def __init__(self, optimizer: SGD) -> None:
        self.optimizer = optimizer

    def hook(self, parameter: Tensor) -> None:
        self.optimizer.step()

    def __call__(self, parameter: Tensor) -> None:
        self.optimizer.step()


def _steps(optimizer: SGD, parameter: Tensor) -> None:
    optimizer.step()


def _stepping_hooks(p: nn.Parameter) -> dict[str, Callable[[Tensor], None]]:
    own = SGD([p])
    OPTIMIZERS[p] = own
    table = {p: own}

    def by_closure(parameter: Tensor) -> None:
        table[parameter].step()

    def by_default(parameter: Tensor, optimizer: SGD = own) -> None:
        optimizer.step()

    return {
        "closure": by_closure,
        "default": by_default,
        "global": steps_by_global,
        "method": Stepping(own).hook,
        "object": Stepping(own),
        "partial": functools.partial(_steps, own),
    }


@pytest.mark.parametrize("how", ["closure", "default", "global", "method", "object", "partial"])
def test_optimizers_that_step_inside_backward(how: str) -> None:
    model = mlp()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_stepping_hooks(p)[how])
    refuses(Refused, "an optimizer that steps inside backward", "0.weight", model=model)


def test_other_hooks_on_gradients_are_ordinary_and_run_once_on_the_total() -> None:
    model = mlp()
    want = plain(model, loss_fn, points())[1]
    called: list[Tensor] = []

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        called.append(parameter.grad.clone())

    model[0].weight.register_post_accumulate_grad_hook(hook)
    run, _ = stepper(model, loss_fn)
    run.step(points())
    assert len(called) == 1
    assert relative_error({"w": called[0]}, {"w": want["0.weight"]}) <= 1e-12


def test_gradients_of_gradients() -> None:
    model = mlp()
    wrapped(model, 5)
    loss = loss_fn(model, points())
    with pytest.raises(Refused, match="create_graph=True"):
        loss.backward(create_graph=True)
    with pytest.raises(Refused, match="create_graph=True"):
        torch.autograd.grad(loss_fn(model, points()), list(model.parameters()), create_graph=True)
    assert all(p.grad is None for p in model.parameters())


# ---- loaders


@BOTH
def test_loaders_without_a_batch(mode: dict[str, Any]) -> None:
    nothing = TensorDataset(torch.zeros(0, 7), torch.zeros(0, dtype=torch.long))
    refuses(UsageError, "dataset is empty", source=DataLoader(nothing), **mode)
    refuses(UsageError, "no batch", source=DataLoader(TensorDataset(*points(3)), batch_size=4, drop_last=True), **mode)
    refuses(UsageError, "no batch", source=[], **mode)


@BOTH
def test_loaders_that_are_none(mode: dict[str, Any]) -> None:
    refuses(UsageError, "type int", "cannot be iterated", source=3, **mode)
    refuses(UsageError, "type str", "no batches", source="train", **mode)
    refuses(UsageError, "type dict", "no batches", source={"train": [points()]}, **mode)
    refuses(UsageError, "target_batch=12", "type list", source=[points(), points()], target_batch=12, **mode)


def test_a_sample_without_values() -> None:
    model = mlp()
    with refusing(UsageError, "meta device", model=model, optimizer=sgd(model)):
        memfit.wrap(model, sgd(model), loss_fn=loss_fn, sample=tuple(t.to("meta") for t in points()))


class Graph:
    """A batch that nobody can cut without being told how."""

    def __init__(self) -> None:
        self.x, self.y = points()
        self.edges, self.ends = torch.zeros(2, 20), torch.zeros(2)


def test_a_batch_that_cannot_be_cut_says_split() -> None:
    model = mlp()
    x, y = points()

    def graph_loss(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["nodes"])[:6], batch["labels"])

    with refusing(Refused, "split=", model=model, optimizer=sgd(model)):
        memfit.wrap(model, sgd(model), loss_fn=graph_loss, sample={"nodes": x, "labels": y[:6]})
    run = memfit.wrap(model, sgd(model), loss_fn=lambda m, b: loss_fn(m, (b.x, b.y)), micro_batch=5)
    with pytest.raises(MemfitError, match="split="):
        run.step(Graph())


def test_a_script_that_accumulates_undeclared() -> None:
    model = mlp()
    optimizer = sgd(model)
    run = memfit.wrap(model, optimizer, loader(), target_batch=12)
    before = copy.deepcopy(model.state_dict())
    batches = iter(run.loader)
    loss_fn(model, next(batches)).backward()
    loss = loss_fn(model, next(batches))
    with pytest.raises(UsageError, match="script_accumulation="):
        loss.backward()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# ---- exceptions of the user's own


class Mine(Exception):
    pass


def fails_on_real_data(module: nn.Module, args: Any) -> None:
    if type(args[0]) is Tensor:
        raise Mine("from the user's code")


def fails_always(module: nn.Module, args: Any) -> None:
    raise Mine("from the user's code")


def test_an_exception_in_the_model_while_planning_surfaces_as_itself() -> None:
    model = mlp()
    optimizer = sgd(model)
    source = loader()
    handle = model[2].register_forward_pre_hook(fails_always)
    picture = Picture(model, optimizer, source)
    with pytest.raises(Mine, match="from the user's code") as caught:
        memfit.wrap(model, optimizer, source, loss_fn=loss_fn, target_batch=12, micro_batch=5)
    assert caught.traceback[-1].name == fails_always.__name__
    picture.check()
    handle.remove()
    run = memfit.wrap(model, optimizer, source, loss_fn=loss_fn, target_batch=12, micro_batch=5)
    run.step(next(iter(run.loader)))


def test_an_exception_on_real_data_alone_surfaces_as_itself_in_the_first_step_at_the_latest() -> None:
    """A loss that fails on the few samples of a proof may be one that needs all of them: only the whole batch tells."""
    model = mlp()
    optimizer = sgd(model)
    source = loader()
    handle = model[2].register_forward_pre_hook(fails_on_real_data)
    before = copy.deepcopy(model.state_dict())

    def first_step() -> None:
        run = memfit.wrap(model, optimizer, source, loss_fn=loss_fn, target_batch=12, micro_batch=5)
        run.step(next(iter(run.loader)))

    with pytest.raises(Mine, match="from the user's code") as caught:
        first_step()
    assert caught.traceback[-1].name == fails_on_real_data.__name__
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not optimizer.state
    handle.remove()


def test_an_exception_in_the_data_set_while_planning_surfaces_as_itself() -> None:
    class Broken(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            raise Mine("sample")

    model = mlp()
    with pytest.raises(Mine, match="sample"):
        memfit.wrap(model, sgd(model), DataLoader(Broken(*points())), loss_fn=loss_fn, target_batch=12)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_an_exception_in_script_mode_surfaces_as_itself_and_the_model_stays_usable(fails_in: str) -> None:
    model = mlp()
    run = wrapped(model, 5)
    loss_fn(model, points()).backward()
    model.zero_grad()

    def fail_forward(module: nn.Module, args: Any) -> None:
        raise Mine("forward")

    def fail_backward(module: nn.Module, incoming: Any, outgoing: Any) -> None:
        raise Mine("backward")

    handle = (
        model[3].register_forward_pre_hook(fail_forward)
        if fails_in == "forward"
        else model[3].register_full_backward_hook(fail_backward)
    )
    with pytest.raises(Mine) as caught:
        loss_fn(model, points()).backward()
    assert caught.traceback[-1].name == f"fail_{fails_in}"
    assert all(p.grad is None for p in model.parameters())  # (hooks have changed: it fails in a proof, which leaves nothing)
    model.zero_grad()
    handle.remove()
    want = plain(_own(model, run), loss_fn, points())[1]
    loss_fn(model, points()).backward()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= 1e-12


def _own(model: nn.Module, run: memfit.Run) -> nn.Module:
    return copy.deepcopy(model)


@pytest.mark.parametrize("after", [0, 1, 2, 4, 8])
def test_ctrl_c_during_planning_leaves_everything_untouched(after: int) -> None:
    model = nn.Sequential(nn.Linear(7, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    optimizer = AdamW(model.parameters())
    source, calls = loader(), Notes()  # (what else a hook counts is put back after each part of planning)

    def interrupt(module: nn.Module, args: Any) -> None:
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(interrupt)
    picture = Picture(model, optimizer, source)
    with pytest.raises(KeyboardInterrupt):
        memfit.wrap(model, optimizer, source, loss_fn=loss_fn, target_batch=12)
    picture.check()
    handle.remove()


def test_ctrl_c_during_a_step_leaves_no_half_of_it() -> None:
    model = mlp()
    run, seen = stepper(model, loss_fn)
    run.step(points())
    before = copy.deepcopy(model.state_dict())
    calls = 0

    def interrupt(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt

    handle = model[2].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.step(points())
    handle.remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    want = plain(model, loss_fn, points())[1]
    run.step(points())
    assert relative_error(seen.gradients[1], want) <= 1e-12


# ---- files


def _saved(path: Path, **changes: Any) -> Path:
    model = mlp()
    run = memfit.wrap(model, sgd(model), loss_fn=loss_fn, sample=points(), target_batch=12, micro_batch=5)
    assert run.plan is not None
    run.plan.save(path)
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(data))
    return path


def test_damaged_plan_files(tmp_path: Path) -> None:
    path = _saved(tmp_path / "plan.json")
    whole = path.read_text()
    damaged = {
        "not JSON": whole[: len(whole) // 2],
        "not a plan": '{"a": 1}',
        "it is JSON, but": "[1, 2]",
        "nothing": "",
        "null": "null",
    }
    for text in damaged.values():
        path.write_text(text)
        refuses(PlanFileError, "plan.json", plan=str(path))
    path.write_bytes(b"\x80\x04\x95pickle")
    refuses(PlanFileError, "plan.json", plan=path)
    refuses(PlanFileError, "nowhere.json", plan=tmp_path / "nowhere.json")
    refuses(PlanFileError, str(tmp_path), plan=tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 0},
        {"micro_batch": "8"},
        {"micro_batch": 2.5},
        {"micro_batch": True},
        {"share": -1},
        {"target_batch": -1},
        {"keep": -1},
        {"limit": 10**31},
        {"overhead": math.inf},
        {"predicted": {"peak": 1, "upper": 1, "seconds": math.nan}},
        {"predicted": {"peak": 1, "upper": 1, "seconds": -1}},
        {"predicted": {"peak": 1, "upper": 10**31}},
        {"checkpoint": "all"},
        {"checkpoint": [1]},
        {"predicted": 3},
        {"predicted": {"peak": "much", "upper": 1}},
        {"options": {}},
        {"options": [{}]},
        {"by_size": [[1, 2]]},
        {"by_size": [[1, 0, 2]]},
        {"precision": None},
        {"precision": "int3"},
        {"mode": "guess"},
        {"surprise": 1},
        {"version": "1"},
        {"checkpoint": ["nowhere"]},
    ],
    ids=str,
)
def test_plan_files_with_a_wrong_field(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _saved(tmp_path / "plan.json", **changes)
    model = mlp()
    name, value = next(iter(changes.items()))
    text = {"predicted": "", "options": "", "checkpoint": str(value).strip("[]")}.get(name, name)
    with refusing(MemfitError, text, model=model):
        memfit.apply(path, model, sgd(model), loss_fn=loss_fn)


def test_a_plan_file_of_a_later_version(tmp_path: Path) -> None:
    path = _saved(tmp_path / "plan.json", version=99, brand_new_field=3)
    refuses(PlanFileError, "version 99", "update memfit", plan=path)


def test_a_plan_file_of_another_model(tmp_path: Path) -> None:
    path = _saved(tmp_path / "plan.json")
    other = mlp(width=9)
    refuses(PlanFileError, "Sequential with SGD", "another model or optimizer", model=other, plan=path)


@pytest.mark.parametrize("suffix", ["html", "json", "md"])
def test_a_report_that_cannot_be_written(tmp_path: Path, suffix: str) -> None:
    run, _ = stepper(mlp(), loss_fn)
    run.step(points())
    (tmp_path / "file").write_text("")
    for where in (tmp_path / "file" / f"report.{suffix}", tmp_path / "nowhere" / f"report.{suffix}"):
        with pytest.raises((MemfitError, OSError)) as caught:
            run.report().save(where)
        assert str(where.parent) in str(caught.value) or where.name in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    run.step(points())


# ---- circumstances


@BOTH
def test_several_processes(mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses(UsageError, "process 0 of 2", "MASTER_ADDR and MASTER_PORT not set", target_batch=12, **mode)
    monkeypatch.delenv("RANK")
    refuses(UsageError, "WORLD_SIZE=2", "RANK is not set", target_batch=12, **mode)
    monkeypatch.setenv("WORLD_SIZE", "1")
    model = mlp()
    assert memfit.wrap(model, sgd(model), loader(), target_batch=12, **mode).enabled


def test_a_mistake_in_wrapping_again_leaves_the_run_that_is_there() -> None:
    model = mlp()
    optimizer = sgd(model)
    run = wrapped(model, 5, optimizer=optimizer)
    for bad in ({"target_batch": 0}, {"budget": 6}, {"checkpoint": ["x"]}, {"loader": 3}, {"plan": 3}):
        with pytest.raises(UsageError):
            memfit.wrap(model, optimizer, bad.get("loader"), **{k: v for k, v in bad.items() if k != "loader"})
    assert run.enabled and "forward" in vars(model)
    want = plain(mlp(), loss_fn, points())[1]
    loss_fn(model, points()).backward()
    assert relative_error({n: p.grad for n, p in model.named_parameters()}, want) <= 1e-12


# ---- the other verbs


def test_profile() -> None:
    model = mlp()
    optimizer = sgd(model)
    with refusing(UsageError, "device='cuda'", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, device="cuda")
    with refusing(UsageError, "precision='int8'", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, precision="int8")
    with refusing(UsageError, "a profile has one precision", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, precision="fast")
    with refusing(UsageError, "no machine counts that many", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, evaluation=1 << 40)
    with refusing(UsageError, "no gradient comes near it", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, max_grad_norm=10**400)
    with refusing(UsageError, "zero_grad=", "does not know it", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, zero_grad=np.array(["after step", "x"]))  # type: ignore[arg-type]
    with refusing(UsageError, "tensors on the meta device", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, tuple(t.to("meta") for t in points()), loss_fn=loss_fn)
    evaluated = memfit.profile(model, optimizer, points(), loss_fn=loss_fn, evaluation=4)
    with refusing(UsageError, "samples=0", "an evaluation batch has at least one"):
        evaluated.evaluation(0)
    with refusing(UsageError, "no block 'x'", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, checkpoint=["x"])
    with refusing(Refused, "split=", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, (points(3)[0], points(5)[1]), loss_fn=loss_fn)
    with refusing(UsageError, "holds none", model=model, optimizer=optimizer):
        memfit.profile(model, sgd(mlp()), points(), loss_fn=loss_fn)
    with refusing(UsageError, "a loss to run backward from", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=lambda m, b: m(b[0]))
    with refusing(UsageError, "type str", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn="mse")  # type: ignore[arg-type]
    with refusing(UsageError, 'precision="bfloat16"', model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, points(), loss_fn=loss_fn, precision=torch.bfloat16)  # type: ignore[arg-type]
    with refusing(UsageError, "the batch is None", model=model, optimizer=optimizer):
        memfit.profile(model, optimizer, None, loss_fn=loss_fn)
    with refusing(UsageError, "the model is of type", model=model, optimizer=optimizer):
        memfit.profile(loss_fn, optimizer, points(), loss_fn=loss_fn)  # type: ignore[arg-type]


def test_plan_verb() -> None:
    model = mlp()
    profile = memfit.profile(model, sgd(model), points(), loss_fn=loss_fn)
    budget = memfit.probe(device="cpu")
    for arguments, text in (
        ({"target_batch": 0}, "at least 1"),
        ({"target_batch": 2.5}, "type float"),
        ({"target_batch": 8, "micro_batch": 0}, "at least 1"),
        ({"target_batch": 8, "micro_batch": "x"}, "does not know it"),
        ({"target_batch": 8, "checkpoint": ["x"]}, "no block 'x'"),
        ({"target_batch": 8, "checkpoint": "some"}, "checkpoint='some'"),
    ):
        with refusing(UsageError, text):
            memfit.plan(profile, budget, **arguments)  # type: ignore[arg-type]
    with refusing(UsageError, "type str", "memfit.probe(budget='6GiB')"):
        memfit.plan(profile, "6GiB", target_batch=8)  # type: ignore[arg-type]
    with refusing(UsageError, "type Sequential", "memfit.profile("):
        memfit.plan(model, budget, target_batch=8)  # type: ignore[arg-type]


def test_apply_and_verify_of_something_else() -> None:
    model = mlp()
    with refusing(UsageError, "type int", "memfit.Plan", model=model):
        memfit.apply(3, model, sgd(model))  # type: ignore[arg-type]
    with refusing(UsageError, "type Sequential", "the Run", model=model):
        memfit.verify(model)  # type: ignore[arg-type]


def test_verify_before_there_is_anything_to_compare() -> None:
    model = mlp()
    run = memfit.wrap(model, sgd(model))
    with refusing(UsageError, "one training step first", model=model):
        memfit.verify(run)
    run.undo()
    with refusing(UsageError, "switched off", "wrap again", model=model):
        memfit.verify(run)
