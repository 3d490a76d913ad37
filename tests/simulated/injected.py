"""Memory that runs out once, at any allocation of planning and of the first steps: what a script then meets."""

from __future__ import annotations

import gc
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import simcuda
import torch
import torch.nn.functional as F
from helpers import unseen
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import memfit

STEPS = 3
SAMPLES = 24


class Net(nn.Module):
    """Tokens to classes; computes its loss where it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.head = nn.Embedding(20, 16), nn.Linear(16, 32), nn.Linear(32, 5)
        self.double().cuda()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        out = self.head(F.gelu(self.hidden(self.embed(x))).mean(1))
        return out if y is None else F.cross_entropy(out, y)


Loss = Callable[[nn.Module, Any], Tensor]
LOSSES: dict[str, Loss] = {
    "known": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    "own": lambda model, batch: model(*batch),
    "in two passes": lambda model, batch: F.softplus(unseen(model(batch[0]))).log().square().sum(),
}
Case = tuple[str, str, Any]
"""The loss, the mode, and `micro_batch`."""
CASES: list[Case] = [
    *[(loss, "script", micro) for loss in LOSSES for micro in ("auto", 4)],
    *[(loss, "step", micro) for loss in ("known", "own") for micro in ("auto", 4)],
]


@dataclass(frozen=True)
class Met:
    """What a run came to where its `failing`-th allocation failed (None: none did)."""

    case: Case
    failing: int | None
    allocations: int
    parameters: list[Tensor]
    error: str
    """Where it was raised, by functions of memfit and of torch's optimizers, the innermost first; "" where nothing was."""
    left: int
    """Bytes that are still allocated once all is deleted."""

    @property
    def is_the_scripts(self) -> bool:
        """Whether nothing was raised but by what the script does itself: a whole batch's backward, and its optimizer."""
        return self.error in ("", "script") or self.error.partition(".")[0] in ("sgd", "adam", "adamw", "optimizer")


def met(case: Case, failing: int | None) -> Met:
    """Train with memfit."""
    loss, mode, micro = case
    before = _held()
    torch.cuda.empty_cache()
    parameters, error, allocations = _trained(LOSSES[loss], mode, micro, failing)
    return Met(case, failing, allocations, parameters, error, _held() - before)


def _held() -> int:
    """Bytes of tensors that something refers to."""
    gc.collect(), gc.collect()  # what has finalizers goes with the second one
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
    return torch.cuda.memory_allocated()


def _trained(loss: Loss, mode: str, micro: Any, failing: int | None) -> tuple[list[Tensor], str, int]:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.01) if mode == "step" else SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(0, 20, (SAMPLES, 7), generator=draw).cuda(), torch.randint(0, 5, (SAMPLES,), generator=draw).cuda())
        for _ in range(STEPS)
    ]
    before, error = _allocations(), ""
    simcuda.fail_in(-1 if failing is None else failing)
    try:
        run = memfit.wrap(model, optimizer, micro_batch=micro, **({"loss_fn": loss} if mode == "step" else {}))
        for batch in batches:
            if mode == "step":
                run.step(batch)
                continue
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        run.undo()
    except torch.OutOfMemoryError as raised:
        error = " < ".join([*_sites(raised), "script"])
    finally:
        simcuda.fail_in(-1)
    sys.last_traceback = None
    return [p.detach().cpu() for p in model.parameters()], error, _allocations() - before


def _allocations() -> int:
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


def _sites(error: BaseException) -> Iterator[str]:
    """Functions of memfit and of torch.optim that an error came through, the innermost first."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "/memfit/" in frame.filename or "torch/optim" in frame.filename:
            yield f"{frame.filename.rpartition('/')[2].removesuffix('.py')}.{frame.name}"


def sampled(count: int, seed: int = 0) -> Iterator[tuple[Met, Met]]:
    """(what nothing failing comes to, what one that fails does) for so many allocations, spread over all cases."""
    draw = random.Random(seed)
    whole = {case: met(case, None) for case in CASES}
    for i in range(count):
        case = CASES[i % len(CASES)]
        yield whole[case], met(case, draw.randrange(whole[case].allocations))


def faults(want: Met, got: Met) -> Iterator[str]:
    """What is wrong with a run in which an allocation failed, beside one in which none did."""
    where = f"{got.case}, allocation {got.failing}"
    if not got.is_the_scripts:
        yield f"{where}: raised in {got.error}"
    elif not got.error and max(float((a - b).abs().max()) for a, b in zip(got.parameters, want.parameters)) > 1e-10:
        yield f"{where}: other parameters"
    if got.left > want.left:
        yield f"{where}: {got.left} bytes are left ({got.error or 'nothing raised'})"
