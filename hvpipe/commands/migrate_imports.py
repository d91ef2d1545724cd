"""Moves the imports of a Python file from `horovod` to `hvpipe.horovod`, and the names that they bind.

Every edit inserts `hvpipe.` before the word `horovod`, so nothing else in the file can change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hvpipe.commands.migrate_source import PythonSource, parse_quietly

# The modules of Horovod that hvpipe.horovod has, too.
COUNTERPARTS = frozenset(
    {
        *("horovod", "horovod.keras", "horovod.keras.callbacks", "horovod.keras.elastic"),
        *("horovod.tensorflow", "horovod.tensorflow.elastic", "horovod.tensorflow.keras"),
        *("horovod.tensorflow.keras.callbacks", "horovod.tensorflow.keras.elastic"),
    }
)
# What `import horovod` offers; Horovod's other names there have no counterpart.
_IN_THE_PACKAGE = frozenset({"keras", "tensorflow"})
# Modules of Horovod without a counterpart, beside functions and classes of the same package.
_ABSENT = frozenset(
    f"horovod.tensorflow.{name}"
    for name in (
        *("compression", "data", "functions", "gradient_aggregation", "gradient_aggregation_eager"),
        *("mpi_ops", "sync_batch_norm", "util"),
    )
)
_INSTEAD = {
    **dict.fromkeys(("horovod.torch", "horovod.mxnet"), "it trains Keras 3 on TensorFlow"),
    **dict.fromkeys(("horovod.spark", "horovod.ray"), "start the script with `hvpipe run`"),
    **dict.fromkeys(("horovod.run", "horovod.runner"), "start the script with `hvpipe run`"),
    "horovod.common": "hvpipe.horovod.tensorflow.elastic has its exceptions",
}
# Functions of importlib and pytest that take the name of a module.
_LOADERS = ("find_spec", "import_module", "importorskip")

_WORD = "hvpipe."
_MODULE = re.compile(r"horovod(?:\.\w+)*")
_FROM = re.compile(r"from(?:[ \t\f]|\\(?:\r\n|\r|\n))+")
_QUOTES = re.compile(r"[rRuU]?(?:\"\"\"|'''|\"|')")

_Edited = ast.alias | ast.Constant | ast.ImportFrom | ast.Name


@dataclass(frozen=True)
class Note:
    """What a user should know about a line.

    Args:
        line: The number of the line, from 1.
        kind: "not moved" for what must be changed by hand, or "hint".
        text: The advice.
    """

    line: int
    kind: str
    text: str


@dataclass(frozen=True)
class _Insertion:
    node: _Edited
    offset: int


@dataclass(frozen=True)
class Moved:
    """A file whose imports have moved.

    Args:
        after: The new file.
        lines: The numbers of the lines that changed.
        notes: What could not be moved, by line.
    """

    after: bytes
    lines: tuple[int, ...]
    notes: tuple[Note, ...]


def move_imports(source: PythonSource) -> Moved:
    """Move the imports of Horovod in a file, and the uses of names that they bind.

    The result is parsed again: only the nodes that were meant to change may differ.

    Args:
        source: The file.

    Returns:
        The new file, and what could not be moved.
    """
    found = [*_of_statements(source), *_of_plain_imports(source), *_of_loaders(source)]
    notes = [one for one in found if isinstance(one, Note)]
    insertions = [one for one in found if isinstance(one, _Insertion)]
    after = source.with_insertions(_WORD, (one.offset for one in insertions))
    nodes = {id(one.node): one.node for one in insertions}
    lines = {source.line_at(one.offset) for one in insertions}
    if not _is_expected(source.tree, after, nodes):
        # For example f"{horovod.size()=}", which prints its own source.
        notes.append(_left(min(lines), "an edit of the imports would change more than names: edit by hand"))
        after, lines = source.raw, set()
    return Moved(after, tuple(sorted(lines)), tuple(sorted(notes, key=lambda note: note.line)))


def is_module_name(name: str | None) -> bool:
    """Tell whether a dotted name is that of Horovod or of a module in it."""
    return name is not None and (name == "horovod" or name.startswith("horovod."))


def dotted_name(node: ast.AST) -> str | None:
    """Return the dotted name that an expression spells (`a.b.c`), or None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None


def loaded_module(node: ast.AST) -> ast.expr | None:
    """Return the argument that names the module, if an expression is a call such as `import_module(...)`."""
    if not isinstance(node, ast.Call):
        return None
    function = (dotted_name(node.func) or "").rpartition(".")[2]
    if function not in (*_LOADERS, "__import__"):
        return None
    by_name = [keyword.value for keyword in node.keywords if keyword.arg in ("modname", "name")]
    return next(iter([*node.args, *by_name]), None)


def _of_statements(source: PythonSource) -> Iterator[_Insertion | Note]:
    """Yield the edits of `import ... as` and `from ... import`, and notes about other frameworks."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if not is_module_name(alias.name):
                    continue
                if alias.name not in COUNTERPARTS:
                    yield _left(alias.lineno, _no_counterpart(alias.name))
                elif alias.asname is not None:
                    yield _insertion(source, alias, source.offset(alias))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and is_module_name(node.module):
            missing = _missing_of(node)
            if missing is not None:
                rest = "; import the others in a line of their own" if len(node.names) > 1 else ""
                yield _left(node.lineno, _no_counterpart(missing) + rest)
                continue
            start = source.offset(node)
            words = _FROM.match(source.text, start)
            yield _insertion(source, node, start if words is None else words.end())


def _missing_of(node: ast.ImportFrom) -> str | None:
    """Return the first thing without a counterpart that a `from horovod... import` asks for, or None."""
    if node.module not in COUNTERPARTS:
        return node.module
    names = (f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*")
    return next((name for name in names if _is_missing(name)), None)


def _of_plain_imports(source: PythonSource) -> Iterator[_Insertion | Note]:
    """Yield the edits of `import horovod...` without `as`, and of each use of the name `horovod`.

    Such an import binds the package, so it moves with all uses, or not at all.
    """
    plain = [
        alias
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname is None and is_module_name(alias.name)
    ]
    moving = [alias for alias in plain if alias.name in COUNTERPARTS]
    if not moving:
        return
    stays = len(moving) < len(plain)  # `import horovod.torch` goes on binding the name
    uses = list(_uses(source.tree, stays))
    obstacle = _obstacle(source, uses, stays)
    for alias in moving:
        if obstacle is not None:
            yield _left(alias.lineno, obstacle)
        else:
            yield _insertion(source, alias, source.offset(alias))
    if obstacle is None:
        for name, _ in uses:
            yield _insertion(source, name, source.offset(name))


def _uses(tree: ast.Module, stays: bool) -> Iterator[tuple[ast.Name, str]]:
    """Yield each use of the name `horovod`, and the whole dotted name there.

    If the name stays bound, uses without a counterpart stay as well.
    """
    above = {id(node.value): node for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "horovod" and isinstance(node.ctx, ast.Load):
            top: ast.expr = node
            while id(top) in above:
                top = above[id(top)]
            dotted = dotted_name(top) or node.id
            if not stays or (dotted != "horovod" and not _is_missing(dotted)):
                yield node, dotted


def _obstacle(source: PythonSource, uses: Iterable[tuple[ast.Name, str]], stays: bool) -> str | None:
    """Return why the name `horovod` cannot become `hvpipe.horovod` in this file; None if it can."""
    for node in ast.walk(source.tree):
        for name in ("horovod", "hvpipe"):
            if _binds(node, name):
                return f"line {getattr(node, 'lineno', '?')} binds the name {name}, too: import with `as`"
    for node, dotted in uses:
        if not stays and _is_missing(dotted):
            return f"line {node.lineno} needs it: {_no_counterpart(dotted)}"
        if not source.text.startswith("horovod", source.offset(node)):  # an f-string, before Python 3.12
            return f"line {node.lineno} uses the name inside a string: import with `as`"
    return None


def _binds(node: ast.AST, name: str) -> bool:
    """Tell whether a node binds a name in another way than `import name` and `import name.module`."""
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Import):
        return any(alias.asname == name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return any((alias.asname or alias.name) == name for alias in node.names)
    if isinstance(node, ast.Global | ast.Nonlocal):
        return name in node.names
    if isinstance(node, ast.alias | ast.keyword):
        return False
    # Functions, classes, arguments, `except ... as`, patterns, type parameters.
    return name in (getattr(node, "name", None), getattr(node, "arg", None), getattr(node, "rest", None))


def _of_loaders(source: PythonSource) -> Iterator[_Insertion | Note]:
    """Yield the edits of `import_module("horovod...")` and the like."""
    for node in ast.walk(source.tree):
        module = loaded_module(node)
        if not isinstance(node, ast.Call) or module is None:
            continue
        name = module.value if isinstance(module, ast.Constant) else None
        if not isinstance(name, str):
            inside = (one.value for one in ast.walk(module) if isinstance(one, ast.Constant))
            if any(isinstance(text, str) and is_module_name(text.rstrip(".")) for text in inside):
                yield _left(node.lineno, "the name of this module is only known when the script runs")
        elif name.startswith("."):
            package = [*node.args[1:2], *(word.value for word in node.keywords if word.arg == "package")]
            if any(isinstance(one, ast.Constant) and is_module_name(str(one.value)) for one in package):
                yield _left(node.lineno, "write the full name of the module")
        elif _MODULE.fullmatch(name):
            yield _of_loader(source, node, module, name)


def _of_loader(source: PythonSource, call: ast.Call, module: ast.expr, name: str) -> _Insertion | Note:
    assert isinstance(module, ast.Constant)
    if name not in COUNTERPARTS:
        return _left(call.lineno, _no_counterpart(name))
    if dotted_name(call.func) == "__import__":
        return _left(call.lineno, f"write importlib.import_module('{_WORD}{name}')")
    start = source.offset(module)
    quotes = _QUOTES.match(source.text, start)
    return _insertion(source, module, start if quotes is None else quotes.end())


def _insertion(source: PythonSource, node: _Edited, offset: int) -> _Insertion | Note:
    if not source.text.startswith("horovod", offset):  # such as "\x68orovod"
        return _left(node.lineno, "edit by hand: the name is spelled in an unusual way")
    return _Insertion(node, offset)


def _is_missing(name: str) -> bool:
    """Tell whether a dotted name of Horovod has no counterpart."""
    parts = name.split(".")
    outside = len(parts) > 1 and parts[1] not in _IN_THE_PACKAGE
    if outside or any(".".join(parts[:length]) in _ABSENT for length in range(3, len(parts) + 1)):
        return True
    modules = [".".join(parts[:length]) for length in range(2, len(parts) + 1)]
    last = max((module for module in modules if module in COUNTERPARTS), key=len, default=name)
    rest = name[len(last) + 1 :].partition(".")[0]
    return bool(rest) and f"{last}.{rest}" not in COUNTERPARTS and rest not in _names_in(last)


@cache
def _names_in(module: str) -> frozenset[str]:
    """Return the names of a counterpart, without importing it: that would import TensorFlow."""
    path = Path(__file__).parents[1] / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name for alias in node.names)
            if isinstance(node, ast.ImportFrom) and "*" in found:
                found = (found - {"*"}) | _names_in(str(node.module).removeprefix(_WORD))
    return frozenset(found)


def _no_counterpart(name: str) -> str:
    package = ".".join(name.split(".")[:2])
    instead = f": {_INSTEAD[package]}" if package in _INSTEAD else ""
    return f"{name} has no counterpart in hvpipe{instead}"


def _left(line: int, text: str) -> Note:
    return Note(line, "not moved", text)


def _is_expected(before: ast.Module, raw_after: bytes, edited: Mapping[int, _Edited]) -> bool:
    """Tell whether a new file differs from the old one in the edited nodes alone, and there as meant.

    Args:
        before: The old file.
        raw_after: The new file.
        edited: The edited nodes of the old file, by their id.
    """
    try:
        after = parse_quietly(raw_after)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    pairs: list[tuple[object, object]] = [(before, after)]
    while pairs:  # not recursive: long sums are deep trees
        old, new = pairs.pop()
        if id(old) in edited and isinstance(old, ast.Name):
            if not isinstance(new, ast.AST) or dotted_name(new) != f"{_WORD}{old.id}":
                return False
        elif isinstance(old, ast.AST):
            if type(old) is not type(new):
                return False
            for field in old._fields:
                value = getattr(old, field, None)
                if id(old) in edited and field == _SPELLED_IN.get(type(old)):
                    value = f"{_WORD}{value}"
                pairs.append((value, getattr(new, field, None)))
        elif isinstance(old, list):
            if not isinstance(new, list) or len(old) != len(new):
                return False
            pairs.extend(zip(old, new, strict=True))
        elif type(old) is not type(new) or repr(old) != repr(new):
            return False
    return True


# The field of a node that holds the name of the module.
_SPELLED_IN: dict[type[ast.AST], str] = {ast.alias: "name", ast.ImportFrom: "module", ast.Constant: "value"}
