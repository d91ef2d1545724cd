"""Which tests are collected where: the planning half, and the cases that are for the ranks of an MPI job."""

from __future__ import annotations

import ast
import importlib.abc
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere, and no clock that decides: the machine may be busy.
settings.register_profile(
    "hvpipe", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("hvpipe")

# Cases in terms of hvpipe.size(): test_mpi.py runs them under mpirun.
RANKS = Path(__file__).parent / "mpi"
# Out of reach of the planning half, and the modules that bring them in.
BLOCKED = ("horovod", "keras", "mpi4py", "tensorflow")
BRINGING_IN = (
    "distributed",
    "hvpipe.comm.engine",
    "hvpipe.keras",
    "hvpipe.session",
    "native_build",
    *BLOCKED,
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--planning",
        action="store_true",
        help="only the tests that need neither MPI nor TensorFlow, with both out of reach",
    )
    parser.addoption("--rest", action="store_true", help="only the tests that --planning leaves out")


def pytest_configure(config: pytest.Config) -> None:
    # What a shell starts in the background ignores Ctrl-C and Ctrl-\, and what nohup starts a hangup; so
    # would all that the tests start.
    usual_handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, usual in usual_handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if config.getoption("planning"):
        sys.meta_path.insert(0, _Blocker())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        if config.getoption("planning") and _needs_more(collection_path):
            return True
        in_rank_folder = RANKS in collection_path.parents
        if config.getoption("rest") and not in_rank_folder and not _needs_more(collection_path):
            return True
    if collection_path == RANKS:
        asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
        return None if any(p == collection_path or collection_path in p.parents for p in asked) else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Where several run at a time, what takes minutes should not be what begins last.
    items.sort(key=lambda item: item.path.name != "test_mpi.py")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    properties = [p for report in terminalreporter.stats.get("passed", []) for p in report.user_properties]
    lines = [text for name, text in properties if name == "ranks"]
    if lines:
        terminalreporter.section("under mpirun, each case on every rank")
        for line in lines:
            terminalreporter.write_line(line)


class _Blocker(importlib.abc.MetaPathFinder):
    """Makes MPI and TensorFlow look uninstalled."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is out of reach of the planning half", name=fullname)
        return None


def _needs_more(test_file: Path) -> bool:
    """True where the file imports, anywhere in it, MPI, TensorFlow or what brings them in."""
    for node in ast.walk(ast.parse(test_file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        if any(name == b or name.startswith(b + ".") for name in names for b in BRINGING_IN):
            return True
    return False
