"""Captures the context of a call (autocast, train/eval modes, requires_grad, buffers) and restores it to run the call later or
again.

Not covered: backend flags that a script changes between call and backward.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from memfit.engine.modules import parameters_in
from memfit.engine.suspended_autocast import stays_on
from memfit.hardware.exhausted import drop_frames


@dataclass(frozen=True)
class Autocast:
    """The autocast state of one device type."""

    device_type: str
    """"cpu", "cuda", ..."""
    enabled: bool
    """Whether operations are cast."""
    dtype: torch.dtype
    """The dtype they are cast to."""
    cache: bool
    """Whether casts of weights are cached within the region."""

    def entered(self) -> torch.autocast:
        """Return a context with exactly this state, but for proofs that run without autocast."""
        enabled = self.enabled and stays_on()
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=enabled, cache_enabled=self.cache)


def autocast_now(device_types: Iterable[str]) -> tuple[Autocast, ...]:
    """Return the current autocast states of these device types."""
    cache = torch.is_autocast_cache_enabled()
    return tuple(
        Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cache)
        for kind in dict.fromkeys(device_types)
    )


def autocasting(states: Iterable[Autocast]) -> AbstractContextManager[object]:
    """Return a context with these autocast states. Skips those that hold already (each entry clears the weight cache)."""
    differing = [state for state in states if state.enabled or torch.is_autocast_enabled(state.device_type)]
    if not differing:
        return nullcontext()
    stack = ExitStack()
    for state in differing:
        stack.enter_context(state.entered())
    return stack


@contextmanager
def autocast_kept(device_types: Iterable[str]) -> Iterator[None]:
    """Restore autocast afterwards, even if the code inside enters it and never exits."""
    before, depth = autocast_now(device_types), _autocast_depth()
    try:
        yield
    finally:
        for state in before:
            torch.set_autocast_enabled(state.device_type, state.enabled)
            torch.set_autocast_dtype(state.device_type, state.dtype)
            torch.set_autocast_cache_enabled(state.cache)
        if _autocast_depth() != depth:
            torch.clear_autocast_cache()
        while _autocast_depth() > depth:
            torch.autocast_decrement_nesting()
        while _autocast_depth() < depth:
            torch.autocast_increment_nesting()


def _autocast_depth() -> int:
    """The autocast nesting depth of this thread. torch returns it only when it is changed."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Disable autocast on a device and the CPU, for inner backward passes."""
    kind = device.type
    if not torch.is_autocast_enabled(kind) and (kind == "cpu" or not torch.is_autocast_enabled("cpu")):
        return nullcontext()
    return autocasting(Autocast(k, False, torch.get_autocast_dtype(k), True) for k in dict.fromkeys((kind, "cpu")))


def without_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode, which records nothing for backward in any grad mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled models eagerly, without compiling anything or dropping compiled code.

    With memfit's dispatch modes active, the compiler would trace into them, give up, and run that code eagerly from then on.
    """
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def modes_as(modes: list[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Set the modules' train/eval flags to those captured by `modes_of`, and restore them afterwards."""
    changed = [(module, module.training, training) for module, training in modes if module.training != training]
    for module, _, training in changed:
        module.training = training
    try:
        yield
    finally:
        for module, before, _ in changed:
            module.training = before


@contextmanager
def requiring_as(flags: list[tuple[torch.Tensor, bool]]) -> Iterator[None]:
    """Set the parameters' `requires_grad` to that captured by `requires_of`, and restore it afterwards."""
    changed = [(p, wanted) for p, wanted in flags if p.requires_grad != wanted]
    for p, wanted in changed:
        p.requires_grad_(wanted)
    try:
        yield
    finally:
        for p, wanted in changed:
            p.requires_grad_(not wanted)


def in_functional_call() -> bool:
    """Whether `torch.func.functional_call` is running, which temporarily replaces the parameters."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_functional_call" and frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back
    return False


def requires_of(modules: list[nn.Module]) -> list[tuple[torch.Tensor, bool]]:
    """Capture the `requires_grad` of every parameter of these modules."""
    return [(p, p.requires_grad) for p in parameters_in(modules)]


def modes_of(modules: list[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """Capture every module's train/eval flag."""
    return [(module, module.training) for module in modules]


def restore_tensors(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write each copy back into its original without a synchronization. Increments the version only if the shape changed."""
    if not copies:
        return
    with torch.no_grad():
        for original, copy in copies:
            if original.shape != copy.shape:
                original.set_(copy.to(original.device))  # pyright: ignore[reportArgumentType]
            else:
                original.data.copy_(copy)


def is_faking() -> bool:
    """Whether operators compute on fake tensors and nothing is really written."""
    return any(type(mode).__name__ == "FakeTensorMode" for mode in _get_current_dispatch_mode_stack())


@contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Disable the hooks of `torch.autograd.graph.saved_tensors_hooks` and similar."""
    found = _taken_hooks()
    try:
        yield
    except BaseException as error:
        # A function that fails inside torch.utils.checkpoint leaves the hooks of that call enabled for as long as the frames of
        # the exception live: all that is saved later would go through them.
        if _hooks_on_top() is not None:
            drop_frames(error)
        raise
    finally:
        _taken_hooks()
        for pack, unpack in reversed(found):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # pyright: ignore[reportAttributeAccessIssue]


def _taken_hooks() -> list[Any]:
    """Removes and returns the enabled hooks, the innermost first."""
    found: list[Any] = []
    while (top := _hooks_on_top()) is not None:
        found.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def _hooks_on_top() -> Any:
    """Returns the innermost hooks that are enabled; None if there are none, or if torch does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore[reportAttributeAccessIssue]
    return None if top is None else top(False)


def outside_transforms() -> AbstractContextManager[Any]:
    """Disable torch.func transforms (vmap, grad): code inside is not transformed."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    stack = getattr(functorch, "peek_interpreter_stack", lambda: None)()
    if stack is None:
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def transforming() -> str | None:
    """Return what looks at every operation of the script's call itself, so that it has to see them; None if nothing does."""
    if in_checkpoint():
        return "the script's own checkpoint"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    modes = (type(mode) for mode in _get_current_function_mode_stack())
    found = next((kind for kind in modes if not kind.__module__.startswith(("torch.", "memfit."))), None)
    return None if found is None else f"the mode {found.__name__}"


def in_checkpoint() -> bool:
    """Whether the code runs inside `torch.utils.checkpoint` (the non-reentrant kind), which counts the tensors saved for
    backward and expects as many when it recomputes."""
    hooks = _hooks_on_top()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
