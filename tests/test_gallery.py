"""Scripts in the shapes that people have: with the one line, the same losses and parameters as without it."""

from __future__ import annotations

from pathlib import Path

import gallery
import pytest

EXACT = {"float32": 1e-5, "float64": 1e-10}
HALF_INSIDE = {"lora_bf16"}
"""In float32 the model is bfloat16, and in float64 Hugging Face's loss computes in float32."""
REFUSED = {
    "moe_aux": "layers.1.aux_loss holds a tensor with a graph after the forward",
    "distillation": "a dict outside the model (filled by a forward hook?) holds a tensor with a graph",
    "detection_lists": "none of the call's tensors has a dimension of 8",
}
"""What memfit cannot cut: said, with the way out, where micro-batches are asked for; they run whole where there is room."""
PAIRS = {"clip_methods"}
"""Where each process compares the samples that it has itself."""
SECOND_FORWARD = {"adversarial", "clip_methods", "dcgan"}
"""Output values are read before the loss, samples are compared, or a gradient goes on into another model."""
CUT = sorted(set(gallery.NAMES) - set(REFUSED))


@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_line_is_one(name: str) -> None:
    """For each model that is trained."""
    lines = gallery.lines_of(name)
    assert lines[0] == "#: import memfit" and len(lines) == (3 if name == "dcgan" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("name", gallery.NAMES)
def test_the_same_training(name: str, dtype: str, tmp_path: Path) -> None:
    plain = gallery.plain(name, tmp_path, "--dtype", dtype)
    assert gallery.apart(gallery.wrapped(name, tmp_path, "--dtype", dtype, micro_batch="off"), plain) == (0.0, 0.0)
    if name in REFUSED:
        return
    cut = gallery.wrapped(name, tmp_path, "--dtype", dtype, micro_batch=5)
    bounds = (1e-4, 1e-2) if name in HALF_INSIDE else (EXACT[dtype], EXACT[dtype])
    assert all(found <= bound for found, bound in zip(gallery.apart(cut, plain), bounds)), gallery.apart(cut, plain)
    assert "micro-batches of" in cut.err or name == "policy_gradient"  # (which acts on one sample at a time)
    assert ("two passes" in cut.err) == (name in SECOND_FORWARD)
    if name in PAIRS:
        return
    two = gallery.wrapped(name, tmp_path, "--dtype", dtype, micro_batch=5, processes=2)
    parameters = gallery.apart(two, plain)[1]
    assert parameters <= bounds[1], parameters


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_says_so(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError) as failed:
        gallery.wrapped(name, tmp_path, micro_batch=5)
    assert REFUSED[name] in str(failed.value) and "next:" in str(failed.value)
