"""The systems under test, by name. Each trains the same model on the same data in its own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.rounds.record import ROUND
from bench.systems.system import System, read_tuned

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
_HVPIPE = System(
    "hvpipe", "hvpipe", "hvpipe_modes", "mpirun", needs=("tensorflow", "keras", "hvpipe", "mpi4py")
)
_HOROVOD = System("horovod", "Horovod", "horovod_tape", "mpirun", needs=("tensorflow", "keras", "horovod"))
_MIRRORED = System(
    "tf-mwms",
    "TensorFlow MultiWorkerMirrored",
    "mirrored",
    "processes",
    options={"bytes_per_pack": "0"},
)
_SINGLE = System("single", "computing alone", "single", "processes")

_RIVALS = ".venv-rivals"
_JAX = System(
    "keras-jax",
    "Keras on JAX, keras.distribution",
    "jax_distribution",
    "processes",
    needs=("keras", "jax"),
    environment={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
    own_environment=_RIVALS,
    alone="keras-jax-alone",
)
_TORCH = System(
    "torch-ddp",
    "Keras on PyTorch, DistributedDataParallel",
    "torch_ddp",
    "processes",
    needs=("keras", "torch"),
    environment={"KERAS_BACKEND": "torch"},
    own_environment=_RIVALS,
    alone="torch-ddp-alone",
)


def _alone(system: System) -> System:
    """Return the same without the other ranks: all compute at once and share nothing."""
    return replace(
        system,
        name=system.alone,
        title=f"{system.title.partition(',')[0]}, computing alone",
        options={"alone": "yes"},
        exact=False,
    )


def _hvpipe(name: str, title: str, options: Mapping[str, str], **more: Any) -> System:
    return replace(_HVPIPE, name=f"hvpipe-{name}", title=f"hvpipe, {title}", options=options, **more)


def _tuned(system: System, **more: Any) -> System:
    """Return the system with its stored values, and a note that names them."""
    name = f"{system.name}-tuned"
    values, source = read_tuned()[name]
    note = f"{', '.join(f'{key}={value}' for key, value in values.items())}: {source}"
    return replace(system, name=name, title=f"{system.title}, tuned", notes=(note,), **more).tuned(values)


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
        "tf-ps",
        "TensorFlow parameter servers",
        "parameter_server",
        "servers",
        uneven=True,
        exact=False,
    ),
    _MIRRORED,
    _tuned(_MIRRORED),
    _HOROVOD,
    _tuned(_HOROVOD, environment=_OPEN_MPI),
    replace(_HOROVOD, name="horovod-gloo", title="Horovod, under horovodrun --gloo", start="horovodrun"),
    _JAX,
    _alone(_JAX),
    _TORCH,
    _alone(_TORCH),
    *(_hvpipe(mode, mode, {"overlap": mode}) for mode in ("none", "backward", "step")),
    *(
        _hvpipe(f"mpi-{m}", f"{m}, by MPI", {"overlap": m}, environment={"HVPIPE_BACKEND": "mpi"})
        for m in ("none", "step")
    ),
    _hvpipe("stale", "stale", {"overlap": "stale"}, exact=False),
    *(
        _hvpipe(name, f"step, {compression}", {"overlap": "step", "compression": compression}, exact=False)
        for name, compression in (("bf16", "bf16"), ("int8", "int8"), ("powersgd", "powersgd:8"))
    ),
    *(
        _hvpipe(
            name,
            f"averages every {ROUND} steps{of_what}",
            {"overlap": "local", "every": str(ROUND), **options},
            exact=False,
            uneven=True,
            least_steps=3 * ROUND,  # three averages, of which only the last one waits for the link
        )
        for name, of_what, options in (("local", "", {}), ("local-int8", ", int8", {"compression": "int8"}))
    ),
    _hvpipe("slow-link", 'link="slow"', {"link": "slow"}, exact=False, uneven=True, least_steps=3 * ROUND),
)

SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}


def is_exact(system: str) -> bool:
    """Return whether a system trains as one process would on the whole batch; so do unknown ones."""
    return system not in SYSTEMS or SYSTEMS[system].exact
