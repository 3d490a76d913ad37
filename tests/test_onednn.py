"""What convolutions hold beside their tensors on the CPU: by hand, and in the kernel's figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memfit.kernels.onednn import stages

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def of(func: Any, x: torch.Tensor, weight: torch.Tensor, groups: int = 1) -> tuple[int, ...]:
    """What either direction of a padded convolution with stride 1 holds; nothing is computed."""
    options = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), groups)
    out = torch.empty(x.shape[0], weight.shape[0], *x.shape[2:], dtype=x.dtype, device=x.device)
    if func is FORWARD:
        return stages(func, (x, weight, *options), out)
    return stages(func, (out, x, weight, *options, (True, True, False)), (x, weight, None))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


@onednn
def test_weights_and_inputs_are_copied_into_blocks() -> None:
    x, weight = meta(2, 32, 8, 8), meta(64, 32, 3, 3)
    assert of(FORWARD, x, weight) == (x.nbytes + weight.nbytes, 2 * x.nbytes)
    assert of(BACKWARD, x, weight) == (3 * x.nbytes, weight.nbytes)
    assert of(FORWARD, meta(2, 3, 8, 8), meta(64, 3, 3, 3))[0] == 4 * 16 * (2 * 64 + 64 * 9)  # 3 channels take 16


@onednn
def test_in_half_precision_gradients_of_weights_gather_in_float32() -> None:
    x, weight = meta(2, 32, 8, 8, dtype=torch.bfloat16), meta(64, 32, 3, 3, dtype=torch.bfloat16)
    assert of(BACKWARD, x, weight) == (4.5 * x.nbytes + 2 * weight.nbytes, weight.nbytes)


@onednn
def test_depthwise_weights_are_filled_up_in_both_directions_backward() -> None:
    assert of(BACKWARD, meta(2, 32, 8, 8), meta(32, 1, 7, 7), groups=32)[1] == 4 * 32 * 16 * 16 * 49


@pytest.mark.parametrize("func", [torch.ops.aten.mm.default, FORWARD])
def test_other_kernels_have_no_rule(func: Any) -> None:
    double = meta(2, 32, 8, 8, dtype=torch.float64)
    assert of(func, double, meta(32, 32, 3, 3, dtype=torch.float64)) == ()


CHILD = """
import json
from pathlib import Path
import torch
from test_onednn import BACKWARD, FORWARD, of

def status(*names):
    lines = (l.split() for l in Path("/proc/self/status").read_text().splitlines())
    found = {words[0][:-1]: int(words[1]) * 1024 for words in lines if words[0][:-1] in names}
    return [found[name] for name in names]

def peak_of(run):
    run()
    Path("/proc/self/clear_refs").write_text("5")
    before, = status("RssAnon")
    made = run()
    most, files, shared = status("VmHWM", "RssFile", "RssShmem")
    return most - files - shared - before - sum(t.nbytes for t in made if t is not None)

found = []
for shape, weights in (((8, 512, 4, 4), (512, 512, 3, 3)), ((8, 64, 64, 64), (32, 64, 3, 3))):
    x, weight = torch.randn(shape), torch.randn(weights)
    out = torch.randn(shape[0], weights[0], *shape[2:])
    options = (None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    found.append([peak_of(lambda: (FORWARD(x, weight, *options),)), max(of(FORWARD, x, weight))])
    found.append([peak_of(lambda: BACKWARD(out, x, weight, *options, (True, True, False))), max(of(BACKWARD, x, weight))])
print(json.dumps(found))
"""


def _keeps_a_record() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return "avx512" in Path("/proc/cpuinfo").read_text()


@onednn
@pytest.mark.skipif(not _keeps_a_record(), reason="the figures are of AVX-512, and read from a record the kernel lets us clear")
def test_the_kernel_counts_as_much() -> None:
    environment = {**os.environ, **PINNED, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    for measured, told in json.loads(done.stdout.splitlines()[-1]):
        assert measured == pytest.approx(told, rel=0.12), f"{measured} measured, {told} told"
