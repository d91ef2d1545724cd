"""Every installed system of the evaluation trains two steps; the others are skipped by name."""

from __future__ import annotations

import os
from dataclasses import asdict

import pytest

from bench.hosts.hosts import ThisHost
from bench.rounds.record import Case, Round, Task, from_dict
from bench.rounds.round import run_round
from bench.systems import SYSTEMS
from distributed import environment
from hvpipe.environment.discover import prepare_open_mpi

TASK = Task("digits", batch=4, warm_up=1, steps=2)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the processes of a round from taking themselves for ranks of the job that runs these tests."""
    kept = environment()
    for name in set(os.environ) - set(kept):
        monkeypatch.delenv(name)
    for name, value in kept.items():
        monkeypatch.setenv(name, value)


FOUR_MIB = {"bytes_per_pack": "4194304"}  # whatever `hvpipe bench tune` has found


def _run(system: str, task: Task, timeout_s: float = 300, ranks: int = 2) -> Round:
    return run_round(Case(system, "one host", ranks, task), 0, ThisHost(), timeout_s)


# The two tests after the next one run these, and check the same. TensorFlow takes long to start.
RUN_BELOW = ("single", "tf-mwms", "tf-mwms-tuned", "hvpipe-step")
# They differ from hvpipe-step by an argument of `data_parallel` or by the backend.
NOT_RUN = (
    *("hvpipe-none", "hvpipe-backward", "hvpipe-stale", "hvpipe-mpi-none", "hvpipe-mpi-step"),
    *("hvpipe-bf16", "hvpipe-int8", "hvpipe-powersgd"),
    *("keras-jax-alone", "torch-ddp-alone"),
)
HOSTS = ("single-beside-tcp",)  # needs several


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name not in (*RUN_BELOW, *NOT_RUN, *HOSTS)])
def test_two_steps(name: str) -> None:
    round_ = _run(name, TASK)
    if round_.skipped:
        pytest.skip(round_.skipped)
    _check(round_, TASK)


def _check(round_: Round, task: Task) -> None:
    """Check that a round on two ranks ended well, and the figures that it reports."""
    assert round_.error == ""
    steps = len(round_.ranks[0].step_s)
    assert [len(rank.step_s) for rank in round_.ranks] == [steps] * 2
    assert steps > task.steps if task.epochs else steps == task.steps  # whole epochs count all their steps
    for rank in round_.ranks:
        assert min(rank.step_s) > 0
        assert sum(rank.step_s) <= rank.wall_s * steps * 1.001
        assert rank.first_step_s > max(rank.step_s)
        if round_.case.system == "tf-ps":  # of which only times are known
            continue
        # The clocks are not read at the same moment, so steps may differ by a millisecond.
        assert 0 < rank.cpu_share * rank.wall_s < (os.cpu_count() or 1) * (rank.wall_s + 0.002)
        assert rank.peak_bytes > 100e6
    library = "Keras" if SYSTEMS[round_.case.system].own_environment else "TensorFlow"
    assert library in round_.versions
    assert (round_.ranks[0].host_share or 0.5) <= 1
    assert from_dict(Round, asdict(round_)) == round_


def test_exact_systems_learn_digits_equally() -> None:
    task = Task("digits", batch=64, warm_up=1, steps=2, epochs=3)
    alone, step, mirrored = (_run(name, task) for name in ("single", "hvpipe-step", "tf-mwms"))
    for round_ in (alone, step, mirrored):
        _check(round_, task)
    assert step.ranks[0].loss == step.ranks[1].loss
    assert step.ranks[0].loss[2] < step.ranks[0].loss[0]
    assert step.ranks[0].accuracy[2] > 0.5
    assert "all-reduces a step 1," in mirrored.versions + ","
    assert mirrored.ranks[0].loss[:2] == pytest.approx(step.ranks[0].loss[:2], rel=1e-4)
    # A single process trains on all images of each step. It adds in another order, and the difference grows.
    assert alone.ranks[0].loss[0] == pytest.approx(step.ranks[0].loss[0], rel=0.02)


def test_bytes_per_pack_changes_the_compiled_step() -> None:
    # Above, a step has one pack, the default. Here a pack ends above 4 MiB, counted from the last gradient.
    # First pack: 1024 x 100 floats of the last layer and 5 x 512 x 1024 of the second convolution. Second:
    # the other convolution. The Embedding's rows are gathered.
    case = Case("tf-mwms-tuned", "one host", 2, Task("text", batch=2, pixels=4, warm_up=1, steps=1))
    systems = {"tf-mwms-tuned": SYSTEMS["tf-mwms-tuned"].tuned(FOUR_MIB)}
    round_ = run_round(case, 0, ThisHost(), 300, systems=systems)
    assert round_.error == ""
    assert "all-reduces a step 2," in round_.versions + ","


def test_horovod_tuned_has_the_open_mpi_settings_of_hvpipe(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {
        name: value
        for name, value in SYSTEMS["horovod-tuned"].environment.items()
        if name.startswith("OMPI_MCA_")
    }
    ours: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", ours)
    prepare_open_mpi()
    sizes = {name: value for name, value in ours.items() if name.startswith("OMPI_MCA_btl_tcp")}
    own = {name for name in theirs if name.startswith("OMPI_MCA_coll_tuned")}
    assert {name: theirs[name] for name in theirs.keys() - own} == {
        **sizes,
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    assert not any(name.startswith("OMPI_MCA_") for name in SYSTEMS["horovod"].environment)


def test_a_hang_is_reported_and_ended() -> None:
    round_ = _run("tf-mwms", TASK, timeout_s=1)
    assert "did not end within 1 s" in round_.error
