"""The tree by module: its figures add up to the timeline's, to the byte, and what is alike stands together."""

from __future__ import annotations

from typing import Any

import handmade
import numpy as np
import pytest
import torch
from torch import nn
from zoo import FAMILIES, first_batch

import memfit
from memfit._errors import UsageError
from memfit.profiling.describe import LOOSE, tree_rows
from memfit.profiling.profile import ModuleFacts, Profile
from memfit.profiling.roofline import in_micro_batch, operation_seconds
from memfit.profiling.seconds import Timing
from memfit.profiling.timeline import CATEGORIES
from memfit.profiling.tree import ITSELF, ModuleCost, kept_by_forward, together

TRACED = ("gpt", "resnet", "lstm")


def profile_of(name: str, device: str | None = None, **more: Any) -> Profile:
    family = FAMILIES[name]
    model = family.build("tiny").float()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    return memfit.profile(model, optimizer, first_batch(family, 5), loss_fn=family.loss, device=device, **more)


@pytest.fixture(scope="module", params=[(name, device) for name in TRACED for device in (None, "a100-40gb")], ids=str)
def traced(request: pytest.FixtureRequest) -> Profile:
    return profile_of(*request.param)


def by_name(root: ModuleCost) -> dict[str, ModuleCost]:
    return {entry.path: entry for _, entry in root.flat() if entry.name not in (ITSELF, LOOSE)}


# ---- sums


def test_totals_are_those_of_the_timeline_to_the_byte(traced: Profile) -> None:
    timeline = traced.timeline
    assert timeline is not None and timeline.operations is not None
    for samples in (1, 7, 32):
        root = traced.tree(samples).root
        sizes = timeline.sizes(samples)
        event = timeline.peak_event(samples)
        assert root.at_peak == timeline.peak(samples)
        assert dict(root.holds) == timeline.at(event, samples)
        assert root.kept == sizes[kept_by_forward(timeline)].sum()
        inside = in_micro_batch(timeline)
        assert root.flops == timeline.operations.flops_at(samples)[inside].sum()
        assert root.parameters == traced.model.parameters
        transient = timeline.category[timeline.event] == CATEGORIES.index("transient")
        signed = np.where(timeline.birth, 1.0, -1.0) * sizes[timeline.event]
        assert root.transient == np.cumsum(np.where(transient, signed, 0.0)).max()


def test_entries_inside_add_up(traced: Profile) -> None:
    for _, entry in traced.tree(8).root.flat():
        if entry.children:
            for name in ("parameters", "trainable", "kept", "at_peak"):
                assert getattr(entry, name) == sum(getattr(child, name) for child in entry.children), (entry.path, name)
            assert entry.flops == pytest.approx(sum(child.flops or 0.0 for child in entry.children))
            assert entry.transient >= max(child.transient for child in entry.children)


def test_parameters_lie_with_the_modules_that_hold_them(traced: Profile) -> None:
    root = traced.tree(4).root
    family = FAMILIES["gpt"]
    if traced.model.name != type(family.build("tiny")).__name__:
        return
    entries, model = by_name(root), family.build("tiny").float()
    wte = model.get_submodule("transformer.wte")
    entry = entries["transformer.wte"]
    size = sum(p.numel() * p.element_size() for p in wte.parameters())
    assert entry.held("parameters") == size == entry.held("gradients")
    assert 2 * size <= entry.held("optimizer") <= 2 * size + 8  # two moments, and a step's count
    assert entries["lm_head"].parameters == 0  # tied: they count where they come first


def test_modelled_seconds_add_up() -> None:
    found = profile_of("gpt", "a100-40gb")
    assert found.timeline is not None and found.card is not None
    tree = found.tree(64)
    assert tree.seconds_are == "modelled"
    seconds = operation_seconds(found.timeline, found.card, 64)[in_micro_batch(found.timeline)]
    assert tree.root.seconds == pytest.approx(seconds.sum())
    known = next(t for t in found.timings if t.samples == 64)
    assert tree.root.seconds == pytest.approx(known.seconds)
    assert tree.root.forward_seconds == pytest.approx(known.forward)
    assert not profile_of("gpt", "24GiB").tree(64).seconds_are


# ---- what is alike


class Stack(nn.Module):
    """Six layers, the last of another width."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(5)]
        self.layers = nn.ModuleList([*layers, nn.Sequential(nn.Linear(8, 4), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stacked() -> Profile:
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return memfit.profile(model, optimizer, torch.ones(5, 8), loss_fn=lambda m, x: m(x).sum(), device="a100-40gb")


def test_layers_alike_in_a_row_are_one_entry() -> None:
    entries = by_name(stacked().tree(3).root)
    assert entries["layers.0-4"].name == "0 to 4" and entries["layers.0-4"].alike == 5
    assert entries["layers.0-4"].parameters == 5 * 72
    assert entries["layers.0-4.0"].parameters == 5 * 72 and entries["layers.0-4.0"].kind == "Linear"
    assert entries["layers.5"].alike == 1 and entries["layers.5"].parameters == 36


def test_figures_of_one_and_of_all() -> None:
    tree = stacked().tree(3)
    rows = {row.name: row for row in tree_rows(tree, None)}
    assert rows["0 to 4"].cells[0] == "360" and rows["0 to 4"].kind == "Sequential, 5 alike"
    assert rows["each of 5"].cells[0] == "72"
    assert rows["each of 5"].level == rows["0 to 4"].level + 1
    # The first one's input needs no gradient, which is one matrix product less in its backward.
    assert rows["each of 5"].cells[4].startswith("~") and not rows["0 to 4"].cells[4].startswith("~")
    assert not rows["each of 5"].cells[2].startswith("~") and "~ where those alike differ" in str(tree)


def test_a_list_of_modules_all_alike_is_called_by_their_names() -> None:
    names = [entry.name for _, entry in profile_of("gpt").tree(3).root.flat(2)]
    assert "h.0 to h.1" in names and "h" not in names


def test_depth_ends_the_tree() -> None:
    tree = profile_of("gpt").tree(3)
    assert max(row.level for row in tree_rows(tree, 1)) == 1
    assert len(tree_rows(tree, 1)) < len(tree_rows(tree, 2)) < len(tree_rows(tree, None))
    assert "some modules have more inside" in str(tree)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["h.0.mlp", "h.1.mlp", "h.2.mlp"], "h.0-2.mlp"),
        (["h.0", "h.2"], "h.*"),
        (["a.q", "a.k"], "a.*"),
        (["a", "a"], "a"),
        ([""], ""),
    ],
)
def test_names_together(names: list[str], said: str) -> None:
    assert together(names) == said


# ---- by hand


def test_by_hand() -> None:
    modules = (ModuleFacts("", "Net", 0, 0), ModuleFacts("a", "Linear", 20, 20), ModuleFacts("b", "Linear", 5, 0))
    found = handmade.profile(handmade.two_blocks(), modules=modules)
    tree = found.tree(10)
    a, b, loose = tree.root.children
    assert (a.kept, b.kept, tree.root.kept) == (110, 110, 220)
    assert (a.transient, b.transient, tree.root.transient) == (10, 10, 40)
    assert (a.parameters, b.trainable, tree.root.trainable) == (20, 0, 20)
    assert loose.name == LOOSE and dict(loose.holds) == {"parameters": 100, "input": 10, "gradients": 100, "transient": 40}
    assert tree.root.at_peak == found.timeline.peak(10) == 470  # type: ignore[union-attr]
    assert tree.root.flops is None and not tree.seconds_are


def test_measured_seconds_are_those_that_are_known() -> None:
    timings = (Timing(10, 3.0, 1.0, (("a", 0.25),)),)
    tree = handmade.profile(handmade.two_blocks(), timings=timings).tree(10)
    a, b, loose = tree.root.children
    assert (tree.seconds_are, tree.root.seconds, tree.root.forward_seconds) == ("measured", 3.0, 1.0)
    assert (a.forward_seconds, a.seconds, b.forward_seconds, loose.forward_seconds) == (0.25, None, None, None)


def test_without_a_timeline_only_parameters_are_told() -> None:
    modules = (ModuleFacts("", "Net", 0, 0), ModuleFacts("a", "Linear", 20, 20))
    tree = handmade.profile(None, points=((1, 100), (2, 200)), source="measured", modules=modules).tree(8)
    assert tree.root.parameters == 20 and not tree.root.holds and "unknown" in str(tree)


@pytest.mark.parametrize("samples", [0, -3, True, 2.0, "4", None, 1 << 50])
def test_what_is_no_number_of_samples(samples: Any) -> None:
    found = handmade.profile(handmade.two_blocks())
    for ask in (found.tree, found.explain):
        with pytest.raises(UsageError, match=r"(?s)micro_batch=.*for example 32"):
            ask(samples)
