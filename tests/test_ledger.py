"""What a ledger makes of odd models and steps: on fake tensors the same as on real ones, phase by phase, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memfit.profiling.fake import FakeWorld

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "mse, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse, each": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "mse, spread": lambda x, y: F.mse_loss(x, y[:1].expand_as(y)),
    "smooth l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce": F.binary_cross_entropy,
    "bce of logits": F.binary_cross_entropy_with_logits,
    "soft margin": F.soft_margin_loss,
    "kl": lambda x, y: F.kl_div(x, y, reduction="batchmean"),
    "poisson": F.poisson_nll_loss,
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_holds_on_fakes_what_it_holds_in_a_real_run(name: str) -> None:
    """Some keep one value per element in the memory of their only number."""
    x, y = torch.rand(8, 16), torch.rand(8, 16)
    real = LOSSES[name](x, y)
    world = FakeWorld()
    fakes = world.mode.from_tensor(x), world.mode.from_tensor(y)
    with world.entered():
        for _ in range(2):  # the second time from what was learnt
            fake = LOSSES[name](*fakes)
            assert fake.shape == real.shape
            assert fake.untyped_storage().nbytes() == real.untyped_storage().nbytes()
