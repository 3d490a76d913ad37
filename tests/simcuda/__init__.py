"""Device type "cuda" in host memory, for the CPU build of torch: what a script does on a GPU that is not there.

    python -m tests.simcuda --capacity 2GiB --devices 2 train.py

Tensors of the device are computed by the CPU's kernels, allocated by the rules of CUDA's caching allocator within the capacity
of the device, and drawn from generators of its own; streams, events, autocast, GradScaler and `torch.cuda` work as they do; and
every place where the host would wait for the device is counted (`counters`).

It lives in processes of its own: autograd makes its threads for the devices that there are at the first backward, and every
other test of a process would see a GPU. `environment` is one for commands in which Python begins with the device there
(`site/sitecustomize.py`), children of that command included; tests say `import simcuda`, which is this package then.

`torch.distributed` works by the name of nccl: collectives run over gloo, on the same memory.

Not covered: what kernels hold inside while they run (scratch), flash attention and cuDNN's kernels, CUDA graphs (refused by
name), seconds and overlap of any kind: every operation is done when the call returns, so a missing wait for a stream or for a
copy from pinned memory goes unseen. Numbers are the CPU's, not a GPU's to the last bit, and random draws are others. Memory of
the device is host memory that limits of the host count. Processes do not share a device's memory. Written for torch 2.13.
"""

from .build import NoCompiler, built, compiler, native
from .device import counters, fail_in, install, installed, reset_counters, set_capacity, set_others
from .launch import environment, settings_of

__all__ = [
    "NoCompiler",
    "built",
    "compiler",
    "counters",
    "environment",
    "fail_in",
    "install",
    "installed",
    "native",
    "reset_counters",
    "set_capacity",
    "set_others",
    "settings_of",
]
