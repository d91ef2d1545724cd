"""Run the cases of tests/mpi under mpirun, on the numbers of ranks that SUITES lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from distributed import ALONE, run_cases


@dataclass(frozen=True)
class Suite:
    """Folders or files of cases. Each world size runs them once, in one job, with this environment.

    `only` selects cases by mark, as pytest's -m does. A suite with `part_of` repeats cases of other suites,
    and runs only if -m selects that mark.
    """

    name: str
    cases: tuple[str, ...]
    sizes: tuple[int, ...]
    limit_s: float = 600.0  # some ten times the usual time, because the machine may be busy
    env: Mapping[str, str] = field(default_factory=dict)
    only: str = ""
    part_of: str = ""


HERE = Path(__file__).parent
KERAS = "mpi/keras"
DATA_PARALLEL = f"{KERAS}/data_parallel"
# The device cases come last, because they leave the session's engine on the tests' device.
PIPELINES = tuple(
    f"{KERAS}/pipeline/{path.name}"
    for path in sorted(
        (HERE / KERAS / "pipeline").glob("test_*.py"), key=lambda path: (path.stem == "test_device", path)
    )
)
# One process can prove these cases, because they exchange nothing.
ONE_PROCESS = tuple(
    f"{KERAS}/{name}.py"
    for name in (
        "data_parallel/test_bucket_update",
        "data_parallel/test_gradient_compressors",
        "profiling/test_measure",
        "graph/test_split_gradient",
        "graph/test_layer_graph",
    )
)
OTHER_KERAS = tuple(
    name
    for path in sorted((HERE / KERAS).rglob("test_*.py"))
    if (name := path.relative_to(HERE).as_posix()) not in (*PIPELINES, *ONE_PROCESS)
)
EVERY_KERAS = (*OTHER_KERAS, *PIPELINES)
# The sums of gradients, which data parallel cases test too, are the engine's: it runs on 3 and 4 ranks.
# Three ranks prove what two cannot: shares that are no halves, several others, replicas of unequal numbers.
ON_THREE = (
    f"{DATA_PARALLEL}/test_exact.py::test_step_gives_the_bits_of_none[momentum]",
    f"{DATA_PARALLEL}/test_exact.py::test_step_gives_the_bits_of_none[table]",
    f"{DATA_PARALLEL}/test_checks.py::test_the_first_variable_and_rank_that_differ_are_named",
    f"{DATA_PARALLEL}/test_compression.py::test_sums_are_numpys[int8-False]",
    f"{DATA_PARALLEL}/test_local.py::test_weights_are_those_of_the_formula",
    f"{DATA_PARALLEL}/test_logs.py::test_history_of_unequal_ranks",
    f"{DATA_PARALLEL}/test_ranks_equal.py::test_equal_after_every_epoch_and_repeatable[step]",
    f"{DATA_PARALLEL}/test_untrained_state.py::test_aggregation_says_how_ranks_combine_a_variable",
    f"{DATA_PARALLEL}/test_whole_batch.py::test_unequal_batches[accumulation]",
    f"{KERAS}/pipeline/test_replicas.py::test_replicas_of_stages_train_alike",
    f"{KERAS}/pipeline/test_replicas.py::test_replicas_that_drift_apart_are_noticed",
    f"{KERAS}/pipeline/test_training.py::test_trains_as_the_undivided_model",
)
ON_FOUR = (
    f"{KERAS}/named",
    *(f"{KERAS}/pipeline/test_{name}.py" for name in ("training", "replicas", "update", "device")),
)
# Cases that compare bits. TensorFlow's graph optimizer may change them: it reorders sums, merges operations.
OF_BITS = (
    f"{KERAS}/checkpoint/test_resume.py",
    *(f"{DATA_PARALLEL}/test_{name}.py" for name in ("exact", "models", "overlap", "shards", "ranks_equal")),
    *(f"{DATA_PARALLEL}/test_{name}.py" for name in ("stale", "finished_weights")),
)
OTHER_THAN_BITS = tuple(name for name in OTHER_KERAS if name not in OF_BITS)
# What runs code of its own on a single rank.
ON_ONE = (
    f"{DATA_PARALLEL}/test_logs.py",
    f"{DATA_PARALLEL}/test_checks.py::test_a_step_is_skipped_as_a_whole[step]",
    f"{DATA_PARALLEL}/test_checks.py::test_a_guard_ends_with_its_data_parallel",
    f"{DATA_PARALLEL}/test_whole_batch.py::test_unequal_batches[accumulation]",
    f"{KERAS}/named/test_collectives.py::test_sums[eager]",
    f"{KERAS}/checkpoint/test_resume.py::test_resumed_in_the_middle_of_an_epoch[loss scaling and PyDataset]",
    f"{KERAS}/pipeline/test_training.py::test_trains_as_the_undivided_model",
)
# What `every_size` marks, but for collectives, which three ranks call over TCP.
OF_ANY_SIZE = (
    *(name for name in OTHER_KERAS if not name.startswith(f"{KERAS}/named/")),
    *(f"{KERAS}/pipeline/test_{name}.py" for name in ("training", "replicas", "device")),
)
COLLECTIVES = tuple(f"mpi/engine/test_{name}.py" for name in ("all_reduce", "gather_broadcast", "buckets"))
# These cases mostly wait for deadlines, so not every suite runs them.
ERRORS = ("mpi/engine/test_device_errors.py", "mpi/engine/test_engine_errors.py")
WITHOUT_ERRORS = tuple(
    name
    for path in sorted((HERE / "mpi" / "engine").glob("test_*.py"))
    if (name := path.relative_to(HERE).as_posix()) not in ERRORS
)
# Arrays on devices: NCCL carries them, or they pass through the host by the transports of NumPy's arrays. So
# three ranks of one host and four of two hosts suffice.
DEVICES = tuple(
    path.relative_to(HERE).as_posix() for path in sorted((HERE / "mpi" / "engine").glob("test_device*.py"))
)
WITHOUT_DEVICES = tuple(name for name in WITHOUT_ERRORS if name not in DEVICES)
NO_DEVICES = (*WITHOUT_DEVICES, "mpi/engine/test_engine_errors.py")
EAGER = "every_size and not in_graph"
OLDER = "older_tensorflow"
TWO_TO_A_HOST = {"HVPIPE_RANKS_PER_HOST": "2"}
RING = {"HVPIPE_SHARED_MEMORY": "0"}
OVER_TCP = {"HVPIPE_BACKEND": "tcp"}
TINY = {"HVPIPE_SEGMENT_BYTES": "1000", "HVPIPE_SLOT_BYTES": "4096"}
# Tracing takes a seventh less.
UNOPTIMIZED = {"WITHOUT_GRAPH_OPTIMIZER": "1"}

# Two ranks run every Keras case (one process, where a case needs no peer). Cases of collectives, and of
# pipelines, which then have more stages, also run on 4, if their result depends on the number of ranks: they
# have the mark `every_size`, and not `three_suffice`. ON_THREE runs on 3 ranks, ON_ONE on one.
# `make test-all` also runs all of `every_size` on 3 ranks and on one, and devices in two more layouts.
# tests/BEHAVIOURS.md says which case proves what.
#
# `make rest` runs several suites at a time. xdist gives its first worker the first two suites, its second one
# the next two, and so on: so the longest are not in one pair.
SUITES = (
    Suite("keras", OTHER_THAN_BITS, (2,), 3000.0, UNOPTIMIZED),
    Suite("engine ring", NO_DEVICES, (2,), env=RING),
    Suite("pipelines", PIPELINES, (2,), 1800.0, UNOPTIMIZED),
    Suite("engine", ("mpi/engine",), (3,)),
    Suite("keras bits", OF_BITS, (2,), 1800.0),
    # 2 + 1 ranks: shared memory on the first host, a ring between the first rank of each.
    Suite("keras hosts", ON_THREE, (3,), 1800.0, {**TWO_TO_A_HOST, **UNOPTIMIZED}),
    Suite("keras", ON_FOUR, (4,), 1800.0, UNOPTIMIZED, only="every_size and not three_suffice"),
    Suite("keras", (*ON_ONE, *ONE_PROCESS), (ALONE,)),
    Suite("engine", NO_DEVICES, (ALONE, 1)),
    Suite("engine", WITHOUT_DEVICES, (2, 4)),
    Suite("engine hosts", WITHOUT_ERRORS, (4,), env=TWO_TO_A_HOST),
    # As between hosts with Ethernet, and under `horovodrun --gloo`.
    Suite("engine over tcp", NO_DEVICES, (3,), env={**OVER_TCP, **TWO_TO_A_HOST}),
    Suite(
        "collectives over tcp",
        (f"{KERAS}/named",),
        (3,),
        env={**OVER_TCP, **TWO_TO_A_HOST, **UNOPTIMIZED},
        only=EAGER,
    ),
    Suite("engine by mpi", COLLECTIVES, (3,), env={**RING, "HVPIPE_ALL_REDUCE": "mpi"}),
    # Every message travels in many pieces; on 4 ranks, both of a host send their slices.
    Suite("engine tiny pieces", COLLECTIVES, (2, 4), env={**TWO_TO_A_HOST, **TINY}),
    # Three ranks prove these on another MPI than the rest: `make mpich`.
    Suite("mpich hosts", WITHOUT_DEVICES, (3,), env=TWO_TO_A_HOST, part_of="mpich"),
    Suite("mpich ring", WITHOUT_DEVICES, (3,), env=RING, part_of="mpich"),
    Suite("mpich tiny pieces", COLLECTIVES, (3,), env={**TWO_TO_A_HOST, **TINY}, part_of="mpich"),
    # What carries MPI over InfiniBand: `make ucx`.
    Suite("ucx", WITHOUT_DEVICES, (3,), env=RING, part_of="ucx"),
    Suite("ucx hosts", WITHOUT_DEVICES, (3,), env=TWO_TO_A_HOST, part_of="ucx"),
    Suite("quick", EVERY_KERAS, (2,), only="quick", part_of="quick"),
    Suite("quick engine", COLLECTIVES, (2,), part_of="quick"),
    Suite(
        *("every size", OF_ANY_SIZE, (3,), 1800.0, {**TWO_TO_A_HOST, **UNOPTIMIZED}),
        only="every_size",
        part_of="all_layouts",
    ),
    Suite("every size", EVERY_KERAS, (1,), env=UNOPTIMIZED, only=EAGER, part_of="all_layouts"),
    Suite("devices", DEVICES, (1,), part_of="all_layouts"),
    Suite("devices ring", DEVICES, (2,), env=RING, part_of="all_layouts"),
    Suite("older", EVERY_KERAS, (2,), 1800.0, only=OLDER, part_of=OLDER),
    Suite("older", ONE_PROCESS, (ALONE,), only=OLDER, part_of=OLDER),
)


def _runs() -> Iterator[object]:
    for suite in SUITES:
        marks = [getattr(pytest.mark, suite.part_of), pytest.mark.part] if suite.part_of else []
        for size in suite.sizes:
            name = f"{suite.name.replace(' ', '-')}-{size or 'alone'}"
            yield pytest.param(suite, size, id=name, marks=marks)


@pytest.mark.timeout(max(suite.limit_s for suite in SUITES) + 60)
@pytest.mark.parametrize(("suite", "size"), list(_runs()))
def test_every_case_passes_on_every_rank(
    suite: Suite,
    size: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    closing = run_cases(
        size,
        [HERE / cases for cases in suite.cases],
        tmp_path / "ranks",
        limit_s=suite.limit_s,
        env=suite.env,
        options=["-m", suite.only] if suite.only else [],
    )
    ranks = f"{size} ranks" if size else "one process without a launcher"
    record_property("ranks", f"{suite.name}, {ranks}: {closing}")
