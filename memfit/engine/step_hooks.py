"""Hooks that run before and after an optimizer's steps, also those of wrappers without the hooks of `torch.optim.Optimizer`.

A wrapper that does not call the base's `__init__` (Lookahead, SAM) or does not derive from it (LARC) has no hooks. It gets a
`step` on the instance that calls them, as learning rate schedulers do to count steps. Copies and pickles of it have none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def before_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` before each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, Optimizer.register_step_pre_hook, hook)


def after_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` after each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, Optimizer.register_step_post_hook, hook)


def _registered(optimizer: Any, register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[], None]:
    if not (hasattr(optimizer, _BEFORE) and hasattr(optimizer, _AFTER)):
        _HookedStep.install(optimizer)
    handle = register(optimizer, hook)

    def remove() -> None:
        handle.remove()
        _HookedStep.remove_unused(optimizer)

    return remove


class _Hooks(OrderedDict[int, Callable[..., Any]]):
    """Hooks of one object: a copy or a pickle of it has none."""

    def __reduce__(self) -> Any:
        return OrderedDict, ()


class _HookedStep:
    """An optimizer's `step` that calls hooks, in the instance's place of it."""

    _wrapped_by_lr_sched = True  # keeps schedulers from wrapping it; they check `_opt_called`

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._plain = optimizer, optimizer.step
        self._before = vars(optimizer).get("step")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._optimizer
        for hook in list(getattr(own, _BEFORE).values()):
            hook(own, args, kwargs)
        own._opt_called = True
        done = self._plain(*args, **kwargs)
        for hook in list(getattr(own, _AFTER).values()):
            hook(own, args, kwargs)
        return done

    def __reduce__(self) -> Any:
        return partial, (type(self._optimizer).step, self._optimizer)

    @classmethod
    def install(cls, optimizer: Any) -> None:
        step = cls(optimizer)
        vars(optimizer).update({_BEFORE: _Hooks(), _AFTER: _Hooks(), "step": step})

    @classmethod
    def remove_unused(cls, optimizer: Any) -> None:
        """Put the optimizer's own step back once it has no hooks, unless a scheduler has replaced it."""
        held = vars(optimizer)
        step = held.get("step")
        if not isinstance(step, cls) or held[_BEFORE] or held[_AFTER]:
            return
        for name in ("step", _BEFORE, _AFTER):
            del held[name]
        if step._before is not None:
            held["step"] = step._before
