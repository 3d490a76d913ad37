"""Runs one script of the gallery, its one line unmarked, and says what memory it took from that line on; a child of scripts.py.

    python benchmarks/script_child.py '{"memory": null, "enabled": true, ...settings of memfit.wrap}' SCRIPT ARGUMENTS...

`memory` is how many bytes the process may grow by from there on, really: a memory cgroup of its own ends it otherwise, as a
container's does. The last line of output is JSON.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def benchmarks_common() -> ModuleType:
    """benchmarks/common.py under another name, as the scripts have a `common` of their own."""
    spec = importlib.util.spec_from_file_location("benchmarks_common", Path(__file__).with_name("common.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main() -> None:
    tools = benchmarks_common()
    settings = json.loads(sys.argv[1])
    room = settings.pop("memory")
    group = tools.own_cgroup()
    sys.argv = sys.argv[2:]
    sys.path[0] = str(tools.ROOT / "tests" / "scripts")
    import memfit

    wrap, start = memfit.wrap, {}

    def limited(*given: Any, **own: Any) -> Any:
        if not start:
            start["held"] = tools.reset_charged(group)
            if room is not None:
                tools.limit_cgroup(group, room)
        return wrap(*given, **{**own, **settings})

    memfit.wrap = limited
    runpy.run_path(sys.argv[0], run_name="__main__")
    grown = tools.most_charged(group) - start["held"]
    sys.stdout.write("\n" + json.dumps({"grown": grown}) + "\n")


if __name__ == "__main__":
    main()
