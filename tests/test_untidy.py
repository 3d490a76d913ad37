"""What scripts do with models and outputs beside training as books have it: as in plain PyTorch, or an error that says why."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, points
from stepping import sgd
from torch import Tensor, nn
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused

Loop = Callable[[nn.Module, Tensor, Tensor], Any]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 6, generator=generator).double(), torch.randint(0, 4, (10,), generator=generator)


class Beside(nn.Module):
    """Returns something without a batch dimension beside its output."""

    def __init__(self, what: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.what = net(), what

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out = self.inner(x)
        return out, self.what(out)


def retained(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def kept_across_steps(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    kept = []
    for _ in range(3):
        kept.append(model(x))
        model.zero_grad()
        F.cross_entropy(kept[-1], y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    return [out.detach().clone() for out in kept]


def together(model: nn.Module, x: Tensor, y: Tensor) -> None:
    first, second = model(x), model(x + 1)
    (F.cross_entropy(first, y) + F.cross_entropy(second, y)).backward()


def listed(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.stack([F.cross_entropy(model(x + i), y) for i in range(3)]).mean().backward()


def added_in_place(model: nn.Module, x: Tensor, y: Tensor) -> None:
    loss: Any = 0.0
    for i in range(3):
        loss += F.cross_entropy(model(x + i), y)
    (loss / 3).backward()


def written_output(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    out.mul_(2.0)
    out[:, 0] = 0.0
    F.cross_entropy(out, y).backward()


def indexed_by_a_mask(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    mask = y != 1
    F.cross_entropy(out[mask], y[mask]).backward()


def hooked(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    seen = []
    out = model(x)
    out.register_hook(lambda gradient: seen.append(gradient.clone()))
    out.retain_grad()
    F.cross_entropy(out, y).backward()
    return [*seen, out.grad]


def hooked_losses(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    seen: list[Any] = []
    out, other = model(x), model(x + 0.1)
    loss = F.cross_entropy(out, y) + F.kl_div(F.log_softmax(other, 1), out.softmax(1), reduction="batchmean")
    loss = (loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())) / 2
    loss.register_hook(lambda gradient: seen.append(gradient.clone()))
    loss.register_hook(lambda gradient: gradient * 2)
    loss.backward()
    return seen


def looked_at(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    out = model(x)
    F.cross_entropy(out, y).backward()
    found = [out.detach().numpy().sum(), out.tolist()[0][0], len(out), out.is_leaf, out.requires_grad, bool((out > 0).any())]
    return [torch.tensor(float(value)) for value in found]


def with_autograd_grad(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def saved(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    file = io.BytesIO()
    torch.save(model(x), file)
    file.seek(0)
    return [torch.load(file, weights_only=False).detach()]


def jacobian(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    return [torch.autograd.functional.jacobian(lambda given: model(given).sum(0), x)]


def functional(model: nn.Module, x: Tensor, y: Tensor) -> list[Any]:
    parameters = dict(model.named_parameters())

    def loss(given: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)

    return list(torch.func.grad(loss)(parameters).values())


LOOPS = [
    retained, kept_across_steps, together, listed, added_in_place, written_output, indexed_by_a_mask, hooked, hooked_losses,
    looked_at, with_autograd_grad, saved, jacobian, functional,
]  # fmt: skip


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_it_is_as_without_memfit(loop: Loop) -> None:
    plain, model = net(), net()
    want = loop(plain, *data())
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    got = loop(model, *data())
    run.undo()
    for mine, its in zip(got or (), want or (), strict=True):
        assert torch.allclose(torch.as_tensor(mine), torch.as_tensor(its), rtol=1e-12, atol=1e-14)
    if any(p.grad is not None for p in plain.parameters()):
        assert relative_error(gradients_of(model), gradients_of(plain)) < 1e-12


@pytest.mark.parametrize("computed", [True, False])
def test_a_hook_on_a_part_of_another_loss_is_refused_or_called(computed: bool) -> None:
    model, (x, y) = net(), data()
    memfit.wrap(model, sgd(model), micro_batch=3)
    for step in range(2):  # from the second step on, losses wait for others
        model.zero_grad()
        out, seen = model(x), []
        first, second = F.cross_entropy(out, y), out.pow(2).mean()
        total = first + second
        if computed:
            total.item()
        with pytest.raises(Refused, match="gradient of a loss") if step else nullcontext():
            first.register_hook(seen.append)
        total.backward()
        assert step or seen


def test_a_hook_on_a_loss_before_it_is_added_is_called() -> None:
    model, plain, (x, y) = net(), net(), data()
    memfit.wrap(model, sgd(model), micro_batch=3)
    for step in range(3):
        grads = []
        for each in (model, plain):
            each.zero_grad()
            out = each(x)
            first, second = F.cross_entropy(out, y), out.pow(2).mean()
            first.register_hook(lambda gradient: gradient * 3)
            first.retain_grad()
            (first + second).backward()
            assert first.grad == 3.0, step
            grads.append(gradients_of(each))
        assert relative_error(*grads) < 1e-12


@pytest.mark.parametrize("what", [lambda o: o.softmax(-1).amax(-1).mean(), lambda o: (o > 0).sum()], ids=["mean", "count"])
def test_a_metric_without_a_batch_dimension_is_that_of_the_whole(what: Callable[[Tensor], Tensor]) -> None:
    plain, model = Beside(what), Beside(what)
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    (x, y) = data()
    out, metric = model(x)
    F.cross_entropy(out, y).backward()
    assert metric.item() == pytest.approx(plain(x)[1].item(), rel=1e-12)
    run.undo()


def test_a_loss_has_one_backward_as_torch_says_it() -> None:
    model, (x, y) = net(), data()
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    run.undo()


@pytest.mark.parametrize("writes", ["parameters", "input"])
def test_what_changes_before_backward_is_torchs_own_error_with_memfits_reason(writes: str) -> None:
    """An output of an earlier batch whose parameters have been stepped since; a batch that is written to."""
    model, (x, y) = net(), data()
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    out = model(x)
    with torch.no_grad():
        (model[0].weight if writes == "parameters" else x).add_(1.0)
    with pytest.raises(RuntimeError, match=r"(?s)running a call in micro-batches.*modified by an inplace operation"):
        F.cross_entropy(out, y).backward()
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()  # and the model goes on
    run.undo()


class Sometimes(nn.Module):
    """Its output's size depends on what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[: max(1, int((x[:, 0] > 0).sum()))]


def test_shapes_that_change_between_micro_batches_are_refused_by_name() -> None:
    model = Sometimes()
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    with pytest.raises(Refused, match=r"(?s)found:.*output.*next:"):
        model(data()[0]).square().mean().backward()
    run.undo()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_models_are_refused() -> None:
    with pytest.raises(Refused, match=r"(?s)scripted.*next:"):
        model = torch.jit.script(nn.Linear(3, 2))
        memfit.wrap(model, sgd(model), micro_batch=3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"])
def test_copies_are_plain(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, (x, _) = net(), data()
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    model(x)
    other = copied(model)
    assert type(other(x)) is Tensor and b"memfit" not in pickle.dumps(other)
    assert torch.equal(other(x), net()(x))
    run.undo()


def test_a_line_that_reads_an_output_before_its_loss_is_said() -> None:
    model, (x, y) = net(), data()
    run = memfit.wrap(model, sgd(model), micro_batch=3)
    for _ in range(2):
        out = model(x)
        largest = out.max().item()  # read here
        F.cross_entropy(out, y).backward()
    (said,) = (event.message for event in run.events if "the forward runs again" in event.message)
    assert "test_untidy.py" in said and "largest = out.max().item()" in said and largest and said in str(run.report()).replace(
        "\n                ", " "
    )
    run.undo()


def grown_head(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Two more classes, in a layer of its own."""
    model.head = nn.Linear(8, 6).double()
    optimizer.add_param_group({"params": model.head.parameters()})


def densified(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Rows that are split in two, in the parameters' old places in the optimizer."""
    for name in ("weight", "bias"):
        old = getattr(model.head, name)
        new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2]]))
        setattr(model.head, name, new)
        for group in optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
            optimizer.state.pop(old, None)


def one_more_layer(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """A layer where there was none."""
    model.middle = nn.Linear(8, 8).double()
    optimizer.add_param_group({"params": model.middle.parameters(), "lr": 0.01})


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.middle, self.head = nn.Linear(7, 8).double(), nn.Tanh(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.body(x)))


@pytest.mark.parametrize("step_mode", [False, True])
@pytest.mark.parametrize("grow", [grown_head, densified, one_more_layer])
def test_parameters_that_are_added_or_replaced_are_planned_for_anew(
    grow: Callable[[Any, torch.optim.Optimizer], None], step_mode: bool
) -> None:
    def trained(wrap: Callable[..., Any]) -> tuple[list[Tensor], list[int], Any]:
        model = Growing()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        run = wrap(model, optimizer)
        for step in range(4):
            if step == 2:
                torch.manual_seed(step)
                grow(model, optimizer)
                sizes = Forwards(model.head).sizes
            x, y = points(12, seed=step)
            if run is not None and step_mode:
                run.step((x, y))
                continue
            optimizer.zero_grad()
            loss_of_growing(model, (x, y)).backward()
            optimizer.step()
        return list(model.parameters()), sizes, run

    given = {"loss_fn": loss_of_growing, "sample": points(12)} if step_mode else {}
    wanted, _, _ = trained(lambda model, optimizer: None)
    made, sizes, run = trained(lambda model, optimizer: memfit.wrap(model, optimizer, micro_batch=5, **given))
    assert sizes == [4, 4, 4] * 2
    assert all(float((p - q).detach().norm()) <= 1e-12 for p, q in zip(made, wanted, strict=True))
    assert any("added or replaced" in event.message for event in run.events)


def loss_of_growing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def test_functional_call_with_parameters_that_the_optimizer_trains_runs_with_these() -> None:
    def trained(wrap: Callable[..., Any]) -> list[Tensor]:
        model = net()
        members = [{name: nn.Parameter(p.detach() * (1 + i)) for name, p in model.named_parameters()} for i in range(2)]
        optimizer = sgd(model)
        optimizer.add_param_group({"params": [p for member in members for p in member.values()]})
        wrap(model, optimizer)
        for _ in range(2):
            x, y = data()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            for member in members:
                loss = loss + F.cross_entropy(torch.func.functional_call(model, member, (x,)), y)
            loss.backward()
            optimizer.step()
        return [*model.parameters(), *(p for member in members for p in member.values())]

    wanted = trained(lambda model, optimizer: None)
    made = trained(lambda model, optimizer: memfit.wrap(model, optimizer, micro_batch=4))
    assert all(float((p - q).detach().norm()) <= 1e-12 for p, q in zip(made, wanted, strict=True))


def test_parameters_that_are_replaced_before_the_loss_are_refused() -> None:
    model = Growing()
    optimizer = sgd(model)
    memfit.wrap(model, optimizer, micro_batch=5)
    x, y = points(12)
    F.cross_entropy(model(x), y).backward()
    out = model(x)
    grown_head(model, optimizer)
    with pytest.raises(Refused, match="replaced since the call"):
        F.cross_entropy(out, y).backward()


class Checkpointed(nn.Module):
    """Its first layer is checkpointed on data: torch gives it no gradient where the checkpoint is reentrant."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(7, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.last(hidden.tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_parameters_without_a_gradient_are_named(reentrant: bool, in_steps: bool) -> None:
    model, (x, y) = Checkpointed(reentrant), points()
    more: dict[str, Any] = {"loss_fn": lambda m, b: F.cross_entropy(m(b[0]), b[1])} if in_steps else {}
    optimizer = sgd(model)
    run = memfit.wrap(model, optimizer, micro_batch=5, **more)
    for _ in range(2):
        if in_steps:
            run.step((x, y))
        else:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    said = [event.message for event in run.events if "no gradient reached" in event.message]
    assert said == (["no gradient reached first.weight, first.bias in the first step"] if reentrant else [])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_submodule() -> None:
    def trained(cut: bool) -> list[Tensor]:
        model = net()
        model = nn.Sequential(torch.jit.script(model[:2]), model[2])  # type: ignore[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = memfit.wrap(model, optimizer, micro_batch=3) if cut else None
        x, y = data()
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert run is None or (run.plan is not None and run.plan.accumulation == 4)
        return [p.detach() for p in model.parameters()]

    for got, want in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
