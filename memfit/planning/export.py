"""Exports a plan as code for another tool: the closest equivalent to paste, with the differences as comments.

Not covered: the rest of the tool's set-up (optimizer, schedule, logging). Names from a plan file end up in literals and
comments, never in code.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.planning.plan import Plan


WIDTH = 110
"""Maximum line length of exported code."""


def to_torch(plan: Plan) -> str:
    """Export a plan as a training loop in plain PyTorch."""
    code = [*_torch_imports(plan), "", *_checkpointing(plan), *_torch_loop(plan)]
    given = f"model, optimizer, loss_fn and loader (batches of {plan.share} samples: inputs, targets) are your script's"
    return _text(plan, [given], code, _beyond_torch(plan))


def to_accelerate(plan: Plan) -> str:
    """Export a plan as the arguments of accelerate's `Accelerator` and the loader's batch size."""
    size, steps = equal_micro_batches(plan)
    arguments = [f"gradient_accumulation_steps={steps}"]
    if plan.precision in _SHORT:
        arguments.append(f'mixed_precision="{_SHORT[plan.precision]}"')
    code = ["from accelerate import Accelerator", *_checkpoint_imports(plan), ""]
    code += [*_checkpointing(plan), *_call("accelerator", "Accelerator", arguments), _loader(size)]
    needs = ["the loop's body belongs in `with accelerator.accumulate(model):`, with accelerator.backward(loss)"]
    return _text(plan, needs if steps > 1 else [], code, _beyond_accelerate(plan))


def to_transformers(plan: Plan) -> str:
    """Export a plan as the arguments of transformers' `TrainingArguments`."""
    size, steps = equal_micro_batches(plan)
    arguments = [f"per_device_train_batch_size={size}", f"gradient_accumulation_steps={steps}"]
    if plan.precision in _SHORT:
        arguments.append(f"{_SHORT[plan.precision]}=True")
    if plan.checkpoint:
        arguments += ["gradient_checkpointing=True", 'gradient_checkpointing_kwargs={"use_reentrant": False}']
    code = ["from transformers import TrainingArguments", "", *_call("arguments", "TrainingArguments", arguments)]
    return _text(plan, [], code, _beyond_transformers(plan))


def to_lightning(plan: Plan) -> str:
    """Export a plan as the arguments of Lightning's `Trainer` and the loader's batch size."""
    size, steps = equal_micro_batches(plan)
    arguments = [f"accumulate_grad_batches={steps}"]
    if plan.precision in _SHORT:
        arguments.append(f'precision="{_SHORT[plan.precision].replace("fp16", "16")}-mixed"')
    code = ["from lightning.pytorch import Trainer", "", *_call("trainer", "Trainer", arguments), _loader(size)]
    return _text(plan, [], code, _beyond_lightning(plan))


EXPORTS: dict[str, Callable[[Plan], str]] = {
    "torch": to_torch,
    "accelerate": to_accelerate,
    "transformers": to_transformers,
    "lightning": to_lightning,
}
"""Maps a tool's name to the function that turns a plan into valid Python."""

_SHORT = {"bfloat16": "bf16", "float16": "fp16"}


def fitting(plan: Plan) -> int:
    """Return the samples per micro-batch that the plan allows for samples of any size."""
    return min(plan.share, plan.micro_batch, *(row[1] for row in plan.by_size))


def equal_micro_batches(plan: Plan) -> tuple[int, int]:
    """Return (samples per micro-batch, micro-batches per step) for tools whose micro-batches all have one size.

    The size is at most the plan's. It divides the plan's samples per step if a divisor above half the plan's size exists.
    Otherwise the samples per step come as close as possible.
    """
    largest = fitting(plan)
    for size in range(largest, largest // 2, -1):
        if plan.share % size == 0:
            return size, plan.share // size
    steps = -(-plan.share // largest)
    return -(-plan.share // steps), steps


# ---- code


def _torch_imports(plan: Plan) -> list[str]:
    lines = [] if plan.mode == "whole" and plan.precision not in _SHORT else ["import torch"]
    if plan.mode == "replay" and not plan.checkpoint:
        return [*lines, "from torch.utils.checkpoint import checkpoint"]
    return [*_checkpoint_imports(plan)[:1], *lines, *_checkpoint_imports(plan)[1:]]


def _checkpoint_imports(plan: Plan) -> list[str]:
    return ["from functools import partial", "from torch.utils.checkpoint import checkpoint"] if plan.checkpoint else []


def _checkpointing(plan: Plan) -> list[str]:
    if not plan.checkpoint:
        return []
    return [
        *_wrapped("for name in (", [ascii(name) for name in plan.checkpoint], "):"),
        "    block = model.get_submodule(name)",
        "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "",
    ]


def _torch_loop(plan: Plan) -> list[str]:
    step = {"whole": _whole, "replay": _two_passes}.get(plan.mode, _micro_batches)(plan)
    scaled = plan.precision == "float16"
    before = ["device_type = next(model.parameters()).device.type"] if plan.precision in _SHORT else []
    before += ["scaler = torch.amp.GradScaler(device_type)"] if scaled else []
    after = ["scaler.step(optimizer)", "scaler.update()"] if scaled else ["optimizer.step()"]
    counting = _COUNTING if plan.mode not in ("whole", "replay") else []
    return [
        *counting,
        *before,
        f"for inputs, targets in loader:  # batches of {plan.share} samples",
        *_indented(["optimizer.zero_grad()", *step, *after]),
    ]


_COUNTING = [
    "def count(targets):",
    "    return len(targets)  # what loss_fn's mean divides by; over valid labels: int((targets != -100).sum())",
    "",
    "",
]


def _whole(plan: Plan) -> list[str]:
    return [*_computed(plan, ["loss = loss_fn(model(inputs), targets)"]), _backward(plan)]


def _two_passes(plan: Plan) -> list[str]:
    split = "[checkpoint(model, x, use_reentrant=False) for x in inputs.tensor_split(parts)]"
    computed = [f"outputs = torch.cat({split})", "loss = loss_fn(outputs, targets)"]
    return [_parts(plan), *_computed(plan, computed), _backward(plan)]


def _micro_batches(plan: Plan) -> list[str]:
    computed = ["loss = loss_fn(model(x), y) * (count(y) / count(targets))"]
    return [
        _parts(plan),
        "for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts)):",
        "    if count(y):  # where nothing counts, the mean is 0 / 0",
        *_indented([*_computed(plan, computed), _backward(plan)], 2),
    ]


def _parts(plan: Plan) -> str:
    largest = fitting(plan)
    parts = -(-plan.share // largest)
    return f"parts = -(-len(targets) // {largest})  # {parts} micro-batches of at most {largest} samples"


def _computed(plan: Plan, lines: list[str]) -> list[str]:
    if plan.precision not in _SHORT:
        return lines
    return [f"with torch.autocast(device_type, dtype=torch.{plan.precision}):", *_indented(lines)]


def _backward(plan: Plan) -> str:
    return "scaler.scale(loss).backward()" if plan.precision == "float16" else "loss.backward()"


def _call(name: str, function: str, arguments: list[str]) -> list[str]:
    return _wrapped(f"{name} = {function}(", arguments, ")")


def _loader(size: int) -> str:
    return f'loader_arguments = {{"batch_size": {size}}}  # for your DataLoader'


def _wrapped(head: str, items: list[str], tail: str) -> list[str]:
    """Join `head`, comma-separated `items` and `tail`: on one line if they fit, else one item per line."""
    line = f"{head}{', '.join(items)}{',' if head.endswith(' (') and len(items) == 1 else ''}{tail}"
    return [line] if len(line) <= WIDTH else [head, *(f"    {item}," for item in items), tail]


def _indented(lines: Iterable[str], levels: int = 1) -> list[str]:
    return [f"{'    ' * levels}{line}" for line in lines]


# ---- what is not expressed


def _beyond_torch(plan: Plan) -> Iterator[str]:
    if plan.by_size:
        yield f"{_sizes_differ(plan)}; this loop takes at most {fitting(plan)} of any size"
    if plan.mode == "replay" and plan.keep:
        yield f"memfit keeps the activations of {plan.keep} micro-batches; this loop recomputes all of them"
    if plan.mode == "replay" or plan.checkpoint:
        yield "batch norm updates its running statistics twice when a forward is recomputed, except in memfit"
    how = (
        "in DistributedDataParallel all micro-batches but the last in no_sync(), count(targets) the mean over processes"
    )
    yield from _processes(plan, how)
    yield from _beyond_any(plan)


def _beyond_accelerate(plan: Plan) -> Iterator[str]:
    yield from _beyond_equal(plan)
    yield from _divides_by_steps(plan, "accelerate")
    if plan.precision == "float16":
        yield 'accelerate refuses mixed_precision="fp16" on the CPU'
    yield from _processes(plan, "accelerate launch --num_processes")
    yield from _beyond_any(plan)


def _beyond_transformers(plan: Plan) -> Iterator[str]:
    _, steps = equal_micro_batches(plan)
    yield from _beyond_equal(plan)
    if steps > 1:
        yield (
            "Trainer weights micro-batches by their valid labels where the model's forward takes num_items_in_batch or "
            "a compute_loss_func is given; elsewhere all count the same, however many labels they have"
        )
    if plan.checkpoint:
        yield (
            f"memfit checkpoints {_blocks(plan)}; gradient_checkpointing=True (activation_checkpointing=True from "
            "transformers 5 on) checkpoints every layer the model class declares, which may be more and then is slower"
        )
    if plan.precision == "bfloat16":
        yield "bf16=True without an accelerator needs use_cpu=True"
    yield from _processes(plan, "torchrun --nproc_per_node")
    yield "started without a launcher, Trainer runs this on every GPU it sees, which multiplies the samples per step"
    yield from _beyond_any(plan)


def _beyond_lightning(plan: Plan) -> Iterator[str]:
    yield from _beyond_equal(plan)
    yield from _divides_by_steps(plan, "Lightning")
    if plan.checkpoint:
        yield (
            f"memfit checkpoints {_blocks(plan)}; Trainer has no argument for that: torch.utils.checkpoint belongs "
            "around their forward"
        )
    yield from _processes(plan, "devices=")
    yield from _beyond_any(plan)


def _beyond_equal(plan: Plan) -> Iterator[str]:
    """Differences for tools whose micro-batches all have one size."""
    size, steps = equal_micro_batches(plan)
    if plan.share % plan.accumulation and not plan.by_size:
        yield (
            f"memfit cuts {plan.share} samples into {plan.accumulation} micro-batches of unequal size, at most "
            f"{plan.micro_batch}; here there are {steps} of {size}"
        )
    if size * steps != plan.share:
        largest = fitting(plan)
        yield (
            f"a step has {size * steps} samples here and {plan.share} in the plan, which has no divisor from "
            f"{largest // 2 + 1} to {largest}"
        )
    if plan.by_size:
        yield f"{_sizes_differ(plan)}; here each has {size}, padded to the longest sample in it"
    if plan.mode == "replay":
        yield (
            f"memfit runs two passes, so that the loss sees the outputs of all {plan.share} samples together; here it "
            f"sees {size} at a time, which is a different loss if it compares samples with each other"
        )


def _divides_by_steps(plan: Plan, tool: str) -> Iterator[str]:
    _, steps = equal_micro_batches(plan)
    if steps > 1:
        yield (
            f"{tool} divides every loss by {steps}, also in a shorter last window of an epoch: the gradient of that "
            "step is too small"
        )
        yield (
            "each micro-batch counts the same: where a loss is a mean over valid labels or tokens and their number "
            "differs between micro-batches, the gradient is not the whole batch's"
        )


def _sizes_differ(plan: Plan) -> str:
    counts = [row[1] for row in plan.by_size]
    most = f"{min(counts)} to {max(counts)}"
    return f"samples differ in size, and memfit puts {most} into a micro-batch, those of similar size together"


def _processes(plan: Plan, how: str) -> Iterator[str]:
    target = plan.target_batch
    if target is None or target == plan.share:
        return
    if target % plan.share == 0:
        yield f"{target} samples per step take {target // plan.share} processes running {plan.share} each ({how})"
    else:
        yield f"this process runs {plan.share} of {target} samples per step; here all processes run as many ({how})"


def _beyond_any(plan: Plan) -> Iterator[str]:
    if plan.accumulation > 1 and plan.accumulate_in == "float32":
        yield "gradients of bfloat16 or float16 parameters add up in their own precision; memfit adds them in float32"
    for lever, value in (("shard", plan.shard), ("offload", plan.offload)):
        if value != "off":
            yield f"{lever}={value!r} is not included"
    yield "where memory runs out, or a sample is larger than planned for, memfit uses smaller micro-batches"


def _blocks(plan: Plan) -> str:
    first = ", ".join(plan.checkpoint[:4])
    more = f" and {len(plan.checkpoint) - 4} more" if len(plan.checkpoint) > 4 else ""
    return f"{len(plan.checkpoint)} blocks ({first}{more})"


# ---- text


def _text(plan: Plan, needs: list[str], code: list[str], beyond: Iterable[str]) -> str:
    head = [f"memfit's plan for {plan.model} with {plan.optimizer} on {plan.device}", plan.summary(), *needs]
    lines = [*(line for part in head for line in _comment(part)), *code, "", "# Not the same as with memfit:"]
    lines += [line for part in beyond for line in _comment(part, "# - ", "#   ")]
    return "\n".join(lines) + "\n"


def _comment(text: str, first: str = "# ", following: str = "#   ") -> list[str]:
    plain = ascii(text)[1:-1]  # names come from files: a line break in one must not start a line of code
    return textwrap.wrap(plain, WIDTH, initial_indent=first, subsequent_indent=following, break_on_hyphens=False)
