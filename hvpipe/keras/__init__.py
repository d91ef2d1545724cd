"""hvpipe for Keras on TensorFlow: pipelined data-parallel training."""

from __future__ import annotations

from hvpipe.keras import ops as _ops
from hvpipe.keras import supported as _supported

_ops.library()  # fails here, with what to do, if hvpipe was built against another TensorFlow
_supported.check_installed()  # and here, if Keras is too old or on another backend

from hvpipe.collectives import allgather_object, barrier, broadcast_object  # noqa: E402
from hvpipe.keras.callbacks import BroadcastGlobalVariablesCallback, MetricAverageCallback  # noqa: E402
from hvpipe.keras.checkpoint.callback import Checkpoint  # noqa: E402
from hvpipe.keras.data_parallel.copies import keep_in_clones as _keep_in_clones  # noqa: E402
from hvpipe.keras.data_parallel.custom_loops import (  # noqa: E402
    DistributedGradientTape,
    DistributedOptimizer,
    average_gradients,
)
from hvpipe.keras.data_parallel.model import data_parallel  # noqa: E402
from hvpipe.keras.data_parallel.shards import shard  # noqa: E402
from hvpipe.keras.gpu import claim_gpu as _claim_gpu  # noqa: E402
from hvpipe.keras.named.functions import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allreduce,
    join,
    reducescatter,
)
from hvpipe.keras.named.process_sets import (  # noqa: E402
    ProcessSet,
    add_process_set,
    remove_process_set,
)
from hvpipe.keras.named.sync_batch_norm import SyncBatchNormalization  # noqa: E402
from hvpipe.keras.pipeline.model import pipeline_parallel  # noqa: E402
from hvpipe.keras.profiling.cluster import measure_cluster, measure_ranks  # noqa: E402
from hvpipe.keras.profiling.measure import measure  # noqa: E402
from hvpipe.keras.resize import on_resize  # noqa: E402
from hvpipe.keras.training_alone import alone  # noqa: E402
from hvpipe.keras.training_alone import watch as _watch  # noqa: E402
from hvpipe.keras.variables import broadcast_variables  # noqa: E402
from hvpipe.session import (  # noqa: E402
    init,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvpipe.session import when_joined as _when_joined  # noqa: E402

_when_joined(_claim_gpu)
_when_joined(_watch)
_keep_in_clones()

__all__ = [
    "BroadcastGlobalVariablesCallback",
    "Checkpoint",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "MetricAverageCallback",
    "ProcessSet",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "alone",
    "average_gradients",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "data_parallel",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "measure",
    "measure_cluster",
    "measure_ranks",
    "on_resize",
    "pipeline_parallel",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shard",
    "shutdown",
    "size",
]
