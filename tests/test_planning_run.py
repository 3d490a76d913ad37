"""From a budget to a plan to a run: what is planned fits, planning itself stays inside, and what runs is what was traced."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from handmade import budget, profile, two_blocks
from helpers import Forwards, Notes, wrapped
from processes import in_a_new_process
from stepping import is_fake, plain, sgd
from test_compose import of_family
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.data import default_collate
from zoo import FAMILIES, first_batch
from zoo.plain import gradients_of, relative_error

import memfit
from memfit import DoesNotFit, Run, UsageError
from memfit.autotune import measure_sizes as measure
from memfit.autotune.measure_sizes import Excess, Measurer, busy_note, excess_beside
from memfit.autotune.memory import Memory
from memfit.autotune.task import Task
from memfit.batches.samples import SampleBatch
from memfit.batches.tree import tensors
from memfit.engine.work import Work
from memfit.hardware.heap import give_back_free_heap
from memfit.hardware.meter import Meter
from memfit.kernels.onednn import stages
from memfit.planning.checkpointed import with_blocks
from memfit.profiling.profile import Profile
from memfit.profiling.seconds import Timing
from memfit.tracing.ledger import Ledger
from memfit.tracing.timing import Stopwatch

ROOT = Path(__file__).resolve().parent.parent

MIB = 1 << 20
CPU = torch.device("cpu")
SHARE, LENGTH, WIDTH = 12, 2000, 64


class Deep(nn.Module):
    """Four blocks that each keep about two MiB per sample, and hardly any parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean((1, 2))


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), torch.ones(len(batch)))


def batch(n: int = SHARE) -> Tensor:
    return torch.rand(n, LENGTH, WIDTH)


def step_mode(size: int, n: int = SHARE, **settings: Any) -> Run:
    model = Deep()
    return memfit.wrap(model, sgd(model, 0.01), loss_fn=loss_fn, sample=batch(n), budget=size, **settings)


def test_a_plan_fits_its_budget_and_more_room_allows_more() -> None:
    # The batch itself stays within what the process held already; the budget is for what comes on top.
    plans = [step_mode(size * MIB, checkpoint="off").plan for size in (100, 900)]
    assert all(plan is not None and plan.held + plan.predicted.upper + plan.margin <= plan.limit for plan in plans)
    largest = [max(o.micro_batch for o in plan.options if o.fits) for plan in plans if plan is not None]
    assert largest[0] < largest[1] == SHARE
    assert plans[0] is not None and plans[0].mode == "accumulate"
    assert any("needs up to" in option.reason for option in plans[0].rejected)


def test_where_a_single_sample_does_not_fit_blocks_are_checkpointed() -> None:
    model = Deep()
    optimizer = sgd(model, 0.01)
    profile = memfit.profile(model, optimizer, batch(6), loss_fn=loss_fn)
    without, every = profile.peak(1).upper, with_blocks(profile, profile.blocks).peak(1).upper
    assert every < 0.7 * without
    between = budget((without + every) // 2, kind="cpu")
    with pytest.raises(DoesNotFit, match="checkpoint='auto'"):
        memfit.plan(profile, between, target_batch=SHARE, checkpoint="off")
    plan = memfit.plan(profile, between, target_batch=SHARE)
    assert plan.checkpoint and plan.predicted.upper <= between.room
    run = memfit.apply(plan, model, optimizer, loss_fn=loss_fn)
    x = batch()
    want = plain(model, loss_fn, x)[1]
    run.step(x)
    assert relative_error(gradients_of(model), want) <= 1e-6


def test_what_is_planned_is_what_runs() -> None:
    run = step_mode(100 * MIB, checkpoint="off")
    assert run.plan is not None
    sizes = Notes()
    run.model.blocks[0].register_forward_pre_hook(lambda m, args: sizes.append(len(args[0])))
    largest = max(option.micro_batch for option in run.plan.options if option.fits)
    for _ in range(4):
        sizes.clear()
        run.step(batch())
        assert sum(sizes) == SHARE and max(sizes) <= largest
    assert run.plan.predicted.seconds is not None and run.stats()["micro_batch"] == run.plan.micro_batch


class Sizes:
    """The sizes of forwards on real data, and whether they recorded gradients; kept where planning puts nothing back."""

    def __init__(self, model: Deep) -> None:
        self._queue: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        self.handle = model.blocks[0].register_forward_pre_hook(self._before)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not is_fake(args[0]):
            self._queue.put((len(args[0]), torch.is_grad_enabled()))

    def taken(self) -> list[tuple[int, bool]]:
        """Those since the last time."""
        return [self._queue.get() for _ in range(self._queue.qsize())]


class Growth:
    """What a budget counts from now on: the parameters, and what comes on top of all that is held now."""

    def __init__(self, model: nn.Module) -> None:
        give_back_free_heap()
        self._meter = Meter(CPU)
        self._there = sum(p.numel() * p.element_size() for p in model.parameters()) - self._meter.held()

    def most(self) -> int:
        """The most bytes so far."""
        peak = self._meter.peak()
        assert peak is not None
        return self._there + peak


def test_planning_runs_nothing_that_would_not_fit_in_step_mode() -> None:
    model, sample = Deep(), batch()
    sizes = Sizes(model)
    memfit.wrap(model, sgd(model), loss_fn=loss_fn, sample=sample, budget=100 * MIB, checkpoint="off", target_batch=SHARE)
    most = max(n for n, recorded in sizes.taken() if recorded)
    assert 2 <= most < SHARE


def test_planning_is_made_inside_the_first_training_call_in_script_mode() -> None:
    model, x = Deep(), batch()
    sizes = Sizes(model)
    run = memfit.wrap(model, sgd(model), budget=100 * MIB, checkpoint="off")
    assert run.plan is None
    F.mse_loss(model(x), torch.ones(SHARE)).backward()
    assert run.plan is not None and run.plan.mode == "accumulate"
    assert run.plan.held + run.plan.predicted.upper + run.plan.margin <= run.plan.limit
    assert 2 <= max(n for n, recorded in sizes.taken() if recorded) < SHARE


def grown(mode: str) -> tuple[int, int]:
    """(the most that was held while planning and in a first step, what was allowed), in a process that has run nothing."""
    model, x = Deep(), batch()
    warm = Deep()
    memfit.profile(warm, sgd(warm), batch(2), loss_fn=loss_fn)  # what planning imports is no tensor of its
    growth = Growth(model)
    if mode == "step":
        run = memfit.wrap(model, sgd(model), loss_fn=loss_fn, sample=x, budget=100 * MIB, checkpoint="off", target_batch=SHARE)
    else:
        run = memfit.wrap(model, sgd(model), budget=100 * MIB, checkpoint="off")
        F.mse_loss(model(x), torch.ones(SHARE)).backward()
    assert run.plan is not None
    return growth.most(), run.plan.limit


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's thresholds are pinned, so that what is freed goes back")
@pytest.mark.parametrize("mode", ["step", "script"])
def test_planning_holds_no_more_than_it_may(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's own margin is what the kernel may count otherwise."""
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "65536")
    held, limit = in_a_new_process(grown, mode)
    assert held <= limit


def test_the_verbs_by_hand_come_to_the_same() -> None:
    model = Deep()
    optimizer = sgd(model)
    profile = memfit.profile(model, optimizer, batch(6), loss_fn=loss_fn)
    assert profile.source == "traced" and len(profile.blocks) == 4
    plan = memfit.plan(profile, memfit.probe(budget=100 * MIB, device="cpu"), target_batch=SHARE, checkpoint="off")
    assert 1 <= plan.micro_batch < SHARE and plan.share == plan.target_batch == SHARE
    with pytest.raises(DoesNotFit):
        memfit.plan(profile, memfit.probe(budget=20 * MIB, device="cpu"), target_batch=SHARE, checkpoint="off")
    run = memfit.apply(plan, model, optimizer, loss_fn=loss_fn)
    run.step(batch())
    assert run.plan == plan
    verification = memfit.verify(run)
    assert verification.relative_error <= verification.tolerance


class Choosing(Deep):
    """The same on the samples that are not zero, of which a trace does not know how many there are."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[torch.where(x.sum((1, 2)) != 0)])


@pytest.mark.parametrize(("kind", "source"), [(Deep, "traced"), (Choosing, "measured")])
@pytest.mark.parametrize(("checkpoint", "times"), [("off", 1), ("all", 2)])
def test_a_profile_is_of_micro_batches_that_ran_with_its_blocks_checkpointed(
    kind: type[Deep], source: str, checkpoint: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ran = kind(), Notes([0, 0])

    def counting(of: int, forward: Any) -> Any:
        def counted(module: nn.Module, x: Tensor) -> Tensor:
            ran[of] += not is_fake(x)
            return forward(module, x)

        return counted

    monkeypatch.setattr(Deep, "forward", counting(0, Deep.forward))
    monkeypatch.setattr(nn.Sequential, "forward", counting(1, nn.Sequential.forward))
    found = memfit.profile(model, sgd(model), batch(6), loss_fn=loss_fn, checkpoint=checkpoint)
    assert found.source == source
    assert ran[0] and ran[1] == 4 * times * ran[0]


def test_what_cannot_be_traced_is_measured_up_to_the_whole_sample() -> None:
    """However long that takes: what the smallest micro-batches take says nothing of large ones."""

    class Slow(Choosing):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.1 * len(x))
            return super().forward(x)

    model = Slow()
    found = memfit.profile(model, sgd(model), batch(20), loss_fn=loss_fn)
    assert found.source == "measured" and [timing.samples for timing in found.timings] == [1, 4, 20]


def test_a_plan_by_a_profile_with_checkpointed_blocks_checkpoints_them() -> None:
    model = Deep()
    profile = memfit.profile(model, sgd(model), batch(6), loss_fn=loss_fn, checkpoint="all")
    budget = memfit.probe(budget=100 * MIB, device="cpu")
    assert memfit.plan(profile, budget, target_batch=SHARE).checkpoint == profile.checkpoint != ()
    with pytest.raises(UsageError, match="made with 4 blocks checkpointed"):
        memfit.plan(profile, budget, target_batch=SHARE, checkpoint="off")


def test_what_checkpointing_would_save_is_not_told_from_a_profile_that_was_measured() -> None:
    model = Choosing()
    budget = memfit.probe(budget=400 * MIB, device="cpu")
    plain = memfit.profile(model, sgd(model), batch(6), loss_fn=loss_fn)
    with pytest.raises(UsageError, match=r"(?s)measured.*memfit.profile\(..., checkpoint='all'\)"):
        memfit.plan(plain, budget, target_batch=SHARE, checkpoint="all")
    with pytest.raises(UsageError, match=r"memfit.profile\(..., checkpoint=\['blocks.0'\]\)"):
        memfit.plan(plain, budget, target_batch=SHARE, checkpoint=["blocks.0"])
    profile = memfit.profile(model, sgd(model), batch(6), loss_fn=loss_fn, checkpoint="all")
    assert profile.source == "measured"
    assert len(memfit.plan(profile, budget, target_batch=SHARE).checkpoint) == 4


def test_explicit_levers_are_kept_or_refused_with_a_reason() -> None:
    run = step_mode(400 * MIB, micro_batch=3, checkpoint=["blocks.1"])
    assert run.plan is not None and (run.plan.micro_batch, run.plan.checkpoint) == (3, ("blocks.1",))
    with pytest.raises(DoesNotFit, match="allow micro_batch='auto'"):
        step_mode(100 * MIB, micro_batch=SHARE, checkpoint="off")


# ---- law 2: traced = applied


def _applied_peak(model: nn.Module, optimizer: Optimizer, run: Run, make: Any, samples: int) -> int:
    """Most bytes alive in one real step, as a ledger over the real tensors has it."""
    for _ in range(2):
        run.step(make())
    model.zero_grad(set_to_none=True)
    effective = make()
    ledger = Ledger(CPU, inside=stages)
    gc.collect()
    gc.disable()
    try:
        with ledger:
            ledger.present(model.parameters(), "parameters")
            ledger.present(model.buffers(), "buffers")
            states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
            ledger.present(states, "optimizer")
            ledger.restart()
            run.step(effective)
        return ledger.timeline().peak(samples)
    finally:
        gc.enable()


@pytest.mark.parametrize("every", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("name", ["mlp", "gpt", "convnext", "resnet", "superres"])
def test_what_runs_holds_what_was_traced(name: str, every: bool) -> None:
    family, samples = FAMILIES[name], 4
    for package in family.requires:
        pytest.importorskip(package)
    traced = of_family(name)
    blocks = traced.blocks if every else ()
    if every and not blocks:
        pytest.skip("nothing to checkpoint")
    timeline = (of_family(name, blocks) if blocks else with_blocks(traced, ())).timeline
    assert timeline is not None
    model, data = family.build(), family.dataset(n=2 * samples)
    optimizer = AdamW(model.parameters())
    run = wrapped(
        model, samples, share=2 * samples, optimizer=optimizer, fields={"checkpoint": blocks}, loss_fn=family.loss
    )

    def make() -> SampleBatch:
        return SampleBatch([data[i] for i in range(2 * samples)], family.collate or default_collate)

    got = _applied_peak(model, optimizer, run, make, samples)
    # Copies of what batch norm writes, in case the batch has to start again, and of the state of the random generator before
    # and after it, are beside what the profile counts.
    copies = sum(b.nbytes for b in model.buffers()) + 2 * torch.get_rng_state().nbytes
    # Traced by samples, the mean squared error keeps a value per element; the run divides the sum itself, and lets go of these,
    # and of the targets, which a trace keeps to the end of their micro-batch.
    values = 2 * max(t.nbytes for t in tensors(first_batch(family, samples))) if name == "superres" else 0
    assert timeline.peak(samples) * 0.98 - values <= got <= timeline.peak(samples) + copies


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (1000.0, True)])
def test_a_busy_machine_is_noted(load: float, said: bool) -> None:
    assert bool(busy_note(CPU, load)) is said
    assert not busy_note(torch.device("cuda"), 1000.0)


@pytest.mark.parametrize(("set_to", "advised"), [("passive", False), ("PASSIVE", False), ("active", True), (None, True)])
def test_what_is_set_already_is_not_advised(set_to: str | None, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if set_to is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", set_to)
    (note,) = busy_note(CPU, 1000.0)
    assert ("OMP_WAIT_POLICY" in note) is advised


@pytest.mark.parametrize("disturbed", [1, 99])
def test_what_a_disturbance_made_look_too_large_is_measured_again_before_it_is_refused(
    disturbed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, calls = Measurer.timed, []

    def timed(self: Measurer, task: Task, profile: Profile) -> Profile:
        calls.append(profile.precision)
        found = measure(self, task, profile)
        excess = tuple((timing.samples, 1 << 40) for timing in found.timings)
        return replace(found, excess=excess) if len(calls) <= disturbed else found

    monkeypatch.setattr(Measurer, "timed", timed)
    if disturbed == 1:
        run = step_mode(2000 * MIB)
        assert run.plan is not None and run.plan.precision == "off" and calls == ["float32", "float32"]
    else:
        with pytest.raises(DoesNotFit):
            step_mode(2000 * MIB)


def test_a_second_precision_is_timed_at_the_largest_size_only(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[Stopwatch, set[int]] = {}
    timing = Stopwatch.run

    def run(self: Stopwatch, work: Work, samples: int) -> Timing:
        ran.setdefault(self, set()).add(samples)
        return timing(self, work, samples)

    monkeypatch.setattr(Stopwatch, "run", run)
    monkeypatch.setattr(Memory, "fast_dtypes", ("float32", "bfloat16"))
    step_mode(2000 * MIB, precision="fast")
    own, lower = ran.values()
    assert len(own) > 1 and lower == {max(own)}


class Narrow(Deep):
    """Its kernels take what no tensor shows: from some size on they run out of memory."""

    most = 4

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most and not is_fake(x):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return super().forward(x)


@pytest.mark.parametrize("most", [1, 4, 9])
def test_running_out_of_memory_while_sizes_are_timed_only_makes_them_smaller(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "TIMING_SECONDS", 60.0)  # however busy the machine is, the largest size runs
    model, data = Narrow(), batch(SHARE)
    model.most = most
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run = memfit.wrap(model, sgd(model, 0.01), loss_fn=loss_fn, sample=data)
    assert run.plan is not None and run.plan.micro_batch <= most
    assert any("ran out of memory while they were timed" in note for note in run.plan.notes)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    said = len(run.events)
    run.step(data)
    assert not [event for event in run.events[said:] if event.kind == "out of memory"]


def test_a_second_precision_that_runs_out_of_memory_while_it_is_timed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class OneOnly(Deep):
        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu") and not is_fake(x):
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(x)

    monkeypatch.setattr(Memory, "fast_dtypes", ("float32", "bfloat16"))
    model = OneOnly()
    run = memfit.wrap(model, sgd(model, 0.01), loss_fn=loss_fn, sample=batch(), precision="fast")
    assert run.plan is not None and run.plan.precision == "off"


@pytest.mark.parametrize(
    ("own", "lower", "at_32"),
    [
        (((8, 100), (16, 200)), ((16, 300),), 500),  # grows as the first precision's does
        (((8, 26), (16, 26)), ((16, 30),), 30),  # the same at every size
        (((8, 100), (16, 200)), ((16, 120),), 240),  # a share of the first precision's
        ((), ((16, 300),), 600),  # nothing is known of how it grows
        (((8, 100), (16, 200)), (), 400),  # none seen at one size: the first precision's may still come
    ],
)
def test_what_a_second_precision_takes_beyond_its_trace_grows_with_the_size(own: Excess, lower: Excess, at_32: int) -> None:
    found = profile(two_blocks(), excess=excess_beside(own, lower))
    assert found.excess_at(32) == at_32
    assert not lower or found.excess_at(16) == lower[-1][1]


@pytest.mark.parametrize("pinned", [False, True])
def test_where_kernels_take_much_beside_the_tensors_a_heap_that_keeps_it_gets_sizes_that_ran(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, ran = Measurer.timed, set()
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
        monkeypatch.setenv(name, "65536") if pinned else monkeypatch.delenv(name, raising=False)

    def timed(self: Measurer, task: Task, profile: Profile) -> Profile:
        found = measure(self, task, profile)
        ran.update(timing.samples for timing in found.timings)
        assert found.timeline is not None
        return replace(found, excess=tuple((t.samples, int(found.timeline.growth(t.samples) // 2)) for t in found.timings))

    monkeypatch.setattr(Measurer, "timed", timed)
    run = step_mode(2000 * MIB)
    assert run.plan is not None and ran
    assert ({option.micro_batch for option in run.plan.options} <= ran) is not pinned


WHOLE = """
import threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import memfit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 256, 2, batch_first=True), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])

def held():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while True:
        peak[0] = max(peak[0], held())
        time.sleep(0.002)

torch.manual_seed(0)
model, loader = Net(), DataLoader(TensorDataset(torch.randn(256, 100, 64), torch.randint(0, 10, (256,))), batch_size=128)
optimizer = torch.optim.Adam(model.parameters())
nn.functional.cross_entropy(model(torch.randn(2, 100, 64)), torch.tensor([1, 2])).backward()
optimizer.zero_grad()
there, peak = held(), [0]
run = memfit.wrap(model, optimizer, loader, budget="220MiB")
threading.Thread(target=watch, daemon=True).start()
for x, y in run.loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
print(peak[0] - there, 220 << 20, run.plan.micro_batch)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_batch_whose_tensors_fit_but_whose_kernels_do_not_is_cut() -> None:
    """An LSTM's tensors for 128 samples take 77 MiB, and all that its kernels hold 320."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", WHOLE], capture_output=True, text=True, check=True, cwd=ROOT)
    held, budget, micro_batch = map(int, done.stdout.splitlines()[-1].split())
    assert micro_batch < 128
    assert held <= budget


class OfTwoKinds(nn.Module):
    """Takes pictures, and videos that it averages."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        return self.head(hidden.mean(1) if x.dim() == 3 else hidden)


def test_every_kind_of_call_runs_by_its_own_plan() -> None:
    model = OfTwoKinds()
    optimizer = sgd(model)
    run = memfit.wrap(model, optimizer, micro_batch=6)
    sizes = Forwards(model.head).sizes
    videos, pictures = torch.randn(12, 5, 6), torch.randn(24, 6)

    def step(*batches: Tensor) -> list[int]:
        sizes.clear()
        optimizer.zero_grad()
        losses = [model(batch).flip(0).flip(0).square().mean() for batch in batches]
        first = list(sizes)
        for loss in losses:
            loss.backward()
        optimizer.step()
        return first

    for _ in range(2):  # (once more where gradients are zeroed, which leaves more room)
        step(videos, pictures)
    assert run._script is not None
    for kind, most in zip(run._script._kinds._kinds.values(), (4, 8), strict=True):  # (as if so many fitted of each)
        for planned in kind.planned.values():
            planned.plan, planned.largest = replace(planned.plan, micro_batch=most, accumulation=3), most
    for batches in ((videos, pictures), (pictures, videos), (videos,), (pictures,)):
        assert step(*batches) == [size for batch in batches for size in ([4] * 3 if batch is videos else [8] * 3)]
    assert run._core is not None
    run._core.in_force.ran_out(8, 2, "a test")  # pictures, which ran last
    assert step(videos, pictures) == [4] * 3 + [2] * 12
