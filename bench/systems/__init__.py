"""The systems under test, by name. Each trains the same model on the same data in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.systems.system import System
from bench.systems.tuned import read_tuned

__all__ = ["SYSTEMS", "System"]

# What hvpipe sets for itself over TCP. Also, a thread that waits in MPI gives up its core: Horovod has such a
# thread beside each computing rank. The rules choose the algorithms that `python -m bench.all_reduce` found
# to be fastest on links, by the number of ranks and the size.
_OPEN_MPI = {
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_dynamic_rules_filename": str(Path(__file__).with_name("open_mpi_all_reduce.rules")),
    "OMPI_MCA_btl_tcp_eager_limit": str(256 << 10),
    "OMPI_MCA_btl_tcp_max_send_size": str(256 << 10),
}


def _hvpipe(name: str, title: str, options: Mapping[str, str], **more: Any) -> System:
    system = System(
        name=f"hvpipe-{name}",
        title=f"hvpipe, {title}",
        adapter="hvpipe_modes",
        start="mpirun",
        needs=("tensorflow", "keras", "hvpipe", "mpi4py"),
        options=options,
    )
    return replace(system, **more)


def _horovod(name: str, title: str, environment: dict[str, str]) -> System:
    return System(
        name=name,
        title=title,
        adapter="horovod_tape",
        start="mpirun",
        needs=("tensorflow", "keras", "horovod"),
        environment=environment,
    )


def _mirrored(name: str, title: str) -> System:
    return System(
        name=name,
        title=title,
        adapter="mirrored",
        start="processes",
        options={"bytes_per_pack": "0"},
    )


def _tuned(system: System) -> System:
    """Return the system with its stored values, and a note that names them."""
    tuned = read_tuned()[system.name]
    values = ", ".join(f"{name}={value}" for name, value in tuned.values.items())
    return replace(system.tuned(tuned.values), notes=(f"{values}: {tuned.source}",))


_SINGLE = System(
    name="single",
    title="computing alone",
    adapter="single",
    start="processes",
)
_HOROVOD = _horovod("horovod", "Horovod", {})
_BY_OVERLAP = {each: _hvpipe(each, each, {"overlap": each}) for each in ("none", "backward", "step")}
_ALL = (
    _SINGLE,
    replace(
        _SINGLE,
        name="single-beside-tcp",
        title="computing alone beside plain TCP",
        options={"beside_tcp": "yes"},
        exact=False,
    ),
    System(
        name="tf-ps",
        title="TensorFlow parameter servers",
        adapter="parameter_server",
        start="servers",
        uneven=True,
        exact=False,
    ),
    _mirrored("tf-mwms", "TensorFlow MultiWorkerMirrored"),
    _tuned(_mirrored("tf-mwms-tuned", "TensorFlow MultiWorkerMirrored, tuned")),
    _HOROVOD,
    _tuned(_horovod("horovod-tuned", "Horovod, tuned", _OPEN_MPI)),
    replace(
        _HOROVOD,
        name="horovod-gloo",
        title="Horovod, under horovodrun --gloo",
        start="horovodrun",
    ),
    *_BY_OVERLAP.values(),
    *(
        _hvpipe(
            f"mpi-{overlap}",
            f"{overlap}, by MPI",
            {"overlap": overlap},
            environment={"HVPIPE_BACKEND": "mpi"},
        )
        for overlap in ("none", "step")
    ),
    _hvpipe("stale", "stale", {"overlap": "stale"}, exact=False),
    *(
        _hvpipe(name, f"step, {compression}", {"overlap": "step", "compression": compression}, exact=False)
        for name, compression in (("bf16", "bf16"), ("int8", "int8"), ("powersgd", "powersgd:4"))
    ),
    _hvpipe(
        "local",
        "averages every 8 steps",
        {"overlap": "local", "every": "8"},
        exact=False,
        uneven=True,
        least_steps=24,  # three averages, of which only the last one waits for the link
    ),
)

SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
