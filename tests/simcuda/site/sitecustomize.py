"""Runs when Python begins, in a command that `simcuda.environment` was made for: the device is there once torch is.

Nothing else is put on the path, so that modules of a script are found as ever. Not covered: `python -S`, `-I` and `-E`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parent.parent


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports torch as ever, and then installs the device."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        simcuda = sys.modules["simcuda"]
        simcuda.install(**simcuda.settings_of(os.environ))


def _load_package() -> None:
    """So that `import simcuda` finds it."""
    where = [str(PACKAGE)]
    spec = importlib.util.spec_from_file_location("simcuda", PACKAGE / "__init__.py", submodule_search_locations=where)
    assert spec is not None and spec.loader is not None
    module = sys.modules["simcuda"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _next_one() -> None:
    """What this module hides: a sitecustomize of the system's, or of a virtual environment's."""
    here = str(Path(__file__).resolve().parent)
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_next_one()
if "SIMCUDA" in os.environ:
    _load_package()
    sys.meta_path.insert(0, _AfterTorch())
