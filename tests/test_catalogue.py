"""Devices that are not here: every entry is plausible and has sources, names find what people mean, or say what is missing."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from listing import each

import memfit
from memfit import UsageError
from memfit._units import GiB
from memfit.hardware.budget import budget_for
from memfit.hardware.catalogue import CONTEXT, CONTEXT_ROCM, Card, _key, card, cards

DTYPES = {"float32", "tf32", "float16", "bfloat16"}


def name_of(one: Card) -> str:
    return one.name


every_card = each(cards(), name=name_of)


# ---- the entries


def test_there_are_the_cards_that_people_train_on() -> None:
    names = {one.name for one in cards()}
    assert len(names) == len(cards()) >= 80
    assert {"v100-16gb", "t4", "l4", "a10g", "a100-40gb", "a100-80gb", "h100-80gb", "h200", "b200", "mi300x"} <= names
    assert {"rtx-3060", "rtx-3090", "rtx-4090", "rtx-5090", "rtx-a6000", "rtx-6000-ada", "gtx-1650"} <= names


@every_card
def test_an_entry_is_well_formed(one: Card) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", one.name)
    assert one.title and one.architecture and one.vendor in ("NVIDIA", "AMD")
    assert (one.capability is None) == (one.vendor == "AMD") == bool(one.gfx)
    assert one.capability is None or (6, 0) <= one.capability <= (12, 1)
    assert one.gfx == "" or re.fullmatch(r"gfx\d+[0-9a-f]\d?", one.gfx)


@every_card
def test_memory_is_a_little_less_than_on_the_box(one: Card) -> None:
    assert isinstance(one.memory, int)
    assert 0.90 <= one.memory / one.nominal <= 1.0
    sizes = re.findall(r"(\d+)gb", one.name) + re.findall(r"(\d+) GB", one.title)
    assert all(abs(one.nominal / GiB - int(size)) <= 3 for size in sizes)


@every_card
def test_speeds_are_plausible(one: Card) -> None:
    assert 1e11 <= one.bandwidth <= 1e13
    assert {"float32", "float16"} <= one.flops.keys() <= DTYPES
    assert all(1e12 <= rate <= 5e15 for rate in one.flops.values())
    assert one.flops["float16"] >= one.flops["float32"]
    assert one.flops.get("bfloat16", 0) <= one.flops["float16"]
    assert 1e-3 <= one.bandwidth / one.flops["float16"] <= 1e-1  # bytes for each operation


@every_card
def test_precisions_belong_to_the_generation(one: Card) -> None:
    if one.capability is None:
        return
    since_ampere = one.capability >= (8, 0)
    assert ("bfloat16" in one.flops) == ("tf32" in one.flops) == since_ampere
    if since_ampere:
        assert one.flops["bfloat16"] == one.flops["float16"]
        assert one.flops["tf32"] == pytest.approx(one.flops["float16"] / 2, rel=0.02)


@each([c for c in cards() if "GeForce RTX" in c.title], name=name_of)
def test_geforce_accumulates_in_float32_at_half_the_rate(one: Card) -> None:
    turing = one.capability == (7, 5)  # 64 instead of 128 float32 units on as many tensor cores
    assert one.flops["float16"] / one.flops["float32"] == pytest.approx(4 if turing else 2, rel=0.01)


@every_card
def test_every_figure_has_its_source(one: Card) -> None:
    assert one.sources.keys() == {"memory", "bandwidth", "flops"}
    assert all(texts and all(text.strip() == text and len(text) > 8 for text in texts) for texts in one.sources.values())
    assert set(one.unverified) <= one.sources.keys()
    if not one.reported:
        assert re.search(r"^as |less|least|GiB", one.sources["memory"][0])


def test_names_are_told_apart() -> None:
    names = [_key(one.name) for one in cards()]
    assert len(set(names)) == len(names)
    for one in cards():
        assert card(one.name) is one and card(one.title) is one
        assert not {_key(alias) for alias in one.aliases} & (set(names) - {_key(one.name)})


def test_published_totals() -> None:
    assert card("a100-40gb").memory == 42298834944
    assert card("gtx-1650-super").memory == 4066574336
    assert round(card("t4").memory / GiB, 2) == 14.56
    assert round(card("b200").memory / GiB, 2) == 178.35


def test_cards_are_sorted_and_read_once() -> None:
    assert cards() is cards()
    assert all((a.vendor, a.architecture, a.name) < (b.vendor, b.architecture, b.name) for a, b in pairwise(cards()))


# ---- names


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        *(("RTX 4090", "rtx-4090"), ("rtx4090", "rtx-4090"), ("Rtx_4090", "rtx-4090")),
        *(("NVIDIA GeForce RTX 4090", "rtx-4090"), ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090-laptop")),
        *(("NVIDIA GeForce RTX 3060", "rtx-3060"), ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "rtx-3050-laptop-6gb")),
        *(("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("A100 80GB", "a100-80gb")),
        *(("NVIDIA A100-PCIE-40GB", "a100-40gb-pcie"), ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie")),
        *(("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA H100 NVL", "h100-nvl")),
        *(("Tesla V100-SXM2-16GB", "v100-16gb"), ("Tesla V100-PCIE-32GB", "v100-32gb-pcie"), ("Tesla T4", "t4")),
        *(("NVIDIA H200", "h200"), ("NVIDIA B200", "b200"), ("NVIDIA GH200 480GB", "gh200-96gb"), ("NVIDIA L4", "l4")),
        *(("NVIDIA RTX A6000", "rtx-a6000"), ("A6000", "rtx-a6000"), ("Quadro RTX 6000", "quadro-rtx-6000")),
        *(("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("RTX 3080 mobile 16GB", "rtx-3080-laptop-16gb")),
        *(("AMD Instinct MI300X", "mi300x"), ("AMD Radeon RX 7900 XTX", "rx-7900-xtx")),
    ],
)
def test_a_card_is_found_by_what_people_write(asked: str, name: str) -> None:
    assert card(asked).name == name


@pytest.mark.parametrize(
    ("asked", "variants"),
    [
        ("a100", ("a100-40gb", "a100-40gb-pcie", "a100-80gb", "a100-80gb-pcie")),
        ("H100", ("h100-80gb", "h100-pcie", "h100-nvl")),
        ("Tesla V100", ("v100-16gb", "v100-16gb-pcie", "v100-32gb", "v100-32gb-pcie")),
        ("NVIDIA GeForce RTX 4060 Ti", ("rtx-4060-ti-8gb", "rtx-4060-ti-16gb")),
        ("RTX 6000", ("quadro-rtx-6000", "rtx-6000-ada", "rtx-pro-6000")),
    ],
)
def test_an_ambiguous_name_is_not_guessed(asked: str, variants: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        card(asked)
    assert error.value.asked == f"card {asked!r}"
    assert error.value.found.startswith(f"{len(variants)} cards")
    assert all(f"{name} (" in error.value.found for name in variants)
    assert repr(variants[0]) in error.value.next_move


@pytest.mark.parametrize(("asked", "near"), [("rtx 4095", "rtx-4090"), ("h300", "h200"), ("a100-60gb", "a100-80gb")])
def test_an_unknown_name_gets_its_nearest(asked: str, near: str) -> None:
    with pytest.raises(UsageError) as error:
        card(asked)
    assert near in error.value.found
    assert "24GiB" in error.value.next_move


@pytest.mark.parametrize("asked", ["", "voodoo", "24", "-", "24 G"])
def test_nonsense_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="other names"):
        card(asked)


# ---- sizes


@pytest.mark.parametrize(("asked", "size"), [("24GiB", 24 * GiB), ("16 GiB", 16 * GiB), ("24gb", 24 * 10**9)])
def test_a_size_is_an_unnamed_card(asked: str, size: int) -> None:
    one = card(asked)
    assert one.memory == one.nominal == size
    assert (one.capability, one.bandwidth, one.flops, one.vendor) == ((8, 0), 0.0, {}, "")
    assert card(one.name) == one
    assert one.as_device().total == size


def test_no_memory_is_no_card() -> None:
    with pytest.raises(UsageError, match="0 bytes"):
        card("0GiB")


# ---- as a device


@every_card
def test_a_card_is_photographed_idle(one: Card) -> None:
    device = one.as_device()
    assert (device.kind, device.index, device.cached, device.others) == ("cuda", None, 0, 0)
    assert device.total == one.memory == device.free + device.held
    assert device.held == (CONTEXT_ROCM if one.vendor == "AMD" else CONTEXT)
    assert (device.limits[0].left, device.limits[0].total) == (device.free, device.total)
    assert "not here" in device.notes[0] and str(device) == f"{one.title} (cuda)"
    assert ("derived" in " ".join(device.notes)) == (not one.reported)


def test_a_budget_fits_the_card() -> None:
    device = card("a100-80gb").as_device()
    budget = budget_for(device, None)
    assert budget.limit == device.total and budget.held == CONTEXT
    assert budget_for(device, "100GiB").limit == device.total
    assert budget_for(device, 0.5).limit == device.total // 2


def test_precisions_of_the_device() -> None:
    assert card("t4").as_device().fast_dtypes == ("float32", "float16")
    assert card("p100").as_device().fast_dtypes == ("float32",)
    assert card("mi50-16gb").as_device().fast_dtypes == ("float32", "float16")
    for name in ("a10", "mi300x", "24GiB"):
        assert set(card(name).as_device().fast_dtypes) == {"float32", "bfloat16", "float16"}


@pytest.mark.parametrize(
    ("name", "capability"),
    [("h100-80gb", (9, 0)), ("rtx-3090", (8, 6)), ("mi300x", (9, 4)), ("mi250x", (9, 0)), ("rx-7900-xtx", (11, 0))],
)
def test_the_device_reports_the_capability_that_torch_would(name: str, capability: tuple[int, int]) -> None:
    assert card(name).as_device().capability == capability


# ---- the module


def test_it_needs_no_torch_and_reads_nothing_until_asked() -> None:
    child = (
        "import sys; sys.modules['memfit'] = type(sys)('memfit'); sys.modules['memfit'].__path__ = [sys.argv[1]]\n"
        "import memfit.hardware.catalogue as catalogue\n"
        "assert catalogue.cards.cache_info().currsize == 0\n"
        "catalogue.card('h200').as_device()\n"
        "assert catalogue.cards.cache_info().misses == 1 and 'torch' not in sys.modules"
    )
    root = str(Path(memfit.__file__).parent)
    done = subprocess.run([sys.executable, "-c", child, root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_figures_say_nothing_but_what_is_public() -> None:
    text = (Path(memfit.__file__).parent / "hardware" / "devices.json").read_text(encoding="utf-8")
    without_addresses = re.sub(r"https://[^\s\"]+", "", text)
    assert "://" not in without_addresses and not re.search(r"(?<![\w.])/[a-z]+/", without_addresses)
