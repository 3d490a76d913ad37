"""Faults on purpose: processes that train together, in which some fail at chosen places, and what became of all of them.

Every trial has processes of its own, forked from one that has torch imported already, and they end as a script's would. Not
covered: faults of the network between machines.
"""

from __future__ import annotations

import atexit
import math
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import Aside
from processes import free_port, warm
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

SAMPLES, TARGET, MICRO, EPOCHS = 108, 48, 8, 2
STEPS = 6
PATIENCE = 120.0
"""Seconds after which processes that have not ended are taken to hang."""
PROMPT = 15.0
"""Seconds within which all processes end once one of them has failed: on a quiet machine, so that slow tests alone ask."""
MODES = ("step", "script", "replay", "own")
"""run.step; a known loss in the script; one that the script computes by hand; one that the model returns."""
IN_MICRO_BATCHES = ("forward", "backward", "hook")
IN_BATCHES = (*IN_MICRO_BATCHES, "collate", "loss")
PLACES = (
    *IN_MICRO_BATCHES, "collate", "loss", "reduce", "exchange", "optimizer", "half optimizer", "before_step", "gradient hook",
    "dataset", "validate",
)  # fmt: skip
KINDS = ("memory", "memory of the host", "error", "kill")


@dataclass(frozen=True)
class Fault:
    """One process fails at a place."""

    rank: int
    """Which."""
    place: str
    """One of PLACES."""
    step: int
    """In which optimizer step."""
    nth: int = 0
    """At which visit of the place in this step."""
    times: int = 1
    """How many visits in a row fail."""
    kind: str = "memory"
    """One of KINDS."""


@dataclass(frozen=True)
class Trial:
    """A short training and the faults in it."""

    size: int
    """Processes."""
    mode: str = "step"
    """One of MODES."""
    faults: tuple[Fault, ...] = ()
    """What fails."""
    autocast: bool = False
    """Whether the forward computes in bfloat16."""
    shard: str = "off"
    """What of the training is held in parts."""
    norm: bool = False
    """Whether the model normalises by batches."""
    overlap: bool | None = None
    """Whether gradients are reduced beside the last micro-batch: wherever they can be, or never; None: as memfit decides."""


@dataclass
class Outcome:
    """What one process left."""

    error: str = ""
    """The exception that ended it: its class."""
    text: str = ""
    """Its message."""
    states: list[list[float]] = field(default_factory=list)
    """Parameters and optimizer state after each step."""
    parameters: list[float] = field(default_factory=list)
    """Parameters at the end."""
    seen: list[int] = field(default_factory=list)
    """The samples that it loaded."""
    fired: list[tuple[Fault, float]] = field(default_factory=list)
    """The faults that were met, and when."""
    events: list[str] = field(default_factory=list)
    """Kinds of events of the run."""
    overlapped: int = 0
    """Steps that reduced gradients beside the last micro-batch."""
    ended: float = 0.0
    """When the process had ended."""
    hung: bool = False
    """Whether it had to be ended."""


class Injector:
    """Fails where `faults` say, for this process."""

    def __init__(self, faults: Sequence[Fault], rank: int, tell: Callable[[Any], None]) -> None:
        self._faults = [fault for fault in faults if fault.rank == rank]
        self._tell = tell
        self._visits = Aside(of=[0] * len(PLACES))  # (a retry would find anything else as it was before)
        self.step = 0

    def __deepcopy__(self, memo: Any) -> Injector:
        return self

    def begin(self, step: int) -> None:
        self.step = step
        self._visits.of = [0] * len(PLACES)

    def at(self, place: str) -> None:
        """The process comes to this place."""
        number = PLACES.index(place)
        visit = self._visits.of[number]
        self._visits.of[number] += 1
        for fault in self._faults:
            if (fault.place, fault.step) == (place, self.step) and fault.nth <= visit < fault.nth + fault.times:
                self._tell((fault, time.time()))
                _fail(fault.kind)


def _fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if kind == "memory of the host":
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.")
    raise ValueError("a fault on purpose")


# ---- what is trained


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, injector: Injector) -> torch.Tensor:
        ctx.injector = injector
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        if _real(gradient):
            ctx.injector.at("backward")
        return gradient, None


class Point(nn.Module):
    """A place in a model where memory may run out."""

    def __init__(self, injector: Injector) -> None:
        super().__init__()
        self.injector = injector

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _real(x) and self.training:
            self.injector.at("forward")
        return _Backward.apply(x, self.injector)  # type: ignore[no-any-return]

    def __deepcopy__(self, memo: Any) -> Point:
        return Point(self.injector)


class Network(nn.Module):
    def __init__(self, injector: Injector, *, own_loss: bool, norm: bool) -> None:
        super().__init__()
        self.own_loss = own_loss
        more = [nn.BatchNorm1d(16)] if norm else []
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), *more, Point(injector), nn.Linear(16, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        out = self.head(self.body(x))
        return F.cross_entropy(out, y) if self.own_loss and y is not None else out


class Samples(Dataset[Any]):
    def __init__(self, injector: Injector, seen: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (SAMPLES,), generator=generator)
        self._injector, self._seen = injector, seen

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self._injector.at("dataset")
        self._seen.append(index)
        return self.x[index], self.y[index]


class Stepper(torch.optim.AdamW):
    """AdamW that may run out of memory before it has done anything, or when a part of the parameters has been stepped."""

    injector: Injector
    own = 0

    def at(self, place: str) -> None:
        if self.own == id(self):  # and no clone of it, whose steps are timed
            self.injector.at(place)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.at("optimizer")
        groups = self.param_groups
        for group in list(groups):
            self.param_groups = [group]
            try:
                super().step()
            finally:
                self.param_groups = groups
            self.at("half optimizer")


def _real(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.device.type != "meta"


def _optimizer(model: Network, injector: Injector) -> Stepper:
    groups = [{"params": list(model.head.parameters()), "lr": 0.02}, {"params": list(model.body.parameters())}]
    optimizer = Stepper(groups, lr=0.01)
    optimizer.injector, optimizer.own = injector, id(optimizer)
    return optimizer


def train(trial: Trial, rank: int, found: Outcome, tell: Callable[[Any], None]) -> None:
    """The script that every process runs."""
    import memfit
    from memfit.ranks import buckets

    buckets.BUCKET, buckets.ALONE = 1 << 10, 900  # several collectives, of both kinds
    injector = Injector(trial.faults, rank, tell)
    injector.begin(-1)
    torch.manual_seed(1)
    model = Network(injector, own_loss=trial.mode == "own", norm=trial.norm).double()
    optimizer = _optimizer(model, injector)
    model.body[0].register_forward_hook(lambda m, x, out: injector.at("hook") if _real(out) and m.training else None)
    if trial.shard in ("off", "optimizer"):  # others take no hooks on parameters
        model.head.weight.register_post_accumulate_grad_hook(lambda p: injector.at("gradient hook"))

    def collate(samples: list[Any]) -> Any:
        injector.at("collate")
        return default_collate(samples)

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=trial.autocast):
            loss = _loss(trial.mode, model, x, y)
        if x.device.type != "meta" and _real(x):
            injector.at("loss")
        return loss

    data = Samples(injector, found.seen)
    sampler = DistributedSampler(data, num_replicas=trial.size, rank=rank, seed=5)
    source = DataLoader(data, batch_size=4, sampler=sampler, collate_fn=collate)
    own: dict[str, Any] = {}
    if trial.mode == "step":
        own = {"loss_fn": loss_fn, "before_step": lambda: injector.at("before_step")}
    run = memfit.wrap(model, optimizer, source, target_batch=TARGET, micro_batch=MICRO, shard=trial.shard, **own)
    overlap = None if run._core is None or run._core.team.reduction is None else run._core.team.reduction.overlap
    if overlap is not None:
        overlap.forced = trial.overlap
    found.seen.clear()
    number = 0
    with _collectives(injector):
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            batches = iter(run.loader)
            injector.begin(number)
            while (batch := next(batches, None)) is not None:
                if trial.mode == "step":
                    run.step(batch)
                else:
                    optimizer.zero_grad()
                    loss_fn(model, batch).backward()
                    injector.at("before_step")
                    optimizer.step()
                found.states.append(_state(model, optimizer, whole=in_parts(trial)))
                found.events = [event.kind for event in run.events]
                found.overlapped = 0 if overlap is None else overlap.ran
                if rank == 0:
                    _validate(model, injector, data)
                number += 1
                injector.begin(number)
    found.parameters = _state(model, optimizer, whole=True)


def _loss(mode: str, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if mode == "own":
        return model(x, y)
    out = model(x)
    if mode == "replay":
        out = out.flip(0).flip(0)  # a way that memfit does not see through
        return (out.logsumexp(1) - out.gather(1, y[:, None])[:, 0]).sum() / len(y)
    return F.cross_entropy(out, y)


def _validate(model: nn.Module, injector: Injector, data: Samples) -> None:
    """Rank 0 alone."""
    injector.at("validate")
    model.eval()
    with torch.no_grad():
        model(data.x)
    model.train()


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool) -> list[float]:
    """Parameters, `whole` also where they are held in parts; else what the optimizer holds here, too."""
    held = model.state_dict() if whole else dict(model.named_parameters())
    tensors = [held[name].detach() for name, _ in model.named_parameters()]
    for p in () if whole else model.parameters():
        tensors += [value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
    return [float(v) for t in tensors for v in t.reshape(-1)]


@contextmanager
def _collectives(injector: Injector) -> Iterator[None]:
    """Inside, what processes exchange are places, too."""
    reduce, exchange = dist.all_reduce, dist.all_gather

    def all_reduce(*arguments: Any, **named: Any) -> Any:
        injector.at("reduce")
        return reduce(*arguments, **named)

    def all_gather(*arguments: Any, **named: Any) -> Any:
        injector.at("exchange")
        return exchange(*arguments, **named)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        yield
    finally:
        dist.all_reduce, dist.all_gather = reduce, exchange


# ---- processes


def run(trial: Trial, script: Callable[..., None] = train) -> list[Outcome]:
    """What became of every process. `script(trial, rank, outcome, tell)` is what they run."""
    context = warm()
    port = free_port()
    pipes, processes = [], []
    for rank in range(trial.size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(script, trial, rank, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found = _collected(pipes)
    for outcome, process in zip(found, processes):
        outcome.hung = not outcome.ended
        process.kill()
        process.join()
    return found


def _collected(pipes: Sequence[Connection]) -> list[Outcome]:
    found = [Outcome() for _ in pipes]
    fired: list[list[Any]] = [[] for _ in pipes]
    limit = time.time() + PATIENCE
    open_ = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_ and time.time() < limit:
        for pipe in wait(list(open_), max(0.0, limit - time.time())):
            rank = open_[pipe]  # type: ignore[index]
            try:
                said = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                found[rank].ended = time.time()
                del open_[pipe]  # type: ignore[arg-type]
                continue
            if isinstance(said, Outcome):
                found[rank] = said
            else:
                fired[rank].append(said)
    for outcome, mine in zip(found, fired):
        outcome.fired = mine
    return found


def _process(script: Callable[..., None], trial: Trial, rank: int, port: int, pipe: Connection) -> None:
    if trial.size > 1:
        there = {"RANK": rank, "WORLD_SIZE": trial.size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in there.items()})
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")
    found = Outcome()
    try:
        script(trial, rank, found, pipe.send)
    except BaseException as error:
        found.error, found.text = type(error).__name__, "".join(traceback.format_exception(error))
        sys.last_value = error  # as Python does for one that nobody catches
    pipe.send(found)
    atexit._run_exitfuncs()
    os._exit(1 if found.error else 0)


# ---- what should have become of them


def in_parts(trial: Trial) -> bool:
    """Whether each pass takes all processes."""
    return trial.shard in ("gradients", "parameters")


def survives(trial: Trial, fault: Fault) -> bool:
    """Whether training goes on after this fault."""
    if not fault.kind.startswith("memory"):
        return False
    if in_parts(trial) and fault.place != "exchange":
        return False  # the others wait for its passes
    if fault.place in ("collate", "loss", "optimizer", "half optimizer"):
        return trial.mode == "step"
    return fault.place in (*IN_MICRO_BATCHES, "reduce", "exchange")


def expected_to_survive(trial: Trial, fired: Sequence[Fault]) -> bool:
    """Whether all of it goes on: where every process fails in its optimizer's step, none has what the step makes."""
    stepping = {(fault.step, fault.rank) for fault in fired if "optimizer" in fault.place}
    for step in {step for step, _ in stepping}:
        if len({rank for s, rank in stepping if s == step}) == trial.size:
            return False
    return all(survives(trial, fault) for fault in fired)


def wrong(trial: Trial, found: Sequence[Outcome], want: Outcome, prompt: float = math.inf) -> list[str]:
    """What is not as it should be; `want` is what a single process without faults left, `prompt` the seconds within which all
    have to end after a failure."""
    fired = [fault for outcome in found for fault, _ in outcome.fired]
    hung = [str(rank) for rank, outcome in enumerate(found) if outcome.hung]
    if hung:
        return [f"hang: rank {', '.join(hung)}"]
    said = _wrong_parameters(trial, found, want, fired)
    if expected_to_survive(trial, fired):
        return said + _not_survived(trial, found)
    if all(fault.place in IN_BATCHES for fault in fired) and not _not_survived(trial, found):
        return said  # all failed in pieces, ran again or whole, and did not fail again
    return said + _not_ended(trial, found, fired, prompt)


def _wrong_parameters(trial: Trial, found: Sequence[Outcome], want: Outcome, fired: Sequence[Fault]) -> list[str]:
    """Every state on the way is one that plain training passes through, in its order: no batch is lost or trained twice."""
    tolerance = 2e-2 if trial.autocast else 1e-11
    said = []
    for rank, outcome in enumerate(found):
        for number, (state, wanted) in enumerate(zip(outcome.states, want.states)):
            width = len(want.parameters) if trial.shard != "off" else None
            if difference(state[:width], wanted[:width]) > tolerance:
                said.append(f"rank {rank} has wrong parameters after step {number + 1}")
                break
        others = [other.states[: len(outcome.states)] for other in found]
        if trial.shard == "off" and any(o != outcome.states[: len(o)] for o in others):
            said.append(f"rank {rank} differs from others")
    return said


def _not_survived(trial: Trial, found: Sequence[Outcome]) -> list[str]:
    said = []
    for rank, outcome in enumerate(found):
        if outcome.error:
            said.append(f"rank {rank} ended with {outcome.error}: {outcome.text.splitlines()[-1]}")
        elif len(outcome.states) != STEPS:
            said.append(f"rank {rank} did {len(outcome.states)} steps")
    seen = sorted(index for outcome in found for index in outcome.seen)
    if not said and seen != sorted(list(range(SAMPLES)) * EPOCHS):
        said.append("samples were lost or loaded twice")
    return said


def _not_ended(trial: Trial, found: Sequence[Outcome], fired: Sequence[Fault], prompt: float) -> list[str]:
    fatal = [(fault, at) for outcome in found for fault, at in outcome.fired if not survives(trial, fault)]
    fatal = fatal or [(fault, at) for outcome in found for fault, at in outcome.fired]
    first = min(at for _, at in fatal)
    said = []
    for rank, outcome in enumerate(found):
        own = [fault for fault, _ in fatal if fault.rank == rank]
        if own and own[0].kind == "kill":
            continue
        accepted = {"RankFailed"} | ({"OutOfMemoryError", "RuntimeError", "ValueError"} if own else set())
        last = trial.mode != "step" and len(outcome.states) == STEPS and not own  # it had done all there was to do
        if outcome.error not in accepted | ({""} if last else set()):
            said.append(f"rank {rank} ended with {outcome.error or 'nothing'} after {len(outcome.states)} steps")
        if outcome.ended - first > prompt:
            said.append(f"rank {rank} took {outcome.ended - first:.0f} s to end")
    steps = {len(outcome.states) for outcome in found if outcome.states or outcome.error}
    ahead = max(steps, default=0) - min(steps, default=0)
    killed = any(fault.kind == "kill" for fault, _ in fatal)
    if ahead > (0 if trial.mode == "step" and not killed and not _around_the_step(fatal) else 1):
        said.append(f"processes were {ahead} steps apart when they ended")
    return said


def _around_the_step(fatal: Sequence[tuple[Fault, float]]) -> bool:
    """Whether one failed where others could already have stepped, or could not yet have."""
    return any("optimizer" in fault.place for fault, _ in fatal)


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference, by the size of the whole."""
    if len(one) != len(other):
        return float("inf")
    size = sum(v * v for v in other) ** 0.5
    return sum((a - b) ** 2 for a, b in zip(one, other)) ** 0.5 / (size or 1.0)


# ---- random trials


def drawn(seed: int, shard: str = "off") -> Trial:
    """A random trial: mostly memory that runs out, on one, several or all processes, once or repeatedly."""
    rng = random.Random(seed)
    size = rng.choice((2, 3))
    mode = rng.choice(("step", "step", "step", "script", "script", "replay", "own"))
    fatal = rng.random() < 0.25
    places = PLACES if fatal else [p for p in PLACES if survives(Trial(size, mode), Fault(0, p, 0))]
    ranks = rng.sample(range(size), rng.choice((1, 1, 1, 2, size)))
    step = rng.randrange(STEPS)
    faults = []
    for rank in ranks:
        place = rng.choice(places)
        kind = rng.choice(KINDS if fatal else KINDS[:2])
        if place == "validate":
            rank = 0
        nth = rng.randrange(3) if place in (*IN_MICRO_BATCHES, "reduce", "collate", "loss", "dataset") else 0
        times = rng.choice((1, 1, 2)) if place in (*IN_MICRO_BATCHES, "reduce") else 1
        for later in range(rng.choice((1, 1, 1, 2)) if times == 1 else 1):  # in consecutive steps
            faults.append(Fault(rank, place, min(step + later, STEPS - 1), nth, times, kind))
    return Trial(size, mode, tuple(dict.fromkeys(faults)), autocast=rng.random() < 0.15, shard=shard)


_WANTED: dict[Any, Outcome] = {}


def wanted(trial: Trial) -> Outcome:
    """What one process without faults leaves."""
    key = (trial.mode, trial.autocast, trial.norm)
    if key not in _WANTED:
        (_WANTED[key],) = run(Trial(1, trial.mode, autocast=trial.autocast, norm=trial.norm))
        assert not _WANTED[key].error, _WANTED[key].text
    return _WANTED[key]
