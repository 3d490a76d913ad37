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

_BEFORE, _AFTER = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


def before_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` before each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, Optimizer.register_step_pre_hook, hook)


def after_steps(optimizer: Any, hook: Callable[..., Any]) -> Callable[[], None]:
    """Call `hook(optimizer, args, kwargs)` after each of its steps. Returns a function that removes the hook."""
    return _registered(optimizer, Optimizer.register_step_post_hook, hook)


def hooks_after_steps(optimizer: Any) -> list[Callable[..., Any]]:
    """Return the hooks that are called after an optimizer's steps."""
    return list((getattr(_followed(optimizer), _AFTER, None) or {}).values())


def _registered(optimizer: Any, register: Callable[..., Any], hook: Callable[..., Any]) -> Callable[[], None]:
    followed = _followed(optimizer)
    if not _has_hooks(followed):
        _HookedStep.install(followed)
    handle = register(followed, hook)

    def remove() -> None:
        handle.remove()
        _HookedStep.remove_unused(followed)

    return remove


def _has_hooks(optimizer: Any) -> bool:
    return hasattr(optimizer, _BEFORE) and hasattr(optimizer, _AFTER)


def _followed(optimizer: Any) -> Any:
    """Return the optimizer whose steps are those of this one: itself, or the one with the same parameters that it holds."""
    if _has_hooks(optimizer):
        return optimizer
    trained = _parameters(optimizer)
    held = (value for value in vars(optimizer).values() if isinstance(value, Optimizer) and _has_hooks(value))
    return next((inner for inner in held if _parameters(inner) == trained), optimizer)


def _parameters(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


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
