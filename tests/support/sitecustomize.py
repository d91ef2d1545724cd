"""Halves the CPU time in which a process of the tests imports TensorFlow and Keras. The tests start hundreds.

Python imports `sitecustomize` when it starts, and tests/conftest.py puts this folder on PYTHONPATH.
"""

from __future__ import annotations

import gc
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NotForKeras(importlib.abc.MetaPathFinder):
    """Keras imports these two if they are installed, for wrappers and plots. Others get them as usual."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name in ("sklearn", "matplotlib"):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
                frame = frame.f_back
            if frame.f_globals.get("__name__", "").startswith("keras."):
                raise ModuleNotFoundError(f"{__file__}: Keras does not get {name}", name=name)
        return None


sys.meta_path.insert(0, _NotForKeras())
# Importing TensorFlow and tracing make many objects that stay.
gc.set_threshold(100_000, 20, 20)
