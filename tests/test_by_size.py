"""Forwards and losses that do something else with many samples than with few: refused, or run in two passes, never cut."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards, mlp, points
from stepping import error_of_step, error_of_steps
from torch import Tensor, nn

import memfit
from memfit import Refused
from memfit.capture.size_dependence import Positions
from memfit.capture.size_looks import SizeLooks

X, Y = points(24)
EXACT, MOST = 1e-12, 8
"""Samples beyond which they do something else: parts of a batch of 12 have fewer, and so have proofs."""


def mask_of(x: Tensor) -> Tensor:
    return (torch.arange(len(x)) < MOST).double()


FORWARDS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a factor": lambda net, x: net(x) * (2.0 if len(x) > MOST else 1.0),
    "another function": lambda net, x: net(x).tanh() if len(x) > MOST else net(x),
    "another module": lambda net, x: net(net.get_submodule("0")(x)[:, :7]) if len(x) > MOST else net(x),
    "a word": lambda net, x: F.gelu(net(x), approximate="tanh" if len(x) > MOST else "none"),
    "the first samples": lambda net, x: torch.cat([net(x[:MOST]) * 2, net(x[MOST:])]),
    "a mask of positions": lambda net, x: net(x) * mask_of(x)[:, None],
    "a limit": lambda net, x: net(x) * torch.ones(min(len(x), MOST)).sum() / 4,
    "a capacity": lambda net, x: net(x) * (torch.ones(len(x)).cumsum(0)[:, None] <= MOST),
    "a rank": lambda net, x: net(x) * (x.detach().sum(1).argsort().argsort() < MOST).double()[:, None],
    "a factor in a loop": lambda net, x: torch.stack([net(o) * (3 if i >= MOST else 1) for i, o in enumerate(x)]),
    "a number of samples of a kind": lambda net, x: net(x) * torch.where((x.sum(1) < 99).sum() > MOST, 2.0, 1.0),
    "a divisor with a limit": lambda net, x: net(x) / (x.sum(1) < 99).sum().clamp(max=MOST) * len(x),
    "another module of its type": lambda net, x: (net.get_submodule("0") if len(x) > MOST else net.other)(x)[:, :4],
    "another parameter": lambda net, x: net(x) * (net.get_submodule("0").weight if len(x) > MOST else net.other.weight).sum(),
    "its number in a tensor": lambda net, x: net(x) * torch.where(torch.tensor(len(x)) > MOST, 2.0, 1.0),
    "its number in a tensor with a limit": lambda net, x: net(x) * torch.tensor(float(len(x))).clamp(min=MOST) / len(x),
    "groups of positions": lambda net, x: net(x) * (torch.arange(len(x)) // MOST + 1)[:, None],
    "positions with a limit": lambda net, x: net(x) * torch.arange(len(x)).clamp(min=MOST)[:, None],
    "the last of a group": lambda net, x: net(x) * (torch.arange(len(x)) % MOST == MOST - 1)[:, None],
    "weights by position": lambda net, x: net(x) * torch.tensor([2.0 if i >= MOST else 1.0 for i in range(len(x))])[:, None],
}
SAME: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a list of sizes": lambda net, x: torch.stack(
        [o.mean(0) for o in net(torch.cat([x, x], 1).view(-1, 7)).split([2] * len(x))]
    ),
    "a list of lengths": lambda net, x: torch.stack([net(o) for o in x]) / torch.tensor([len(o) for o in x])[:, None],
    "each sample": lambda net, x: torch.stack([net(sample) for sample in x]),
    "a view": lambda net, x: net(x.view(len(x), -1)).view(len(x), 4),
    "features by position": lambda net, x: net(x) * (torch.arange(4) < 2)[None] + net(x)[:, :8].sum(1, keepdim=True),
    "its length": lambda net, x: net(x) * len(x) / len(x),
    "its length in a tensor": lambda net, x: net(x) * torch.tensor(len(x)) / torch.tensor(float(len(x))),
    "the sample of each row": lambda net, x: net(x) + (torch.arange(4 * len(x)) // 4).view(-1, 4).sum(1, keepdim=True) * 0,
    "the place in a sample": lambda net, x: net(x) * (torch.arange(4 * len(x)) % 4).view(-1, 4),
    "weights of samples": lambda net, x: net(x) * torch.tensor([2.0 for _ in x])[:, None],
    "places of samples": lambda net, x: net(x)[torch.tensor([i for i, _ in enumerate(x)])],
    "features by a running count": lambda net, x: net(x) * (torch.ones(len(x), 4).cumsum(1) <= 2),
    "a sum of features": lambda net, x: net(x) * (x.sum(1, keepdim=True) > 2),
}


class Doing(nn.Module):
    """A net and what is done with it. `how`: the forward of these that it is made of, if it is one."""

    def __init__(self, what: Callable[[nn.Module, Tensor], Tensor], how: str = "") -> None:
        super().__init__()
        self.net, self.what = mlp(), what
        if how in ("another module of its type", "another parameter"):
            self.net.__dict__["other"] = self.other = nn.Linear(7, 16).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self.net, x)


@pytest.mark.parametrize("how", FORWARDS)
def test_a_forward_that_decides_by_size_is_refused(how: str) -> None:
    model = Doing(FORWARDS[how], how)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    with pytest.raises(Refused, match="the number of samples"):
        model(X[:12])


def test_a_batch_that_grows_beyond_it_is_looked_at_again() -> None:
    model = Doing(FORWARDS["a factor"])
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    F.cross_entropy(model(X[:7]), Y[:7]).backward()
    with pytest.raises(Refused, match="the number of samples"):
        model(X[:12])


@pytest.mark.parametrize("how", FORWARDS)
def test_it_runs_whole_where_that_fits(how: str) -> None:
    model, plain = Doing(FORWARDS[how], how), Doing(FORWARDS[how], how)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    for each in (model, plain):
        F.cross_entropy(each(X[:12]), Y[:12]).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        assert p.grad is q.grad is None or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", SAME)
def test_what_does_the_same_for_any_number_is_cut(how: str) -> None:
    model = Doing(SAME[how])
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    F.cross_entropy(model(X[:12]), Y[:12]).backward()


LOSSES: dict[str, Callable[[nn.Module, Any], Tensor]] = {
    "integers in a loop": lambda m, b: torch.stack(
        [o.pow(2).mean() + o.pow(4 if len(b[0]) > MOST else 2).mean() for o in m(b[0])]
    ).mean(),
    "a type in a loop": lambda m, b: torch.stack(
        [o.to(torch.bfloat16 if len(b[0]) > MOST else torch.float64).double().exp().mean() for o in m(b[0])]
    ).mean(),
    "a weight by position": lambda m, b: torch.stack(
        [(3 if i >= MOST else 1) * o.exp().mean() for i, o in enumerate(m(b[0]))]
    ).mean(),
    "a dimension in a loop": lambda m, b: torch.stack(
        [one.cumsum(0 if len(b[0]) > MOST else 1).pow(2).mean() for one in m(b[0]).view(-1, 2, 2)]
    ).mean(),
    "a factor": lambda m, b: F.cross_entropy(m(b[0]), b[1]) * (2.0 if len(b[0]) > MOST else 1.0),
    "smoothing": lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1 if len(b[0]) > MOST else 0.0),
    "another loss": lambda m, b: (F.cross_entropy if len(b[0]) > MOST else F.multi_margin_loss)(m(b[0]), b[1]),
    "the first samples": lambda m, b: F.cross_entropy(m(b[0])[:MOST], b[1][:MOST]),
    "a mask of positions": lambda m, b: (F.cross_entropy(m(b[0]), b[1], reduction="none") * mask_of(b[0])).mean(),
    "a rank": lambda m, b: (each(m, b) * (each(m, b).detach().argsort().argsort() < MOST)).mean(),
    "a running count": lambda m, b: (each(m, b) * ((b[1] >= 0).double().cumsum(0) < MOST)).mean(),
    "classes": lambda m, b: m(b[0])[:, : 3 if len(b[0]) > MOST else 4].exp().mean() + m(b[0])[0:1].mean() * 0,
    "samples of a class": lambda m, b: (each(m, b) * torch.where(b[1].clamp(0, 0).bincount() > MOST, 2.0, 1.0)[0]).mean(),
    "a divisor with a limit": lambda m, b: each(m, b).sum() / (b[1] >= 0).sum().clamp(max=MOST),
    "its number in a tensor": lambda m, b: each(m, b).mean() * torch.where(torch.tensor(len(b[0])) > MOST, 2.0, 1.0),
    "weights by position": lambda m, b: (each(m, b) * torch.tensor([1.0 + (i >= MOST) for i in range(len(b[0]))])).mean(),
    "a part of a list": lambda m, b: torch.stack(list(each(m, b))[:MOST]).mean(),
}


def each(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_fn_that_decides_by_size_runs_in_two_passes(how: str) -> None:
    assert error_of_step(mlp(), LOSSES[how], (X[:12], Y[:12])) <= EXACT


@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_fn_that_decides_by_the_size_of_a_later_batch_runs_in_two_passes(how: str) -> None:
    assert error_of_steps(mlp(), LOSSES[how], [(X[:7], Y[:7]), (X[:12], Y[:12])]) <= EXACT


def looped(m: nn.Module, b: Any) -> Tensor:
    """Many functions are called once per sample."""
    out = m(b[0])
    each = [0.5 * F.cross_entropy(out[i, :] * 3.0, label) for i, label in enumerate(b[1])]
    return sum(each) / len(out)  # type: ignore[return-value]


@pytest.mark.parametrize("how", FORWARDS)
def test_a_forward_that_decides_by_size_is_refused_under_a_loss_that_loops_over_samples(how: str) -> None:
    with pytest.raises(Refused, match="the number of samples"):
        error_of_step(Doing(FORWARDS[how], how), looped, (X[:12], Y[:12]))


@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_that_decides_by_size_runs_in_two_passes_beside_one_that_loops_over_samples(how: str) -> None:
    assert error_of_step(mlp(), lambda m, b: looped(m, b) + LOSSES[how](m, b), (X[:12], Y[:12])) <= EXACT


REPEATED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "looped": looped,
    "by index": lambda m, b: sum(1.5 * F.cross_entropy(m(b[0])[i], b[1][i]) for i in range(len(b[0]))) / len(b[0]),
    "calls of the model": lambda m, b: sum(F.cross_entropy(m(x[None]), y[None]) for x, y in zip(*b)) / len(b[0]),
    "samples and classes": lambda m, b: sum(m(b[0])[i][c] ** 2 for i in range(len(b[0])) for c in range(3)) / len(b[0]),
    "pieces": lambda m, b: sum(m(b[0])[i : i + 1][:, :3].pow(2).sum() for i in range(len(b[0]))) / len(b[0]),
    "a half": lambda m, b: sum((1.0 / len(b[0])) * (o.exp().mean() + 0.5 * o.sin().mean()) for o in m(b[0])),
    "a list of sizes": lambda m, b: sum(o.exp().mean() for o in m(b[0]).split([1 for _ in b[0]])) / len(b[0]),
    "a list of weights": lambda m, b: (each(m, b) * torch.tensor([1.0 for _ in b[0]])).mean(),
    "a divisor inside": lambda m, b: sum(F.cross_entropy(m(x[None]), y[None]) * (1.0 / len(b[0])) for x, y in zip(*b)),
}


@pytest.mark.parametrize("how", REPEATED)
def test_a_loss_that_loops_over_samples_is_cut(how: str) -> None:
    run = memfit.wrap(
        model := mlp(),
        torch.optim.SGD(model.parameters(), 0.1),
        micro_batch=5,
        loss_fn=REPEATED[how],
    )
    run.step((X[:12], Y[:12]))
    assert not [event for event in run.events if "together" in event.message]


UNTRACEABLE: dict[str, Callable[[Tensor], Tensor]] = {
    "a mask": lambda x: x[x.detach().sum(1) > 1.0],
    "indices": lambda x: x[(x.detach().sum(1) > 1.0).nonzero().squeeze(1)],
    "selected entries": lambda x: x.masked_select(x.detach() > 0.5),
    "distinct rows": lambda x: x.detach().round().unique(dim=0),
    "repeated rows": lambda x: x.repeat_interleave((x.detach().sum(1) > 1.0).long() + 1, dim=0),
    "an operator without a shape function": lambda x: torch.ops.memfit_tests.opaque(x.detach()),
}
"""Functions whose results have shapes that fake tensors do not know."""


@torch.library.custom_op("memfit_tests::opaque", mutates_args=())
def opaque(x: Tensor) -> Tensor:
    return x[x.sum(1) > 1.0].clone()


def rare(x: Tensor, what: str) -> Any:
    """Tells of few samples, and adds nothing to the loss."""
    return 0.0 * UNTRACEABLE[what](x).detach().sum().nan_to_num() if len(UNTRACEABLE[what](x)) > 1000 else 0.0


@pytest.mark.parametrize("what", UNTRACEABLE)
@pytest.mark.parametrize("how", FORWARDS)
def test_a_forward_that_decides_by_size_and_cannot_be_traced_is_refused(how: str, what: str) -> None:
    model = Doing(lambda net, x: FORWARDS[how](net, x) + rare(x, what), how)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    with pytest.raises(Refused, match="the number of samples"):
        model(X[:12])


@pytest.mark.parametrize("what", UNTRACEABLE)
@pytest.mark.parametrize("how", SAME)
def test_what_does_the_same_for_any_number_and_cannot_be_traced_is_cut(how: str, what: str) -> None:
    model = Doing(lambda net, x: SAME[how](net, x) + rare(x, what))
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    F.cross_entropy(model(X[:12]), Y[:12]).backward()


@pytest.mark.parametrize("what", UNTRACEABLE)
@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_that_decides_by_size_and_cannot_be_traced_runs_in_two_passes(how: str, what: str) -> None:
    assert error_of_step(mlp(), lambda m, b: LOSSES[how](m, b) + rare(b[0], what), (X[:12], Y[:12])) <= EXACT


VALUES: dict[str, Callable[[Tensor], Any]] = {
    "a number": lambda x: x.detach().abs().max().item() > 0.001,
    "a comparison": lambda x: x.detach().abs().max() > 0.001,
    "a list": lambda x: max(x.detach().flatten().tolist()) > -99,
    "an array": lambda x: x.detach().numpy().max() > -99 and x.detach().numpy().any(),
}
"""Conditions that hold for all samples, and not for all that fake tensors say."""


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("how", FORWARDS)
def test_a_forward_that_decides_by_size_where_a_value_says_so_is_refused(how: str, what: str) -> None:
    model = Doing(lambda net, x: FORWARDS[how](net, x) if VALUES[what](net(x)) else net(x), how)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), 0.1), micro_batch=5)
    with pytest.raises(Refused, match=r"the forward branches on|mixes samples"):
        model(X[:12])


@pytest.mark.parametrize("what", VALUES)
@pytest.mark.parametrize("how", LOSSES)
def test_a_loss_that_decides_by_size_where_a_value_says_so_runs_in_two_passes(how: str, what: str) -> None:
    def loss(m: nn.Module, b: Any) -> Tensor:
        return LOSSES[how](m, b) if VALUES[what](m(b[0])) else F.cross_entropy(m(b[0]), b[1])

    assert error_of_step(mlp(), loss, (X[:12], Y[:12])) <= EXACT


def test_a_loss_with_a_gradient_penalty_that_cannot_be_traced_is_looked_at() -> None:
    def loss(m: nn.Module, b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        rare(x, "a mask")
        return slope.pow(2).mean() + F.cross_entropy(m(b[0]), b[1]) * (2.0 if len(b[0]) > MOST else 1.0)

    with pytest.raises(Refused, match="create_graph"):  # it would run in two passes
        error_of_step(mlp(), loss, (X[:12], Y[:12]))


def test_a_loss_fn_that_divides_by_the_size_does_not() -> None:
    model = mlp()
    seen = Forwards(model[0])
    run = memfit.wrap(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        sample=(X[:12], Y[:12]),
        loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum") / len(b[0]),
        micro_batch=5,
    )
    run.step((X[:12], Y[:12]))
    assert seen.sizes == [4, 4, 4]


def test_modules_of_other_threads_call_none_of_this_ones_functions() -> None:
    entered, released = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            entered.set()
            released.wait(60)
            return x

    x = torch.ones(3)
    with ThreadPoolExecutor(1) as pool, Positions().watching() as found:
        waiting = pool.submit(Waits(), x)
        entered.wait(60)
        torch.tanh(x)
        released.set()
        waiting.result()
    assert [(inside, func) for (inside, func), _ in found.functions] == [("", torch.tanh)]


def test_copies_of_one_sample_take_no_more_than_there_is_room_for() -> None:
    ran = list[int]()

    def real(samples: int) -> Callable[[], Tensor]:
        def pairs() -> Tensor:
            ran.append(samples)
            x = torch.ones(samples, 3)
            return torch.cdist(x, x)

        return pairs

    def untraceable(twin: Callable[[Tensor], Tensor], samples: int) -> Callable[[], Tensor]:
        return lambda: twin(torch.ones(samples, 3))[twin(torch.ones(samples)).cumsum(0) > 0]

    room = 1 << 20
    looks = SizeLooks(mlp(), torch.device("cpu"), lambda: room)
    assert looks.first_that_decides(untraceable, real, (100_000,), alike=True) is None
    assert 100 < max(ran) and 4 * max(ran) ** 2 <= room


@pytest.mark.slow
def test_code_that_does_not_end_on_copies_of_one_sample_is_stopped() -> None:
    def search(m: nn.Module, b: Any) -> Tensor:
        found = 0
        while b[0][found, 0].item() == b[0][-1, 0].item():
            found = (found + 1) % len(b[0])
        return F.cross_entropy(m(b[0]), b[1])

    looks = SizeLooks(mlp(), torch.device("cpu"), lambda: 1 << 30)
    alike = (torch.ones(1, 7).double(), torch.zeros(1).long())

    def real(samples: int) -> Callable[[], Tensor]:
        return lambda: search(mlp(), tuple(part.expand(samples, *part.shape[1:]) for part in alike))

    def untraceable(twin: Callable[[Tensor], Tensor], samples: int) -> Callable[[], Tensor]:
        return lambda: twin(torch.ones(samples)).nonzero()

    assert looks.first_that_decides(untraceable, real, (12,), alike=True) is None
