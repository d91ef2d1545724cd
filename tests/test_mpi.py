"""The cases of tests/mpi under mpirun, on the numbers of ranks that SUITES names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distributed import ALONE, run_cases


@dataclass(frozen=True)
class Suite:
    """Folders or files of cases, run once for each world size with this environment."""

    name: str
    cases: tuple[str, ...]
    sizes: tuple[int, ...] = (ALONE, 1, 2, 3, 4)
    limit_s: float = 600.0  # some ten times what it takes: the machine may be busy
    env: Mapping[str, str] = field(default_factory=dict)
    only: str = ""  # marks, as pytest's -m takes them


HERE = Path(__file__).parent
DATA_PARALLEL = "mpi/keras/data_parallel"
ENGINE = tuple(f"mpi/comm/test_{name}.py" for name in ("all_reduce", "gather_broadcast", "buckets"))
# Nothing in these waits for another rank.
OF_ONE_RANK = tuple(
    f"mpi/keras/{name}.py"
    for name in ("profiling/test_measure", "graph/test_split_gradient", "graph/test_layer_graph")
)
PIPELINES = tuple(f"mpi/keras/pipeline/test_{name}.py" for name in ("training", "checkpoint", "keras"))
KERAS = tuple(
    name
    for path in sorted((HERE / "mpi" / "keras").rglob("test_*.py"))
    if (name := path.relative_to(HERE).as_posix()) not in (*PIPELINES, *OF_ONE_RANK)
)
NUMBERS = tuple(
    f"{DATA_PARALLEL}/test_{name}.py"
    for name in ("exact", "whole_batch", "ranks_equal", "logs", "finished_weights")
)
DEVICES = "mpi/keras/pipeline/test_device.py"
TWO_TO_A_HOST = {"HVPIPE_RANKS_PER_HOST": "2"}
TINY = {"HVPIPE_SEGMENT_BYTES": "1000", "HVPIPE_SLOT_BYTES": "4096"}

# Everything about Keras once, on two ranks or, where it needs no other, on one; what depends on their number
# on 1, 3 and 4 as well. Several run at a time (`make rest`): the longest first, and beside them those of the
# engine, which mostly wait. xdist gives its workers the first two, the next two, and so on.
SUITES = (
    Suite("keras", KERAS, sizes=(2,), limit_s=1800.0),
    Suite(
        "keras hosts",
        (*NUMBERS, f"{DATA_PARALLEL}/test_stopping.py"),
        (3,),
        1200.0,
        TWO_TO_A_HOST,
        "not slow",
    ),
    Suite("keras", (*NUMBERS, PIPELINES[0], DEVICES), sizes=(4,), limit_s=1800.0, only="not slow"),
    Suite("keras pipelines", PIPELINES, sizes=(2,), limit_s=1800.0),
    Suite("mpi", ("mpi/comm",)),
    Suite("ring", ("mpi/comm",), sizes=(2, 3, 4), env={"HVPIPE_SHARED_MEMORY": "0"}),
    # 2 + 1 and 2 + 2 ranks to a host: shared memory inside, a ring between the first of each.
    Suite("hosts", ("mpi/comm",), sizes=(3, 4), env=TWO_TO_A_HOST),
    # Everything travels in many pieces.
    Suite("tiny pieces", ENGINE, sizes=(2, 3), env={**TWO_TO_A_HOST, **TINY}),
    Suite("keras pipelines", PIPELINES[:2], sizes=(3,), limit_s=1200.0, only="not slow"),
    Suite("keras", (*NUMBERS, *PIPELINES[:2]), sizes=(1,), limit_s=1200.0, only="not slow"),
    Suite(
        "keras",
        (f"{DATA_PARALLEL}/test_life.py", f"{DATA_PARALLEL}/test_logs.py", *OF_ONE_RANK),
        (ALONE,),
        1200.0,
    ),
)


def _runs() -> Iterator[object]:
    for suite in SUITES:
        for size in suite.sizes:
            # The fast half needs no more than two ranks, and has Keras's cases there.
            marks = [pytest.mark.slow] if size > 2 or (size == 1 and "keras" in suite.name) else []
            yield pytest.param(
                suite, size, id=f"{suite.name.replace(' ', '-')}-{size or 'alone'}", marks=marks
            )


@pytest.mark.timeout(max(suite.limit_s for suite in SUITES) + 60)
@pytest.mark.parametrize(("suite", "size"), list(_runs()))
def test_every_case_passes_on_every_rank(
    suite: Suite,
    size: int,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    closing = run_cases(
        size,
        [HERE / cases for cases in suite.cases],
        tmp_path / "ranks",
        limit_s=suite.limit_s,
        env=suite.env,
        options=["-m", marks] if (marks := suite.only or pytestconfig.option.markexpr) else [],
    )
    ranks = f"{size} ranks" if size else "one rank without a launcher"
    record_property("ranks", f"{suite.name}, {ranks}: {closing}")
