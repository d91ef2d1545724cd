"""Select what pytest collects: the planning half, the rest, and the cases for ranks of an MPI job."""

from __future__ import annotations

import importlib.abc
import os
import re
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# The same examples everywhere, without deadlines, because the machine may be busy.
settings.register_profile(
    "hvpipe", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
# For hours of search: pytest --hypothesis-profile=fuzz FILES
settings.register_profile(
    "fuzz",
    parent=settings.get_profile("hvpipe"),
    derandomize=False,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "20000")),
)
settings.load_profile("hvpipe")

# Cases for any hvpipe.size(). test_mpi.py runs them under mpirun.
RANKS = Path(__file__).parent / "mpi"
SUPPORT = str(Path(__file__).with_name("support"))
# Packages that the planning half must not import, and the modules that import them.
BLOCKED = ("horovod", "keras", "mpi4py", "tensorflow")
IMPORTERS = (
    "bench.faults",
    "distributed",
    "hvpipe.engine.engine",
    "hvpipe.world.tcp",
    "hvpipe.keras",
    "hvpipe.session",
    "native_build",
    *BLOCKED[1:],  # no test imports Horovod, but scripts within tests do
)


def _import_of(module: str) -> str:
    """Return a pattern for `import a.b`, `from a.b import c` and `from a import b`."""
    package, _, name = module.rpartition(".")
    whole = rf"(import|from)\s+{re.escape(module)}\b"
    return rf"{whole}|from\s+{re.escape(package)}\s+import\b[^\n(]*\b{name}\b" if package else whole


# One regular expression, because every worker reads all files of tests.
_IMPORT = re.compile(rf"^[ \t]*({'|'.join(map(_import_of, IMPORTERS))})", re.MULTILINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--planning",
        action="store_true",
        help="only the tests that need neither MPI nor TensorFlow; importing either one fails",
    )
    parser.addoption("--rest", action="store_true", help="only the tests that --planning leaves out")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background jobs ignore Ctrl-C and Ctrl-\, and nohup ignores a hangup. Processes that the tests
    # start would inherit that.
    usual_handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, usual in usual_handlers.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    # Processes that tests start find sitecustomize.py and the other modules there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SUPPORT, os.environ.get("PYTHONPATH")]))
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


@pytest.hookimpl(trylast=True)  # after pytest has deselected by mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.markexpr:
        parts = [item for item in items if item.get_closest_marker("part")]
        config.hook.pytest_deselected(items=parts)
        items[:] = [item for item in items if item not in parts]
    # With several workers, the tests that take minutes start first.
    items.sort(key=lambda item: item.path != RANKS.with_name("test_mpi.py"))
    # xdist gives its first worker the first two tests: with -m, these are the longest suites.
    if config.option.markexpr and hasattr(config, "workerinput"):
        items[1:3] = items[1:3][::-1]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    properties = [p for report in terminalreporter.stats.get("passed", []) for p in report.user_properties]
    lines = [text for name, text in properties if name == "ranks"]
    if lines:
        terminalreporter.section("under mpirun, each case on every rank")
        for line in lines:
            terminalreporter.write_line(line)


class _Blocker(importlib.abc.MetaPathFinder):
    """Import hook that makes MPI and TensorFlow look uninstalled."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} must not be imported by the planning half", name=fullname)
        return None


def _needs_more(test_file: Path) -> bool:
    """Return whether the file imports MPI, TensorFlow or one of their importers, at any level."""
    return bool(_IMPORT.search(test_file.read_text()))
