"""Prints what the ranks of a failed job said of their ends: each traceback once, the cause last."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hvpipe.blackbox.story import LOST_A_PEER
from hvpipe.environment.job_folder import told_by_rank

# A frame of a traceback, with its line of code and the marks below. TensorFlow puts empty lines between.
_FRAME = re.compile(
    r'^  File "(?P<path>[^"]*)", line \d+, in .*\n(?:    .*\n)*(?:[ \t]*\n(?=  File "))?', re.M
)
_INSTALLED = re.compile(
    r"/(?:site|dist)-packages/(\w+)|/lib/python3\.\d+/(?!(?:site|dist)-packages/)|"
    r"/(hvpipe)/(?:\w+/)*\w+\.py$|^<frozen"
)
# TensorFlow says where an operation was made, but has forgotten it.
_NOWHERE = re.compile(r"^Detected at node .*\n(?:<stack traces unavailable>\n)?|^\t \[\[.*\n", re.M)


def print_told(folder: Path, verdict: str) -> bool:
    """Print what ranks of this host have told, unless the verdict says it; return whether any has told."""
    told = told_by_rank(folder)
    news = {rank: (line, text) for rank, (line, text) in told.items() if not verdict or "\n  " in text}
    print(merged(news), end="", file=sys.stderr, flush=True)
    return bool(told)


def merged(told: Mapping[int, tuple[str, str]]) -> str:
    """Return equal tracebacks once. Errors that follow from the loss of another rank come first, in a line.

    Args:
        told: The error in a line and its traceback, by rank.
    """
    follow = [line for line, _ in told.values() if line.partition(" ")[0] in LOST_A_PEER]
    if len(follow) == len(told):
        follow = []
    ranks_of: dict[str, list[int]] = {}
    for rank, (line, text) in told.items():
        if line not in follow:
            ranks_of.setdefault(shortened(text), []).append(rank)
    first = "".join(f"\nhvpipe: {line}\n" for line in follow)
    return first + "".join(f"\nhvpipe: {_named(ranks)} failed:\n{text}" for text, ranks in ranks_of.items())


def shortened(text: str) -> str:
    """Return a traceback without the frames of installed packages, unless there are no others."""
    frames = list(_FRAME.finditer(text))
    if not any(_package(frame) is None for frame in frames):
        return text
    parts, hidden, at = [], list[str](), 0
    for frame in frames:
        between = text[at : frame.start()]
        if between:
            parts += [_gap(hidden), between]
            hidden = []
        package = _package(frame)
        if package is None:
            parts += [_gap(hidden), frame[0]]
            hidden = []
        else:
            hidden.append(package)
        at = frame.end()
    return _NOWHERE.sub("", "".join([*parts, _gap(hidden), text[at:]]))


def _gap(hidden: list[str]) -> str:
    if not hidden:
        return ""
    packages = ", ".join(dict.fromkeys(hidden))
    return f"  ... {len(hidden)} frame{'s' * (len(hidden) > 1)} of {packages} (--verbose shows them)\n"


def _package(frame: re.Match[str]) -> str | None:
    """Return what a frame belongs to; None if it is the user's."""
    found = _INSTALLED.search(frame["path"])
    return None if found is None else found[1] or found[2] or "Python"


def _named(ranks: list[int]) -> str:
    """Return "rank 2", "ranks 0-3" or "ranks 0, 2"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"
