"""`hvpipe.plan` offers all of planning, whatever was imported before it."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import hvpipe.plan

SOURCE = Path(hvpipe.plan.__file__)
FUNCTIONS = [name for name in hvpipe.plan.__all__ if inspect.isfunction(getattr(hvpipe.plan, name))]
CLASSES = [name for name in hvpipe.plan.__all__ if inspect.isclass(getattr(hvpipe.plan, name))]


def test_type_checkers_see_the_names_that_python_finds() -> None:
    (block,) = (node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    seen = {
        (node.module, alias.name, alias.asname)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {(module, name, name) for module, names in hvpipe.plan._NAMES_BY_MODULE.items() for name in names}
    assert seen == found


def test_each_name_is_that_of_its_module() -> None:
    for module, names in hvpipe.plan._NAMES_BY_MODULE.items():
        for name in names:
            assert getattr(hvpipe.plan, name) is getattr(import_module(module), name)
    assert dir(hvpipe.plan) == sorted(hvpipe.plan.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"'hvpipe\.plan' has no attribute 'perfect'"):
        hvpipe.plan.perfect  # noqa: B018


SUBMODULES = "import hvpipe.plan.exact, hvpipe.plan.explain, hvpipe.forecast.simulate"
NAMES = "from hvpipe.plan import exact, explain, forecast, partition, simulate"


@pytest.mark.parametrize("order", [(SUBMODULES, NAMES), (NAMES, SUBMODULES)])
def test_a_function_is_not_hidden_by_its_module(order: tuple[str, str]) -> None:
    check = (
        "import hvpipe.plan, types; from hvpipe.plan.exact import exact as deep; "
        "names = [hvpipe.plan.exact, hvpipe.plan.explain, hvpipe.plan.simulate, exact, explain, partition]; "
        "assert all(isinstance(name, types.FunctionType) for name in names), names; assert deep is exact"
    )
    code = "\n".join([*order, check])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_package_imports_no_large_library() -> None:
    code = "import sys, hvpipe.plan; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert not {"numpy", "matplotlib", "tensorflow", "mpi4py"} & set(loaded.stdout.split())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_documents_its_arguments_and_result(name: str) -> None:
    text = inspect.getdoc(getattr(hvpipe.plan, name)) or ""
    signature = inspect.signature(getattr(hvpipe.plan, name))
    assert "\nArgs:\n" in text
    assert "\nReturns:\n" in text or signature.return_annotation == "None"
    assert "\nExample:\n" in text
    assert [parameter for parameter in signature.parameters if f"    {parameter}: " not in text] == []


@pytest.mark.parametrize("name", [name for name in CLASSES if name != "PlanError"])
def test_a_class_documents_its_fields(name: str) -> None:
    text = inspect.getdoc(getattr(hvpipe.plan, name)) or ""
    parameters = inspect.signature(getattr(hvpipe.plan, name)).parameters
    assert [parameter for parameter in parameters if f"    {parameter}: " not in text] == []
