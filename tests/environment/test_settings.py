"""What settings are read from environment variables."""

from __future__ import annotations

import re

import pytest

from hvpipe.environment.settings import Settings, live_folder, settings
from hvpipe.errors import HvpipeError


def test_an_unknown_back_end_is_named() -> None:
    with pytest.raises(HvpipeError, match=r"HVPIPE_BACKEND should be mpi or tcp.*'gloo'"):
        settings({"HVPIPE_BACKEND": "gloo"})


def test_variables_that_nothing_reads_are_named() -> None:
    assert settings({"HVPIPE_TIMEOUTS": "9"}).unknown == ("HVPIPE_TIMEOUTS (did you mean HVPIPE_TIMEOUT?)",)
    listed = re.findall(r"HVPIPE_[A-Z_]*[A-Z]", str(settings.__doc__).split("Args:")[0])
    assert settings(dict.fromkeys(listed, "")).unknown == ()
    assert settings({"HVPIPE_QQ": "1", "HVPIPE_TRACE": "t.json"}).unknown == ("HVPIPE_QQ",)


def test_settings_without_variables_are_the_defaults() -> None:
    assert settings({}) == Settings()
    assert settings({"HVPIPE_TIMEOUT": "", "HVPIPE_TRACE": "", "HVPIPE_LOG_LEVEL": ""}) == Settings()


def test_settings_are_read() -> None:
    environ = {
        "HVPIPE_PORTS": "40000-40100",
        "HVPIPE_SECRET": "/home/me/secret",
        "HVPIPE_TIMEOUT": "2.5",
        "HVPIPE_FIRST_STEP_TIMEOUT": "90",
        "HVPIPE_TRACE": "/tmp/t.json",
        "HVPIPE_UTILIZATION": "u.json",
        "HVPIPE_UTILIZATION_HZ": "2.5",
        "CUDA_VISIBLE_DEVICES": "1,0",
        "HVPIPE_BUCKET_BYTES": "1000",
        "HVPIPE_TABLE_BYTES": "2000",
        "HVPIPE_SEGMENT_BYTES": "64",
        "HVPIPE_SHARED_MEMORY": "0",
        "HVPIPE_ALL_REDUCE": "doubling:65536,halving:1048576,ring",
        "HVPIPE_VERIFY": "100",
        "HVPIPE_NONFINITE": "skip",
        "HVPIPE_STRICT": "1",
        "HVPIPE_SUMMARY": "1",
        "HVPIPE_LOG_LEVEL": "DEBUG",
    }
    assert settings(environ) == Settings(
        ports=range(40_000, 40_101),
        secret="/home/me/secret",
        timeout_s=2.5,
        first_step_timeout_s=90.0,
        trace_path="/tmp/t.json",
        utilization_path="u.json",
        utilization_hz=2.5,
        visible_gpus="1,0",
        live=True,
        bucket_bytes=1000,
        table_bytes=2000,
        segment_bytes=64,
        shared_memory=False,
        algorithms=(("doubling", 65536), ("halving", 1048576), ("ring", 0)),
        verify_every=100,
        nonfinite="skip",
        strict=True,
        summary=True,
        log_level="debug",
    )


def test_a_json_file_may_name_the_algorithms() -> None:
    assert settings({"HVPIPE_ALL_REDUCE": "a,b.json"}) == Settings(tuning_path="a,b.json")


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("HVPIPE_TIMEOUT", "soon", "a positive number of seconds"),
        ("HVPIPE_TIMEOUT", "0", "a positive number of seconds"),
        *(
            ("HVPIPE_PORTS", text, "a range of ports from 1 to 65535, as 40000-40100")
            for text in ("40000", "9-8", "1-65536", "0-9", "a-b")
        ),
        ("HVPIPE_TIMEOUT", "inf", "a positive number of seconds"),
        ("HVPIPE_UTILIZATION_HZ", "0", "a positive number of samples a second"),
        ("HVPIPE_LIVE", "yes", "0, 1 or the absolute path of a folder"),
        ("HVPIPE_BUCKET_BYTES", "4M", "a positive number of bytes"),
        ("HVPIPE_SEGMENT_BYTES", "-1", "a positive number of bytes"),
        ("HVPIPE_SEGMENT_BYTES", str(1 << 64), "a positive number of bytes"),
        ("HVPIPE_SHARED_MEMORY", "yes", "0 or 1"),
        *(
            ("HVPIPE_ALL_REDUCE", text, "one of doubling, halving, ring, mpi, several")
            for text in (
                "fast",
                "ring:9",
                f"doubling:{1 << 64},ring",
                "ring,doubling",
                "halving:9,doubling:8,ring",
                "ring:x,ring",
                ",",
            )
        ),
        ("HVPIPE_VERIFY", "0", "a positive number of steps"),
        ("HVPIPE_NONFINITE", "stop", "raise, skip or ignore"),
        ("HVPIPE_SUMMARY", "2", "0 or 1"),
        ("HVPIPE_LOG_LEVEL", "loud", "one of debug, info, warning, error"),
    ],
)
def test_a_bad_setting_is_named(name: str, text: str, wanted: str) -> None:
    with pytest.raises(HvpipeError, match=f"{name} should be {wanted}.*Received: {name}=.{re.escape(text)}."):
        settings({name: text})


def test_settings_from_horovods_variables() -> None:
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "33554432",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_LOG_LEVEL": "TRACE",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600",
        "HOROVOD_CYCLE_TIME": "3.5",
    }
    assert settings(environ) == Settings(
        timeout_s=600,
        trace_path="t.json",
        bucket_bytes=33554432,
        log_level="debug",
        without_effect=("HOROVOD_CYCLE_TIME",),
    )


@pytest.mark.parametrize(
    ("environ", "live", "folder"),
    [
        ({"HVPIPE_SUMMARY": "1"}, True, None),
        ({"HVPIPE_SUMMARY": "1", "HVPIPE_LIVE": "0"}, False, None),
        ({"HVPIPE_LIVE": "1"}, True, None),
        ({"HVPIPE_LIVE": "/shared/jobs"}, True, "/shared/jobs"),
    ],
)
def test_settings_that_make_a_run_visible_to_hvpipe_top(
    environ: dict[str, str], live: bool, folder: str | None
) -> None:
    assert (settings(environ).live, settings(environ).live_folder) == (live, folder)
    assert live_folder(environ) == folder


def test_a_stall_is_reported_before_any_limit_ends_the_job() -> None:
    """Regression: HVPIPE_TIMEOUT did not count."""
    assert Settings(timeout_s=8.0).engine_stall_s == 4.0
    assert Settings(stall_abort_s=12.0).engine_stall_s == 8.0
    assert Settings().engine_stall_s == 10.0
    assert Settings(timeout_s=8.0, stall_warn_s=0.0).engine_stall_s == 0.0


@pytest.mark.parametrize(
    ("given", "waits_s"),
    [
        (Settings(), 300.0),
        (Settings(job_may_have_gpus=True), 1800.0),
        (Settings(job_may_have_gpus=True, timeout_s=60.0), 360.0),
        (Settings(job_may_have_gpus=True, stall_abort_s=100.0), 100.0),
        (Settings(first_step_timeout_s=900.0), 900.0),
        (Settings(first_step_timeout_s=20.0), 300.0),
    ],
)
def test_ranks_wait_longer_for_the_first_steps_where_gpus_compile(given: Settings, waits_s: float) -> None:
    assert given.engine_first_step_s == waits_s
