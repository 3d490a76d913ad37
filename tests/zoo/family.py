"""What a family is: a model, its data, its loss, and the facts about them that tests need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from zoo.data import Samples


@dataclass(frozen=True)
class Family:
    """A model family. Every callable can be pickled, so loaders may use worker processes."""

    name: str
    build: Callable[..., nn.Module]
    """build(size="tiny"|"bench"|"large" (of some), dropout=0.0, dtype=torch.float32, seed=0): train mode, no RNG disturbed."""
    dataset: Callable[..., Dataset]
    """dataset(size="tiny", n=64, dtype=torch.float32, seed=0): map-style; sample i depends on (size, seed, i) alone."""
    loss: Callable[[nn.Module, Any], Tensor]
    """What a user would pass as loss_fn(model, batch): a scalar mean."""
    script_loss: Callable[[nn.Module, Any], Tensor]
    """The same loss as the lines of a plain script."""
    logits: Callable[[nn.Module, Any], Tensor]
    """The output that `zoo.losses` applies other losses to."""
    count: Callable[[Any], int]
    """What the mean of `loss` divides by, up to a constant: samples, valid tokens or valid pixels of a batch."""
    task: str
    """What the labels are: "classes", "tokens", "next_tokens", "pixels", "numbers" or "bits"."""
    collate: Callable[[list[Any]], Any] | None = None
    """None is default_collate; ragged families pad (inputs 0, labels -100, with an attention mask)."""
    returns_loss: bool = False
    """The model itself returns its loss (when it is given labels)."""
    mixes: bool = False
    """Samples of a batch influence each other (BatchNorm in train mode)."""
    ragged: bool = False
    """Samples have different lengths."""
    requires: tuple[str, ...] = ()
    """Packages beyond torch, for pytest.importorskip."""


def builder(make: Callable[[str, float], nn.Module], **options: Any) -> Callable[..., nn.Module]:
    """The `build` of a family from `make(size, dropout, **options)`; options may be overridden in each call."""
    return partial(_build, make, **options)


def dataset(make_sample: Callable[[str, torch.Generator], Any]) -> Callable[..., Dataset]:
    """The `dataset` of a family from `make_sample(size, generator)`."""
    return partial(_dataset, make_sample)


def first_batch(
    family: Family, n: int = 12, *, size: str = "tiny", dtype: torch.dtype = torch.float32, seed: int = 0
) -> Any:
    """The first n samples of a family's dataset, collated as its loader would."""
    samples = family.dataset(size=size, n=n, dtype=dtype, seed=seed)
    return (family.collate or default_collate)([samples[i] for i in range(n)])


def _build(
    make: Callable[..., nn.Module],
    size: str = "tiny",
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **options: Any,
) -> nn.Module:
    with _private_rng(seed):
        model = make(size, dropout, **options)
    return model.to(dtype).train()


def _dataset(
    make_sample: Callable[[str, torch.Generator], Any],
    size: str = "tiny",
    n: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Dataset:
    return Samples(partial(make_sample, size), n, dtype, seed)


@contextmanager
def _private_rng(seed: int) -> Iterator[None]:
    """Seeds the CPU generator only: torch.manual_seed would reseed every device's as well."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
