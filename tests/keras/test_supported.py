"""Which Keras hvpipe works with: it has all private names, or one line says what to install."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import hvpipe.keras
from hvpipe.errors import InitError
from hvpipe.keras import compat
from hvpipe.keras.supported import check_installed
from hvpipe.world.versions import NEWEST_KERAS, OLDEST_KERAS

pytestmark = pytest.mark.quick

SAYS = (
    rf"Keras {keras.__version__} lacks\. .*tried with Keras {OLDEST_KERAS} to {NEWEST_KERAS}: "
    rf"pip install 'keras>=3\.12,<={NEWEST_KERAS}'\. Received: "
)
# Names of this module, and one of TensorFlow that it does without.
NOT_NEEDED = {"_", "_dataset"}


def test_this_keras_has_all_private_names() -> None:
    check_installed()
    assert compat.missing_members() == []


def test_a_keras_without_a_member(monkeypatch: Any) -> None:
    monkeypatch.setitem(compat._MEMBERS, keras.Sequential, ("_functional", "_gone", "fit", "_gone_too"))
    with pytest.raises(InitError, match=f"{SAYS}no Sequential._gone, Sequential._gone_too"):
        check_installed()


def test_a_keras_without_a_private_module_or_name(monkeypatch: Any) -> None:
    monkeypatch.delattr(hvpipe.keras, "compat")
    monkeypatch.delitem(sys.modules, "hvpipe.keras.compat")
    monkeypatch.delattr(sys.modules["keras.src.utils.naming"], "to_snake_case")
    with pytest.raises(InitError, match=f"{SAYS}cannot import name 'to_snake_case'") as raised:
        check_installed()
    assert raised.value.__suppress_context__  # one traceback, whose last line says it all


def test_the_table_has_every_member_that_the_file_uses() -> None:
    nodes = list(ast.walk(ast.parse(Path(compat.__file__).read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    private = {name for name in used if name.startswith("_") and name.isidentifier() and name[:2] != "__"}
    assert private - NOT_NEEDED <= {name for names in compat._MEMBERS.values() for name in names}
