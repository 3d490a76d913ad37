"""The house: imports go one way, the front door is small, importing does nothing, functions stay short."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from listing import each
from thinned import EVERY

import memfit

ROOT = Path(memfit.__file__).parent
MODULES = sorted(p for p in ROOT.rglob("*.py") if "__pycache__" not in p.parts)

# Each room may import from itself and from those before it; the drawing names the rooms in that order.
DRAWING = (ROOT.parent / "docs" / "design.md").read_text()
DRAWN = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (`\w+/`.*?) \|", DRAWING, re.M)]
ROOMS = (
    ("_errors", "_reading", "_units", "_tested"),
    *[tuple(names) for names in DRAWN if "cli" not in names],
    ("_asked", "_hooks", "_values"),
    ("_arguments", "_several"),
    ("_announce",),
    ("_wrap",),
    ("_verbs",),
    ("__init__",),
    ("cli", "demo", "integrations", "__main__"),
)
LEVEL = {name: level for level, names in enumerate(ROOMS) for name in names}
PUBLIC = {
    *("wrap", "probe", "profile", "plan", "apply", "verify"),
    *("Budget", "Device", "Event", "Plan", "Profile", "Report", "Run", "Verification"),
    *("MemfitError", "UsageError", "DoesNotFit", "PlanFileError", "Refused", "RankFailed"),
}


def room_of(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return first.removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports_of(path: Path, *, top_level: bool = False) -> list[str]:
    """The modules a file imports, by their full names; `top_level`: only those imported with the file itself."""
    tree = ast.parse(path.read_text())
    nodes = _outside_functions(tree) if top_level else list(ast.walk(tree))
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.append(str(node.module))
    return found


def _outside_functions(tree: ast.Module) -> list[ast.AST]:
    found: list[ast.AST] = []
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or _only_for_types(node):
            continue
        found.append(node)
        pending += list(ast.iter_child_nodes(node))
    return found


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


def test_every_room_has_its_place() -> None:
    assert {room_of(path) for path in MODULES} <= LEVEL.keys()


def test_class_names_mean_one_thing() -> None:
    defined: dict[str, set[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, set()).add(name_of(path))
    assert not {name: files for name, files in defined.items() if len(files) > 1}


def test_files_that_are_named_exist() -> None:
    pages = [ROOT.parent / "README.md", *(ROOT.parent / "docs").glob("*.md"), *MODULES]
    named = {(page.name, file) for page in pages for file in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())}
    assert not {each for each in named if not any((place / each[1]).exists() for place in (ROOT, ROOT.parent))}


@each(MODULES, name=name_of)
def test_imports_go_one_way(path: Path) -> None:
    here = LEVEL[room_of(path)]
    for name in imports_of(path):
        if name == "memfit" or name.startswith("memfit."):
            there = name.split(".")[1] if "." in name else "__init__"
            assert LEVEL[there] <= here, f"{name_of(path)} imports {name}"


def test_files_import_in_no_circle() -> None:
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__") for path in MODULES]
    files = dict(zip(names, MODULES))
    arrows = {name: {each for each in _files_imported(path, files) if each != name} for name, path in files.items()}
    while leaves := {name for name, to in arrows.items() if not to}:
        arrows = {name: to - leaves for name, to in arrows.items() if name not in leaves}
    assert not arrows, f"in a circle, or leading into one: {sorted(arrows)}"


def _files_imported(path: Path, files: dict[str, Path]) -> set[str]:
    """The files of the package that this one imports, without those that it only names in annotations."""
    found: set[str] = set()
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if not _only_for_types(node):
            for alias in node.names if isinstance(node, ast.ImportFrom) else ():
                name = f"{node.module}.{alias.name}"
                found.add(name if name in files else str(node.module))
            pending += list(ast.iter_child_nodes(node))
    return (found & files.keys()) - {"memfit"}


@each([p for p in MODULES if room_of(p) == "planning"], name=name_of)
def test_planning_computes_with_values_alone(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.split(".")[0] == "torch"]


@each([p for p in MODULES if room_of(p) == "integrations"], name=name_of)
def test_guests_import_public_names_alone(path: Path) -> None:
    assert not [name for name in imports_of(path) if name.startswith("memfit.") and room_of(path) not in name]


def test_the_front_door() -> None:
    import types

    shown = {name for name in dir(memfit) if not name.startswith("_")}
    names = {name for name in shown if not isinstance(getattr(memfit, name), types.ModuleType)}
    assert names == set(memfit.__all__)
    assert names == PUBLIC
    assert len(names) <= 25
    assert [
        n for n in ("wrap", "probe", "profile", "plan", "apply", "verify") if not callable(getattr(memfit, n))
    ] == []


def test_public_names_have_docstrings() -> None:
    for name in PUBLIC:
        assert (getattr(memfit, name).__doc__ or "").strip(), name


@each(MODULES, name=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip()


def test_no_file_is_longer_than_four_hundred_lines() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 400} == {}


@each(MODULES, name=name_of)
def test_no_function_is_longer_than_sixty_lines(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert _body_lines(node) <= 60, f"{node.name} has {_body_lines(node)} lines"


def _body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
    return (node.end_lineno or node.lineno) - body[0].lineno + 1


@each(MODULES, name=name_of)
def test_public_functions_and_classes_have_docstrings(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_") and not _is_overload(node):
            assert ast.get_docstring(node), f"{name_of(path)}: {node.name}"


def _is_overload(node: ast.stmt) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "overload" for each in getattr(node, "decorator_list", ()))


HEAVY = (
    "transformers",
    "lightning",
    "accelerate",
    "plotly",
    "rich",
    "scipy",
    "jinja2",
    "typer",
    "pynvml",
    "torch._dynamo",
)

CHILD = f"""
import logging, os, random, sys, warnings
import numpy, torch
before = (dict(os.environ), list(logging.root.handlers), torch.get_rng_state(), random.getstate(), sys.excepthook)
defaults = (torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision())
there = set(sys.modules)
threads = torch.get_num_threads()
import memfit
assert (dict(os.environ), list(logging.root.handlers)) == before[:2]
assert torch.equal(torch.get_rng_state(), before[2]) and (random.getstate(), sys.excepthook) == before[3:]
assert (torch.get_default_dtype(), torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()) == defaults
assert torch.get_num_threads() == threads
handlers = logging.getLogger("memfit").handlers
assert all(isinstance(h, logging.NullHandler) for h in handlers), handlers
assert not torch.cuda.is_initialized()
print(*[name for name in {HEAVY!r} if name in sys.modules and name not in there])
"""


def test_importing_changes_nothing_and_brings_nothing_heavy() -> None:
    environment = {"PYTHONPATH": str(ROOT.parent), "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.split() == [] and child.stderr == ""


def test_typing_is_declared() -> None:
    assert (ROOT / "py.typed").exists()


# ---- the tests themselves

TESTS = Path(__file__).parent
READS = re.compile(
    r"(?<!def )\b(perf_counter|monotonic|monotonic_ns|process_time|thread_time|time\.time|mem_get_info)\("
    r"|\b(psutil|getrusage|setrlimit|tracemalloc|mallinfo2?)\b|/proc/self|\bread_status\(\)|\b(host|reserved)_level\(\)"
    r"|\bMeter\((?!.*(proc=|cuda))|stats\(\)\[.(peak_measured|seconds|samples_per_second|loader_wait).\]"
)
"""What tells the clock or the memory of a machine: a quick test that looks at it fails on another one, or on a busy day."""
MAY_READ = {
    "faults.py": "deadlines after which processes are taken to hang; when they ended is for slow tests to compare",
    "test_hardware_device.py::test_photograph_follows_a_real_allocation": "needs a GPU of its own",
}
"""What may all the same: a test, or a helper, and why."""


def _sources(text: str) -> dict[str, str]:
    """The source of what a module defines outside of functions, decorators included, by its names."""
    lines, found = text.splitlines(), dict[str, str]()
    for node in ast.parse(text).body:
        names = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else []
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names += [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        found.update(dict.fromkeys(names, "\n".join(lines[first - 1 : node.end_lineno])))
    return found


def _reached(name: str, sources: dict[str, str]) -> set[str]:
    """What a test mentions of its module, and what that mentions in turn: helpers, fixtures, scripts of children."""
    reached, pending = set[str](), [name]
    while pending:
        here = pending.pop()
        if here not in reached:
            reached.add(here)
            pending += [other for other in re.findall(r"\b\w+\b", sources[here]) if other in sources]
    return reached


def readers(path: Path) -> list[str]:
    """Quick tests of a file that read the clock or the memory; of a helper the file itself, where it does."""
    text = path.read_text()
    if not path.name.startswith("test_"):
        return [path.name] if READS.search(text) else []
    sources = _sources(text)
    quick = [name for name in sources if name.startswith("test_") and "mark.slow" not in sources[name].split("\ndef ")[0]]
    return [f"{path.name}::{n}" for n in quick if any(READS.search(sources[each]) for each in _reached(n, sources))]


def test_quick_tests_read_neither_the_clock_nor_the_memory() -> None:
    here = Path(__file__).name
    found = [each for path in sorted(TESTS.glob("*.py")) if path.name != here for each in readers(path)]
    assert sorted(set(found) - MAY_READ.keys()) == []
    assert sorted(MAY_READ.keys() - set(found)) == []  # no longer than it has to be


def test_what_is_thinned_out_is_there() -> None:
    there = {path.name: path.read_text() for path in TESTS.rglob("test_*.py")}
    gone = [name for name in EVERY if f"def {name.split('::')[1]}(" not in there.get(name.split("::")[0], "")]
    assert gone == []


def test_a_quick_test_that_reads_through_a_helper_is_found(tmp_path: Path) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(
        'CHILD = """open("/proc/self/status")"""\ndef run():\n    return CHILD\n'
        "def test_child():\n    run()\n\n@pytest.mark.slow\ndef test_slow():\n    run()\n\ndef test_other():\n    pass\n"
    )
    assert readers(path) == ["test_it.py::test_child"]
