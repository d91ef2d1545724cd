"""The cases of tests/mpi and tests/mpi_keras on 1, 2, 3 and 4 ranks under mpirun, and on one without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distributed import ALONE, CLOSING_LINES, run_cases

# More ranks than the fast half needs.
SLOW_SIZES = (3, 4)


@dataclass(frozen=True)
class Suite:
    """A folder of cases, run once for each world size with this environment."""

    name: str
    folder: str
    limit_s: float
    sizes: tuple[int, ...] = (ALONE, 1, 2, 3, 4)
    env: Mapping[str, str] = field(default_factory=dict)


SUITES = (
    Suite("mpi", "mpi", limit_s=180.0),
    Suite("ring", "mpi", limit_s=180.0, sizes=(2, 3, 4), env={"HVPIPE_SHARED_MEMORY": "0"}),
    Suite("keras", "mpi_keras", limit_s=600.0),
)


def _runs() -> Iterator[object]:
    for suite in SUITES:
        for size in suite.sizes:
            marks = [pytest.mark.slow] if size in SLOW_SIZES else []
            yield pytest.param(suite, size, id=f"{suite.name}-{size or 'alone'}", marks=marks)


@pytest.mark.timeout(max(suite.limit_s for suite in SUITES) + 60)
@pytest.mark.parametrize(("suite", "size"), list(_runs()))
def test_every_case_passes_on_every_rank(
    suite: Suite, size: int, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    closing = run_cases(
        size,
        Path(__file__).parent / suite.folder,
        tmp_path / "ranks",
        limit_s=suite.limit_s,
        env=suite.env,
        options=["-m", pytestconfig.option.markexpr] if pytestconfig.option.markexpr else [],
    )
    ranks = f"{size} ranks" if size else "one rank without a launcher"
    pytestconfig.stash[CLOSING_LINES][f"{suite.name}, {ranks}"] = closing
