"""What a step of timm's training script is predicted to take on an A100.

timm 1.0.9, the version of the source: all of its models are there, and none of the 34 that came with the next one. The loop
is that of this version's train.py: gradients gone after each step; the loader makes the next batch on a stream of its own, in
bytes and then in floats, while two are held, so that its memory is nobody else's. Taken is SGD with momentum, the script's
default, but without weight decay, whose copy of all gradients is not in the calibration rows of large models.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

CAPABILITY = (8, 0)
ITERATIONS = 3
FACTORS = tuple(n / 4 for n in range(4, 13))
"""What is tried for `memfit.kernels.scratch.BACKWARD`."""


def declare_torchvision(timm: Path) -> None:
    """The two operators of torchvision that timm's import asks for."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    sys.path.append(str(timm))
    globals()["_library"] = library  # as long as this lives, so do the operators


def predicted(name: str, batches: list[int], tried: int | None) -> dict[str, Any]:
    """Bytes by batch, and what else is known of the step; those of the batch `tried` for each of FACTORS as well."""
    import time

    from memfit.profiling.timeline import fit

    model, size = built(name)
    start = time.perf_counter()
    timeline = fit(looped(model, size, 2), 2, looped(model, size, 3), 3)
    traced = time.perf_counter() - start
    assert timeline is not None, "it runs in another way for another batch"
    pixels = size[0] * size[1] * size[2]
    return {
        "rows": {str(batch): held(timeline, batch, pixels) for batch in batches},
        "tried": {} if tried is None else {str(f): held(with_factor(timeline, f), tried, pixels)["reserved"] for f in FACTORS},
        "parameters": sum(p.numel() for p in model.parameters()),
        "convolutions": convolutional_share(timeline),
        "traced": traced,
    }


def held(timeline: Any, batch: int, pixels: int) -> dict[str, int]:
    from memfit.profiling.allocator import caching_peak

    step = caching_peak(timeline, batch, capability=CAPABILITY)
    return {"reserved": step.reserved + loaded(batch * pixels), "allocated": step.allocated}


def loaded(pixels: int) -> int:
    """Bytes that timm's PrefetchLoader reserves on its stream for batches of so many pixels."""
    from memfit.allocators.caching import CachingAllocator

    allocator, batches = CachingAllocator(), []
    for _ in range(4):
        as_bytes = allocator.malloc(pixels)
        batches.append(allocator.malloc(4 * pixels))
        allocator.free(as_bytes)
        if len(batches) > 2:  # the training's variable holds one until it gets the next
            allocator.free(batches.pop(0))
    return allocator.peak_reserved


def with_factor(timeline: Any, factor: float) -> Any:
    """The same step, with another factor for what convolutions hold inside in backward."""
    import numpy as np

    from memfit.kernels.scratch import BACKWARD

    born, died = timeline.lifetimes()
    names = np.array(timeline.operation_names)[timeline.operation]
    inside = (names == "convolution_backward") & (died == born + 1)
    times = np.where(inside, factor / BACKWARD, 1.0)
    return replace(timeline, fixed=timeline.fixed * times, per_sample=timeline.per_sample * times)


def looped(model: Any, size: tuple[int, int, int], batch: int) -> Any:
    """The timeline of some iterations of timm's training loop."""
    import torch

    from memfit.engine.shadow_optimizer import shadow_optimizer, step_by_lists
    from memfit.kernels.scratch import scratch
    from memfit.kernels.substitute import cuda_kernels
    from memfit.kernels.target import Target
    from memfit.tracing.fake import FakeWorld
    from memfit.tracing.flop_counter import Counts
    from memfit.tracing.ledger import Ledger
    from memfit.tracing.sandbox import leave_no_trace

    world, cpu = FakeWorld(), torch.device("cpu")
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ledger = Ledger(cpu, inside=scratch, counts=Counts())
    with leave_no_trace(model, cpu, buffers=False), world.replacing(model) as twins, world.entered(), ledger:
        ledger.present((*model.parameters(), *model.buffers()), "parameters")
        optimizer = shadow_optimizer(own, lambda t: twins.get(id(t)), world.twin)
        step_by_lists(optimizer)
        with cuda_kernels(Target(CAPABILITY)):
            ledger.phase("forward")
            for _ in range(ITERATIONS):
                images, labels = torch.empty(batch, *size), torch.empty(batch, dtype=torch.int64)
                ledger.ignore((images, labels))  # `loaded` counts them
                loss = loss_of(model, images, labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return ledger.timeline()


def built(name: str) -> tuple[Any, tuple[int, int, int]]:
    """The model with whatever lies in memory as weights, and the size of its images."""
    import timm
    import torch

    changed = {n: getattr(torch.nn.init, n) for n in dir(torch.nn.init) if n.endswith("_") and not n.startswith("_")}
    for n in changed:
        setattr(torch.nn.init, n, lambda tensor, *args, **kwargs: tensor)
    try:
        model = timm.create_model(name, pretrained=False)
    finally:
        for n, function in changed.items():
            setattr(torch.nn.init, n, function)
    return model.train(), timm.data.resolve_model_data_config(model)["input_size"]


def loss_of(model: Any, images: Any, labels: Any) -> Any:
    """timm's LabelSmoothingCrossEntropy."""
    import torch

    logs = torch.nn.functional.log_softmax(model(images), dim=-1)
    nll = -logs.gather(dim=-1, index=labels.unsqueeze(1)).squeeze(1)
    return (0.9 * nll - 0.1 * logs.mean(dim=-1)).mean()


def convolutional_share(timeline: Any) -> float:
    """The convolutions' share of the arithmetic."""
    operations = timeline.operations
    kinds = [index for index, (name, _) in enumerate(operations.kinds) if name.startswith("convolution")]
    flops = operations.flops_at(8)
    chosen = [index for index, kind in enumerate(operations.kind.tolist()) if kind in kinds]
    return float(flops[chosen].sum() / max(1.0, flops.sum()))
