"""Entries that a forward sets or removes in the containers among its arguments: `batch["x"] = batch["x"] / 255`.

Every micro-batch has containers of its own. What its forward changes there is joined like an output, and put into the script's
containers. Not covered: attributes of other objects, which `find_side_outputs` refuses.
"""

from __future__ import annotations

from typing import Any

from memfit.batches.entries import REMOVED, Entries, put_entries
from memfit.batches.tree import Path, path_name, with_new_containers
from memfit.capture.output_leaf import Named
from memfit.capture.side_outputs import Door


class ArgumentEntries(Door):
    """The door that all such entries of a call leave by."""

    copies_arguments = True

    def __init__(self) -> None:
        super().__init__("an entry of the arguments", {}, "")
        self._paths: dict[str, tuple[Path, bool]] = {}

    def before(self, arguments: Any) -> Any:
        return Entries(arguments)

    def taken(self, before: Any) -> dict[str, Any]:
        found = {}
        for path, value in before.changed():
            gone = value is REMOVED
            name = Named(path_name(path[1:], "arguments") + (" (removed)" if gone else ""))
            self._paths[name] = path, gone
            found[name] = None if gone else value
        return found

    def put(self, value: Any, arguments: Any) -> None:
        places = [(*self._paths[name], item) for name, item in value.items()]
        put_entries([(path, REMOVED if gone else with_new_containers(item)) for path, gone, item in places], arguments)
