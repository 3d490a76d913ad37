"""What cannot be cut and stay the same is refused by name, with what to do; what the user's code raises surfaces as itself.

After every refusal the model is usable, and nothing was updated.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import Aside, Forwards, assert_transparent, mlp, plain_gradients, points, unseen, wrapped
from torch import Tensor, nn
from torch.optim import LBFGS, SGD
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import Refused
from memfit.tracing import fake

N = 12


class Wrapper(nn.Module):
    """`mlp` with something of the test's own around it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()


def assert_refused(model: nn.Module, *words: str, script: Any = None, **settings: Any) -> None:
    """The first call is refused in these words, leaves nothing behind, and the model runs plain after `undo`."""
    x, y = points()
    before = copy.deepcopy(model.state_dict())
    run = wrapped(model, 5, **settings)
    with pytest.raises(Refused) as raised:
        (script or trained)(model, x, y)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert all(getattr(raised.value, part) for part in ("asked", "found", "next_move"))
    assert relative_error(model.state_dict(), before) == 0
    assert all(p.grad is None for p in model.parameters())
    assert not nn.modules.module._has_any_global_hook()
    run.undo()
    (script or trained)(model, x, y)


def trained(model: nn.Module, x: Tensor, y: Tensor) -> None:
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    (out if out.dim() == 0 else F.cross_entropy(out, y)).backward()


# ---- samples that mix inside the forward


class Centred(nn.Module):
    """Batch statistics by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Mixing(Wrapper):
    def __init__(self) -> None:
        super().__init__()
        self.centre = Centred()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.centre(x))


class ByPositives(Wrapper):
    """Returns a loss divided by how many of the batch's samples are positive."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)[:, 0]
        positive = (x[:, 0] > 0).to(out.dtype)
        return (positive * out.square()).sum() / positive.sum()


class Balanced(Wrapper):
    """A mixture of experts with the usual balance loss: shares of the batch times mean probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(7, 3).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(1)
        share = F.one_hot(probabilities.argmax(1), 3).double().mean(0)
        return self.net(x) * probabilities.max(1, keepdim=True).values, 3 * (share * probabilities.mean(0)).sum()


class InBatchNegatives(Wrapper):
    def forward(self, x: Tensor) -> Tensor:
        out = F.normalize(self.net(x))
        return F.cross_entropy(out @ out.t(), torch.arange(len(out)))


class Inline(Wrapper):
    """Mixes samples itself. Its module gets them mixed, by keyword."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(input=x - x.mean(0))


MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch statistics": (Mixing, "centre"),
    "batch statistics in the forward": (Inline, "output"),
    "positives": (ByPositives, "loss"),
    "in-batch negatives": (InBatchNegatives, "loss"),
}


@pytest.mark.parametrize(("build", "name"), MIXING.values(), ids=MIXING)
def test_samples_that_mix_are_refused_naming_the_module(build: Callable[[], nn.Module], name: str) -> None:
    assert_refused(build(), "mixes samples", "differs by", name, "allow_inexact=[")


def test_a_balance_loss_is_refused_where_it_is_used() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out, balance = model(x)
        (F.cross_entropy(out, y) + 0.01 * balance).backward()

    torch.manual_seed(0)  # with few samples, all parts of some batches choose their experts alike: nothing differs
    assert_refused(Balanced(), "differs by", "allow_inexact=[", script=script)


def test_a_mixing_module_that_is_accepted_is_reported() -> None:
    model, (x, y) = Mixing(), points()
    run = wrapped(model, 5, allow_inexact=["centre"])
    trained(model, x, y)
    assert all(p.grad is not None for p in model.parameters())
    told = [event.message for event in run.events if event.kind == "not equal"]
    assert len(told) == 1 and "allow_inexact" in told[0] and "differs by" in told[0]


def test_accepting_another_module_does_not_help() -> None:
    assert_refused(Mixing(), "centre", allow_inexact=["net"])


def test_a_mixing_loss_that_is_accepted_is_reported() -> None:
    model, (x, y) = ByPositives(), points()
    run = wrapped(model, 5, allow_inexact=["the loss"])
    trained(model, x, y)
    assert [event.kind for event in run.events].count("not equal") == 1


def test_samples_that_mix_run_whole_where_they_fit() -> None:
    model, plain, (x, y) = Mixing(), Mixing(), points()
    memfit.wrap(model, SGD(model.parameters(), lr=0.1))
    trained(model, x, y)
    trained(plain, x, y)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters()))  # type: ignore[arg-type]


def test_batch_norm_is_accepted() -> None:
    class Normed(Wrapper):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(7).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.norm(x))

    model, (x, y) = Normed(), points()
    wrapped(model, 5)
    trained(model, x, y)
    assert int(model.norm.num_batches_tracked) == 3


class Codebook(Wrapper):
    """A moving maximum of what passes: parts after one another do not leave what the whole does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(0.1 * x.detach().amax(0))
        return self.net(x)


def test_state_that_the_forward_writes_differently_in_parts_is_refused_by_name() -> None:
    assert_refused(Codebook(), "updates state", "average", "allow_inexact=['average']")
    model, (x, y) = Codebook(), points()
    run = wrapped(model, 5, allow_inexact=["average"])
    trained(model, x, y)
    assert [event.kind for event in run.events].count("not equal") == 1


# ---- tensors that leave by other ways


def test_what_custom_functions_and_tensor_hooks_keep_is_no_side_door() -> None:
    class Keeping(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.kept, ctx.more = x, [x, {"x": x}]
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return 2 * gradient

    class Hooked(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.net[0](x)
            scale = hidden.abs().mean(1, keepdim=True)
            hidden = Keeping.apply(hidden)
            hidden.register_hook(lambda gradient: gradient / (1 + scale))
            return self.net[3](hidden)

    model, (x, y) = Hooked(), points()
    want = plain_gradients(Hooked(), trained, x, y)
    wrapped(model, 5)
    trained(model, x, y)
    assert relative_error(gradients_of(model), want) <= 1e-12


def test_a_cache_that_the_model_returns_is_no_side_door() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(config).double()
    tokens = torch.randint(0, 32, (N, 8), generator=torch.Generator().manual_seed(0))

    def script(model: nn.Module, tokens: Tensor) -> None:
        out = model(tokens, labels=tokens, use_cache=True)
        out.loss.backward()

    assert_transparent(model, script, tokens, tolerance=1e-6)  # its loss is computed in float32


def test_what_is_kept_detached_is_no_side_door() -> None:
    class Logging(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            self.last = out.detach()
            return out

    model, (x, y) = Logging(), points()
    want = plain_gradients(Logging(), trained, x, y)
    wrapped(model, 5)
    trained(model, x, y)
    assert relative_error(gradients_of(model), want) <= 1e-12


# ---- what cannot be cut or joined


def test_an_output_with_two_batch_dimensions_is_refused() -> None:
    class Similarities(Wrapper):
        def forward(self, x: Tensor) -> Tensor:
            out = self.net(x)
            return out @ out.t()

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x), torch.arange(len(x))).backward()

    words = "output has the shape (2, 2) for 2 samples and (3, 3) for 3", "outside the model"
    assert_refused(Similarities(), *words, script=script)


class Trimmed(nn.Module):
    """Returns as many positions as the longest sample of its batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(inputs=1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.net(x[:, : int(lengths.max()), None])


@pytest.mark.parametrize("lengths", [[3, 1, 2, 5, 4, 1, 6, 2, 3, 2, 1, 4], [6, 1, 2, 6, 4, 1, 6, 2, 3, 2, 1, 4]])
def test_an_output_as_long_as_its_longest_sample_is_refused(lengths: list[int]) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        model(x, torch.tensor(lengths)).square().sum().backward()

    assert_refused(Trimmed(), "depends on the batch's content", "longest sample", "loss_fn=", script=script)


def test_an_output_that_becomes_as_long_as_its_longest_sample_is_refused() -> None:
    model, (x, _) = Trimmed(), points()
    wrapped(model, 5)
    model(x, torch.full((12,), 6)).square().sum().backward()
    for use in (lambda out: out.square().sum(), lambda out: F.mse_loss(out, torch.zeros(12, 6, 4, dtype=out.dtype))):
        model.zero_grad()
        with pytest.raises(Refused, match="depends on the batch's content"):
            use(model(x, torch.tensor([6, 6, 6, 6, 6, 6, 6, 6, 3, 2, 1, 4]))).backward()
        assert all(p.grad is None for p in model.parameters())


class Holder:
    """What a model returns, by a class of the script's own."""

    def __init__(self, logits: Tensor, name: str) -> None:
        self.logits, self.name = logits, name


@pytest.mark.parametrize("kind", [SimpleNamespace, Holder])
def test_tensors_in_attributes_of_a_returned_object_are_joined(kind: Any) -> None:
    class Returning(Wrapper):
        def forward(self, x: Tensor) -> Any:
            return kind(logits=self.net(x), name="out")

    def known(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.cross_entropy(model(x).logits, y).backward()

    def unknown(model: nn.Module, x: Tensor, y: Tensor) -> None:
        out = model(x)
        assert type(out) is kind and out.name == "out"
        unseen(out.logits).exp().mean().backward()

    assert_transparent(Returning(), known, *points())
    assert_transparent(Returning(), unknown, *points())


class Packed(nn.Module):
    """Takes all samples' rows in one tensor, and how many rows each has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, rows: Tensor, lengths: list[int]) -> Tensor:
        return torch.stack([part.sum(0) for part in self.net(rows).split(lengths)])


LENGTHS = [1, 3, 2, 4, 1, 1, 2, 3, 1, 2, 3, 1]


def packed_script(model: nn.Module, x: Tensor, y: Tensor) -> None:
    rows = points(sum(LENGTHS), seed=3)[0]
    F.cross_entropy(model(rows, LENGTHS), y).backward()


def split_packed(batch: Any, sizes: list[int]) -> list[Any]:
    (rows, lengths), kwargs = batch
    assert not kwargs and sum(sizes) == len(lengths)
    found, row, sample = [], 0, 0
    for size in sizes:
        mine = lengths[sample : sample + size]
        found.append(((rows[row : row + sum(mine)], mine), {}))
        row, sample = row + sum(mine), sample + size
    return found


def test_a_batch_that_cannot_be_cut_says_split_and_split_works() -> None:
    x, y = points()
    want = plain_gradients(Packed(), packed_script, x, y)
    model = Packed()
    run = wrapped(model, 5, loader=[(x, y)])
    with pytest.raises(Refused, match=r"split="):
        for batch in run.loader:
            packed_script(model, *batch)
    run.undo()
    run = wrapped(model, 5, loader=[(x, y)], split=split_packed)
    seen = Forwards(model.net[0])
    for batch in run.loader:
        packed_script(model, *batch)
    assert relative_error(gradients_of(model), want) <= 1e-12
    assert seen.sizes[-3:] == [sum(LENGTHS[:4]), sum(LENGTHS[4:8]), sum(LENGTHS[8:])]
    assert run.verify().passed


def test_split_serves_batches_of_other_sizes_without_being_learnt_anew() -> None:
    """The list of lengths is another one in every batch."""
    model, plain = Packed(), Packed()
    x, y = points()
    run = wrapped(model, 5, loader=[(x, y), (x[:7], y[:7]), (x[:9], y[:9])], split=split_packed)
    seen = Forwards(model.net[0])
    for batch, _ in run.loader:
        lengths = sorted(LENGTHS[: len(batch)])
        rows = points(sum(lengths), seed=len(batch))[0]
        for m in (model, plain):
            m.zero_grad()
            F.cross_entropy(m(rows, lengths), y[: len(batch)]).backward()
        assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12
        assert len(batch) == N or len(seen.sizes) == 2
        seen.sizes.clear()


class Picked(Wrapper):
    """Takes tensors that share no dimension with the batch."""

    def forward(self, rows: Tensor, chosen: Tensor) -> Tensor:
        return self.net(rows)[chosen]


def picked_script(model: nn.Module) -> None:
    chosen = torch.tensor([3, 1, 20, 4, 8])
    F.cross_entropy(model(points(24)[0], chosen), chosen % 4).backward()


def test_a_call_that_does_not_show_its_samples_runs_whole_and_says_so() -> None:
    model, plain = Picked(), Picked()
    run = memfit.wrap(model, SGD(model.parameters(), lr=0.1), [points()])
    for _ in run.loader:
        for m in (model, plain):
            picked_script(m)
            picked_script(m)
    assert relative_error(gradients_of(model), gradients_of(plain)) == 0
    assert sum("split=" in event.message for event in run.events) == 1


def test_a_call_that_does_not_show_its_samples_is_refused_where_it_was_to_be_cut() -> None:
    model = Picked()
    run = wrapped(model, 5, loader=[points()])
    with pytest.raises(Refused, match=r"dimension of 12, the samples in the batch[\s\S]*split="):
        for _ in run.loader:
            picked_script(model)


def test_packed_sequences_inside_of_other_arguments_are_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(7, 4).double()

        def forward(self, given: Any) -> Tensor:
            return self.lstm(given["packed"])[1][0][-1]

    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        sequence = nn.utils.rnn.pack_sequence(list(x[:, None].expand(-1, 3, -1)))
        F.cross_entropy(model({"packed": sequence}), y).backward()

    model, (x, y) = Recurrent(), points()
    run = wrapped(model, 5, loader=[(x, y)])
    with pytest.raises(Refused, match="PackedSequence") as raised:
        for batch in run.loader:
            script(model, *batch)
    assert "split=" in str(raised.value)


def test_state_that_the_model_returns_beside_its_output_is_refused_only_when_used() -> None:
    class WithCache(Wrapper):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"logits": self.net(x), "cache": object(), "norm": float(x.detach().norm())}

    model, (x, y) = WithCache(), points()
    wrapped(model, 5)
    out = model(x)
    F.cross_entropy(out["logits"], y).backward()
    with pytest.raises(Refused, match=r"output\['norm'\]"):
        _ = out["norm"] + 1.0
    with pytest.raises(Refused, match="cache"):
        _ = out["cache"].keys()


# ---- what staged gradients cannot do


@pytest.mark.parametrize("known", [True, False])
def test_create_graph_is_refused(known: bool) -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    out = model(x)
    loss = F.cross_entropy(out, y) if known else unseen(out).exp().mean()
    with pytest.raises(Refused, match="create_graph=True") as raised:
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    assert "enabled=False" in str(raised.value)
    assert all(p.grad is None for p in model.parameters())
    F.cross_entropy(model(x), y).backward()


def test_the_gradient_of_an_output_that_was_never_made_is_refused() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    out = model(x)
    loss = F.cross_entropy(out, y)
    with pytest.raises(Refused, match="retain_grad"):
        torch.autograd.grad(loss, out)


def test_optimizers_that_take_closures_are_refused() -> None:
    model = mlp()
    with pytest.raises(memfit.MemfitError, match="LBFGS"):
        memfit.wrap(model, LBFGS(model.parameters()), target_batch=8)
    assert "forward" not in vars(model)


def test_optimizer_steps_inside_backward_are_refused() -> None:
    model = mlp()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(memfit.MemfitError, match="backward"):
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), target_batch=8)
    assert "forward" not in vars(model) and relative_error(model.state_dict(), before) == 0


def test_a_parameter_read_through_a_reference_of_the_scripts_is_refused_or_right() -> None:
    """The forward reads a weight from a list: its gradient would miss the staging."""

    class Elsewhere(Wrapper):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))
            self.references = [self.scale]

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x) * self.references[0]

    model, (x, y) = Elsewhere(), points()
    wrapped(model, 5)
    with pytest.raises(Refused, match="scale"):
        trained(model, x, y)
    assert model.net[0].weight.grad is None


# ---- the user's own exceptions


class Raises(Wrapper):
    """Raises where it is told to."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.armed = error, Aside(value=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.armed.value:
            self.deeper(x)
        return self.net(x)

    def deeper(self, x: Tensor) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "planned"),
    [(ValueError("mine"), True), (ValueError("mine"), False), (KeyError("mine"), False), (RuntimeError("mine"), False)],
)
@pytest.mark.parametrize("when", ["planning", "later", "second pass"])
def test_exceptions_in_the_model_surface_as_themselves(error: Exception, planned: bool, when: str) -> None:
    model, (x, y) = Raises(error), points()
    before = copy.deepcopy(model.state_dict())
    if planned:
        memfit.wrap(model, SGD(model.parameters(), lr=0.1), micro_batch=5)
    else:
        wrapped(model, 5)
    if when != "planning":
        F.cross_entropy(model(x), y).backward()
        model.zero_grad()
    with pytest.raises(type(error)) as raised:
        if when == "second pass":
            loss = unseen(model(x)).exp().mean()
            model.armed.value = True
            loss.backward()
        model.armed.value = True
        F.cross_entropy(model(x), y).backward()
    assert raised.value is error
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "deeper"
    assert all(p.grad is None for p in model.parameters())
    model.armed.value = False
    want = plain_gradients(Raises(error), trained, x, y)
    trained(model, x, y)
    assert relative_error(gradients_of(model), want) <= 1e-12
    assert relative_error(model.state_dict(), before) == 0


def test_a_wrong_shape_is_torchs_own_error() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    trained(model, x, y)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.cross_entropy(model(x[:, :5]), y).backward()
    with pytest.raises(ValueError, match=r"Expected input batch_size \(12\) to match target batch_size \(7\)"):
        F.cross_entropy(model(x), y[:7]).backward()
    with pytest.raises(IndexError, match="out of bounds"):
        F.cross_entropy(model(x), y + 4).backward()
    model.zero_grad()
    want = plain_gradients(mlp(), trained, x, y)
    trained(model, x, y)
    assert relative_error(gradients_of(model), want) <= 1e-12


def test_a_wrong_shape_in_the_first_call_is_torchs_own_error() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.cross_entropy(model(x[:, :5]), y).backward()
    trained(model, x, y)


def test_a_view_that_torch_refuses_is_torchs_own_error() -> None:
    model, (x, y) = mlp(), points()
    wrapped(model, 5)
    with pytest.raises(RuntimeError, match="invalid for input of size 48"):
        F.cross_entropy(model(x).view(7, -1), y).backward()
    with pytest.raises(RuntimeError):
        F.cross_entropy(model(x).transpose(0, 1).view(-1), y).backward()
    with pytest.raises(IndexError):
        model(x)[:, 9].sum().backward()
    trained(model, x, y)


class Adaptive(nn.Module):
    """Its loop ends by values of the batch, which fake tensors don't have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        error, rounds = x.square().mean(), 0
        while not error < 1e-3:
            error, rounds = error / 2, rounds + 1
        return self.net(x) / rounds


def test_a_loop_that_never_ends_on_fake_tensors_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "MOST_GUESSES", 50)
    torch.manual_seed(0)
    model, x = Adaptive(), torch.randn(7, 6).double()
    memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    with pytest.raises(memfit.Refused, match="mixes samples"):  # the rounds follow from all of them
        model(x)
    memfit.wrap(other := Adaptive(), SGD(other.parameters(), 0.1), budget="8GiB")
    other(x).square().mean().backward()


class Pair(tuple[Tensor, Tensor]):
    def __new__(cls, x: Tensor, y: Tensor) -> Pair:
        return super().__new__(cls, (x, y))


class Both(list[Tensor]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__([x, y])


class Entries(dict[Any, Any]):
    """Its entries are attributes, too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class OfContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3).double()

    def forward(self, given: Any) -> tuple[Tensor, torch.Size]:
        x = given.x if isinstance(given, Entries) else given[0]
        assert given[0] is x
        out = self.net(x) * given[1].mean(1, keepdim=True)
        return out, out.shape


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": Pair,
    "list": Both,
    "read-only": lambda x, y: MappingProxyType({0: x, 1: y}),
    "attributes": lambda x, y: Entries({0: x, 1: y, "x": x}),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_containers_with_ways_of_their_own_are_cut(kind: str) -> None:
    model = OfContainer()
    plain = copy.deepcopy(model)
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    for each in (model, plain):
        out, size = each(CONTAINERS[kind](x, y))
        assert size[1] == 3
        out.square().mean().backward()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12
    assert run.plan is not None and run.plan.micro_batch == 3


class Rollout(nn.Module):
    """Makes a distribution per step, each of which checks its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for step in range(7):
            mean, spread = self.net(x + step).chunk(2, 1)
            found.append(torch.distributions.Normal(mean, spread.exp()).log_prob(x[:, :3]).sum(1))
        return torch.stack(found, 1)


def test_argument_checks_of_many_distributions_are_no_branches() -> None:
    model = Rollout()
    run = memfit.wrap(model, SGD(model.parameters(), 0.1), micro_batch=3)
    model(torch.randn(8, 6).double()).mean().backward()
    assert run.plan is not None and run.plan.micro_batch == 3
