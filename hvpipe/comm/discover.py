"""Reads the environment: who launched this process, and the settings."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from hvpipe.comm import horovod_variables
from hvpipe.errors import HvpipeError, InitError

Launcher = Literal["mpirun", "srun", "horovodrun", "none"]

Backend = Literal["mpi", "horovod"]

NcclSpan = Literal["world", "host"]
Nonfinite = Literal["raise", "skip", "ignore"]
NONFINITE: tuple[Nonfinite, ...] = ("raise", "skip", "ignore")
LrScaling = Literal["none", "linear", "sqrt"]
LR_SCALINGS: tuple[LrScaling, ...] = ("none", "linear", "sqrt")
_Choice = TypeVar("_Choice", bound=str)

LOG_LEVELS = ("debug", "info", "warning", "error")

# The variables that hold rank, size, local rank and local size, by process manager; "" if only MPI knows.
# The order matters: inside a SLURM job Hydra (MPICH, Intel MPI) starts its proxies with srun. Then
# SLURM_PROCID counts proxies, and PMI_RANK counts ranks.
_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_MVAPICH = (
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
_SLURM_PMI = ("PMI_RANK", "PMI_SIZE", "SLURM_LOCALID", "")
_PMIX = ("PMIX_RANK", "", "", "")
_FUSION = "HOROVOD_FUSION_THRESHOLD"
_GLOO = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_HOROVOD = ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE")


_EAGER_LIMIT, _MAX_SEND_SIZE = "OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"
_FAULT_TOLERANCE = "OMPI_MCA_mpi_ft_enable"
_EAGER_BYTES, _USUAL_EAGER_BYTES = 256 << 10, 64 << 10


@dataclass(frozen=True)
class Launch:
    """The launcher, rank and size of this process, from the environment; None for what only MPI knows."""

    launcher: Launcher
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None


_ALONE = Launch("none", 0, 1, 0, 1)


@dataclass(frozen=True)
class Settings:
    """The HVPIPE_* variables, Horovod's and CUDA_VISIBLE_DEVICES, checked. `settings` lists their names."""

    backend: Backend | None = None  # None: Horovod under `horovodrun --gloo`, else MPI
    timeout_s: float = 300.0
    shutdown_timeout_s: float | None = None  # None: an hour, or timeout_s if that is longer
    trace_path: str | None = None
    utilization_path: str | None = None
    utilization_hz: float = 10.0
    visible_gpus: str | None = None
    live: bool = False
    live_folder: str | None = None
    bucket_bytes: int | None = None  # None: hvpipe chooses it for the model
    table_bytes: int = 1 << 20
    segment_bytes: int = 0  # 0: what MPI's eager limit allows
    slot_bytes: int = 256 << 10
    messages_in_flight: int = 8
    ranks_per_host: int = 0
    shared_memory: bool = True
    summary: bool = False
    nccl_library: str = ""  # "": look for it; "none": send data on GPUs through the host
    nccl_span: NcclSpan = "world"  # "host": MPI carries data of GPUs between hosts
    device_library: str = ""  # "": hvpipe's own for CUDA
    gpus_may_be_shared: bool = False
    dynamic_process_sets: bool = False  # whether process sets can be added to Horovod
    job_folder: Path | None = None  # that `hvpipe run` shares with the ranks of its host
    verify_every: int = 0  # steps; 0: never
    nonfinite: Nonfinite = "ignore"
    stall_warn_s: float = 10.0  # 0: never
    stall_abort_s: float | None = None  # None: timeout_s
    flight_folder: str | None = None  # None: the job folder, or memory without one
    flight_path: str = ""  # the session sets it
    elastic: bool = False  # whether training goes on without ranks that are lost
    min_ranks: int = 1  # with fewer, an elastic job ends
    lr_scaling: LrScaling = "none"  # of the learning rate when the number of ranks changes
    log_level: str | None = None  # None: the level that the program configured
    without_effect: tuple[str, ...] = ()  # variables of Horovod that ask for what hvpipe does not have

    @property
    def engine_timeout_s(self) -> float:
        """The longest wait of a collective."""
        return min(self.timeout_s, self.stall_abort_s or math.inf)

    @property
    def engine_stall_s(self) -> float:
        """After how long a wait is reported: in time for the report to precede the end of the job."""
        abort_s = self.stall_abort_s or math.inf
        return min(self.stall_warn_s, max(abort_s / 2, abort_s - 4))


def discover(environ: Mapping[str, str] | None = None) -> Launch:
    """Find out who launched this process.

    Args:
        environ: The environment to read; None for this process's own.

    Raises:
        InitError: If a variable of the launcher is not a whole number.
    """
    env = os.environ if environ is None else environ
    # First: inside a SLURM job, or under an MPI that started horovodrun, the others' variables are set, too.
    if _GLOO in env:
        return _launch("horovodrun", env, _HOROVOD)
    # A SLURM batch script also has SLURM_PROCID=0, but only a job step has a number of tasks.
    in_step = "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env
    if _OPEN_MPI[0] in env:
        return _launch("mpirun", env, _OPEN_MPI)
    if _MVAPICH[0] in env:
        return _launch("mpirun", env, _MVAPICH)
    if _HYDRA[0] in env and (not in_step or "MPI_LOCALRANKID" in env):
        return _launch("mpirun", env, _HYDRA)
    if in_step:
        step = _launch("srun", env, _SLURM_PMI if _HYDRA[0] in env else _SLURM)
        # One task is a shell of salloc or `srun --pty`. With PMIx it may be a rank that the shell launched.
        return _ALONE if step.size == 1 and _PMIX[0] not in env else step
    if _PMIX[0] in env:
        return _launch("mpirun", env, _PMIX)
    return _ALONE


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from environment variables.

    | variable | value |
    |---|---|
    | HVPIPE_BACKEND | "mpi" or "horovod": what joins the ranks |
    | HVPIPE_TIMEOUT | longest wait for another rank, in seconds |
    | HVPIPE_SHUTDOWN_TIMEOUT | longest wait for the others in `shutdown`, in seconds |
    | HVPIPE_TRACE, HVPIPE_UTILIZATION | files to write |
    | HVPIPE_UTILIZATION_HZ | samples per second |
    | HVPIPE_LIVE | report to `hvpipe top`: 0, 1 or a folder; the default is HVPIPE_SUMMARY |
    | HVPIPE_SUMMARY | 0 or 1: print a summary at the end |
    | HVPIPE_BUCKET_BYTES | size of a gradient bucket |
    | HVPIPE_TABLE_BYTES | an Embedding at least this large sends only the rows of its batch |
    | HVPIPE_SEGMENT_BYTES | size of the largest ring message |
    | HVPIPE_SLOT_BYTES | size of a slot of the shared-memory transport |
    | HVPIPE_MESSAGES_IN_FLIGHT | how many ring messages may be under way |
    | HVPIPE_RANKS_PER_HOST | for tests: pretend that this many ranks share a host |
    | HVPIPE_SHARED_MEMORY | 0 or 1 |
    | HVPIPE_NCCL_LIBRARY | a path, or "none" to send data on GPUs through the host |
    | HVPIPE_NCCL_SPAN | "world", or "host" to use NCCL inside hosts only |
    | HVPIPE_DEVICE_LIBRARY | for tests: the library that serves device arrays |
    | HVPIPE_VERIFY | after how many steps data_parallel compares weights over ranks |
    | HVPIPE_NONFINITE | "raise", "skip" or "ignore" steps whose gradients are NaN or Inf |
    | HVPIPE_STALL_WARN | report a collective that waits for so many seconds; 0: none |
    | HVPIPE_STALL_ABORT | end the job after such a wait, in seconds; the default is HVPIPE_TIMEOUT |
    | HVPIPE_FLIGHT_RECORDER | the folder for the recorders of ranks that end badly |
    | HVPIPE_JOB_FOLDER | set by `hvpipe run`: the folder that it shares with the ranks of its host |
    | HVPIPE_ELASTIC | 0 or 1: go on without ranks that are lost |
    | HVPIPE_MIN_NP | with fewer ranks than this, an elastic job ends |
    | HVPIPE_LR_SCALING | "none", "linear" or "sqrt": the learning rate when the number of ranks changes |
    | HVPIPE_LOG_LEVEL | debug, info, warning or error |
    | HOROVOD_DYNAMIC_PROCESS_SETS | Horovod's own: 1 lets process sets be added to it |
    | NCCL_MULTI_RANK_GPU_ENABLE | NCCL's own: 1 lets ranks share a GPU |
    | HOROVOD_* | Horovod's own, where HVPIPE_* is not set: `horovod_variables.hvpipe_variables` lists them |

    Args:
        environ: The environment to read; None for this process's own.

    Raises:
        HvpipeError: For a bad value; the message names the variable.
    """
    given = os.environ if environ is None else environ
    chosen = backend(given.get("HVPIPE_BACKEND"))
    on_horovod = chosen == "horovod" or (chosen is None and _GLOO in given)
    env = {**given, **horovod_variables.hvpipe_variables(given, on_horovod)}
    default = Settings()
    log_level = env.get("HVPIPE_LOG_LEVEL", "").lower() or None
    if log_level not in (None, *LOG_LEVELS):
        raise _bad("HVPIPE_LOG_LEVEL", f"one of {', '.join(LOG_LEVELS)}", env["HVPIPE_LOG_LEVEL"])
    summary = _switch(env, "HVPIPE_SUMMARY", default.summary)
    live, live_folder = _live(env, summary)
    return Settings(
        backend=chosen,
        timeout_s=_positive(env, "HVPIPE_TIMEOUT", "seconds", default.timeout_s),
        shutdown_timeout_s=_positive(env, "HVPIPE_SHUTDOWN_TIMEOUT", "seconds", 0.0) or None,
        trace_path=env.get("HVPIPE_TRACE") or None,
        utilization_path=env.get("HVPIPE_UTILIZATION") or None,
        utilization_hz=_positive(env, "HVPIPE_UTILIZATION_HZ", "samples a second", default.utilization_hz),
        visible_gpus=env.get("CUDA_VISIBLE_DEVICES"),
        live=live,
        live_folder=live_folder,
        bucket_bytes=_number(env, "HVPIPE_BUCKET_BYTES", "bytes", 0) or default.bucket_bytes,
        table_bytes=_number(env, "HVPIPE_TABLE_BYTES", "bytes", default.table_bytes),
        segment_bytes=_number(env, "HVPIPE_SEGMENT_BYTES", "bytes", default.segment_bytes),
        slot_bytes=_number(env, "HVPIPE_SLOT_BYTES", "bytes", default.slot_bytes),
        messages_in_flight=_number(env, "HVPIPE_MESSAGES_IN_FLIGHT", "messages", default.messages_in_flight),
        ranks_per_host=_number(env, "HVPIPE_RANKS_PER_HOST", "ranks", default.ranks_per_host),
        shared_memory=_switch(env, "HVPIPE_SHARED_MEMORY", default.shared_memory),
        summary=summary,
        nccl_library=env.get("HVPIPE_NCCL_LIBRARY", ""),
        nccl_span=_nccl_span(env, default.nccl_span),
        device_library=env.get("HVPIPE_DEVICE_LIBRARY", ""),
        gpus_may_be_shared=env.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1",
        dynamic_process_sets=given.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1",
        job_folder=job_folder(env),
        verify_every=_number(env, "HVPIPE_VERIFY", "steps", default.verify_every),
        nonfinite=_one_of(env, "HVPIPE_NONFINITE", NONFINITE, default.nonfinite),
        stall_warn_s=_stall_warn(env, default.stall_warn_s),
        stall_abort_s=_positive(env, "HVPIPE_STALL_ABORT", "seconds", 0.0) or None,
        flight_folder=env.get("HVPIPE_FLIGHT_RECORDER") or None,
        elastic=_switch(env, "HVPIPE_ELASTIC", default.elastic),
        min_ranks=_number(env, "HVPIPE_MIN_NP", "ranks", default.min_ranks),
        lr_scaling=_one_of(env, "HVPIPE_LR_SCALING", LR_SCALINGS, default.lr_scaling),
        log_level=log_level,
        without_effect=() if on_horovod else horovod_variables.without_effect(given),
    )


def backend(text: str | None) -> Backend | None:
    """Return the back end with this name; None for no name.

    Raises:
        HvpipeError: For any other name.
    """
    if not text:
        return None
    if text not in ("mpi", "horovod"):
        raise _bad("HVPIPE_BACKEND", "mpi or horovod", text)
    return "mpi" if text == "mpi" else "horovod"


def prepare_open_mpi() -> None:
    """Set Open MPI's options for hvpipe, before MPI starts. Options that the user set stay as they are.

    UCX is off for shared windows: the PyPI wheel has the component without the hardware, and prints an error
    at every start. Over TCP, messages of up to 256 KiB (default: 64 KiB) are sent at once, without a
    handshake. Fewer messages for the same bytes take less time from the cores that compute. If a rank may be
    lost, MPI_Finalize has no barrier: now and then it would wait there for ever for a rank that was lost.
    """
    os.environ.setdefault("OMPI_MCA_osc", "^ucx")
    if fault_tolerance_asked():
        os.environ.setdefault("OMPI_MCA_async_mpi_finalize", "1")
    if _EAGER_LIMIT not in os.environ and _MAX_SEND_SIZE not in os.environ:
        os.environ[_EAGER_LIMIT] = os.environ[_MAX_SEND_SIZE] = str(_EAGER_BYTES)


def fault_tolerance_asked() -> bool:
    """Return whether this rank was started with Open MPI's `mpirun --with-ft ulfm`."""
    return os.environ.get(_FAULT_TOLERANCE, "") in ("1", "t", "true", "yes", "y", "enabled")


@contextmanager
def unfused_horovod() -> Iterator[None]:
    """Let a Horovod that starts in this block fuse no tensors, unless the user has said how many.

    hvpipe's buckets are fused already: fusing them again would copy them, and make early ones wait.
    """
    if _FUSION in os.environ:
        yield
        return
    os.environ[_FUSION] = "0"
    try:
        yield
    finally:
        del os.environ[_FUSION]  # `settings` reads it, too, as the size of a bucket


def eager_bytes(library: str, environ: Mapping[str, str] | None = None) -> int:
    """Return the largest message, in bytes, that this MPI (`library`) sends over TCP without a handshake."""
    text = (os.environ if environ is None else environ).get(_EAGER_LIMIT, "")
    return int(text) if "Open MPI" in library and text.isdecimal() else _USUAL_EAGER_BYTES


def _launch(launcher: Launcher, env: Mapping[str, str], names: tuple[str, str, str, str]) -> Launch:
    rank, size, local_rank, local_size = (_count(env, name) for name in names)
    return Launch(launcher, rank, size, local_rank, local_size)


def _count(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise InitError(f"The launcher should set {name} to a whole number. Received: {name}={text!r}")
    return value


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


def live_folder(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the folder in HVPIPE_LIVE, where jobs report to `hvpipe top`; None if it names none."""
    return _live(os.environ if environ is None else environ, False)[1]


def job_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder that `hvpipe run` shares with the ranks of its host; None if there is none here."""
    text = (os.environ if environ is None else environ).get("HVPIPE_JOB_FOLDER")
    return Path(text) if text and os.path.isdir(text) else None


def _live(env: Mapping[str, str], default: bool) -> tuple[bool, str | None]:
    """Return whether to report to `hvpipe top`, and the folder to report in if one is named."""
    text = env.get("HVPIPE_LIVE")
    if text and text.startswith("/"):
        return True, text
    if text and text not in ("0", "1"):
        raise _bad("HVPIPE_LIVE", "0, 1 or the absolute path of a folder", text)
    return (text == "1" if text else default), None


def _number(env: Mapping[str, str], name: str, unit: str, default: int) -> int:
    text = env.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise _bad(name, f"a positive number of {unit}", text)
    return value


def _nccl_span(env: Mapping[str, str], default: NcclSpan) -> NcclSpan:
    text = env.get("HVPIPE_NCCL_SPAN")
    if not text:
        return default
    if text == "world":
        return "world"
    if text == "host":
        return "host"
    raise _bad("HVPIPE_NCCL_SPAN", "world or host", text)


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
