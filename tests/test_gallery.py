"""Scripts in the shapes that people have: with the one line, the same losses and parameters as without it."""

from __future__ import annotations

from pathlib import Path

import gallery
import pytest
from listing import each

SINGLE_INSIDE = {"lora_bf16"}
"""Hugging Face's loss for causal language models computes in float32."""
MIXING = {"moe_aux": "layers.1.aux_loss mixes samples"}
"""What cannot be cut exactly: said, with the way out, where micro-batches are asked for; they run whole where there is room."""
PAIRS = {"clip_methods", "simclr"}
"""Where each process compares the samples that it has itself."""
SECOND_FORWARD = {"clip_methods", "dcgan", "simclr"}
"""Samples are compared, or a gradient goes on into another model."""


@each(gallery.NAMES)
def test_the_line_is_one(name: str) -> None:
    """Beside the import."""
    lines = gallery.lines_of(name)
    assert lines[0] == "#: import memfit" and len(lines) == 2


def test_one_of_them_trains_as_plain_in_pieces(tmp_path: Path) -> None:
    """What stands for the others in the quick tests: several heads, and losses that are added up."""
    plain = gallery.plain("multitask", tmp_path, "--dtype", "float64")
    cut = gallery.wrapped("multitask", tmp_path, "--dtype", "float64", micro_batch=5)
    assert gallery.losses_apart(cut, plain) <= 1e-10 and gallery.parameters_apart(cut, plain) <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_same_training(name: str, tmp_path: Path) -> None:
    """In float64; `python tests/gallery.py NAME` shows float32 as well."""
    options, exact = ("--dtype", "float64"), 1e-6 if name in SINGLE_INSIDE else 1e-10
    plain = gallery.plain(name, tmp_path, *options)
    whole = gallery.wrapped(name, tmp_path, *options, micro_batch="off")
    assert (gallery.losses_apart(whole, plain), gallery.parameters_apart(whole, plain)) == (0.0, 0.0)
    if name in MIXING:
        return
    cut = gallery.wrapped(name, tmp_path, *options, micro_batch=5)
    assert gallery.losses_apart(cut, plain) <= exact and gallery.parameters_apart(cut, plain) <= exact
    assert "micro-batches of" in cut.err or name == "policy_gradient"  # (which acts on one sample at a time)
    assert ("two passes" in cut.err) == (name in SECOND_FORWARD)
    two = gallery.wrapped(name, tmp_path, *options, micro_batch=5, processes=2)
    if name in PAIRS:  # it trains: what such processes come to is in test_strays
        assert gallery.parameters_apart(two, plain) <= 0.1 and len(two.losses) == len(plain.losses)
        return
    assert gallery.parameters_apart(two, plain) <= exact


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXING)
def test_what_cannot_be_cut_says_so_and_can_be_accepted(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        gallery.wrapped(name, tmp_path, micro_batch=5)
    assert MIXING[name] in str(failed.value) and "next:" in str(failed.value)
    accepted = gallery.wrapped(name, tmp_path, micro_batch=5, allow_inexact=["layers"])
    assert gallery.losses_apart(accepted, gallery.plain(name, tmp_path)) <= 0.05
    assert "two passes" not in accepted.err
