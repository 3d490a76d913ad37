"""`split=`: batches that only the script's own function cuts train as those that memfit cuts by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import mlp, points
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import memfit
from memfit import Refused

X, Y = points(24)
Wrap = Callable[..., Any]


def pieces_of(batch: Any, sizes: list[int]) -> list[Any]:
    """Along the first dimension of all tensors."""
    found, spec = tree_flatten(batch)
    cut = [leaf.split(sizes) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * len(sizes) for leaf in found]
    return [tree_unflatten(list(piece), spec) for piece in zip(*cut)]


def without_graph(batch: Any, sizes: list[int]) -> list[Any]:
    with torch.no_grad():
        return pieces_of(batch, sizes)


def plain(*_: Any, **__: Any) -> None:
    return None


def apart(script: Callable[[Wrap], list[Tensor]], **settings: Any) -> float:
    """How far what a script leaves with memfit is from what it leaves without."""
    want, got = script(plain), script(lambda *objects, **more: memfit.wrap(*objects, micro_batch=5, **settings, **more))
    return max(float((w - g).norm() / w.norm()) for w, g in zip(want, got, strict=True))


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "known": F.cross_entropy,
    "in two passes": lambda out, y: (out.exp().mean() + F.cross_entropy(out, y)).sqrt(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("given", ["an output of another model", "a leaf"])
def test_gradients_flow_into_what_the_model_is_given(given: str, loss: str) -> None:
    def script(wrap: Wrap) -> list[Tensor]:
        encoder, model = mlp(outputs=7), mlp()
        x = X[:12].clone().requires_grad_(given == "a leaf")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer, split=pieces_of)
        for _ in range(2):
            optimizer.zero_grad()
            out = model(x if given == "a leaf" else encoder(x))
            LOSSES[loss](out, Y[:12]).backward()
            optimizer.step()
        reached = [x] if given == "a leaf" else [*encoder.parameters()]
        return [*(p.detach() for p in model.parameters()), *(p.grad for p in reached if p.grad is not None)]

    assert apart(script) <= 1e-12


def test_a_split_that_autograd_does_not_follow_is_refused_where_gradients_flow_through_it() -> None:
    model = mlp()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5, split=without_graph)
    with pytest.raises(Refused, match="no graph"):
        F.cross_entropy(model(X[:12].clone().requires_grad_()), Y[:12]).backward()


def test_calls_with_other_numbers_of_samples_than_the_loaders_batch() -> None:
    def script(wrap: Wrap) -> list[Tensor]:
        model, found = mlp(), []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=12)
        run = wrap(model, optimizer, loader, split=pieces_of)
        for x, y in loader if run is None else run.loader:
            optimizer.zero_grad()
            both, few = model(torch.cat([x, x + 1])), model(x[:7])
            found.append(few.detach() + 0)
            (F.cross_entropy(both, torch.cat([y, y])) + F.cross_entropy(few, y[:7])).backward()
            optimizer.step()
        return [*(p.detach() for p in model.parameters()), *found]

    assert apart(script) <= 1e-12


def trained(loss_fn: Callable[[nn.Module, Any], Tensor]) -> Callable[[Wrap], list[Tensor]]:
    def script(wrap: Wrap) -> list[Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = wrap(model, optimizer, split=pieces_of, loss_fn=loss_fn)
        for batch in ((X[:12], Y[:12]), (X[12:], Y[12:])):
            if run is not None:
                run.step(batch)
                continue
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    return script


def compared(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out @ out.T, torch.arange(len(out)))


def by_number(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * (2.0 if len(batch[1]) > 6 else 1.0)


def by_values(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * (2.0 if batch[0].abs().max().item() > 1.0 else 1.0)


@pytest.mark.parametrize("loss_fn", [compared, by_number, by_values])
def test_step_mode_with_losses_that_need_all_samples(loss_fn: Any) -> None:
    assert apart(trained(loss_fn)) <= 1e-12


def test_a_forward_that_decides_by_the_number_of_samples_is_refused() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x) * (2.0 if len(x) > 6 else 1.0)

    model = Decides()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5, split=pieces_of)
    with pytest.raises(Refused, match="number of samples"):
        model(X[:12])


class Lengthy(nn.Module):
    """Its output is as long as its longest sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn, self.head = nn.Embedding(7, 4), nn.GRU(4, 4, batch_first=True), nn.Linear(4, 5)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_batches_of_other_lengths_are_known_by_their_shapes(loss: str) -> None:
    def script(wrap: Wrap) -> list[Tensor]:
        model, draw = Lengthy(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer, split=pieces_of)
        for length in (5, 3, 6, 3):
            x, y = (torch.randint(0, 5, (12, length), generator=draw) for _ in range(2))
            optimizer.zero_grad()
            LOSSES[loss](model(x).flatten(0, 1), y.flatten()).backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert apart(script) <= 1e-12


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.net(query) * (2.0 if query is key else 0.5)


@pytest.mark.parametrize("given", ["data", "a leaf"])
def test_one_tensor_that_is_given_twice_stays_one(given: str) -> None:
    def script(wrap: Wrap) -> list[Tensor]:
        model = Asks()
        x = X[:12].clone().requires_grad_(given == "a leaf")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        wrap(model, optimizer, split=pieces_of)
        for _ in range(2):
            optimizer.zero_grad()
            (F.cross_entropy(model(x, x), Y[:12]) + F.cross_entropy(model(x, x.clone()), Y[:12])).backward()
            optimizer.step()
        return [*(p.detach() for p in model.parameters()), *([] if x.grad is None else [x.grad])]

    assert apart(script) <= 1e-12
