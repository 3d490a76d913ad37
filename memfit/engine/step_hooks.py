"""Hooks that run before and after an optimizer's steps, also those of wrappers without the hooks of `torch.optim.Optimizer`.

A wrapper that does not call the base's `__init__` (Lookahead, accelerate's) or does not derive from it (LARC) has no hooks.
Those of the optimizer that it holds are used: it may step that one in some of its steps alone. If it holds several, it gets a
`step` on the instance that calls hooks, as learning rate schedulers do to count steps. Copies and pickles of it have none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def before_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` before each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, _BEFORE, hook)


def after_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` after each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, _AFTER, hook)


def hooks_after_steps(optimizer: Any) -> list[Callable[..., Any]]:
    """Return the hooks that are called after an optimizer's steps."""
    holder = _holder(optimizer)
    return [] if holder is None else list(getattr(holder, _AFTER).values())


def _registered(optimizer: Any, when: str, hook: Callable[..., Any]) -> Callable[[], None]:
    holder = _holder(optimizer) or _HookedStep(optimizer)
    hooks = getattr(holder, when)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook

    def remove() -> None:
        handle.remove()
        if isinstance(holder, _HookedStep):
            holder.remove_unused()

    return remove


def _has_hooks(optimizer: Any) -> bool:
    return hasattr(optimizer, _BEFORE) and hasattr(optimizer, _AFTER)


def _holder(optimizer: Any) -> Any:
    """Return what has hooks for the steps of an optimizer: itself, the only one with the same parameters that it holds, or its
    step that was replaced. None: nothing yet."""
    if _has_hooks(optimizer):
        return optimizer
    trained = _parameters(optimizer)
    held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer) and _has_hooks(value))
    alike = [inner for inner in held if _parameters(inner) == trained]
    step = vars(optimizer).get("step")
    return alike[0] if len(alike) == 1 else step if isinstance(step, _HookedStep) else None


def _parameters(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


class _HookedStep:
    """An optimizer's `step` that calls hooks, in the instance's place of it."""

    _wrapped_by_lr_sched = True  # keeps schedulers from wrapping it; they check `_opt_called`

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._plain = optimizer, optimizer.step
        self._optimizer_step_pre_hooks = OrderedDict[int, Callable[..., Any]]()
        self._optimizer_step_post_hooks = OrderedDict[int, Callable[..., Any]]()
        self._before = vars(optimizer).get("step")
        vars(optimizer)["step"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._optimizer
        for hook in list(self._optimizer_step_pre_hooks.values()):
            hook(own, args, kwargs)
        own._opt_called = True
        done = self._plain(*args, **kwargs)
        for hook in list(self._optimizer_step_post_hooks.values()):
            hook(own, args, kwargs)
        return done

    def __reduce__(self) -> Any:  # a copy of the optimizer has no hooks
        return partial, (type(self._optimizer).step, self._optimizer)

    def remove_unused(self) -> None:
        """Put the optimizer's own step back once there are no hooks, unless a scheduler has replaced it."""
        held = vars(self._optimizer)
        if held.get("step") is not self or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return
        del held["step"]
        if self._before is not None:
            held["step"] = self._before
