"""Structure of the package: imports go downward, and one place each reads a dependency or the environment."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Set
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hvpipe"
BENCH = PACKAGE.with_name("bench")
CSRC = PACKAGE.with_name("csrc")
ROOMS = ("base", "transport", "collectives", "progress", "named", "gpu", "engine", "faces")  # lowest first
MOST_LINES = 60  # of a function, without its docstring

# Lowest first. A module may import from its own layer and from those before it, never in a circle.
# A package's name stands for its modules, except those that the table names themselves.
LAYERS = (
    ("errors", "own_folder", "atomic_file", "config_file", "log", "proc", "_build_info", "_engine"),
    ("specs", "checkpoints", "blackbox"),
    ("plan", "trace"),
    ("schedule",),
    ("forecast",),
    ("search", "plan.__init__"),
    ("environment",),
    ("world",),
    ("engine",),
    ("failures",),
    ("monitor", "run_outputs", "session", "collectives"),
    ("keras.compat", "keras.ops", "keras.gpu"),
    ("keras.graph", "keras", "keras.named"),
    ("keras.profiling", "keras.data_parallel"),
    ("keras.pipeline", "keras.checkpoint"),
    ("keras.profiling.action_time", "keras.profiling.cluster", "keras.profiling.ranks", "keras.__init__"),
    ("horovod",),
    ("commands", "cli", "__main__", "__init__"),
)

# The one place that may import each package. A name that ends in "/" is a folder.
PLACES = {
    "keras": "keras/",
    "matplotlib": "trace/chart.py",
    "mpi4py": "world/mpi.py",
    "psutil": "environment/this_host.py",
    "pynvml": "monitor/nvml.py",
    "tensorflow": "keras/",
}
# Any module may import these.
ANYWHERE = {"numpy"}

READ_THE_ENVIRONMENT = {"environment/discover.py", "environment/settings.py", "cli.py"}


@cache
def files() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def every_path() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *BENCH.rglob("*.py")])


def module_of(file: str) -> str:
    """Return a file's module name: hvpipe.world.mpi for world/mpi.py, hvpipe.world for world/__init__.py."""
    return ".".join(["hvpipe", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


@cache
def known_modules() -> set[str]:
    return {module_of(file) for file in files()} | {"hvpipe._build_info", "hvpipe._engine"}


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imports_below(
    node: ast.AST, file: str, *, with_types: bool, modules: Set[str] = frozenset()
) -> Iterator[str]:
    """Yield the full name of every module imported below `node`.

    `from a import b` yields a.b if that is a module: one of hvpipe, or of `modules`.
    """
    for child in ast.iter_child_nodes(node):
        if is_for_types(child) and not with_types:
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = ["hvpipe", *Path(file).parent.parts][: None if child.level < 2 else 1 - child.level]
            base = ".".join([*(package if child.level else []), *([child.module] if child.module else [])])
            for alias in child.names:
                name = f"{base}.{alias.name}"
                yield name if name in known_modules() or name in modules else base
        yield from imports_below(child, file, with_types=with_types, modules=modules)


@cache
def own_imports(file: str, *, with_types: bool = True) -> set[str]:
    found = imports_below(tree(PACKAGE / file), file, with_types=with_types)
    return {name for name in found if name.partition(".")[0] == "hvpipe"}


def layer_of(module: str) -> int:
    parts = module.split(".")[1:] or ["__init__"]
    layers = {name: number for number, names in enumerate(LAYERS) for name in names}
    if ".".join([*parts, "__init__"]) in layers:  # the package itself: re-exports higher layers
        parts.append("__init__")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in layers:
            return layers[name]
    raise AssertionError(f"wanted: a layer in LAYERS for every module. Received: module={module}")


def test_imports_go_downward() -> None:
    upward = [
        f"hvpipe/{file} imports {name}"
        for file in files()
        for name in sorted(own_imports(file))
        if layer_of(name) > layer_of(module_of(file))
    ]
    assert not upward


def test_no_import_runs_in_a_circle() -> None:
    graph = {module_of(f): own_imports(f, with_types=False) - {module_of(f)} for f in files()}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules of the circle


def test_folders_of_the_engine_include_downward() -> None:
    """docs/engine.md has the same order."""
    upward = [
        f"{path.relative_to(CSRC)} includes {header}"
        for path in sorted(CSRC.glob("*/*"))
        if path.suffix in (".cc", ".cu", ".h")
        for header in re.findall(r'#include "([^"]*/[^"]*)"', path.read_text())
        if header.partition("/")[0] in ROOMS
        if ROOMS.index(header.partition("/")[0]) > ROOMS.index(path.parent.name)
    ]
    assert not upward
    assert {path.parent.name for path in CSRC.glob("*/*")} == set(ROOMS)
    page = (CSRC.parent / "docs" / "engine.md").read_text()
    assert tuple(re.findall(r"(?m)^\| `(\w+)/` \|", page)) == ROOMS


def test_no_import_of_benchmarks_runs_in_a_circle() -> None:
    files = {
        ".".join(path.relative_to(BENCH.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in BENCH.rglob("*.py")
    }
    graph = {}
    for name, path in files.items():
        found = imports_below(tree(path), "", with_types=False, modules=files.keys())
        graph[name] = {one for one in found if one in files} - {name}
    TopologicalSorter(graph).prepare()


def test_functions_fit_on_a_screen() -> None:
    long = []
    for path in every_path():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > MOST_LINES:
                    long.append(f"{path}: {node.name} has {lines} lines")
    assert not long


def test_private_attributes_are_those_of_the_same_file() -> None:
    """Files of hvpipe/keras have a stricter rule, below."""
    touched = []
    for path in every_path():
        if path == PACKAGE / COMPAT:
            continue
        defined = {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        attributes = [node for node in nodes(path) if isinstance(node, ast.Attribute)]
        defined |= {node.attr for node in attributes if _is_own(node)}
        touched += [
            f"{path}:{node.lineno}: {ast.unparse(node)}"
            for node in attributes
            if _is_private(node.attr) and not _is_own(node) and node.attr not in defined
        ]
    assert not touched


def test_each_dependency_is_imported_in_one_place() -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for file in files():
        for name in imports_below(tree(PACKAGE / file), file, with_types=True):
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "hvpipe" and top not in ANYWHERE:
                users[top].add(file)
    for package, place in PLACES.items():
        elsewhere = {
            file
            for file in users.pop(package, ())
            if not (file == place or (file.startswith(place) and place[-1] == "/"))
        }
        assert not elsewhere, f"{package} belongs in hvpipe/{place}, not in {sorted(elsewhere)}"
    scattered = {package: sorted(where) for package, where in users.items() if len(where) > 1}
    assert not scattered, f"wanted: one file for each. Received: {scattered}"


def test_the_environment_is_read_in_few_places() -> None:
    names = {"environ", "environb", "getenv", "getenvb"}
    reads = [
        f"hvpipe/{file}:{node.lineno}"
        for file in files()
        if file not in READ_THE_ENVIRONMENT
        for node in nodes(PACKAGE / file)
        if (isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os")
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names})
    ]
    assert not reads


def test_a_file_opens_with_one_sentence() -> None:
    first = {file: (ast.get_docstring(tree(PACKAGE / file)) or "").partition("\n\n")[0] for file in files()}
    assert {file: text for file, text in first.items() if text.rstrip()[-1:] not in (".", ":", "?")} == {}


def test_importing_hvpipe_is_light() -> None:
    code = "import sys, hvpipe; print(*{n.partition('.')[0] for n in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"keras", "matplotlib", "mpi4py", "numpy", "psutil", "rich", "tensorflow"} & set(
        loaded.stdout.split()
    )
    assert not heavy, f"import hvpipe imports {sorted(heavy)}"


# --- Private attributes of Keras -------------------------------------------------------------------------

COMPAT = "keras/compat.py"
# Public attributes that begin with an underscore: of os, sys, torch, namedtuples, and TensorFlow's
# ConcreteFunction. Only Operation's own method can add a control edge to an operation that exists.
ALLOWED_PRIVATE = {"_add_control_input", "_call_flat", "_exit", "_fields", "_getframe", "_replace", "_sleep"}


def files_for_keras() -> list[str]:
    return [file for file in files() if file.startswith("keras/") and file != COMPAT]


def test_only_compat_touches_what_is_private_in_keras() -> None:
    private = [
        f"hvpipe/{file} imports {name}; {COMPAT} is the place for it"
        for file in files_for_keras()
        for name in imports_below(tree(PACKAGE / file), file, with_types=True)
        if name.startswith("keras.src")
    ]
    assert not private


def test_no_object_touches_private_attributes_of_another() -> None:
    """Only compat.py may touch private attributes of Keras objects.

    Our own objects have public names instead.
    """
    touched = [
        f"hvpipe/{file}:{node.lineno}: {ast.unparse(node)}"
        for file in files_for_keras()
        for node in nodes(PACKAGE / file)
        if _is_private(_attribute_of(node)) and not _is_own(node)
    ]
    assert not touched


def _attribute_of(node: ast.AST) -> str:
    """Return the attribute that a node reads or sets: x.name, or getattr(x, "name")."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) > 1:
        name = node.args[1]
        if node.func.id in ("delattr", "getattr", "hasattr", "setattr") and isinstance(name, ast.Constant):
            return str(name.value)
    return ""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in ALLOWED_PRIVATE


def _is_own(node: ast.AST) -> bool:
    owner = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(node, ast.Call):
        owner = node.args[0]
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls")
