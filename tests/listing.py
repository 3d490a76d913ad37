"""One test over many items that are cheap to check: it names every item that fails, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def each(items: Iterable[Item], *, name: Callable[[Item], str] = str) -> Callable[[Callable[[Item], None]], Callable[[], None]]:
    """A decorator that makes a check of one item, which asserts, a test of all of them."""
    every = list(items)
    assert every, "a test of nothing"

    def decorated(check: Callable[[Item], None]) -> Callable[[], None]:
        def test() -> None:
            failed = {name(item): said for item in every if (said := _said(check, item))}
            assert not failed, "\n".join(f"{where}: {said}" for where, said in failed.items())

        # No functools.wraps: pytest would look through it and ask for a fixture by the name of the item.
        test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
        test.__module__ = check.__module__
        return test

    return decorated


def _said(check: Callable[[Item], None], item: Item) -> str:
    """What an assertion that fails says; empty: all hold."""
    try:
        check(item)
    except AssertionError as error:
        return str(error) or "an assertion fails"
    return ""
