"""Intercepts a module's `forward` or another method without changing the module.

The interception is an instance attribute. Type, state_dict, submodules and other attributes stay the same, and a copied or
pickled module is not intercepted. Calls under functorch, torch.jit and torch.export are not intercepted. Not covered: compiled
methods other than `forward`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Interception:
    """Replaces an instance's method `name` by `handler(plain, args, kwargs)`; `plain` runs the original method.

    `owner` must be asked before the module is intercepted again.
    """

    def __init__(self, module: nn.Module, handler: Callable[..., Any], owner: Any = None, name: str = "forward") -> None:
        self.owner, self._name = owner, name
        self.__signature__ = inspect.signature(getattr(module, name))
        self._module = module
        self._handler = handler
        self._had_own = name in module.__dict__
        self._own = module.__dict__.get(name)
        self._compiled_call = getattr(module, "_compiled_call_impl", None) if name == "forward" else None
        self._opaque: Callable[..., Any] | None = None

    @property
    def plain(self) -> Callable[..., Any]:
        """The original method (compiled, if the module was compiled in place)."""
        if self._compiled_call is not None:
            return self._run_compiled
        return self._own if self._had_own else self._of_class()  # type: ignore[return-value]

    def install(self) -> None:
        """Start to intercept."""
        setattr(self._module, self._name, self)
        if self._compiled_call is not None:
            # A compiled call would trace through the interception. The compiled code is kept and called from inside.
            self._module._compiled_call_impl = None  # type: ignore[assignment]

    def remove(self) -> None:
        """Restore the original method, unless something else has replaced the interception."""
        if self._module.__dict__.get(self._name) is not self:
            return
        if self._had_own:
            setattr(self._module, self._name, self._own)
        else:
            del self._module.__dict__[self._name]
        if self._compiled_call is not None:
            self._module._compiled_call_impl = self._compiled_call  # type: ignore[assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._opaque is None and "torch._dynamo" in sys.modules:
            # Compiled callers get a graph break here. Importing dynamo takes a second, so this waits until it is imported.
            self._opaque = torch._dynamo.disable(self._answer)
        return (self._opaque or self._answer)(args, kwargs)  # pyright: ignore[reportCallIssue]

    def _answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _goes_through():
            return self.plain(*args, **kwargs)
        return self._handler(self.plain, args, kwargs)

    def _run_compiled(self, *args: Any, **kwargs: Any) -> Any:
        # The compiled code looks up `forward` on the module, so the interception is removed while it runs.
        self.remove()
        try:
            return self._compiled_call(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.install()

    def _of_class(self) -> Callable[..., Any]:
        return functools.partial(getattr(type(self._module), self._name), self._module)

    def __reduce__(self) -> Any:
        if self._had_own:
            return _itself, (self._own,)
        return getattr, (self._module, self._name)


def interception_of(module: nn.Module) -> Interception | None:
    """Return the interception of `module`, if any."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, Interception) else None


def _goes_through() -> bool:
    return (
        torch._C._functorch.peek_interpreter_stack() is not None  # vmap, grad, jvp: their own rules apply  # pyright: ignore[reportAttributeAccessIssue]
        or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        or torch.jit.is_scripting()  # pyright: ignore[reportPrivateImportUsage]
        or torch.compiler.is_exporting()
    )


def _itself(value: Any) -> Any:
    return value


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of the model run compiled code."""
    return getattr(model, "_compiled_call_impl", None) is not None or hasattr(model, "_orig_mod")
