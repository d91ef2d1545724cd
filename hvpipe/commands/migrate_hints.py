"""Hints for a Horovod script: where hvpipe behaves differently, or has something that does more."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hvpipe.commands.migrate_imports import (
    COUNTERPARTS,
    Note,
    dotted_name,
    is_module_name,
    loaded_module,
)

Kind = Literal["name", "argument", "call", "string"]


@dataclass(frozen=True)
class _Hint:
    """What to look for, and what to say.

    Args:
        kind: "name": a name of Horovod, without the module. "argument": of a call of such a name. "call": of
            any function or method, with a name of Horovod among the arguments. "string": a whole string.
        pattern: A regular expression for it.
        text: The advice; `{}` stands for what was found.
        with_fit: Whether it holds only for files that call `compile` or `fit`.
    """

    kind: Kind
    pattern: str
    text: str
    with_fit: bool = False


_HINTS = (
    _Hint(
        "name",
        "DistributedOptimizer",
        "under compile and fit, `hk.data_parallel(model)` of hvpipe.keras does more: it overlaps"
        " communication with computing, starts all ranks equal, and averages metrics",
        with_fit=True,
    ),
    _Hint(
        "argument",
        "backward_passes_per_step",
        "with hk.data_parallel, give the Keras optimizer gradient_accumulation_steps=k instead; it averages"
        " the k gradients",
    ),
    _Hint(
        "name",
        r"elastic\.run",
        "a lost rank ends a loop in it. `fit` with hk.data_parallel goes on under hvpipe run --elastic:"
        " docs/from-horovod.md",
    ),
    _Hint(
        "call",
        "set_visible_devices",
        "not needed: hvpipe gives each rank its GPU at init. It does no harm",
    ),
    _Hint(
        "string",
        "HOROVOD_FUSION_THRESHOLD",
        "it sets the size of a bucket here, too. Unset it and compare: large buckets hide less communication",
    ),
    _Hint(
        "string",
        "HOROVOD_(?:LOCAL_|CROSS_)?(?:RANK|SIZE)",
        "hvpipe does not set {}: call the function of that name, such as hvd.rank()",
    ),
    _Hint(
        "string",
        "HOROVOD_(?!FUSION_THRESHOLD|TIMELINE$|LOG_LEVEL|STALL_|(?:LOCAL_|CROSS_)?(?:RANK|SIZE)).+",
        "{} has no effect in hvpipe",
    ),
    _Hint(
        "string",
        r"horovod(?:\.(?:tensorflow|keras|torch|mxnet|spark|ray)(?:\.\w+)*)",
        "this string was left unchanged. If it names a module to import, update it",
    ),
)


def find_hints(tree: ast.Module) -> tuple[Note, ...]:
    """Return the hints for a file, each once, at the first line where it holds.

    Args:
        tree: The file, before or after its imports moved.

    Returns:
        The hints, by line.
    """
    names = _names_of_horovod(tree)
    fits = any(isinstance(node, ast.Attribute) and node.attr in ("compile", "fit") for node in ast.walk(tree))
    lines: dict[str, set[int]] = {}
    for kind, word, line in _words(tree, names):
        for hint in _HINTS:
            if hint.kind == kind and (fits or not hint.with_fit) and re.fullmatch(hint.pattern, word):
                lines.setdefault(hint.text.format(word), set()).add(line)
    notes = [Note(min(found), "hint", text + _also(found)) for text, found in lines.items()]
    return tuple(sorted(notes, key=lambda note: note.line))


def _also(lines: set[int]) -> str:
    rest = sorted(lines)[1:]
    return f" (also line{'s' * (len(rest) > 1)} {', '.join(map(str, rest))})" if rest else ""


def _words(tree: ast.Module, names: dict[str, str]) -> Iterator[tuple[Kind, str, int]]:
    """Yield each word that a hint may be about: its kind, itself, its line."""
    loaded = {id(loaded_module(node)) for node in ast.walk(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = _in_horovod(node, names)
            if name is not None:
                yield "name", name, node.lineno
        elif isinstance(node, ast.Call):
            if _in_horovod(node.func, names) is not None:
                for keyword in node.keywords:
                    yield "argument", keyword.arg or "", keyword.value.lineno
            if any(_in_horovod(one, names) for value in node.args for one in ast.walk(value)):
                yield "call", (dotted_name(node.func) or "").rpartition(".")[2], node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in loaded:
            yield "string", node.value, node.lineno


def _in_horovod(node: ast.AST, names: dict[str, str]) -> str | None:
    """Return the name that an expression has in Horovod, without the module (`elastic.run`); or None."""
    spelled = dotted_name(node)
    if spelled is None:
        return None
    first, dot, rest = _without_hvpipe(spelled).partition(".")
    if first not in names:
        return None
    name = names[first] + dot + rest
    for module in ("horovod.tensorflow.keras.", "horovod.tensorflow.", "horovod.keras."):
        if name.startswith(module):
            return name.removeprefix(module)
    return None


def _names_of_horovod(tree: ast.Module) -> dict[str, str]:
    """Return what each name of the file stands for in Horovod: {"hvd": "horovod.tensorflow"}."""
    names = {"horovod": "horovod"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = _without_hvpipe(alias.name)
                if alias.asname is not None and is_module_name(module):
                    names[alias.asname] = module
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            package = _without_hvpipe(node.module or "")
            if is_module_name(package):
                names.update({alias.asname or alias.name: f"{package}.{alias.name}" for alias in node.names})
        elif isinstance(node, ast.Assign) and isinstance(loaded := loaded_module(node.value), ast.Constant):
            module = _without_hvpipe(str(loaded.value))
            if module in COUNTERPARTS:
                names.update({target.id: module for target in node.targets if isinstance(target, ast.Name)})
    return names


def _without_hvpipe(name: str) -> str:
    return name.removeprefix("hvpipe.") if is_module_name(name.removeprefix("hvpipe.")) else name
