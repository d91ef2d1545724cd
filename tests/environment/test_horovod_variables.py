"""What Horovod's environment variables mean here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvpipe.environment.horovod_variables import hvpipe_variables, without_effect
from hvpipe.environment.settings import settings
from hvpipe.errors import HvpipeError

SHUTDOWN, WARNING = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "HOROVOD_STALL_CHECK_TIME_SECONDS"
OF_HVPIPE = {
    "HVPIPE_BUCKET_BYTES": "7",
    "HVPIPE_TRACE": "own.json",
    "HVPIPE_LOG_LEVEL": "error",
    "HVPIPE_TIMEOUT": "7",
    "HVPIPE_STALL_WARN": "7",
}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "33554432", {"HVPIPE_BUCKET_BYTES": "33554432"}),
        (WARNING, "30", {"HVPIPE_STALL_WARN": "30"}),
        (WARNING, "0", {"HVPIPE_STALL_WARN": "0"}),
        ("HOROVOD_STALL_CHECK_DISABLE", "1", {"HVPIPE_STALL_WARN": "0"}),
        ("HOROVOD_FUSION_THRESHOLD", "34078720.0", {"HVPIPE_BUCKET_BYTES": "34078720"}),  # of a YAML file
        ("HOROVOD_FUSION_THRESHOLD", "0", {"HVPIPE_BUCKET_BYTES": "1"}),
        ("HOROVOD_FUSION_THRESHOLD", "-1", {"HVPIPE_BUCKET_BYTES": "1"}),
        ("HOROVOD_TIMELINE", "/tmp/t.json", {"HVPIPE_TRACE": "/tmp/t.json"}),
        ("HOROVOD_TIMELINE", "DYNAMIC", {}),
        ("HOROVOD_LOG_LEVEL", "trace", {"HVPIPE_LOG_LEVEL": "debug"}),
        ("HOROVOD_LOG_LEVEL", "Debug", {"HVPIPE_LOG_LEVEL": "debug"}),
        ("HOROVOD_LOG_LEVEL", "INFO", {"HVPIPE_LOG_LEVEL": "info"}),
        ("HOROVOD_LOG_LEVEL", "warning", {"HVPIPE_LOG_LEVEL": "warning"}),
        ("HOROVOD_LOG_LEVEL", "error", {"HVPIPE_LOG_LEVEL": "error"}),
        ("HOROVOD_LOG_LEVEL", "FATAL", {"HVPIPE_LOG_LEVEL": "error"}),
        (SHUTDOWN, "60", {"HVPIPE_TIMEOUT": "60"}),
        (SHUTDOWN, "0", {}),
    ],
)
def test_translated(name: str, text: str, expected: dict[str, str]) -> None:
    assert hvpipe_variables({name: text}) == expected
    assert hvpipe_variables({**OF_HVPIPE, name: text}) == {}
    settings({name: text})


@pytest.mark.parametrize(
    "name", ["HOROVOD_FUSION_THRESHOLD", "HOROVOD_TIMELINE", "HOROVOD_LOG_LEVEL", SHUTDOWN]
)
def test_an_empty_variable_is_none(name: str) -> None:
    assert (hvpipe_variables({name: ""}), without_effect({name: ""})) == ({}, ())


@pytest.mark.parametrize(
    ("others", "taken"),
    [
        ({}, False),  # Horovod's warning time is 60 s
        ({WARNING: "30"}, True),
        ({WARNING: "31"}, False),
        ({WARNING: "10", "HOROVOD_STALL_CHECK_DISABLE": "1"}, False),
        ({WARNING: "10", "HOROVOD_STALL_CHECK_DISABLE": "0"}, True),
    ],
)
def test_a_shutdown_time_counts_where_horovod_shuts_down(others: dict[str, str], taken: bool) -> None:
    environ = {SHUTDOWN: "30", **others}
    found = hvpipe_variables(environ)
    found.pop("HVPIPE_STALL_WARN", None)
    assert found == ({"HVPIPE_TIMEOUT": "30"} if taken else {})
    assert (SHUTDOWN in without_effect(environ)) is not taken


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "64MB", "a number of bytes"),
        ("HOROVOD_FUSION_THRESHOLD", "inf", "a number of bytes"),
        ("HOROVOD_LOG_LEVEL", "loud", "one of trace, debug, info, warning, error, fatal"),
        (SHUTDOWN, "ten minutes", "a number of seconds"),
    ],
)
def test_a_bad_value_is_named(name: str, text: str, wanted: str) -> None:
    with pytest.raises(HvpipeError, match=f"{name} should be {wanted}. Received: {name}='{text}'"):
        settings({name: text})
    settings({**OF_HVPIPE, name: text})  # nobody reads it


def test_variables_without_effect_are_named_if_they_ask_for_something() -> None:
    asks = {
        "HOROVOD_CYCLE_TIME": "3.5",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_TIMELINE": "DYNAMIC",
        "HOROVOD_AUTOTUNE_LOG": "log.txt",
    }
    assert without_effect(asks) == tuple(sorted(asks))


@pytest.mark.parametrize(
    "environ",
    [
        pytest.param(
            {
                **dict.fromkeys(("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER"), "0"),
                **dict.fromkeys(
                    ("HOROVOD_STALL_CHECK_DISABLE", SHUTDOWN, "HOROVOD_MPI_THREADS_DISABLE"), "0"
                ),
                "HOROVOD_CYCLE_TIME": "1.0",
                "HOROVOD_CACHE_CAPACITY": "1024",
                "HOROVOD_NUM_NCCL_STREAMS": "1",
                WARNING: "60",
            },
            id="defaults",
        ),
        pytest.param({"HOROVOD_WITH_MPI": "1", "HOROVOD_GPU_OPERATIONS": "NCCL"}, id="from a build"),
        pytest.param({"HOROVOD_RANK": "0", "HOROVOD_CONTROLLER": "mpi", "HOROVOD_HOSTNAME": "a"}, id="facts"),
        pytest.param({"HOROVOD_FUSION_THRESHOLD": "5", "HOROVOD_TIMELINE": "t.json"}, id="with effect"),
    ],
)
def test_variables_that_ask_for_nothing_are_not_named(environ: dict[str, str]) -> None:
    assert without_effect(environ) == ()


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["HOROVOD_FUSION_THRESHOLD", SHUTDOWN, WARNING]))
def test_every_integer_that_horovod_takes_is_a_valid_setting(value: int, name: str) -> None:
    found = settings({name: str(value)})
    assert found.bucket_bytes is None or found.bucket_bytes >= 1
    assert found.timeout_s > 0
