"""Each public name of Horovod 0.28.1 is in `hvpipe.horovod` with its signature, or docs list the difference.

Both sources are parsed, not imported. `signatures.json` holds Horovod's signatures. To write it again, unpack
Horovod's source archive and run `python tests/horovod/test_signatures.py FOLDER`.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FROZEN = Path(__file__).with_name("signatures.json")
PAGE = ROOT / "docs" / "from-horovod.md"
MODULES = (
    "tensorflow",
    "tensorflow.elastic",
    "tensorflow.keras",
    "tensorflow.keras.callbacks",
    "tensorflow.keras.elastic",
    "keras",
    "keras.callbacks",
    "keras.elastic",
)
# Helpers of Horovod's own modules, which no page of its documentation names.
INTERNAL = {
    "LocalGradientAggregationHelper",
    "check_extension",
    "handle_average_backwards_compatibility",
    "is_version_greater_equal_than",
    "refs_to_vars",
    "run_fn",
    "split_list",
    "vars_to_refs",
}

Signature = list[str]
"""The parameters: "name", "name=default", "*name", "**name"."""
Name = dict[str, Signature]
"""The signature of a function under "", or those of a class: its constructor ("") and public methods."""


@dataclass(frozen=True)
class Source:
    """A folder with a package, whose modules are parsed."""

    folder: Path

    def tree(self, module: str) -> ast.Module | None:
        path = self.folder.joinpath(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return parsed(path) if path.exists() else None

    def find(self, module: str, name: str) -> tuple[str, ast.stmt] | None:
        """Return where a name of a module is defined, and the definition."""
        tree = self.tree(module)
        for node in [] if tree is None else reversed([*statements(tree.body)]):  # the last one holds
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return module, node
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
                return module, node
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == self.package:
                for alias in node.names:
                    if alias.name == "*" and (found := self.find(node.module, name)):
                        return found
                    named = (alias.asname or alias.name) == name
                    if named and self.tree(f"{node.module}.{alias.name}") is None:
                        return self.find(node.module, alias.name)
        return None

    @property
    def package(self) -> str:
        return "horovod" if (self.folder / "horovod").exists() else "hvpipe"

    def public(self, module: str) -> list[str]:
        """Return the names that a module defines or imports from its package."""
        tree = self.tree(module)
        assert tree is not None, module
        names: set[str] = set()
        for node in statements(tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(self.package):
                names |= {alias.asname or alias.name for alias in node.names}
        modules = {part.rsplit(".", 1)[-1] for part in MODULES}
        return sorted(n for n in names if not n.startswith("_") and n not in modules | INTERNAL)

    def described(self, module: str, name: str) -> Name | None:
        """Return the signatures of a name; None if the module has no such name."""
        found = self.find(module, name)
        if found is None:
            return None
        where, node = found
        if isinstance(node, ast.FunctionDef):
            passed_on = parameters(node) == ["*args", "**kwargs"]
            return self._basics(name) if passed_on else {"": parameters(node)}
        if isinstance(node, ast.ClassDef):
            return self._class(where, node)
        value = getattr(node, "value", None)
        if isinstance(value, ast.Attribute) and ast.unparse(value.value) == "_basics":
            return self._basics(value.attr)
        if isinstance(value, ast.Name) and value.id != name:
            return self.described(where, value.id)
        return {}

    def _basics(self, name: str) -> Name:
        """Return the signature of a method of the one object that many of Horovod's functions belong to."""
        found = self.find("horovod.common.basics", "HorovodBasics")
        assert found is not None
        assert isinstance(found[1], ast.ClassDef)
        method = self._class(found[0], found[1]).get(name)
        return {} if method is None else {"": method}

    def _class(self, module: str, node: ast.ClassDef) -> Name:
        methods: Name = {}
        for base in node.bases:
            found = self.find(module, base.id) if isinstance(base, ast.Name) else None
            if found is not None and isinstance(found[1], ast.ClassDef):
                methods |= self._class(found[0], found[1])
        for member in node.body:
            if not isinstance(member, ast.FunctionDef) or member.name == "call":
                continue  # `call` is Keras' own
            if member.name == "__init__" or member.name[0] != "_":
                static = any(ast.unparse(each) == "staticmethod" for each in member.decorator_list)
                name = "" if member.name == "__init__" else member.name
                methods[name] = parameters(member)[0 if static else 1 :]
        return methods


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those inside of `if` and `try` included."""
    for node in body:
        yield node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try):
                yield from statements(getattr(node, inner, []))


def assigned(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def parameters(node: ast.FunctionDef) -> Signature:
    """Return the parameters without annotations."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + [*given.defaults]
    listed = [
        arg.arg if default is None else f"{arg.arg}={ast.unparse(default)}"
        for arg, default in zip(plain, defaults, strict=True)
    ]
    if given.vararg is not None:
        listed.append(f"*{given.vararg.arg}")
    for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        listed.append(f"*, {arg.arg}" + ("" if default is None else f"={ast.unparse(default)}"))
    if given.kwarg is not None:
        listed.append(f"**{given.kwarg.arg}")
    return listed


def agrees(theirs: Signature, ours: Signature) -> bool:
    """Return whether calls for `theirs` mean the same for `ours`, which may take more at its end."""
    if any(each.startswith("**") for each in theirs) and not any(each.startswith("**") for each in ours):
        return False
    wanted = [each for each in theirs if not each.startswith("*")]
    same = all(
        mine == other or mine.split("=")[0] == other for mine, other in zip(ours, wanted, strict=False)
    )
    rest = ours[len(wanted) :]
    return same and len(ours) >= len(wanted) and all("=" in each or each[0] == "*" for each in rest)


def differences() -> list[str]:
    """Return a row of the documentation's table for each name that differs from Horovod's."""
    source, rows = Source(ROOT), []
    for module, names in json.loads(FROZEN.read_text()).items():
        for name, theirs in names.items():
            ours = source.described(f"hvpipe.horovod.{module}", name)
            if ours is None:
                rows.append(f"| `{module}.{name}` | | missing |")
                continue
            for method, signature in theirs.items():
                called = f"`{module}.{name}{f'.{method}' if method else ''}`"
                found = ours.get(method)
                if found is None or not agrees(signature, found):
                    here = "missing" if found is None else shown(found)
                    rows.append(f"| {called} | {shown(signature)} | {here} |")
    return rows


def shown(signature: Signature) -> str:
    return f"`({', '.join(signature)})`"


def test_every_difference_is_in_the_documentation() -> None:
    section = PAGE.read_text().split("## Signatures that differ")[1].split("\n## ")[0]
    listed = [line for line in section.splitlines() if line.startswith("| `")]
    assert listed == differences(), "python tests/horovod/test_signatures.py prints the rows"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        print("\n".join(differences()))
    else:
        horovod, frozen = Source(Path(sys.argv[1])), {}
        for part in MODULES:
            listed = horovod.public(f"horovod.{part}")
            if part == "tensorflow.elastic":  # it imports others for its own use
                listed = [name for name in listed if name not in frozen["tensorflow"]]
            frozen[part] = {name: horovod.described(f"horovod.{part}", name) for name in listed}
        FROZEN.write_text(json.dumps(frozen, separators=(",", ":")).replace("},", "},\n") + "\n")
