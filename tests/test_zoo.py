"""The zoo itself: its families build, train, cut exactly and trace, so that a failing law is memfit's fault."""

from __future__ import annotations

import copy
import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from zoo import FAMILIES, Family, first_batch
from zoo.losses import Variant, variants_for
from zoo.plain import (
    accumulated_gradients,
    gradients_of,
    parts,
    relative_error,
    train_plain,
    whole_batch_gradients,
)

SIZES = (5, 1, 4, 2)
EXACT = [family for family in FAMILIES.values() if not family.mixes]


def named(families: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", [pytest.param(family, id=family.name) for family in families])


@pytest.fixture(autouse=True)
def required(request: pytest.FixtureRequest) -> None:
    """Skips families whose packages are not here."""
    callspec = getattr(request.node, "callspec", None)
    family = callspec.params.get("family") if callspec else None
    for package in family.requires if family else ():
        pytest.importorskip(package)


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """No family makes transformers log a warning; each is logged once only, so every test listens."""
    records: list[logging.LogRecord] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("transformers")
    handler.emit = records.append
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert [record.getMessage() for record in records] == []


@named(FAMILIES.values())
def test_build_is_deterministic_and_leaves_the_rngs_alone(family: Family) -> None:
    family.build()  # What a first import of transformers draws is not the build's.
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    one, same, other = family.build(seed=3), family.build(seed=3), family.build(seed=4)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before[1:]
    assert one.training
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), same.state_dict().values()))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters()))


@named(FAMILIES.values())
def test_samples_depend_on_seed_and_index_alone(family: Family) -> None:
    samples, few, other = family.dataset(n=8), family.dataset(n=3), family.dataset(n=3, seed=1)
    assert len(samples) == 8 and len(list(samples)) == 8
    assert [_plain(samples[i]) for i in (2, 0)] == [_plain(few[i]) for i in (2, 0)]
    assert _plain(samples[0]) != _plain(other[0])


@named(FAMILIES.values())
def test_raggedness_is_as_declared(family: Family) -> None:
    samples = family.dataset(n=12)
    shapes = {tuple(sorted(map(str, _shapes(samples[i])))) for i in range(12)}
    assert (len(shapes) > 1) == family.ragged


@named(FAMILIES.values())
def test_everything_can_be_pickled_for_loader_workers(family: Family) -> None:
    copied = pickle.loads(pickle.dumps(family))
    loader = DataLoader(copied.dataset(n=6), batch_size=6, collate_fn=copied.collate)
    assert _plain(next(iter(loader))) == _plain(first_batch(family, 6))


@named(FAMILIES.values())
def test_training_lowers_the_loss(family: Family) -> None:
    losses = train_plain(family.build(), [first_batch(family)] * 15, family.loss, lr=1e-2)
    # LoRA's frozen random head leaves little to gain.
    assert losses[-1] < 0.98 * losses[0]


@named(FAMILIES.values())
def test_dropout_is_random(family: Family) -> None:
    model, batch = family.build(dropout=0.5), first_batch(family)
    assert family.loss(model, batch) != family.loss(model, batch)
    assert family.loss(model.eval(), batch) == family.loss(model, batch)


@named(FAMILIES.values())
def test_both_losses_agree(family: Family) -> None:
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)
    whole = whole_batch_gradients(family, model, batch)
    assert family.loss(model, batch).dtype == torch.float64
    assert relative_error(whole_batch_gradients(family, model, batch, family.script_loss), whole) < 1e-13


@named(FAMILIES.values())
def test_the_model_returns_its_loss_as_declared(family: Family) -> None:
    model, batch = family.build(), first_batch(family)
    outputs = model(**batch) if isinstance(batch, dict) else model(*batch) if family.returns_loss else model(batch[0])
    scalars = [value for value in _values(outputs) if value.dim() == 0]
    assert bool(scalars) == family.returns_loss
    assert all(torch.equal(value, family.loss(model, batch)) for value in scalars)


@named(EXACT)
def test_accumulation_by_hand_equals_the_whole_batch(family: Family) -> None:
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)
    whole = whole_batch_gradients(family, model, batch)
    assert relative_error(accumulated_gradients(family, model, batch, SIZES), whole) < 1e-12


def test_the_loss_given_to_gpt2_is_that_of_transformers() -> None:
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    family = FAMILIES["hf_gpt2"]
    model, batch = family.build(), first_batch(family)
    ours = whole_batch_gradients(family, model, batch)
    model.loss_function = loss_utils.ForCausalLMLoss
    assert relative_error(whole_batch_gradients(family, model, batch), ours) == 0


@named([family for family in FAMILIES.values() if family.mixes])
def test_mixing_families_do_mix(family: Family) -> None:
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)
    whole = whole_batch_gradients(family, model, batch)
    assert relative_error(accumulated_gradients(family, model, batch, SIZES), whole) > 1e-3


@pytest.mark.parametrize(
    ("family", "variant"),
    [pytest.param(f, v, id=f"{f.name}-{v.name}") for f in EXACT for v in variants_for(f)],
)
def test_loss_variants_know_their_weights(family: Family, variant: Variant) -> None:
    model, batch = family.build(dtype=torch.float64), first_batch(family, dtype=torch.float64)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return variant.loss(family.logits(model, batch), batch)

    whole = whole_batch_gradients(family, model, batch, loss)
    assert any(gradient is not None and gradient.any() for gradient in whole.values())
    assert relative_error(accumulated_gradients(family, model, batch, SIZES, loss, variant.weight), whole) < 1e-12


@named(FAMILIES.values())
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fake_trace(family: Family, dropout: float) -> None:
    model, batch = family.build(dropout=dropout), first_batch(family)
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    gradients = fake_gradients(family, model, batch)
    assert torch.equal(torch.get_rng_state(), rng)
    assert _kinds(gradients) == _kinds(whole_batch_gradients(family, model, batch))
    assert not any(isinstance(value, FakeTensor) for module in model.modules() for value in vars(module).values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_families_keep_their_gradients_none() -> None:
    for name in ("frozen", "lora"):
        family = FAMILIES[name]
        model = family.build()
        whole = whole_batch_gradients(family, model, first_batch(family))
        frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
        unused = {n for n in whole if n.startswith("unused.")}
        assert frozen and {n for n, g in whole.items() if g is None} == frozen | unused


def test_tied_weights_are_one_parameter() -> None:
    for name, tied in (("gpt", "transformer.wte.weight"), ("frozen", "blocks.0.outer.weight")):
        model = FAMILIES[name].build(dtype=torch.float64)
        names = {n for n, _ in model.named_parameters()}, {n for n, _ in model.named_parameters(remove_duplicate=False)}
        assert tied in names[1] and len(names[0]) < len(names[1])


def test_relative_error_measures_all_parameters_together() -> None:
    want = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0]), "c": None}
    got = {"a": torch.tensor([3.0, 0.05]), "b": torch.tensor([4.0]), "c": None}
    assert relative_error(got, want) == pytest.approx(0.01)
    assert relative_error(want, want) == 0


def test_relative_error_names_the_parameter_that_is_none_on_one_side() -> None:
    with pytest.raises(AssertionError, match="head: got None, want a gradient"):
        relative_error({"head": None}, {"head": torch.zeros(2)})
    with pytest.raises(AssertionError, match="head"):
        relative_error({}, {"head": torch.zeros(2)})


def test_whole_batch_gradients_leave_the_model_as_it_was() -> None:
    family = FAMILIES["resnet"]
    model, batch = family.build(), first_batch(family)
    before = copy.deepcopy(model.state_dict())
    whole_batch_gradients(family, model, batch)
    assert all(gradient is None for gradient in gradients_of(model).values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parts_keep_the_nesting() -> None:
    batch = {"x": torch.arange(6), "y": [torch.arange(6), (torch.arange(6),)]}
    first, second = parts(batch, (4, 2))
    assert first["y"][1][0].tolist() == [0, 1, 2, 3] and second["x"].tolist() == [4, 5]
    assert isinstance(second["y"], list) and isinstance(second["y"][1], tuple)


class _Loss(nn.Module):
    """The loss as a module, so that functional_call can exchange the model's parameters."""

    def __init__(self, family: Family, model: nn.Module) -> None:
        super().__init__()
        self.family, self.model = family, model

    def forward(self, batch: Any) -> Tensor:
        return self.family.loss(self.model, batch)


def fake_gradients(family: Family, model: nn.Module, batch: Any) -> dict[str, Tensor | None]:
    """The gradients of a forward and backward in which every tensor is fake."""
    module, mode = _Loss(family, model), FakeTensorMode()
    parameters = {n: mode.from_tensor(p) for n, p in module.named_parameters()}
    buffers = {n: mode.from_tensor(b) for n, b in module.named_buffers()}
    fake_batch = tree_map_only(Tensor, mode.from_tensor, batch)
    with mode:
        loss = functional_call(module, (parameters, buffers), (fake_batch,))
        loss.backward()
    return {n.removeprefix("model."): p.grad for n, p in parameters.items()}


def _kinds(gradients: dict[str, Tensor | None]) -> dict[str, Any]:
    return {name: None if g is None else (g.shape, g.dtype, g.device) for name, g in gradients.items()}


def _values(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else [outputs]
    return [value for value in values if isinstance(value, Tensor)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _shapes(sample: Any) -> list[torch.Size]:
    entries = sample.values() if isinstance(sample, dict) else sample
    return [entry.shape for entry in entries if isinstance(entry, Tensor)]
