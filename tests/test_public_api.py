"""The public API: its names and signatures are frozen, documented in full, and listed in docs/api.md.

The sources are parsed, not imported, so that `hvpipe.keras` is checked without TensorFlow as well.
After a deliberate change run `python tests/test_public_api.py`, which writes tests/public_api.txt again,
and add a line to CHANGELOG.md.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
FROZEN = Path(__file__).with_name("public_api.txt")
PACKAGES = ("hvpipe", "hvpipe.keras", "hvpipe.plan")
REGENERATE = "python tests/test_public_api.py"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Public:
    """A public name, the module that defines it, and its definition there."""

    name: str
    module: str
    node: Definition


def file_of(module: str) -> Path:
    """Return the file of a module or package."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(file_of(module).read_text())


def exported(package: str) -> list[str]:
    """Return the names in a package's `__all__`.

    Parses `hvpipe.keras`, because importing it needs TensorFlow.
    """
    if package != "hvpipe.keras":
        return sorted(importlib.import_module(package).__all__)
    for node in tree(package).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise AssertionError(f"wanted: a package with __all__. Received: package={package}")


def find(module: str, name: str) -> tuple[str, Definition]:
    """Follow imports, including those under TYPE_CHECKING, to where a name is defined."""
    for node in tree(module).body:
        if isinstance(node, Function | ast.ClassDef) and node.name == name:
            return module, node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return module, node  # type: ignore[return-value]
    for node in ast.walk(tree(module)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("hvpipe"):
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                return find(str(node.module), alias.name)
            if alias.name == "*" and name in _own_names(str(node.module)):
                return find(str(node.module), name)
    raise AssertionError(f"wanted: a definition or an import that leads to one. Received: {module}.{name}")


def _own_names(module: str) -> set[str]:
    return {node.name for node in tree(module).body if isinstance(node, Function | ast.ClassDef)}


@cache
def public() -> tuple[Public, ...]:
    """Return every public name of the three packages."""
    return tuple(
        Public(f"{package}.{name}", *find(package, name))
        for package in PACKAGES
        for name in exported(package)
        if not name.startswith("__")
    )


# Names and signatures -------------------------------------------------------------------------------


def signature(function: Function, *, method: bool = False) -> str:
    """Return the signature without self and cls, such as `(a: int, *, b: str = "x") -> None`."""
    arguments = ast.parse(ast.unparse(function)).body[0].args  # type: ignore[attr-defined]
    if method and not any(_name(d) == "staticmethod" for d in function.decorator_list):
        first = arguments.posonlyargs or arguments.args
        del first[:1]
    returns = f" -> {ast.unparse(function.returns)}" if function.returns else ""
    return f"({ast.unparse(arguments)}){returns}"


def _name(node: ast.expr) -> str:
    """Return the last part of a decorator's or exception's name:

    `dataclass` of `@dataclasses.dataclass(...)`.
    """
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def methods(entry: Public) -> list[Function]:
    """Return a class's public methods and properties, with those of hvpipe's classes that it extends."""
    assert isinstance(entry.node, ast.ClassDef)
    found = {child.name: child for child in entry.node.body if isinstance(child, Function)}
    for base in entry.node.bases:
        if isinstance(base, ast.Name) and base.id != "ABC" and not hasattr(builtins, base.id):
            for method in methods(Public(base.id, *find(entry.module, base.id))):
                found.setdefault(method.name, method)
    return [method for name, method in found.items() if not name.startswith("_")]


def fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    """Return the fields of a dataclass, and nothing for other classes."""
    if not any(_name(decorator) == "dataclass" for decorator in node.decorator_list):
        return []
    return [
        child
        for child in node.body
        if isinstance(child, ast.AnnAssign)
        and isinstance(child.target, ast.Name)
        and not child.target.id.startswith("_")
    ]


def constructor(node: ast.ClassDef) -> Function | None:
    """Return the class's own `__init__`, if it has one."""
    found = [c for c in node.body if isinstance(c, Function) and c.name == "__init__"]
    return found[0] if found else None


def lines_of(entry: Public) -> Iterator[str]:
    """Return the frozen lines of one public name, with the fields and public methods of a class."""
    node = entry.node
    if isinstance(node, Function):
        yield f"{entry.name}{signature(node)}"
    elif isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        init = constructor(node)
        yield f"class {entry.name}({bases})" + (f" = {signature(init, method=True)}" if init else "")
        yield from (f"    {ast.unparse(field)}" for field in fields(node))
        for method in methods(entry):
            if any(_name(decorator) == "property" for decorator in method.decorator_list):
                returns = ast.unparse(method.returns) if method.returns else "Any"
                yield f"    {method.name}: {returns}  (property)"
            else:
                yield f"    {method.name}{signature(method, method=True)}"
    else:
        yield f"{entry.name}"


def text() -> str:
    """Return all names and signatures, as frozen in public_api.txt."""
    return "".join(f"{line}\n" for entry in public() for line in lines_of(entry))


def test_names_and_signatures_are_frozen() -> None:
    frozen = FROZEN.read_text().splitlines()
    changes = [
        line
        for line in difflib.unified_diff(frozen, text().splitlines(), "frozen", "now", n=0, lineterm="")
        if not line.startswith("@@")
    ]
    assert not changes, "\n".join(
        [
            "The public API has changed. If that is meant, run",
            f"    {REGENERATE}",
            "and add a line to CHANGELOG.md: the problem, the change, what users must do.",
            *changes,
        ]
    )


# Documentation --------------------------------------------------------------------------------------


def sections(docstring: str) -> dict[str, str]:
    """Return the text of each Google-style section of a docstring by the section's name."""
    found = re.findall(
        r"^(Args|Attributes|Returns|Raises|Example): *\n((?:    .*\n|\n)+)", docstring + "\n", re.M
    )
    return dict(found)


def entries(section: str) -> set[str]:
    """Return the names that a section describes, as `name: text` or `name (type): text`."""
    return {name.lstrip("*") for name in re.findall(r"^    (\*{0,2}[\w.]+)(?: \(.*?\))?:", section, re.M)}


def parameters(function: Function, *, method: bool) -> set[str]:
    """Return the names of a function's parameters, without self and `**others`."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    if method:
        named = named[1:]
    return {argument.arg for argument in [*named, *arguments.kwonlyargs]}


@cache
def errors() -> frozenset[str]:
    """Return the names of hvpipe's error classes."""
    return frozenset(_own_names("hvpipe.errors"))


def raised(function: Function) -> set[str]:
    """Return the hvpipe errors that a function's own body raises."""
    kinds = {
        _name(child.exc)
        for child in ast.walk(function)
        if isinstance(child, ast.Raise) and child.exc is not None
    }
    return kinds & errors()


def gaps_of_sections(
    node: Function | ast.ClassDef, function: Function | None, wanted: set[str]
) -> Iterator[str]:
    """Return what the sections of a docstring omit."""
    told = sections(ast.get_docstring(node) or "")
    described = entries(told.get("Args", "")) | entries(told.get("Attributes", ""))
    if missing := sorted(wanted - described):
        yield f"Args without {', '.join(missing)}"
    if odd := sorted(entries(told.get("Args", "")) - wanted - {_variadic(function)}):
        yield f"Args with {', '.join(odd)}, which are no parameters"
    if function is None:
        return
    returns = ast.unparse(function.returns) if function.returns else "None"
    if function is node and returns not in ("None", "NoReturn") and "Returns" not in told:
        yield "no Returns"
    if missing := sorted(raised(function) - entries(told.get("Raises", ""))):
        yield f"Raises without {', '.join(missing)}"


def _variadic(function: Function | None) -> str:
    return function.args.kwarg.arg if function is not None and function.args.kwarg is not None else ""


def gaps(entry: Public) -> list[str]:
    """Return what the docstring of a public name omits."""
    node = entry.node
    if not isinstance(node, Function | ast.ClassDef):
        return []
    if not ast.get_docstring(node):
        return ["no docstring"]
    if isinstance(node, Function):
        return list(gaps_of_sections(node, node, parameters(node, method=False)))
    init = constructor(node)
    wanted = parameters(init, method=True) if init else set()
    wanted |= {field.target.id for field in fields(node) if isinstance(field.target, ast.Name)}
    found = list(gaps_of_sections(node, init, {name for name in wanted if not name.startswith("_")}))
    told = ast.get_docstring(node) or ""
    for child in node.body:
        if isinstance(child, Function) and child.name == "__post_init__":
            found += [f"Raises without {kind}" for kind in raised(child) if kind not in told]
    for method in methods(entry):
        words = ast.get_docstring(method) or ""
        found += [f"{method.name} does not say {kind}" for kind in raised(method) if kind not in words]
    if any(ast.unparse(base).startswith("keras.") for base in node.bases):
        return found  # inherited methods are documented on the Keras class
    return found + [
        f"method {method.name} has no docstring" for method in methods(entry) if not ast.get_docstring(method)
    ]


def test_every_public_name_is_documented_in_full() -> None:
    found = {f"{entry.name} ({entry.module})": gaps(entry) for entry in public()}
    told = [f"{name}: {'; '.join(texts)}" for name, texts in found.items() if texts]
    assert not told, f"{len(told)} public names have gaps in their docstrings:\n" + "\n".join(told)


def test_every_public_name_is_in_the_api_pages() -> None:
    """Names are entries of the pages.

    A second name of an object, such as `hvpipe.keras.init`, is in their text.
    """
    page = (ROOT / "docs" / "api.md").read_text()
    # The heading differs if a module has the same name.
    entries_of_page = re.findall(r"^::: ([\w.]+)\n(?:    options:\n      heading: ([\w.]+)\n)?", page, re.M)
    listed = [heading or path for path, heading in entries_of_page]
    first: dict[Definition, str] = {}
    for entry in public():
        first.setdefault(entry.node, entry.name)
    assert sorted(listed) == sorted(first.values())
    others = [entry.name for entry in public() if first[entry.node] != entry.name]
    assert [name for name in others if f"`{name}`" not in page] == []


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    FROZEN.write_text(text())
    print(f"wrote {FROZEN.relative_to(ROOT)}: {len(public())} public names")
