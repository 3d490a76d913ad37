"""What the fuzzer is known to find: options whose scripts still differ, crash or are refused without need, and why."""

from __future__ import annotations

from fuzz.grammar import Choices

KNOWN: dict[str, str] = {
    # values of the batch decide, and parts read others than the whole
    "twist=by_mean": "control flow on values of the batch",
    "twist=by_max_item": "control flow on values of the batch",
    "twist=by_value": "control flow on values of the batch",
    "loss=if_item": "control flow on values of the batch",
    "loss=if_max": "control flow on values of the batch",
    "loss=if_batch": "control flow on values of the batch",
    "loss=if_class": "control flow on values of the batch",
    "loss=if_correct": "control flow on values of the batch",
    "loss=max_of_losses": "control flow on values of the batch",
    # state that the forward moves is not composed over micro-batches
    "state=ema_data": "moved by each micro-batch in step mode",
    "state=spectral": "moved by each micro-batch in step mode",
    "state=hidden": "moved by each micro-batch in step mode",
    "state=aux_loss": "the last micro-batch's in step mode",
    "gradients=module_hook": "a hook's own counter is moved by planning and by each micro-batch",
    # state of the loss in step mode
    "outside=class_centres": "moved by each micro-batch in step mode",
    "outside=centre_buffer": "moved by each micro-batch in step mode",
    "outside=centre_attribute": "meets fake tensors in step mode",
    "outside=queue": "meets fake tensors in step mode",
    "outside=scale_float": "moved by each micro-batch in step mode",
    "outside=running_float": "moved by each micro-batch in step mode",
    "outside=counted": "moved by each micro-batch in step mode",
    "outside=listed": "an entry for each micro-batch in step mode",
    "outside=warmup_attribute": "moved by each micro-batch in step mode",
    "outside=balancing": "moved by each micro-batch in step mode",
    "outside=default_argument": "moved by each micro-batch in step mode",
    "outside=generator_weights": "drawn from by planning and by each micro-batch in step mode",
    "outside=bank": "moved by each micro-batch in step mode",
    "outside=global_list": "an entry for each micro-batch in step mode",
    "outside=global_dict": "moved by each micro-batch in step mode",
    "outside=global_tensor": "moved by each micro-batch in step mode",
    "outside=running_average_meter": "moved by each micro-batch in step mode",
    # what is written past PyTorch's own record
    "between=input_data": "x.data written between loss and backward",
    "between=labels_written": "y.data written between loss and backward",
    # outputs
    "calls=sum_of_three": "an output that was not used is first read after the step",
    "between=retain_grad pack=loss_out": "the gradient of an output lacks what a loss inside the model gives it",
    "state=momentum_encoder": "parameters that the forward writes are taken for the script's writes in two passes",
    "loss=ce_none_masked loader=iterable": "in step mode a masked mean is weighted by samples where the samples of the proof have no mask",
    "gradients=post_hooks|post_hooks_step pack=tuple|list|dict|dataclass|namedtuple|nested": "hooks of parameters without gradient are called",
    "gradients=hooks pack=tuple|list|dict|dataclass|namedtuple|nested": "hooks of parameters without gradient are called",
    "gradients=hook_counts pack=tuple|list|dict|dataclass|namedtuple|nested": "hooks of parameters without gradient are called",
    "calls=in_two_by_hand batch=6": "pieces of a batch that has as many samples as features are cut by features",
    "loader=length_raises": "what __len__ raises comes out of wrap",
    "loss=scripted": "a scripted loss is given a stand-in",
    "loss=vmap": "torch.vmap is given a stand-in",
    "pack=distribution": "a distribution as output is refused by its type",
    "pack=normal": "a distribution as output is refused by its type",
    "twist=divides": "an assert on the batch's size is refused at a size that was asked for",
}
"""By "dimension=option" or "dimension=option|option", several of them with spaces between where it takes all; the list is to become empty."""


def known(choices: Choices) -> bool:
    """Whether a script has what is in the list."""
    return any(all(choices[name] in options for name, options in parts(entry)) for entry in KNOWN)


def parts(entry: str) -> list[tuple[str, list[str]]]:
    """The dimensions that an entry names, each with the options it means."""
    named = [part.split("=") for part in entry.split()]
    return [(name, options.split("|")) for name, options in named]
