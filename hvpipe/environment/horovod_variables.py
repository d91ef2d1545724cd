"""Horovod's environment variables: which stand for settings of hvpipe, and which have no effect here."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvpipe.errors import HvpipeError

_BUCKET_BYTES, _FUSION_THRESHOLD = "HVPIPE_BUCKET_BYTES", "HOROVOD_FUSION_THRESHOLD"
_TRACE, _TIMELINE = "HVPIPE_TRACE", "HOROVOD_TIMELINE"
_LOG_LEVEL, _HOROVOD_LOG_LEVEL = "HVPIPE_LOG_LEVEL", "HOROVOD_LOG_LEVEL"
_TIMEOUT = "HVPIPE_TIMEOUT"
_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_STALL_WARNING, _STALL_OFF = "HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_CHECK_DISABLE"

_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "fatal": "error",
}
_WARN = "HVPIPE_STALL_WARN"
_STALL_WARNING_S = 60  # Horovod's default

# Variables that tune what hvpipe does not have (negotiation between ranks, an autotuner, Gloo), and Horovod's
# defaults. Old versions of horovodrun set variables to their defaults, so a default asks for nothing.
_TUNING = {
    **dict.fromkeys(("HOROVOD_HIERARCHICAL_ALLREDUCE", "HOROVOD_HIERARCHICAL_ALLGATHER"), "0"),
    **dict.fromkeys(("HOROVOD_TORUS_ALLREDUCE", "HOROVOD_AUTOTUNE", "HOROVOD_TIMELINE_MARK_CYCLES"), "0"),
    **dict.fromkeys(("HOROVOD_MPI_THREADS_DISABLE", "HOROVOD_THREAD_AFFINITY", "HOROVOD_LOG_HIDE_TIME"), "0"),
    **dict.fromkeys(("HOROVOD_DISABLE_GROUP_FUSION", "HOROVOD_DISABLE_NVTX_RANGES"), "0"),
    **dict.fromkeys(("HOROVOD_ENABLE_ASYNC_COMPLETION", "HOROVOD_ENABLE_XLA_OPS"), "0"),
    **dict.fromkeys(("HOROVOD_DYNAMIC_PROCESS_SETS", "HOROVOD_CCL_CACHE"), "0"),
    "HOROVOD_CYCLE_TIME": "1",
    "HOROVOD_CACHE_CAPACITY": "1024",
    "HOROVOD_AUTOTUNE_LOG": "",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "3",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "10",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "20",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.8",
    "HOROVOD_NUM_NCCL_STREAMS": "1",
    "HOROVOD_BATCH_D2D_MEMCOPIES": "1",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
    "HOROVOD_START_TIMEOUT": "30",
}


def hvpipe_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Translate Horovod's variables to those of hvpipe. Variables of hvpipe that are set win.

    | Horovod | hvpipe |
    |---|---|
    | HOROVOD_FUSION_THRESHOLD | HVPIPE_BUCKET_BYTES; 0: a bucket for each gradient, so no fusion |
    | HOROVOD_TIMELINE | HVPIPE_TRACE, except for the word DYNAMIC |
    | HOROVOD_LOG_LEVEL | HVPIPE_LOG_LEVEL; trace is debug, fatal is error |
    | HOROVOD_STALL_CHECK_TIME_SECONDS | HVPIPE_STALL_WARN |
    | HOROVOD_STALL_CHECK_DISABLE | 1: HVPIPE_STALL_WARN=0 |
    | HOROVOD_STALL_SHUTDOWN_TIME_SECONDS | HVPIPE_TIMEOUT, where Horovod would shut down |

    Args:
        environ: The environment, or only Horovod's variables.

    Returns:
        The variables to add to `environ`, with their values.

    Raises:
        HvpipeError: If a value cannot be understood; the message names the variable.
    """
    found: dict[str, str] = {}
    threshold_bytes = (
        None if environ.get(_BUCKET_BYTES) else _number(environ, _FUSION_THRESHOLD, "a number of bytes")
    )
    if threshold_bytes is not None:
        found[_BUCKET_BYTES] = str(max(1, int(threshold_bytes)))
    timeline = environ.get(_TIMELINE)
    if timeline and timeline != "DYNAMIC" and not environ.get(_TRACE):
        found[_TRACE] = timeline
    level = environ.get(_HOROVOD_LOG_LEVEL, "").strip().lower()
    if level and not environ.get(_LOG_LEVEL):
        if level not in _LEVELS:
            raise _bad(
                _HOROVOD_LOG_LEVEL,
                "one of trace, debug, info, warning, error, fatal",
                environ[_HOROVOD_LOG_LEVEL],
            )
        found[_LOG_LEVEL] = _LEVELS[level]
    limit_s = None if environ.get(_TIMEOUT) else _shutdown_s(environ)
    if limit_s is not None:
        found[_TIMEOUT] = f"{limit_s:.12g}"
    warning_s = None if environ.get(_WARN) else _warning_s(environ)
    if warning_s is not None:
        found[_WARN] = f"{warning_s:.12g}"
    return found


def without_effect(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of Horovod's variables that ask for something and change nothing here, sorted."""
    names = {name for name, usual in _TUNING.items() if not _asks_nothing(environ.get(name, ""), usual)}
    if environ.get(_TIMELINE) == "DYNAMIC":
        names.add(_TIMELINE)
    asked_s = None if environ.get(_TIMEOUT) else _number(environ, _STALL_SHUTDOWN, "a number of seconds")
    if asked_s is not None and asked_s > 0 and _shutdown_s(environ) is None:
        names.add(_STALL_SHUTDOWN)
    return tuple(sorted(names))


def _shutdown_s(environ: Mapping[str, str]) -> float | None:
    """Return after how long Horovod would end a job that waits for a rank; None if never.

    Horovod ignores a shutdown time below the warning time, and any if the check is off.
    """
    limit_s = _number(environ, _STALL_SHUTDOWN, "a number of seconds")
    if limit_s is None or limit_s <= 0 or (_number(environ, _STALL_OFF, "0 or 1") or 0) > 0:
        return None
    warning_s = _number(environ, _STALL_WARNING, "a number of seconds")
    return limit_s if limit_s >= (_STALL_WARNING_S if warning_s is None else warning_s) else None


def _warning_s(environ: Mapping[str, str]) -> float | None:
    """Return after how long Horovod would warn: 0 for never, None if it is not said."""
    if (_number(environ, _STALL_OFF, "0 or 1") or 0) > 0:
        return 0.0
    warning_s = _number(environ, _STALL_WARNING, "a number of seconds")
    return None if warning_s is None else max(0.0, warning_s)


def _asks_nothing(text: str, usual: str) -> bool:
    if text.strip() in ("", usual):
        return True
    try:
        return float(text) == float(usual)
    except ValueError:
        return False


def _number(environ: Mapping[str, str], name: str, wanted: str) -> float | None:
    """Return a variable as a number: Horovod takes negative ones and fractions, too. None if not set."""
    text = environ.get(name, "")
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise _bad(name, wanted, text)
    return value


def _bad(name: str, wanted: str, received: str) -> HvpipeError:
    return HvpipeError(f"{name} should be {wanted}. Received: {name}={received!r}")
