"""Idioms of public training code that once ended in an error: the same losses and parameters as without memfit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import memfit
from memfit.engine.shadow_optimizer import shadow_optimizer

Step = Callable[[int], Tensor]
Script = Callable[[], tuple[nn.Module, Any, Step]]


def trained(script: Script, line: bool) -> list[float]:
    torch.manual_seed(0)
    model, optimizer, step = script()
    if line:
        memfit.wrap(model, optimizer, micro_batch=3)
    losses = []
    for i in range(3):
        optimizer.zero_grad()
        loss = step(i)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *(p.double().sum().item() for p in model.parameters())]


class Clip(nn.Module):
    """Returns a scalar of its parameters beside embeddings (open_clip)."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4).double(), nn.Embedding(9, 4).double()
        self.logit_scale = nn.Parameter(torch.tensor(2.6).double())

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return F.normalize(self.image(image)), F.normalize(self.text(text).mean(1)), self.logit_scale.exp()


def clip() -> tuple[nn.Module, Any, Step]:
    model = Clip()

    def step(i: int) -> Tensor:
        image, text, scale = model(torch.randn(7, 6).double(), torch.randint(0, 9, (7, 5)))  # with zeros: padding
        scores, labels = scale * image @ text.T, torch.arange(7)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2

    return model, Adam(model.parameters(), lr=0.01), step


class Tagger(nn.Module):
    """Returns lengths beside its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        return F.log_softmax(self.net(x), -1), lengths // 2


def cut_by_own_lengths() -> tuple[nn.Module, Any, Step]:
    model = Tagger()

    def step(i: int) -> Tensor:
        lengths = torch.randint(4, 10, (7,))
        out, _ = model(torch.randn(7, 5, 4).double(), lengths)
        return out[:, : lengths.max() // 2].square().mean()

    return model, SGD(model.parameters(), lr=0.1), step


def cut_by_returned_lengths() -> tuple[nn.Module, Any, Step]:
    model = Tagger()

    def step(i: int) -> Tensor:
        out, lengths = model(torch.randn(7, 5, 4).double(), torch.randint(4, 10, (7,)))
        return out[:, : lengths.max()].square().mean()

    return model, SGD(model.parameters(), lr=0.1), step


def ctc_of_returned_lengths() -> tuple[nn.Module, Any, Step]:
    model = Tagger()

    def step(i: int) -> Tensor:
        out, lengths = model(torch.randn(7, 8, 4).double(), torch.full((7,), 16))
        symbols = torch.tensor([1, 2, 3, 1, 2, 3, 1])
        return F.ctc_loss(out.transpose(0, 1), torch.randint(1, 4, (13,)), lengths, symbols)

    return model, SGD(model.parameters(), lr=0.1), step


class Full(nn.Module):
    """Returns its loss with one dimension, for DataParallel to gather."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(x)
        return F.cross_entropy(out, y).unsqueeze(0), out


def gathered_loss() -> tuple[nn.Module, Any, Step]:
    model = Full()

    def step(i: int) -> Tensor:
        losses, _ = model(torch.randn(7, 6).double(), torch.randint(0, 3, (7,)))
        assert losses.shape == (1,) and len(losses.tolist()) == 1
        return losses[0]

    return model, SGD(model.parameters(), lr=0.1), step


class Lookahead(Optimizer):
    """Without the base's `__init__`."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Scaled:
    """A wrapper that reads the groups of the optimizer inside."""

    param_groups = property(lambda self: self.inner.param_groups)
    state = property(lambda self: self.inner.state)

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner

    def zero_grad(self) -> None:
        self.inner.zero_grad(set_to_none=False)

    def step(self) -> None:
        self.inner.step()


class Several(Scaled):
    """A wrapper of a list of optimizers."""

    param_groups = property(lambda self: [group for each in self.inner for group in each.param_groups])
    state = property(lambda self: {p: held for each in self.inner for p, held in each.state.items()})

    def zero_grad(self) -> None:
        for each in self.inner:
            each.zero_grad(set_to_none=False)

    def step(self) -> None:
        for each in self.inner:
            each.step()


class WithSetters(Scaled):
    """As apex's LARC: groups can be set, and are those of the optimizer inside."""

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.inner.param_groups = value

    @property
    def state(self) -> Any:
        return self.inner.state

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value


class Sharing(Scaled):
    """Holds the groups of the optimizer inside."""

    param_groups = state = None

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state


class Slow(Sharing):
    """Moves slow weights of its own towards the parameters."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            for group, slow in zip(self.inner.param_groups, self.slow):
                for p, q in zip(group["params"], slow):
                    q.add_(p - q, alpha=0.5)
                    p.copy_(q)


def wrapping(wrap: Callable[[list[Any]], Any]) -> Script:
    def script() -> tuple[nn.Module, Any, Step]:
        model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
        for p in model.parameters():
            p.grad = torch.ones_like(p)  # which an optimizer of its own would use
        optimizer = wrap([Adam(model[0].parameters(), lr=0.1), Adam(model[1].parameters(), lr=0.1)])
        return model, optimizer, lambda i: model(torch.randn(7 + i, 6).double()).square().mean()

    return script


def empty_calls() -> tuple[nn.Module, Any, Step]:
    model = nn.Linear(6, 3).double()

    def step(i: int) -> Tensor:
        x, y = torch.randn(7, 6).double(), torch.randint(0, 3, (7,))
        found = [F.cross_entropy(model(x[:n]), y[:n], reduction="sum") for n in (7, 1, 0)]
        return found[0] + found[1] + found[2]

    return model, SGD(model.parameters(), lr=0.1), step


SCRIPTS = {
    "clip": clip,
    "cut by own lengths": cut_by_own_lengths,
    "cut by returned lengths": cut_by_returned_lengths,
    "ctc": ctc_of_returned_lengths,
    "gathered loss": gathered_loss,
    "lookahead": wrapping(lambda inner: Lookahead(inner[0])),
    "scaled": wrapping(lambda inner: Scaled(inner[1])),
    "several": wrapping(Several),
    "with setters": wrapping(lambda inner: WithSetters(inner[0])),
    "slow": wrapping(lambda inner: Slow(inner[0])),
    "sharing": wrapping(lambda inner: Sharing(inner[0])),
    "empty calls": empty_calls,
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_it_trains_as_without_memfit(script: Script) -> None:
    assert trained(script, True) == pytest.approx(trained(script, False), rel=1e-10, abs=1e-12)


class Average:
    def __init__(self, params: list[Tensor]) -> None:
        self.held, self.updates = [p.detach().clone() for p in params], 0

    def update(self, params: list[Tensor]) -> None:
        self.updates += 1
        for q, p in zip(self.held, params):
            q.lerp_(p.detach(), 0.5)


class Averaged(Sharing):
    """Its step updates an object of the script's."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner)
        self.average = Average(self.trained())

    def trained(self) -> list[Tensor]:
        return [p for group in self.inner.param_groups for p in group["params"]]

    def step(self) -> None:
        super().step()
        self.average.update(self.trained())


def test_planning_does_not_update_what_an_optimizer_holds() -> None:
    made: list[Averaged] = []

    def wrap(inner: list[Any]) -> Averaged:
        made.append(Averaged(inner[0]))
        return made[-1]

    for line in (False, True):
        trained(wrapping(wrap), line)
    plain, lined = (each.average for each in made)
    assert lined.updates == plain.updates == 3
    torch.testing.assert_close(lined.held, plain.held)


class AsksWhetherSame(nn.Module):
    """Asks whether its query is its key; `by_size` also how many samples there are."""

    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.net, self.by_size = nn.Linear(6, 3).double(), by_size

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        out = self.net(query) * (1.5 if query is key else 0.5)
        return out * 2.0 if self.by_size and len(query) > 6 else out


def test_one_tensor_given_twice_is_cut_alike_where_the_number_of_samples_decides() -> None:
    model, x = AsksWhetherSame(True).double(), torch.randn(8, 6).double()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    with pytest.raises(memfit.Refused, match="branches on the number of samples"):
        model(x, x).sum().backward()


@pytest.mark.parametrize("same", [True, False])
def test_one_tensor_that_a_batch_holds_twice_stays_one_in_step_mode(same: bool) -> None:
    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        query, key, y = batch
        return F.cross_entropy(model(query, key), y)

    def losses(line: bool) -> list[float]:
        torch.manual_seed(0)
        model = AsksWhetherSame(False).double()
        optimizer = SGD(model.parameters(), 0.1)
        run = memfit.wrap(model, optimizer, loss_fn=loss_fn, micro_batch=3) if line else None
        found = []
        for _ in range(3):
            x, y = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
            batch = x, x if same else x.clone(), y
            if run is not None:
                found.append(run.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.testing.assert_close(losses(True), losses(False), rtol=1e-12, atol=0)


class Similarities(nn.Module):
    """Embeds samples; compares all with all where both arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        a, b = self.net(query), self.net(key)
        return a * (a @ a.T).mean() if query is key else a * b


def test_a_call_with_one_tensor_twice_is_another_kind_of_call() -> None:
    model, x = Similarities(), torch.randn(8, 6).double()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    for _ in range(2):
        model(x, x.clone()).sum().backward()
    with pytest.raises(memfit.Refused, match="batch of 8"):
        model(x, x).sum().backward()


class SlowByParameter(Lookahead):
    """Keeps a slow weight for each parameter."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self.slow = {p: torch.zeros_like(p) for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        with torch.no_grad():
            for p, slow in self.slow.items():
                p.copy_(slow.lerp_(p, 0.5))
        return loss


def test_a_shadow_of_slow_weights_by_parameter_steps_its_twins() -> None:
    p, left_out = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    twin = nn.Parameter(torch.ones(3))
    twin.grad = torch.ones(3)
    optimizer = SlowByParameter(SGD([p, left_out], lr=0.5))
    shadow: Any = shadow_optimizer(optimizer, lambda q: twin if q is p else None, lambda t: t.detach().clone())
    shadow.step()
    assert shadow.param_groups is shadow.optimizer.param_groups
    assert twin.tolist() == [0.25] * 3
    assert p.tolist() == left_out.tolist() == [1.0] * 3
    assert all(slow.tolist() == [0.0] * 3 for slow in optimizer.slow.values())


def test_an_output_that_can_no_longer_run_says_so_where_it_is_given_to_a_model() -> None:
    torch.manual_seed(0)
    model, judge = nn.Linear(6, 3).double(), nn.Linear(3, 1).double()
    memfit.wrap(judge, SGD(judge.parameters(), 0.1), micro_batch=3)
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    out = model(torch.randn(8, 6).double())
    model.weight.data.add_(0.01)
    with pytest.raises(memfit.Refused, match="modified by an inplace operation"):
        judge(out.detach())


@pytest.mark.parametrize("mode", ["script", "step"])
def test_a_prompt_for_a_frozen_model(mode: str) -> None:
    def losses(line: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double().requires_grad_(False)
        prompt = nn.Parameter(torch.randn(6).double())
        optimizer = Adam([prompt], lr=0.1)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(model(batch[0] + prompt), batch[1])

        settings: dict[str, Any] = {"loss_fn": loss_fn} if mode == "step" else {}
        run = memfit.wrap(model, optimizer, micro_batch=3, **settings) if line else None
        found = []
        for _ in range(3):
            batch = torch.randn(8, 6).double(), torch.randint(0, 3, (8,))
            if run is not None and mode == "step":
                found.append(run.step(batch).item())
                continue
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return [*found, *prompt.tolist()]

    assert losses(True) == pytest.approx(losses(False), rel=1e-12)
