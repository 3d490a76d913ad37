"""Evaluation with batches larger than fit: in pieces, with the outputs of the whole."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Forwards
from torch import Tensor, nn
from torch.distributions import Independent, Normal

import memfit

WIDE, SMALL = 2048, "100MiB"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, WIDE), nn.Linear(WIDE, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).relu()
        return self.of(self.last(self.drop(hidden)), hidden)

    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return out


def evaluated(model: nn.Module, x: Tensor, *, in_steps: bool = False, **settings: Any) -> tuple[Any, list[int], memfit.Run]:
    """(what it returns for `x` in eval mode, the sizes that its first layer ran on, the run)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = (lambda m, batch: m(batch[0]).square().mean()) if in_steps else None
    run = memfit.wrap(model, optimizer, loss_fn=loss_fn, budget=SMALL, **settings)
    model.eval()
    seen = Forwards(model.first)  # type: ignore[arg-type]
    with torch.no_grad():
        out = model(x)
    return out, seen.sizes, run


def numbers(samples: int) -> Tensor:
    return torch.randn(samples, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("in_steps", [False, True])
def test_a_batch_that_would_not_fit_runs_in_pieces(in_steps: bool) -> None:
    x = numbers(9000)
    plain = Net().eval()
    with torch.no_grad():
        want = plain(x)
    out, sizes, run = evaluated(Net(), x, in_steps=in_steps)
    assert len(sizes) > 2 and sum(sizes) == 9000 and max(sizes) - min(sizes) <= 1
    assert torch.allclose(out, want) and not out.requires_grad and type(out) is Tensor
    assert any("without gradients runs in" in event.message for event in run.events)


class Distributed(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return Independent(Normal(out, torch.ones_like(out)), 1)


def test_a_distribution_is_that_of_the_whole_batch() -> None:
    x = numbers(9000)
    out, sizes, _ = evaluated(Distributed(), x)
    assert len(sizes) > 2 and out.batch_shape == (9000,) and out.event_shape == (4,)
    assert torch.allclose(out.mean, evaluated(Net(), x)[0])


def test_what_fits_runs_whole_and_is_not_looked_at_again() -> None:
    model = Net()
    _, sizes, run = evaluated(model, numbers(64))
    assert sizes == [64] and len(run.events) == 0
    seen = Forwards(model.first)
    with torch.no_grad():
        for samples in (1, 7, 100):
            model(numbers(samples))
    assert seen.sizes == [1, 7, 100]


def test_training_goes_on_between_evaluations() -> None:
    model, x = Net(), numbers(9000)
    evaluated(model, x)
    model.train()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model.eval()
    with torch.no_grad():
        model(x)
    assert torch.equal(before, torch.get_rng_state())
    model.train()
    F.cross_entropy(model(x[:64]), torch.zeros(64, dtype=torch.long)).backward()
    assert model.first.weight.grad is not None


def test_inference_mode_gives_inference_tensors() -> None:
    model, x = Net(), numbers(9000)
    evaluated(model, x)
    seen = Forwards(model.first)
    with torch.inference_mode():
        out = model(x)
    assert out.is_inference() and len(seen.sizes) > 2


class Masked(nn.Module):
    """Keeps a mask for the number of samples that it saw last, in one of several places."""

    def __init__(self, place: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.place = nn.Linear(16, 4), place
        self.register_buffer("mask", None)
        self.attribute: Tensor | None = None
        self.kept: dict[str, Any] = {"mask": None}
        self.pair: tuple[int, Tensor | None] = (0, None)

    def mask_of(self, samples: int) -> Tensor:
        before = {"buffer": self.mask, "attribute": self.attribute, "dictionary": self.kept["mask"], "pair": self.pair[1]}
        mask = before[self.place]
        if mask is not None and len(mask) == samples:
            return mask
        mask = torch.full((samples, 1), 0.5)
        if self.place == "buffer":
            self.mask = mask
        elif self.place == "attribute":
            self.attribute = mask
        elif self.place == "dictionary":
            self.kept["mask"] = mask
        else:
            self.pair = (samples, mask)
        return mask

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask_of(len(x))


@pytest.mark.parametrize("mode,evaluated", [("inference_mode", 2), ("inference_mode", 5), ("no_grad", 2)])
@pytest.mark.parametrize("place", ["buffer", "attribute", "dictionary", "pair"])
@pytest.mark.parametrize("in_steps", [False, True])
def test_masks_that_an_evaluation_made_may_be_trained_with(in_steps: bool, place: str, mode: str, evaluated: int) -> None:
    x = numbers(12)

    def trained(line: bool) -> list[Tensor]:
        model = Masked(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = None
        if line and in_steps:
            run = memfit.wrap(model, optimizer, loss_fn=lambda m, batch: m(batch).square().mean(), micro_batch=2)
        elif line:
            memfit.wrap(model, optimizer, micro_batch=2)
        for _ in range(2):
            model.eval()
            with getattr(torch, mode)():
                model(x[:evaluated])
            model.train()
            if run is not None:
                run.step(x)
                continue
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters())

    for got, want in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("in_steps", [False, True])
@pytest.mark.parametrize("then", ["train", "verify"])
def test_what_an_evaluation_keeps_is_made_fit_for_training_once_training_comes(then: str, in_steps: bool) -> None:
    model, x = Masked("attribute"), numbers(12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = (lambda m, batch: m(batch).square().mean()) if in_steps else None
    run = memfit.wrap(model, optimizer, loss_fn=loss_fn, micro_batch=2)

    def train() -> None:
        if in_steps:
            run.step(x)
        else:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train()
    for _ in range(3):
        with torch.inference_mode():
            model(x[:2])
        assert model.attribute is not None and model.attribute.is_inference()
    if then == "train":
        train()
    else:
        assert memfit.verify(run).passed
    assert model.attribute is not None and not model.attribute.is_inference()


def test_frozen_models_are_cut_without_no_grad() -> None:
    model, x = Net().requires_grad_(False), numbers(9000)
    trained = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    memfit.wrap([model, trained], optimizer, budget=SMALL)
    model.eval()
    seen = Forwards(model.first)
    out = model(x)
    assert len(seen.sizes) > 2 and sum(seen.sizes) == 9000 and not out.requires_grad


@dataclass
class Found:
    logits: Tensor
    hidden: Tensor
    count: int = 3


class Structured(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return Found(out, hidden[:, :3])


class Mixing(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return out - out.mean(0)


class Scored(Net):
    """Its second output is a number of the whole batch that those of parts do not add up to."""

    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return out, out.std()


class Positional(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return torch.cat([out[:20] * 2.0, out[20:]])


class Large(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        return out * 2.0 if len(out) > 2000 else out


class Left(Net):
    def of(self, out: Tensor, hidden: Tensor) -> Any:
        self.features = hidden[:, :5]
        return out


def test_nested_outputs_are_joined() -> None:
    out, sizes, _ = evaluated(Structured(), numbers(9000))
    assert len(sizes) > 2 and type(out) is Found and out.count == 3
    assert out.logits.shape == (9000, 4) and out.hidden.shape == (9000, 3)


@pytest.mark.parametrize("build", [Mixing, Scored, Positional, Large])
def test_what_parts_do_not_make_runs_whole(build: type[Net]) -> None:
    out, sizes, _ = evaluated(build(), numbers(3000))
    with torch.no_grad():
        want = build().eval()(numbers(3000))
    assert sizes == [3000]
    for mine, its in zip(out, want):
        assert torch.allclose(mine, its, atol=1e-6)


class Asked(Net):
    """Returns what it was asked for last, by an argument or by an attribute."""

    how = "scores"

    def forward(self, x: Tensor, how: str | None = None) -> Any:
        hidden = self.first(x).relu()
        out = self.last(hidden)
        return {
            "scores": out,
            "list": [out],
            "dict": {"out": out},
            "pair": (out, hidden[:, :2]),
            "labels": out.argmax(1),
            "mean": out.mean(1),
            "number": (out, 2),
            "word": (out, "two"),
        }[how or self.how]


@pytest.mark.parametrize("by_argument", [True, False])
def test_a_model_that_returns_something_else_is_joined_as_that(by_argument: bool) -> None:
    x, model, plain = numbers(9000), Asked(), Asked().eval()
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=SMALL)
    model.eval()
    seen = Forwards(model.first)
    for how in ("scores", "list", "dict", "pair", "labels", "mean", "scores", "number", "word", "number"):
        model.how = plain.how = how
        with torch.no_grad():
            given = {"how": how} if by_argument else {}
            found, want = model(x, **given), plain(x, **given)
        assert type(found) is type(want)
        same(found, want)
    assert max(seen.sizes) < 9000


def same(found: Any, want: Any) -> None:
    if isinstance(want, Tensor):
        assert found.dtype == want.dtype and torch.allclose(found, want)
    elif isinstance(want, (tuple, list, dict)):
        assert type(found) is type(want) and len(found) == len(want)
        for a, b in zip(*(each.values() if isinstance(each, dict) else each for each in (found, want))):
            same(a, b)
    else:
        assert found == want


def test_what_it_leaves_on_itself_is_joined() -> None:
    model = Left()
    _, sizes, _ = evaluated(model, numbers(9000))
    assert len(sizes) > 2 and model.features.shape == (9000, 5)


def test_an_error_in_the_forward_is_the_models_own() -> None:
    class Failing(Net):
        def of(self, out: Tensor, hidden: Tensor) -> Any:
            raise ValueError("not today")

    with pytest.raises(ValueError, match="not today"):
        evaluated(Failing(), numbers(9000))


def test_micro_batch_off_leaves_evaluation_alone() -> None:
    assert evaluated(Net(), numbers(9000), micro_batch="off")[1] == [9000]


LIMITED = """
import resource, sys, torch
from torch import nn
import torch.nn.functional as F
import memfit
model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(64, 64), torch.zeros(64, dtype=torch.long)
F.cross_entropy(model(x), y).backward()
held = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + (400 << 20), held + (400 << 20)))
if sys.argv[1] == "wrapped":
    memfit.wrap(model, optimizer)
    F.cross_entropy(model(x), y).backward()
model.eval()
with torch.no_grad():
    print(model(torch.randn(40000, 64)).shape)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
def test_under_a_real_limit(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(LIMITED)
    commands = ([sys.executable, str(script), how] for how in ("plain", "wrapped"))
    plain, wrapped = (subprocess.run(command, capture_output=True, text=True, timeout=120) for command in commands)
    assert plain.returncode != 0 and "Cannot allocate memory" in plain.stderr
    assert wrapped.returncode == 0 and "[40000, 10]" in wrapped.stdout, wrapped.stderr
