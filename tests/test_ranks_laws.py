"""Law 1 over processes: the gradients of several, each with its share, are those of one process over the whole batch."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import wrapped
from processes import Processes
from test_laws import batches, built, frozen_rate, named, of_logits, script_gradients, step_gradients, tolerance, worst
from zoo import FAMILIES, Family
from zoo.losses import variants_for
from zoo.plain import Gradients, gradients_of, parts

PARTS = (0.7, 0.3)
SHARES = {2: (0.5, 0.5), 3: (0.4, 0.3, 0.3)}
"""Which part of every batch each process has."""


@pytest.fixture(scope="module", params=(2, 3))
def processes(request: pytest.FixtureRequest) -> Iterator[Processes]:
    found = Processes(request.param)
    yield found
    found.end()


@pytest.fixture(scope="module")
def two() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.end()


@pytest.fixture(autouse=True)
def required(request: pytest.FixtureRequest) -> None:
    """Skips families whose packages are not here."""
    callspec = getattr(request.node, "callspec", None)
    family = callspec.params.get("family") if callspec else None
    for package in family.requires if family else ():
        pytest.importorskip(package)


def share_of(batch: Any, samples: int, shares: tuple[float, ...], rank: int) -> Any:
    """One process's part of a batch."""
    sizes = [int(samples * share) for share in shares]
    sizes[0] += samples - sum(sizes)
    return parts(batch, sizes)[rank]


def samples_in(batch: Any) -> int:
    while not isinstance(batch, torch.Tensor):
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    return len(batch)


def of_rank(name: str, variant: str | None, mode: str, shares: tuple[float, ...]) -> tuple[list[Gradients], list[str]]:
    """What this process leaves in the model after each batch, and what was said."""
    family = FAMILIES[name]
    loss = family.script_loss
    if variant is not None:
        loss = of_logits(family, next(v for v in variants_for(family) if v.name == variant), mode)
    model, data = built(family), batches(family)
    rank = int(os.environ["RANK"])
    mine = [share_of(batch, samples_in(batch), shares, rank) for batch in data]
    if rank:
        for p in model.parameters():  # it starts from rank 0's
            p.data.add_(1.0)
    if mode == "step":
        run = wrapped(model, 3, optimizer=frozen_rate(model), loss_fn=loss)
        found = step_gradients(run, mine)
    else:
        run = wrapped(model, 3)
        found = script_gradients(model, loss, mine)
    return found, [event.message for event in run.events]


def whole(family: Family, variant: str | None, mode: str) -> list[Gradients]:
    loss = family.script_loss
    if variant is not None:
        loss = of_logits(family, next(v for v in variants_for(family) if v.name == variant), mode)
    return script_gradients(copy.deepcopy(built(family)), loss, batches(family))


def by_processes(family: Family, variant: str, mode: str) -> list[Gradients]:
    """What plain DistributedDataParallel would leave, weighted by samples: the mean of what each process has."""
    loss = of_logits(family, next(v for v in variants_for(family) if v.name == variant), mode)
    found = []
    for batch in batches(family):
        model = built(family)
        for rank in range(len(PARTS)):
            part = share_of(batch, samples_in(batch), PARTS, rank)
            (loss(model, part) * samples_in(part) / samples_in(batch)).backward()
        found.append(gradients_of(model))
    return found


@named(FAMILIES.values())
@pytest.mark.parametrize("mode", ["script", "step"])
def test_the_familys_own_loss(processes: Processes, family: Family, mode: str) -> None:
    found = processes.run(of_rank, family.name, None, mode, SHARES[processes.size])
    want = whole(family, None, mode)
    for each, _ in found:  # every rank has the same
        assert worst(each, want) <= tolerance(family)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "variant"),
    [pytest.param(f, v.name, id=f"{f.name}-{v.name}") for f in FAMILIES.values() for v in variants_for(f)],
)
@pytest.mark.parametrize("mode", ["accumulate", "step"])
def test_every_loss_in_every_mode(two: Processes, family: Family, variant: str, mode: str) -> None:
    if family.name == "t5" and mode == "step":
        pytest.skip("its softmax in float32 hides from proofs in double precision how losses weigh")
    (found, said), (other, _) = two.run(of_rank, family.name, variant, mode, PARTS)
    assert worst(other, found) == 0
    want = whole(family, variant, mode)
    if any("does not see into" in message for message in said):
        assert mode == "accumulate"  # in step mode memfit computes the loss
        want = by_processes(family, variant, mode)
    assert worst(found, want) <= tolerance(family)


