"""The C++ half, compiled once for a version of torch and a state of the source, into a folder beside temporary files.

Every folder of `native/` is one unit of compilation: headers of torch cost far more than what is in the files.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

NATIVE = Path(__file__).resolve().parent / "native"
NAME = "_simcuda"
FLAGS = ("-std=c++20", "-fPIC", "-O1", "-g0", "-w")


class NoCompiler(RuntimeError):
    """There is no C++ compiler on this machine."""


def compiler() -> str | None:
    """The C++ compiler, by its path; None where there is none."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def built() -> Path:
    """The extension, which is built if it is not there yet (a quarter of a minute on two cores); safe where several processes
    ask at once. Raises NoCompiler, or RuntimeError with what the compiler said."""
    folder = Path(tempfile.gettempdir()) / f"memfit-simcuda-{_fingerprint()}"
    made = folder / f"{NAME}.so"
    if not made.exists():
        folder.mkdir(exist_ok=True)
        with _locked(folder / "lock"):
            if not made.exists():
                _build(folder, made)
    return made


def native() -> ModuleType:
    """The extension, loaded once per process."""
    if NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(NAME, built())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[NAME] = module
    return sys.modules[NAME]


def _fingerprint() -> str:
    """What the extension depends on, and who may write it."""
    from torch.version import __version__

    sources = sorted(path for path in NATIVE.rglob("*") if path.suffix in (".h", ".cpp"))
    digest = hashlib.sha256("\0".join((__version__, sys.version, str(os.getuid()), *FLAGS)).encode())
    for path in sources:
        digest.update(str(path.relative_to(NATIVE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(folder: Path, made: Path) -> None:
    """Compile the units side by side, link them, and put the result in its place in one step."""
    found = compiler()
    if found is None:
        raise NoCompiler("no C++ compiler: install g++ or clang++, or set CXX")
    with tempfile.TemporaryDirectory(dir=folder) as there:
        units = [_unit(sources, Path(there)) for sources in sorted(NATIVE.iterdir()) if sources.is_dir()]
        running = [subprocess.Popen(_compile(found, unit), stderr=subprocess.PIPE, text=True) for unit in units]
        said = [process.communicate()[1] for process in running]
        if any(process.returncode for process in running):
            raise RuntimeError("the simulated device does not compile:\n" + "\n".join(said)[-4000:])
        output = Path(there) / NAME
        done = subprocess.run(_link(found, units, output), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the simulated device does not link:\n{done.stderr[-4000:]}")
        os.replace(output, made)


def _unit(sources: Path, there: Path) -> Path:
    """A file that includes all of a folder's."""
    unit = there / f"{sources.name}.cpp"
    unit.write_text("".join(f'#include "{path}"\n' for path in sorted(sources.glob("*.cpp"))))
    return unit


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _compile(found: str, unit: Path) -> list[str]:
    include = _torch() / "include"
    folders = (NATIVE, include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [found, *FLAGS, *(f"-I{folder}" for folder in folders), "-c", str(unit), "-o", str(unit.with_suffix(".o"))]


def _link(found: str, units: list[Path], output: Path) -> list[str]:
    libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
    objects = (str(unit.with_suffix(".o")) for unit in units)
    return [found, "-shared", *objects, f"-L{_torch() / 'lib'}", *libraries, "-o", str(output)]
