"""Outputs written part by part into the whole: as torch joins them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memfit.batches.cut import Axis
from memfit.capture.joining import Joining
from memfit.capture.output_leaf import Leaf
from memfit.equivalence.proofs import relative_difference

SIZES = (2, 3, 1)


def parts(axis: Axis, *, turned: bool = False) -> list[Tensor]:
    made = [torch.randn(*[axis.size(n) if dim == axis.dim else 4 for dim in range(3)]) for n in SIZES]
    return [part.transpose(0, 1).contiguous().transpose(0, 1) for part in made] if turned else made


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", [Axis(0), Axis(1), Axis(0, inner=5), Axis(1, outer=3)], ids=str)
def test_the_whole_is_what_joining_gives(axis: Axis, turned: bool) -> None:
    leaf, found = Leaf("batch", (), (4, 4, 4), axis=axis), parts(axis, turned=turned)
    joining = Joining(leaf, SIZES)
    for part in found:
        joining.add(part)
    assert torch.equal(joining.whole(), axis.join(found))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_parts_that_differ_in_type_follow_torchs_own_rules(odd: int) -> None:
    axis = Axis(0)
    found = [part.double() if i == odd else part for i, part in enumerate(parts(axis))]
    joining = Joining(Leaf("batch", (), (4, 4, 4), axis=axis), SIZES)
    for part in found:
        joining.add(part)
    assert joining.whole().dtype is torch.float64 and torch.equal(joining.whole(), torch.cat(found))


def test_what_is_the_same_for_all_samples_is_the_first() -> None:
    joining = Joining(Leaf("value", (), value=7), SIZES)
    for part in (7, 7, 7):
        joining.add(part)
    assert joining.whole() == 7


def shares_storage(made: Tensor, given: Any) -> bool:
    return isinstance(given, Tensor) and given.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made inside."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(shares_storage(made, each) for each in args):
            self.nbytes = max(self.nbytes, made.nbytes)
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_comparing_takes_little_beside_what_is_compared(dtype: torch.dtype) -> None:
    """Proofs run within the budget, beside their outputs."""
    wanted = torch.linspace(0, 1, 1 << 22, dtype=dtype).view(-1, 64)
    made = wanted.clone()
    with Largest() as largest:
        assert relative_difference(wanted, made) == 0
    assert 0 < largest.nbytes <= wanted.nbytes / 8  # at once it would take several times as much
    assert torch.equal(made, wanted)
    made[-1] += 1
    expected = float((made.double() - wanted.double()).norm() / wanted.double().norm())
    assert relative_difference(wanted, made) == pytest.approx(expected, rel=1e-12)


def test_numbers_that_are_none_count_where_they_differ() -> None:
    bad = torch.tensor([1.0, float("inf"), float("nan")])
    assert relative_difference(bad, bad.clone()) == 0
    assert relative_difference(bad, torch.tensor([1.0, float("inf"), 2.0])) != relative_difference(bad, bad)
    assert relative_difference(torch.tensor(2.0), torch.tensor(1.0)) == 0.5
    assert relative_difference(torch.empty(0), torch.empty(0)) == 0
