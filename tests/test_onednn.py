"""What convolutions hold beside their tensors on the CPU: by hand, and in the kernel's figures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from memfit.kernels.onednn import stages

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
FORWARD, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


def of(
    func: Any, x: torch.Tensor, weight: torch.Tensor, groups: int = 1, gradient: torch.Tensor | None = None
) -> tuple[int, ...]:
    """What either direction of a padded convolution with stride 1 holds; nothing is computed."""
    padding = [side // 2 for side in weight.shape[2:]]
    options = (None, (1, 1), padding, (1, 1), False, (0, 0), groups)
    out = torch.empty(x.shape[0], weight.shape[0], *x.shape[2:], dtype=x.dtype)
    out = out.to(memory_format=torch.channels_last) if is_last(x) or is_last(weight) else out
    if func is FORWARD:
        return stages(func, (x, weight, *options), out)
    gradient = out if gradient is None else gradient
    return stages(func, (gradient, x, weight, *options, (True, True, False)), (x, weight, None))


def is_last(tensor: torch.Tensor) -> bool:
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)


def last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last)


@pytest.fixture(autouse=True)
def on_fakes() -> Iterator[None]:
    """Nothing is computed, and torch still says which kernel it would take."""
    with FakeTensorMode():
        yield


def some(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch is built without oneDNN")


@onednn
def test_weights_and_inputs_are_copied_into_blocks() -> None:
    x, weight = some(2, 32, 8, 8), some(64, 32, 3, 3)
    assert of(FORWARD, x, weight) == (x.nbytes + weight.nbytes, 2 * x.nbytes)
    assert of(BACKWARD, x, weight) == (2 * x.nbytes, 3 * x.nbytes, weight.nbytes)


@onednn
def test_channels_are_filled_up_to_whole_blocks() -> None:
    image, kernel = 4 * 2 * 64, 4 * 9
    assert of(FORWARD, some(2, 20, 8, 8), some(32, 20, 3, 3))[0] == 32 * image + 32 * 32 * kernel
    # What comes out is put back in order from a copy of 16 channels, of which 12 are none of its own.
    assert of(FORWARD, some(2, 32, 8, 8), some(4, 32, 3, 3)) == ((32 + 12) * image + 16 * 32 * kernel, 16 * image)


@onednn
def test_images_of_a_few_channels_are_read_as_they_are() -> None:
    gradient = 4 * 2 * 64 * 64
    three, eight = (of(BACKWARD, some(2, n, 8, 8), some(64, n, 3, 3))[1] for n in (3, 8))
    weights = 4 * 64 * 9
    assert (three, eight) == (gradient + (16 - 3) * weights, gradient + 4 * 2 * 64 * 8 + (16 - 8) * weights)


@onednn
def test_operands_are_brought_into_the_order_of_one_of_them() -> None:
    x, weight = some(2, 32, 8, 8), some(32, 32, 3, 3)
    assert of(FORWARD, last(x), last(weight)) == (weight.nbytes, 0)
    assert of(FORWARD, last(x), weight) == (2 * weight.nbytes, weight.nbytes)
    assert of(FORWARD, x, last(weight)) == (x.nbytes + weight.nbytes, x.nbytes)
    assert max(of(BACKWARD, last(x), last(weight))) == 2 * weight.nbytes
    assert max(of(BACKWARD, last(x), weight)) == 3 * weight.nbytes
    beside = some(2, 64, 8, 8)[:, :32]  # as the gradient of what was concatenated comes
    assert max(of(BACKWARD, x, weight, gradient=beside)) == max(of(BACKWARD, x, weight)) + x.nbytes


@onednn
def test_in_half_precision_gradients_of_weights_gather_in_float32_and_images_are_turned_by_every_thread() -> None:
    x, weight = some(64, 32, 8, 8, dtype=torch.bfloat16), some(64, 32, 3, 3, dtype=torch.bfloat16)
    turned = min(64, torch.get_num_threads()) * 3 * x.nbytes // 64
    assert of(BACKWARD, x, weight)[1] == 3 * x.nbytes + turned + 2 * weight.nbytes
    assert of(BACKWARD, x, some(64, 32, 1, 1, dtype=torch.bfloat16))[1] == 3 * x.nbytes + 2 * 2 * 64 * 32


@onednn
@pytest.mark.parametrize(("side", "held"), [(3, 0), (7, 4 * 32 * 16 * 16 * 49)])
def test_wide_depthwise_weights_are_filled_up_in_both_directions_backward(side: int, held: int) -> None:
    assert max(of(BACKWARD, last(some(2, 32, 8, 8)), some(32, 1, side, side), groups=32)) == held


@onednn
@pytest.mark.filterwarnings("ignore:TF32")
def test_what_onednn_does_not_compute_unfolds_the_images() -> None:
    x, weight = some(2, 32, 8, 8), some(64, 32, 3, 3)
    patches = 9 * x.nbytes
    assert of(FORWARD, x.double(), weight.double()) == (2 * patches,)
    assert of(FORWARD, x.double(), some(64, 32, 1, 1).double()) == (0,)
    with torch.backends.mkldnn.flags(enabled=False):
        assert of(FORWARD, x, weight) == of(BACKWARD, x, weight) == (patches,)


def test_other_kernels_have_no_rule() -> None:
    assert stages(torch.ops.aten.mm.default, (some(8, 8), some(8, 8)), some(8, 8)) == ()


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


@pytest.mark.slow
@onednn
@pytest.mark.skipif(not _keeps_a_record(), reason="the figures are of AVX-512, and read from a record the kernel lets us clear")
def test_the_kernel_counts_as_much() -> None:
    environment = {**os.environ, **PINNED, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, check=True)
    for measured, told in json.loads(done.stdout.splitlines()[-1]):
        assert measured == pytest.approx(told, rel=0.12), f"{measured} measured, {told} told"
