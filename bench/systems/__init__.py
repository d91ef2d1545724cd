"""The systems under test, by name; each trains the same model on the same data in its own way."""

from __future__ import annotations

from bench.systems.system import System

__all__ = ["SYSTEMS", "System"]

_FIT = "driven by Keras `fit`"
_LOOP = "driven by a loop around a compiled step (tf.function)"

_HOROVOD_NOTES = (
    f"{_LOOP} with DistributedGradientTape: under Keras 3 `fit` its DistributedOptimizer reduces nothing",
)


def _hvpipe(overlap: str) -> System:
    return System(
        name=f"hvpipe-{overlap}",
        title=f"hvpipe, {overlap}",
        adapter="hvpipe_modes",
        start="mpirun",
        needs=("tensorflow", "keras", "hvpipe", "mpi4py"),
        options={"overlap": overlap},
        notes=(f"{_FIT}, with hvpipe's trace on",),
    )


def _horovod(name: str, title: str, environment: dict[str, str], note: str) -> System:
    return System(
        name=name,
        title=title,
        adapter="horovod_tape",
        start="mpirun",
        needs=("tensorflow", "keras", "horovod"),
        environment=environment,
        notes=(*_HOROVOD_NOTES, note),
    )


_ALL = (
    System(
        name="single",
        title="computing alone",
        adapter="single",
        start="processes",
        notes=(f"{_FIT}; several ranks are as many processes that compute at once and share nothing",),
    ),
    System(
        name="tf-ps",
        title="TensorFlow parameter servers",
        adapter="parameter_server",
        start="servers",
        notes=(
            f"{_LOOP}, dispatched by ClusterCoordinator: Keras 3 `fit` does not support parameter servers",
            "a worker and a parameter server on every host, the coordinator on the first; variables in turn "
            "on the servers, whole: a step of Keras 3 fails under a variable_partitioner",
            "asynchronous, as TensorFlow 2 has it: each worker pulls, computes and pushes by itself, and its "
            "gradient counts for its share of the global batch",
            "a step has ended when as many batches are done as there are workers; CPU and memory are those "
            "of the host's worker and server; steps end in bursts, so the step here is their mean, drained",
        ),
        asynchronous=True,
    ),
    System(
        name="tf-mwms",
        title="TensorFlow MultiWorkerMirrored",
        adapter="mirrored",
        start="processes",
        notes=(f"{_LOOP}, RING over gRPC: Keras 3 `fit` is reported to fail under it (keras issue 20585)",),
    ),
    _horovod("horovod", "Horovod", {}, "default settings"),
    _horovod(
        "horovod-tuned",
        "Horovod, tuned",
        # The values of its docs/tensor-fusion.rst, which with docs/autotune.rst names these as the knobs.
        {"HOROVOD_CYCLE_TIME": "3.5", "HOROVOD_FUSION_THRESHOLD": str(32 << 20)},
        "cycle time 3.5 ms, fusion threshold 32 MiB, the values in its documentation",
    ),
    *(_hvpipe(overlap) for overlap in ("none", "backward", "step", "stale")),
)

SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
