"""What operators give on fake tensors, recalled: exactly what fake mode itself gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.tracing.fake import FakeWorld

Function = Callable[[Tensor, Tensor], Any]

FUNCTIONS: dict[str, Function] = {
    "fresh": lambda a, b: a @ b,
    "pointwise": lambda a, b: a.relu() + b,
    "promoted by a number's type": lambda a, b: (a.long() * 2, a.long() * 2.0, a.long() * True),
    "a view": lambda a, b: a.view(2, 8),
    "a view of a view": lambda a, b: a[1:, ::2].t(),
    "views of one tensor": lambda a, b: a.split(2),
    "several results": lambda a, b: F.layer_norm(a, (4,), b[0], b[1]),
    "in place": lambda a, b: a.mul_(2.0),
    "in place on a view": lambda a, b: a[0].add_(b[0]),
    "another shape in place": lambda a, b: a.clone().unsqueeze_(0),
    "a list of arguments": lambda a, b: torch.cat([a, b], 1),
    "an index": lambda a, b: a[torch.tensor([0, 2])],
    "expanded": lambda a, b: a[:, :1].expand(4, 5),
    "moved around": lambda a, b: [a.permute(1, 0), a.transpose(0, 1)[None], a[0], a[::2, 1:], a.t(), a.expand(2, 4, 4)],
    "a product in three dimensions": lambda a, b: a.expand(2, 4, 4) @ b,
    "a view of what requires a gradient": lambda a, b: (a.requires_grad_().view(16).exp().view(4, 4) @ b).t().sum(0),
    "a view of a number": lambda a, b: torch.tensor(3.0).view(1).expand(4) + a,
    "a view of a parameter": lambda a, b: torch.nn.Parameter(a.detach()).t(),
    "complex": lambda a, b: [torch.complex(a, b).conj(), torch.complex(a, b).conj().imag],
    "random": lambda a, b: F.dropout(a, 0.5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_second_time_is_like_the_first_and_like_fake_mode(name: str) -> None:
    function = FUNCTIONS[name]
    world, plain = FakeWorld(), FakeWorld()
    large = [torch.zeros(1 << 9, 1 << 8)[:4, :4].clone() for _ in range(2)]
    for _ in range(3):
        mine, theirs = ([w.mode.from_tensor(t.clone()) for t in large] for w in (world, plain))
        with world.entered():
            found = function(*mine)
        with plain.mode:
            wanted = function(*theirs)
        assert described(found, mine) == described(wanted, theirs)


def test_what_is_recalled_has_memory_of_its_own() -> None:
    world = FakeWorld()
    a = world.mode.from_tensor(torch.zeros(4, 4))
    with world.entered():
        made = [a + a for _ in range(3)]
        made[1].add_(1)
        seen = a.view(16)
    assert len({t.untyped_storage()._cdata for t in (a, *made)}) == 4
    assert seen.untyped_storage()._cdata == a.untyped_storage()._cdata and seen._is_view()


def test_errors_stay_errors() -> None:
    world = FakeWorld()
    a, b = (world.mode.from_tensor(torch.zeros(*shape)) for shape in ((4, 4), (3, 4)))
    with world.entered():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.mm(a, b)


def described(found: Any, given: list[Tensor]) -> Any:
    """All that can be known of results on fake tensors."""
    if isinstance(found, (tuple, list)):
        return [described(item, given) for item in found]
    same = [found is t for t in given]
    shares = [found.untyped_storage()._cdata == t.untyped_storage()._cdata for t in given]
    size = found.untyped_storage().nbytes()
    return (
        found.shape, found.stride(), found.dtype, found.device, found.storage_offset(), size, found.is_conj(), same, shares,
        type(found).__name__, found.requires_grad,
    )  # fmt: skip
