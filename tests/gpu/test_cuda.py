"""On a real CUDA device: the laws that the CPU can only stand in for."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from zoo import FAMILIES, first_batch
from zoo.plain import accumulated_gradients, gradients_of, relative_error

import memfit
from memfit._units import GiB, MiB
from memfit.hardware.clock import Clock

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICE = torch.device("cuda", 0)
Loss = Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor]], torch.Tensor]
WITHOUT_BATCH_NORM = [name for name, family in FAMILIES.items() if not family.mixes]


def on_device(batch: object) -> object:
    from memfit.capture.workloads import moved

    return moved(batch, DEVICE)


def wrapped(name: str, *, size: str = "tiny", n: int = 64, **settings: object) -> tuple[memfit.Run, torch.nn.Module]:
    family = FAMILIES[name]
    model = family.build(size).to(DEVICE)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    loader = DataLoader(family.dataset(size=size, n=n), batch_size=8, collate_fn=family.collate)
    return memfit.wrap(model, optimizer, loader, loss_fn=family.loss, **settings), model  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WITHOUT_BATCH_NORM)
def test_gradients_are_those_of_the_whole_batch(name: str) -> None:
    family = FAMILIES[name]
    pytest.importorskip("transformers") if "transformers" in family.requires else None
    model = family.build("tiny", dtype=torch.float64).to(DEVICE)
    plain, batch = copy.deepcopy(model), on_device(first_batch(family, 11, dtype=torch.float64))
    family.script_loss(plain, batch).backward()
    run = memfit.wrap(model, AdamW([p for p in model.parameters() if p.requires_grad]), micro_batch=3)
    family.script_loss(model, batch).backward()
    run.undo()
    assert relative_error(gradients_of(model), gradients_of(plain)) <= (1e-6 if name == "t5" else 1e-12)


@pytest.mark.parametrize("name", ["gpt", "vit", "bert"])
def test_the_peak_stays_within_the_budget_and_near_the_prediction(name: str) -> None:
    pytest.importorskip("transformers") if "transformers" in FAMILIES[name].requires else None
    torch.cuda.empty_cache()
    # One size: what others leave in the allocator's cache, while they are tried, is in no prediction.
    run, _ = wrapped(name, size="bench", n=256, target_batch=128, micro_batch=16, budget="3GiB")
    for epoch in range(2):
        for batch in run.loader:
            run.step(batch)
        if not epoch:  # what planning reserved
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    assert run.plan is not None and not [event for event in run.events if event.kind == "out of memory"]
    reserved, predicted = torch.cuda.max_memory_reserved(), run.plan.predicted.peak  # without what other programs hold
    assert reserved <= run.plan.limit
    # Samples of many lengths reserve more than is predicted while there is room.
    least = torch.cuda.max_memory_allocated() if FAMILIES[name].ragged else reserved
    assert min(0.9 * least, least - 128 * MiB) <= predicted <= max(1.1 * reserved, reserved + 128 * MiB)


def test_a_budget_is_kept_while_sizes_are_measured_and_what_is_predicted_is_reserved() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128)) for _ in range(6)]).to(DEVICE)
    x = torch.randn(1024, 8, 128)
    loader = DataLoader(list(zip(x, x)), batch_size=64)
    free, total = torch.cuda.mem_get_info(DEVICE)
    beyond = total - free - torch.cuda.memory_reserved(DEVICE)  # the context
    if beyond > 4 * GiB:
        pytest.skip("other programs use the GPU, and no part of a budget is theirs")
    run = memfit.wrap(
        model,
        AdamW(model.parameters()),
        loader,
        loss_fn=lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        target_batch=512,
        budget=beyond + 200 * MiB,
    )
    for _ in range(40):  # until a size was chosen, which a step has run with
        for batch in run.loader:
            torch.cuda.reset_peak_memory_stats(DEVICE)
            run.step(batch)
            assert torch.cuda.max_memory_reserved(DEVICE) <= 200 * MiB
        if run.stats()["peak_measured"] is not None:
            break
    assert run.plan is not None and {event.kind for event in run.events} <= {"plan", "replan"}
    reserved = torch.cuda.max_memory_reserved(DEVICE)
    assert abs(run.plan.predicted.peak - reserved) <= max(0.03 * reserved, 24 * MiB)


@pytest.mark.parametrize("other", ["cpu", *(["cuda:1"] if torch.cuda.device_count() > 1 else [])])
def test_a_parameter_of_the_loss_on_another_device(other: str) -> None:
    torch.manual_seed(0)
    model, scale = nn.Linear(6, 3).double().to(DEVICE), nn.Parameter(torch.zeros((), dtype=torch.float64, device=other))
    plain, x, y = copy.deepcopy(model), torch.randn(11, 6, device=DEVICE).double(), torch.randint(3, (11,), device=DEVICE)

    def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * scale.to(DEVICE).exp()

    loss_fn(plain, (x, y)).backward()
    wanted, scale.grad = scale.grad, None
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.0)
    run = memfit.wrap(model, optimizer, micro_batch=3, loss_fn=loss_fn, sample=(x, y))
    run.step((x, y))
    assert wanted is not None and scale.grad is not None and scale.grad.device == torch.device(other)
    assert torch.allclose(scale.grad, wanted, rtol=1e-12, atol=0)
    assert relative_error(gradients_of(model), gradients_of(plain)) <= 1e-12


def write_input(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    x.data.mul_(2)


def write_labels(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    y.data.fill_(0)


def write_parameter(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    next(model.parameters()).data.add_(1)


def write_targets(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """A large tensor, which no loss copies."""
    TARGETS[0].data.add_(1)


TARGETS: list[torch.Tensor] = []


def write_one_more_tensor(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    x.new_zeros(3).data.add_(1)


Write = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]


def backward_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between the loss and its backward."""
    loss = F.cross_entropy(model(x), y)
    written()
    loss.backward()


def values_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between the call and a look at its values."""
    out = model(x)
    written()
    assert len(out.argmax(1).tolist()) == len(y)


def number_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between the call and a number that no backward follows."""
    out = model(x)
    written()
    assert math.isfinite(F.cross_entropy(out, y).item())


def second_backward_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between the values that the loss is computed from and its backward, which runs the model again."""
    loss = (model(x).softmax(0) * F.one_hot(y, 5)).sum()
    written()
    loss.backward()


def distance_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between an operation on known values and its use."""
    out = model(x)
    assert math.isfinite(out.detach().sum().item())
    distance = out[:, :1] - TARGETS[0]
    written()
    distance.square().mean().backward()


def look_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, written: Callable[[], None]) -> None:
    """The write lies between a metric and a look at it."""
    metric = (model(x).detach()[:, :1] - TARGETS[0]).abs().mean()
    written()
    assert math.isfinite(metric.item())


Use = Callable[[nn.Module, torch.Tensor, torch.Tensor, Callable[[], None]], None]


def steps_with(write: Write, x: torch.Tensor, use: Use = backward_of) -> None:
    """Trains four steps. In the second, `write` runs in the middle of `use`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    model = model.to(DEVICE, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=4)
    y = torch.arange(len(x), device=DEVICE) % 5
    TARGETS[:] = [torch.zeros(len(x), 1 << 14, device=DEVICE)]
    for step in range(4):
        optimizer.zero_grad()
        use(model, x, y, (lambda: write(model, x, y)) if step == 1 else lambda: None)
        optimizer.step()
        torch.cuda.synchronize()


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: torch.randn(12, 3, 8, 8),
    "channels_last": lambda: torch.randn(12, 3, 8, 8).to(memory_format=torch.channels_last),
    "a part of another": lambda: torch.randn(12, 3, 8, 11)[..., :8],
}


@pytest.mark.parametrize("write", [write_input, write_labels, write_parameter])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_through_data_before_the_backward_is_an_error_in_the_next_steps(write: Write, layout: str) -> None:
    with pytest.raises(RuntimeError, match=r"written through \.data"):
        steps_with(write, LAYOUTS[layout]().to(DEVICE))


@pytest.mark.parametrize("write", [write_input, write_parameter])
@pytest.mark.parametrize("use", [values_of, number_of, second_backward_of])
def test_what_is_written_through_data_before_a_call_runs_again_is_an_error_in_the_next_steps(write: Write, use: Use) -> None:
    with pytest.raises(RuntimeError, match=r"written through \.data"):
        steps_with(write, LAYOUTS["contiguous"]().to(DEVICE), use)


def test_what_is_written_through_data_in_the_last_step_is_told_by_undo_and_by_no_other_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step_of(model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(torch.ones(12, 6, device=DEVICE)), torch.zeros(12, dtype=torch.long, device=DEVICE))

    def wrapped_model() -> tuple[memfit.Run, nn.Module]:
        model = nn.Linear(6, 3).to(DEVICE)
        return memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4), model

    run, model = wrapped_model()
    monkeypatch.setattr(Clock, "reached", lambda self, moment: False)  # a device that is far behind the host
    loss = step_of(model)
    next(model.parameters()).data.add_(1)
    loss.backward()
    monkeypatch.undo()
    run.undo()
    told = "[torch.cuda.FloatTensor [3, 6]] was written through .data"
    assert any(told in event.message for event in run.events if event.kind == "not equal")
    run, model = wrapped_model()
    step_of(model).backward()
    run.undo()


class Share(torch.nn.Module):
    """Returns or keeps a share of the samples."""

    def __init__(self, *, kept: bool) -> None:
        super().__init__()
        self.net, self.kept, self.share = nn.Linear(6, 3), kept, torch.zeros((), device=DEVICE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        share = (x[:, 0] > 0).float().mean()
        if self.kept:
            self.share = share
        return (self.net(x),) if self.kept else (self.net(x), share)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_statistic_that_the_proof_did_not_show_is_told_of_the_next_steps(
    monkeypatch: pytest.MonkeyPatch, steps: int, kept: bool
) -> None:
    """As an error; by undo, if there are none any more."""
    if steps == 1:
        monkeypatch.setattr(Clock, "reached", lambda self, moment: False)  # a device that is far behind the host
    x = -torch.rand(12, 6, device=DEVICE) - 0.1
    x[6] *= -1
    model = Share(kept=kept).to(DEVICE)
    run = memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4)
    with nullcontext() if steps == 1 else pytest.raises(RuntimeError, match="is not the same in all of them"):
        for _ in range(steps):
            logits, *share = model(x)
            (logits.square().mean() * (1 + sum(share))).backward()
            torch.cuda.synchronize()
    monkeypatch.undo()
    run.undo()
    told = [event.message for event in run.events if event.kind == "not equal"]
    assert steps > 1 or any("is not the same in all of them" in message for message in told)


@pytest.mark.parametrize("use", [distance_of, look_of])
def test_what_a_loss_is_computed_with_is_compared_too(use: Use) -> None:
    with pytest.raises(RuntimeError, match=r"written through \.data"):
        steps_with(write_targets, LAYOUTS["contiguous"]().to(DEVICE), use)


def test_a_block_is_not_computed_again_with_parameters_that_were_written() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())).to(DEVICE)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch="off", checkpoint=["1"])
    with pytest.raises(RuntimeError, match=r"written through \.data"):
        for step in range(4):
            loss = model(torch.ones(12, 6, device=DEVICE)).square().mean()
            if step == 1:
                next(model[1].parameters()).data.mul_(3)
            loss.backward()
            torch.cuda.synchronize()


@pytest.mark.parametrize("use", [backward_of, values_of, number_of, distance_of, look_of, second_backward_of])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_elsewhere_is_none(layout: str, use: Use) -> None:
    steps_with(write_one_more_tensor, LAYOUTS[layout]().to(DEVICE), use)


def test_parameters_may_be_updated_through_data_once_the_gradients_are_there() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double().to(DEVICE)
    plain = copy.deepcopy(model)
    memfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=4)
    x, y = torch.randn(12, 6, dtype=torch.float64, device=DEVICE), torch.arange(12, device=DEVICE) % 5
    read: dict[bool, list[float]] = {}
    for net in (model, plain):
        for _ in range(5):
            out = net(x)
            first, second = F.cross_entropy(out, y), out.pow(2).mean()
            net.zero_grad()
            (first + second).backward()
            for p in net.parameters():
                assert p.grad is not None
                p.data.add_(p.grad, alpha=-0.1)
            torch.cuda.synchronize()
            seen = [first.item(), torch.exp(second.detach()).item(), torch.exp(second).item()]
            read.setdefault(net is model, []).extend(seen)
    assert torch.allclose(torch.tensor(read[True]), torch.tensor(read[False]), rtol=1e-9)


def test_running_out_of_memory_is_survived_and_the_batch_trains_once() -> None:
    family = FAMILIES["mlp"]
    run, model = wrapped("mlp", n=32, target_batch=32, micro_batch=16)
    plain = copy.deepcopy(model)
    optimizer = AdamW(plain.parameters(), lr=1e-4)
    fraction = torch.cuda.mem_get_info(DEVICE)[1]
    failing = {"left": 1}

    def once(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if failing["left"]:
            failing["left"] -= 1
            torch.empty(4 * fraction, dtype=torch.uint8, device=DEVICE)  # more than the device has: the real error

    next(iter(model.children())).register_forward_pre_hook(once)
    for batch in run.loader:
        run.step(batch)
    family.script_loss(plain, on_device(first_batch(family, 32))).backward()
    optimizer.step()
    assert [event.kind for event in run.events].count("out of memory") == 1
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), plain.parameters()))


def test_planning_leaves_the_device_as_it_was() -> None:
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state(DEVICE)
    _, model = wrapped("gpt", target_batch=32, micro_batch=4)
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
    assert all(p.grad is None for p in model.parameters())


class Recurrent(nn.Module):
    """As cuDNN computes it: fake tensors have no addresses, which it compares."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn = getattr(nn, kind)(6, 8, num_layers=2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.among(self.rnn(x)[0][:, -1]))

    def among(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Counting(Recurrent):
    """It acts differently on many samples than on few."""

    def among(self, h: torch.Tensor) -> torch.Tensor:
        return F.gelu(h, approximate="tanh" if len(h) > 6 else "none")


class Packed(Recurrent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(x),), x.shape[1])
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        out = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]
        return self.head(self.among(out[:, -1]))


def cross_entropy(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def checkpointed(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(checkpoint(model, batch[0], use_reentrant=False), batch[1])


def series(n: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(n, 5, 6, device=DEVICE), torch.randint(3, (n,), device=DEVICE)


@pytest.mark.parametrize("loss_fn", [cross_entropy, checkpointed])
@pytest.mark.parametrize(
    ("make", "kind", "dropout"),
    [(Recurrent, "LSTM", 0.0), (Recurrent, "GRU", 0.1), (Recurrent, "RNN", 0.1), (Packed, "LSTM", 0.0)],
)
def test_recurrent_networks_are_traced(make: type[Recurrent], kind: str, dropout: float, loss_fn: Loss) -> None:
    model = make(kind, dropout).to(DEVICE)
    optimizer = AdamW(model.parameters())
    profile = memfit.profile(model, optimizer, series(), loss_fn=loss_fn)
    assert profile.source == "traced" or make is Packed  # its steps are as many as the values of its lengths say
    plain, batch = copy.deepcopy(model), series()
    loss_fn(plain, batch).backward()  # nothing of the trace is left
    run = memfit.wrap(model, optimizer, loss_fn=loss_fn, sample=batch, micro_batch=3, target_batch=16)
    run.step(batch)


@pytest.mark.parametrize("make", [Recurrent, Packed])
def test_dropout_inside_a_recurrent_network_does_not_look_like_mixing(make: type[Recurrent]) -> None:
    model = make("LSTM", 0.5).to(DEVICE)
    (x, y), before = series(11), [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memfit.wrap(model, optimizer, micro_batch=3)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert model.rnn.dropout == 0.5 and not any(torch.equal(a, b) for a, b in zip(before, model.parameters()))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_pass_that_repeats_a_recurrent_network_drops_the_same_entries(checkpoint: bool) -> None:
    """Then a linear head's weights times their gradients sum up to the loss, as its output is linear in them."""
    model = nn.Sequential(nn.Sequential(Recurrent("LSTM", 0.5)), nn.Linear(3, 4, bias=False)).to(DEVICE)
    x, _ = series(11)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = memfit.wrap(model, optimizer, micro_batch=3, checkpoint=["0.0"] if checkpoint else "off")
    for _ in range(3):
        optimizer.zero_grad()
        out = model(x)
        signs = torch.tensor(out.tolist(), device=DEVICE).sign()  # what is read before the loss makes two passes
        loss = (out * signs).sum()
        loss.backward()
        weight = model[1].weight
        assert weight.grad is not None
        assert torch.allclose((weight * weight.grad).sum(), loss, rtol=1e-4)
        optimizer.step()
    assert run.plan is not None and run.plan.mode == "replay"


def test_what_branches_on_the_number_of_samples_is_refused_behind_a_recurrent_network() -> None:
    model = Counting("GRU", 0.0).to(DEVICE)
    x, y = series(8)
    memfit.wrap(model, AdamW(model.parameters()), micro_batch=3)
    with pytest.raises(memfit.MemfitError, match="number of samples"):
        F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", ["unet", "convnext", "resnet_group", "vit"])
def test_what_torch_rounds_differently_for_few_samples_does_not_look_like_mixing(
    name: str, dtype: torch.dtype | None
) -> None:
    """With convolutions in TF32, as torch comes, and under the script's autocast."""
    family = FAMILIES[name]
    pytest.importorskip("transformers") if "transformers" in family.requires else None
    model, allowed = family.build("bench").to(DEVICE), torch.backends.cudnn.allow_tf32
    plain, batch = copy.deepcopy(model), on_device(first_batch(family, 24, size="bench"))
    run = memfit.wrap(model, AdamW(model.parameters()), micro_batch=5)
    for each in (plain, model):
        with nullcontext() if dtype is None else torch.autocast("cuda", dtype):
            loss = family.script_loss(each, batch)
        loss.backward()
    kinds = [event.kind for event in run.events]
    run.undo()
    assert "not equal" not in kinds and torch.backends.cudnn.allow_tf32 is allowed
    whole = gradients_of(plain)
    with nullcontext() if dtype is None else torch.autocast("cuda", dtype):
        by_hand = accumulated_gradients(family, plain, batch, [5, 5, 5, 5, 4], family.script_loss)
    rounding = relative_error(by_hand, whole)  # on an H100, 50 layers in TF32: 0.02
    assert relative_error(gradients_of(model), whole) <= max(2 * rounding, 5e-3 if dtype is None else 5e-2)


def test_verify_passes_with_dropout() -> None:
    run, _ = wrapped("gpt", target_batch=32, micro_batch=5)
    assert memfit.verify(run).passed
