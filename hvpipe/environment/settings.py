"""Reads the settings of hvpipe from environment variables."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvpipe.environment import horovod_variables
from hvpipe.environment.job_folder import abort_marker
from hvpipe.errors import HvpipeError
from hvpipe.own_folder import is_own, why_not_own
from hvpipe.specs.tuning import ALGORITHMS

Backend = Literal["mpi", "tcp"]
Nonfinite = Literal["raise", "skip", "ignore"]
NONFINITE: tuple[Nonfinite, ...] = ("raise", "skip", "ignore")
LrScaling = Literal["none", "linear", "sqrt"]
LR_SCALINGS: tuple[LrScaling, ...] = ("none", "linear", "sqrt")
LOG_LEVELS = ("debug", "info", "warning", "error")
_SHUTDOWN_S = 3600.0
_DIGITS = 20  # of 2^64 - 1
_Choice = TypeVar("_Choice", bound=str)


@dataclass(frozen=True)
class Settings:
    """The HVPIPE_* variables, Horovod's and CUDA_VISIBLE_DEVICES, checked. `settings` lists their names."""

    backend: Backend | None = None  # None: TCP under `horovodrun --gloo` and between hosts with Ethernet
    net: str = ""  # networks for TCP between hosts; "": those that Open MPI was told to use, or all
    ports: range | None = None  # where ranks listen; None: the kernel chooses
    secret: str = field(default="", repr=False)  # of ranks under `horovodrun --gloo`, or the path of its file
    timeout_s: float = 300.0
    first_step_timeout_s: float | None = None  # None: 6 * timeout_s if a rank may have a GPU, else timeout_s
    shutdown_timeout_s: float | None = None  # None: an hour, or timeout_s if that is longer
    trace_path: str | None = None
    utilization_path: str | None = None
    utilization_hz: float = 10.0
    visible_gpus: str | None = None
    live: bool = False
    live_folder: str | None = None
    bucket_bytes: int | None = None  # None: hvpipe chooses it for the model
    table_bytes: int | None = None  # None: 1 MiB; by NCCL 64 MiB between hosts
    segment_bytes: int = 0  # 0: what MPI's eager limit allows
    slot_bytes: int = 256 << 10
    messages_in_flight: int = 8
    ranks_per_host: int = 0
    shared_memory: bool = True
    algorithms: tuple[tuple[str, int], ...] = ()  # of all-reduces, with the largest array in bytes; 0: any
    algorithms_ranks: int = 0  # of sums of so many ranks; 0: of any
    tuning_path: str = ""  # a file of `hvpipe tune`, which has them
    summary: bool = False
    nccl_library: str = ""  # "": look for it; "none": send data on GPUs through the host
    device_library: str = ""  # "": hvpipe's own for CUDA
    gpus_may_be_shared: bool = False
    job_may_have_gpus: bool = False  # whether any rank may find one; the session sets it
    job_folder: Path | None = None  # that `hvpipe run` shares with the ranks of its host
    verify_every: int = 0  # steps; 0: never
    nonfinite: Nonfinite = "ignore"
    strict: bool = False  # whether training that no rank averages is an error
    stall_warn_s: float = 10.0  # 0: never
    stall_abort_s: float | None = None  # None: timeout_s
    flight_folder: str | None = None  # None: the job folder, or memory without one
    flight_path: str = ""  # the session sets it
    elastic: bool = False  # whether training goes on without ranks that are lost
    min_ranks: int = 1  # with fewer, an elastic job ends
    lr_scaling: LrScaling = "none"  # of the learning rate when the number of ranks changes
    log_level: str | None = None  # None: the level that the program configured
    without_effect: tuple[str, ...] = ()  # variables of Horovod that ask for what hvpipe does not have
    unknown: tuple[str, ...] = ()  # variables that begin with HVPIPE_ and that nothing reads

    @property
    def engine_timeout_s(self) -> float:
        """The longest wait of a collective."""
        return min(self.timeout_s, self.stall_abort_s or math.inf)

    @property
    def longest_shutdown_s(self) -> float:
        """The longest wait in shutdown for a rank that may be busy with other work."""
        return self.shutdown_timeout_s or max(_SHUTDOWN_S, self.timeout_s)

    @property
    def engine_first_step_s(self) -> float:
        """The longest wait of a collective until two training steps have ended.

        GPUs that are newer than TensorFlow's CUDA compile its kernels when they first run, some ranks for
        longer than others.
        """
        usual_s = 6 * self.timeout_s if self.job_may_have_gpus else self.timeout_s
        asked_s = min(self.first_step_timeout_s or usual_s, self.stall_abort_s or math.inf)
        return max(self.engine_timeout_s, asked_s)

    @property
    def engine_stall_s(self) -> float:
        """After how long a wait is reported: in time for the report to precede the end of the job."""
        abort_s = self.engine_timeout_s
        return min(self.stall_warn_s, max(abort_s / 2, abort_s - 4))

    def engine_options(self, usual_segment_bytes: int) -> dict[str, Any]:
        """Return the options of the C++ engine that do not depend on what connects the ranks.

        Args:
            usual_segment_bytes: The size of a ring message, unless HVPIPE_SEGMENT_BYTES is set.
        """
        return {
            "timeout_s": self.engine_timeout_s,
            "first_steps_timeout_s": self.engine_first_step_s,
            "segment_bytes": self.segment_bytes or usual_segment_bytes,
            "messages_in_flight": self.messages_in_flight,
            "slot_bytes": self.slot_bytes,
            "algorithms": self.algorithms,
            "algorithms_ranks": self.algorithms_ranks,
            "trace": self.trace_path is not None,
            "stall_warn_s": self.engine_stall_s,
            "flight_path": self.flight_path,
            "abort_marker": "" if self.job_folder is None else str(abort_marker(self.job_folder)),
        }


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from environment variables.

    | variable | value |
    |---|---|
    | HVPIPE_BACKEND | "mpi" or "tcp": what carries the data between ranks |
    | HVPIPE_NET | the networks or interfaces for TCP between hosts, as in 10.0.0.0/24 or eth0,eth1 |
    | HVPIPE_PORTS | the ports at which hvpipe listens, as in 40000-40100; without it the kernel chooses |
    | HVPIPE_SECRET | under `horovodrun --gloo`: a secret of all ranks, or the path of a file with it |
    | HVPIPE_TIMEOUT | longest wait for another rank, in seconds |
    | HVPIPE_FIRST_STEP_TIMEOUT | the same until two training steps have ended |
    | HVPIPE_SHUTDOWN_TIMEOUT | longest wait for the others in `shutdown` and MPI_Finalize, in seconds |
    | HVPIPE_TRACE, HVPIPE_UTILIZATION | files to write |
    | HVPIPE_UTILIZATION_HZ | samples per second |
    | HVPIPE_LIVE | report to `hvpipe top`: 0, 1 or a folder; the default is HVPIPE_SUMMARY |
    | HVPIPE_SUMMARY | 0 or 1: print a summary at the end |
    | HVPIPE_BUCKET_BYTES | size of a gradient bucket |
    | HVPIPE_TABLE_BYTES | an Embedding at least this large sends only the rows of its batch |
    | HVPIPE_SEGMENT_BYTES | size of the largest ring message |
    | HVPIPE_SLOT_BYTES | size of a slot of the shared-memory transport |
    | HVPIPE_MESSAGES_IN_FLIGHT | how many ring messages may be under way |
    | HVPIPE_RANKS_PER_HOST | for tests: pretend that N ranks share a host |
    | HVPIPE_SHARED_MEMORY | 0 or 1 |
    | HVPIPE_ALL_REDUCE | a file of `hvpipe tune`, or algorithms, each but the last with its largest array |
    | HVPIPE_NCCL_LIBRARY | a path, or "none" to send data on GPUs through the host |
    | HVPIPE_DEVICE_LIBRARY | for tests: the library that serves device arrays |
    | HVPIPE_VERIFY | after how many steps data_parallel compares weights over ranks |
    | HVPIPE_NONFINITE | "raise", "skip" or "ignore" steps whose gradients are NaN or Inf |
    | HVPIPE_STRICT | 0 or 1: training that no rank averages is an error, not a warning |
    | HVPIPE_STALL_WARN | seconds after which a waiting collective is reported; 0: none |
    | HVPIPE_STALL_ABORT | seconds after which it ends the job; the default is HVPIPE_TIMEOUT |
    | HVPIPE_FLIGHT_RECORDER | the folder for the recorders of ranks that end badly |
    | HVPIPE_JOB_FOLDER | set by `hvpipe run`: the folder that it shares with the ranks of its host |
    | HVPIPE_ELASTIC | 0 or 1: go on without ranks that are lost |
    | HVPIPE_MIN_NP | with fewer ranks than this, an elastic job ends |
    | HVPIPE_LR_SCALING | "none", "linear" or "sqrt": the learning rate when the number of ranks changes |
    | HVPIPE_LOG_LEVEL | debug, info, warning or error |
    | NCCL_MULTI_RANK_GPU_ENABLE | NCCL's own: 1 lets ranks share a GPU |
    | HOROVOD_* | Horovod's own, where HVPIPE_* is not set: `horovod_variables.hvpipe_variables` lists them |

    Args:
        environ: The environment to read; None for this process's own.

    Raises:
        HvpipeError: For a bad value; the message names the variable.
    """
    given = os.environ if environ is None else environ
    chosen = backend(given.get("HVPIPE_BACKEND"))
    env = _NamesRead({**given, **horovod_variables.hvpipe_variables(given)})
    default = Settings()
    log_level = env.get("HVPIPE_LOG_LEVEL", "").lower() or None
    if log_level not in (None, *LOG_LEVELS):
        raise _bad("HVPIPE_LOG_LEVEL", f"one of {', '.join(LOG_LEVELS)}", env["HVPIPE_LOG_LEVEL"])
    summary = _switch(env, "HVPIPE_SUMMARY", default.summary)
    live, live_folder = _live(env, summary)
    found = Settings(
        backend=chosen,
        net=env.get("HVPIPE_NET", ""),
        ports=port_range(env["HVPIPE_PORTS"]) if env.get("HVPIPE_PORTS") else None,
        secret=env.get("HVPIPE_SECRET", ""),
        timeout_s=_positive(env, "HVPIPE_TIMEOUT", "seconds", default.timeout_s),
        first_step_timeout_s=_positive(env, "HVPIPE_FIRST_STEP_TIMEOUT", "seconds", 0.0) or None,
        shutdown_timeout_s=_positive(env, "HVPIPE_SHUTDOWN_TIMEOUT", "seconds", 0.0) or None,
        trace_path=env.get("HVPIPE_TRACE") or None,
        utilization_path=env.get("HVPIPE_UTILIZATION") or None,
        utilization_hz=_positive(env, "HVPIPE_UTILIZATION_HZ", "samples a second", default.utilization_hz),
        visible_gpus=env.get("CUDA_VISIBLE_DEVICES"),
        live=live,
        live_folder=live_folder,
        bucket_bytes=_number(env, "HVPIPE_BUCKET_BYTES", "bytes", 0) or default.bucket_bytes,
        table_bytes=_number(env, "HVPIPE_TABLE_BYTES", "bytes", 0) or default.table_bytes,
        segment_bytes=_number(env, "HVPIPE_SEGMENT_BYTES", "bytes", default.segment_bytes),
        slot_bytes=_number(env, "HVPIPE_SLOT_BYTES", "bytes", default.slot_bytes),
        messages_in_flight=_number(env, "HVPIPE_MESSAGES_IN_FLIGHT", "messages", default.messages_in_flight),
        ranks_per_host=_number(env, "HVPIPE_RANKS_PER_HOST", "ranks", default.ranks_per_host),
        shared_memory=_switch(env, "HVPIPE_SHARED_MEMORY", default.shared_memory),
        algorithms=_algorithms(env),
        tuning_path=_tuning_path(env),
        summary=summary,
        nccl_library=env.get("HVPIPE_NCCL_LIBRARY", ""),
        device_library=env.get("HVPIPE_DEVICE_LIBRARY", ""),
        gpus_may_be_shared=env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        job_folder=job_folder(env),
        verify_every=_number(env, "HVPIPE_VERIFY", "steps", default.verify_every),
        nonfinite=_one_of(env, "HVPIPE_NONFINITE", NONFINITE, default.nonfinite),
        strict=_switch(env, "HVPIPE_STRICT", default.strict),
        stall_warn_s=_stall_warn(env, default.stall_warn_s),
        stall_abort_s=_positive(env, "HVPIPE_STALL_ABORT", "seconds", 0.0) or None,
        flight_folder=env.get("HVPIPE_FLIGHT_RECORDER") or None,
        elastic=_switch(env, "HVPIPE_ELASTIC", default.elastic),
        min_ranks=_number(env, "HVPIPE_MIN_NP", "ranks", default.min_ranks),
        lr_scaling=_one_of(env, "HVPIPE_LR_SCALING", LR_SCALINGS, default.lr_scaling),
        log_level=log_level,
        without_effect=horovod_variables.without_effect(given),
    )
    known = env.names | {"HVPIPE_BACKEND"}
    named = (name for name in given if name.startswith("HVPIPE_") and name not in known)
    return replace(found, unknown=tuple(f"{name}{_similar(name, known)}" for name in sorted(named)))


class _NamesRead(Mapping[str, str]):
    """Variables; `names` are those that somebody has looked up."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.names.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def _similar(name: str, known: Collection[str]) -> str:
    import difflib

    prefix = "HVPIPE_"
    endings = sorted(one.removeprefix(prefix) for one in known if one.startswith(prefix))
    closest = difflib.get_close_matches(name.removeprefix(prefix), endings, 1)
    return f" (did you mean {prefix}{closest[0]}?)" if closest else ""


def backend(text: str | None) -> Backend | None:
    """Return the back end with this name; None for no name.

    Raises:
        HvpipeError: For any other name.
    """
    if not text:
        return None
    if text not in ("mpi", "tcp"):
        raise _bad("HVPIPE_BACKEND", "mpi or tcp", text)
    return "mpi" if text == "mpi" else "tcp"


def port_range(text: str) -> range:
    """Return the ports that a text such as "40000-40100" names.

    Raises:
        HvpipeError: For any other text.
    """
    first, _, last = text.partition("-")
    if first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16:
        return range(int(first), int(last) + 1)
    raise _bad("HVPIPE_PORTS", "a range of ports from 1 to 65535, as 40000-40100", text)


def live_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the folder in HVPIPE_LIVE, where jobs report to `hvpipe top`; None if it names none."""
    return _live(os.environ if environ is None else environ, False)[1]


def job_name(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the path of the job folder, which may be on another host; None outside of `hvpipe run`."""
    return (os.environ if environ is None else environ).get("HVPIPE_JOB_FOLDER") or None


def job_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder that `hvpipe run` shares with the ranks of its host; None outside of such a job.

    On other hosts anybody could have made it, so it counts only if it is this user's.
    """
    text = job_name(environ)
    return Path(text) if text and is_own(Path(text)) else None


def strange_job_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """Return why `job_folder` does not count what is there; None if it counts, or nothing is there."""
    text = job_name(environ)
    return why_not_own(Path(text)) if text else None


def _live(env: Mapping[str, str], default: bool) -> tuple[bool, str | None]:
    """Return whether to report to `hvpipe top`, and the folder to report in if one is named."""
    text = env.get("HVPIPE_LIVE")
    if text and text.startswith("/"):
        return True, text
    if text and text not in ("0", "1"):
        raise _bad("HVPIPE_LIVE", "0, 1 or the absolute path of a folder", text)
    return (text == "1" if text else default), None


def _positive(env: Mapping[str, str], name: str, unit: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise _bad(name, f"a positive number of {unit}", text)
    return value


def _number(env: Mapping[str, str], name: str, unit: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    value = _whole(text)
    if value < 1:
        raise _bad(name, f"a positive number of {unit}", text)
    return value


def _whole(text: str) -> int:
    """Return the number in a text, or 0: also where it does not fit into the 64 bits of the engine."""
    try:
        value = int(text) if len(text) <= _DIGITS else 0
    except ValueError:
        return 0
    return value if 0 < value < 1 << 64 else 0


def _algorithms(env: Mapping[str, str]) -> tuple[tuple[str, int], ...]:
    text = env.get("HVPIPE_ALL_REDUCE")
    if not text or _tuning_path(env):
        return ()
    *limited, last = (part.partition(":") for part in text.split(","))
    named = all(name in ALGORITHMS for name, _, _ in (*limited, last))
    sizes = [_whole(size) if size.isdecimal() else 0 for _, _, size in limited]
    if not named or last[1] or any(b <= a for a, b in pairwise((0, *sizes))):
        names = ", ".join(ALGORITHMS)
        wanted = (
            f"one of {names}, several with growing sizes in bytes, as doubling:65536,ring, or a .json file"
        )
        raise _bad("HVPIPE_ALL_REDUCE", wanted, text)
    return (*((name, size) for (name, _, _), size in zip(limited, sizes, strict=True)), (last[0], 0))


def _tuning_path(env: Mapping[str, str]) -> str:
    text = env.get("HVPIPE_ALL_REDUCE", "")
    return text if text.endswith(".json") else ""


def _stall_warn(env: Mapping[str, str], default: float) -> float:
    name = "HVPIPE_STALL_WARN"
    return 0.0 if env.get(name) == "0" else _positive(env, name, "seconds, or 0", default)


def _one_of(env: Mapping[str, str], name: str, choices: tuple[_Choice, ...], default: _Choice) -> _Choice:
    text = env.get(name)
    if not text:
        return default
    for choice in choices:
        if text == choice:
            return choice
    raise _bad(name, f"{', '.join(choices[:-1])} or {choices[-1]}", text)


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name)
    if not text:
        return default
    if text not in ("0", "1"):
        raise _bad(name, "0 or 1", text)
    return text == "1"


def _bad(name: str, wanted: str, received: str) -> HvpipeError:
    return HvpipeError(f"{name} should be {wanted}. Received: {name}={received!r}")
