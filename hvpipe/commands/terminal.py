"""The properties of the terminal that the commands print on."""

from __future__ import annotations

import sys
from collections.abc import Mapping


def has_colours(environ: Mapping[str, str]) -> bool:
    """Tell whether to print in colours: on a terminal, unless NO_COLOR is set."""
    return sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in environ
