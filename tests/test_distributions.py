"""Models that return a torch.distributions.Distribution: it is of the whole batch, and trains as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_transparent, mlp, points
from torch import Tensor, distributions as dist, nn

X, Y = points()
GOAL = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
MADE: dict[str, Callable[[Tensor], Any]] = {
    "categorical": lambda out: dist.Categorical(logits=out),
    "categorical_of_probabilities": lambda out: dist.Categorical(probs=out.softmax(1)),
    "bernoulli": lambda out: dist.Independent(dist.Bernoulli(logits=out), 1),
    "normal": lambda out: dist.Normal(out, torch.ones_like(out)),
    "normal_learned": lambda out: dist.Normal(out, out.exp().clamp(0.1)),
    "independent": lambda out: dist.Independent(dist.Normal(out, 1 + out.square()), 1),
    "multivariate": lambda out: dist.MultivariateNormal(out, scale_tril=torch.eye(4).double().expand(len(out), 4, 4)),
    "beta": lambda out: dist.Beta(1 + out.exp(), 2 + out.square()),
    "squashed": lambda out: dist.Independent(
        dist.TransformedDistribution(dist.Normal(out, 1 + out.square()), [dist.SigmoidTransform()]), 1
    ),
    "mixture": lambda out: dist.MixtureSameFamily(
        dist.Categorical(logits=out), dist.Normal(out.square(), torch.ones_like(out))
    ),
}


class Returning(nn.Module):
    """Returns a distribution."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = mlp(), how

    def forward(self, x: Tensor) -> Any:
        return MADE[self.how](self.net(x))


def value_for(found: Any) -> Tensor:
    """A value that the distribution takes."""
    if isinstance(found, dist.Categorical):
        return Y
    value = GOAL.sigmoid() if len(found.batch_shape + found.event_shape) == 2 else GOAL[:, 0]
    return value.round() if "Bernoulli" in repr(found) else value


@pytest.mark.parametrize("how", MADE)
def test_the_likelihood_of_values(how: str) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        found = model(x)
        assert len(found.batch_shape) >= 1 and found.batch_shape[0] == len(x)
        (-found.log_prob(value_for(found)).mean()).backward()

    assert_transparent(Returning(how), script, X, Y)


@pytest.mark.parametrize("how", ["categorical", "normal_learned", "independent", "beta"])
def test_entropy_beside_the_likelihood_of_samples_drawn_from_it(how: str) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        found = model(x)
        torch.manual_seed(0)
        action = found.sample()
        assert action.shape == found.batch_shape + found.event_shape
        ratio = (found.log_prob(action) - found.log_prob(action).detach()).exp()
        (ratio.mean() - 0.01 * found.entropy().mean()).backward()

    assert_transparent(Returning(how), script, X, Y)


@pytest.mark.parametrize("how", ["normal_learned", "independent", "squashed"])
def test_samples_with_a_gradient(how: str) -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        found = model(x)
        torch.manual_seed(0)
        ((found.rsample() - GOAL).square().mean() + 0.1 * found.log_prob(GOAL.sigmoid()).mean()).backward()

    assert_transparent(Returning(how), script, X, Y)


def test_a_divergence_of_two_calls() -> None:
    def script(model: nn.Module, x: Tensor, y: Tensor) -> None:
        dist.kl_divergence(model(x), model(x + 0.1)).mean().backward()

    assert_transparent(Returning("normal_learned"), script, X, Y)
