"""What `hvpipe.horovod` takes, refuses and says, beside the results of its collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvpipe.horovod.keras as hvd_of_keras
import hvpipe.horovod.tensorflow as hvd
import hvpipe.horovod.tensorflow.keras as hvd_keras
from hvpipe.errors import HvpipeError
from hvpipe.keras.named import process_sets

pytestmark = [pytest.mark.every_size, pytest.mark.three_suffice]


def test_process_sets_that_init_refuses() -> None:
    """Regression: a set that was given twice, and the set of all ranks, silently got another one's number."""
    rank, size = hvd.rank(), hvd.size()
    refused = [[[0], [0]], [list(range(size))], [[0], [0]] if rank == 0 else [[0], [size - 1]]]
    for given in refused:
        sets = [hvd.ProcessSet(ranks) for ranks in given]
        with pytest.raises(ValueError, match=r"each set of ranks once.*Received: entry \d of ranks \[0"):
            hvd.init(process_sets=sets)
        assert [each.process_set_id for each in sets] == [None] * len(sets)
    with pytest.raises(ValueError, match="process_sets='static'"):
        hvd.init(process_sets="static")
    if size == 1:
        return
    first, again = [hvd.ProcessSet([0])], [hvd.ProcessSet([0]), hvd.ProcessSet([size - 1])]
    hvd.init(process_sets=first)
    hvd.init(process_sets=again)
    assert again[0].process_set_id == first[0].process_set_id not in (None, 0)
    assert again[1].size() == 1
    assert [hvd.remove_process_set(each) for each in again] == [True, True]


def test_the_communicator_that_init_is_given() -> None:
    """Regression: the set of all ranks did not know it."""
    from mpi4py import MPI

    hvd.init(comm=[])
    hvd.init(comm=range(hvd.size()))
    try:
        hvd.init(comm=MPI.COMM_WORLD)
        assert hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
    finally:
        hvd.global_process_set.mpi_comm = None
    with pytest.raises(ValueError, match=r"comm should be None, a list of ranks or an mpi4py.* comm=5"):
        hvd.init(comm=5)
    with pytest.raises(ValueError, match="add_process_set of no rank"):
        hvd.add_process_set([])
    with pytest.raises(ValueError, match=r"a list of tensors\. Received: ndarray"):
        hvd.grouped_allreduce(np.ones(3))
    reverse = MPI.COMM_WORLD.Split(0, -hvd.rank())
    if hvd.size() > 1:
        with pytest.raises(HvpipeError, match=r"all ranks.*of ranks \["):
            hvd.init(comm=reverse)
    reverse.Free()


ONES = np.ones(4, np.float32)
ON_A_SET: dict[str, Callable[[Any], Any]] = {
    "size": lambda s: s.size(),
    "rank": lambda s: s.rank(),
    "allreduce": lambda s: hvd.allreduce(ONES, process_set=s),
    "allreduce in a graph": lambda s: tf.function(lambda: hvd.allreduce(ONES, process_set=s))(),
    "allreduce of slices": lambda s: hvd.allreduce(tf.IndexedSlices(tf.ones(4), tf.range(4)), process_set=s),
    "grouped_allreduce": lambda s: hvd.grouped_allreduce([ONES], process_set=s),
    "allgather": lambda s: hvd.allgather(ONES, process_set=s),
    "grouped_allgather": lambda s: hvd.grouped_allgather([ONES], process_set=s),
    "broadcast": lambda s: hvd.broadcast(ONES, 0, process_set=s),
    "broadcast_": lambda s: hvd.broadcast_([tf.Variable(1.0)], 0, process_set=s),
    "broadcast_variables": lambda s: hvd.broadcast_variables([tf.Variable(1.0)], 0, process_set=s),
    "broadcast_object": lambda s: hvd.broadcast_object(1, 0, process_set=s),
    "allgather_object": lambda s: hvd.allgather_object(1, process_set=s),
    "alltoall": lambda s: hvd.alltoall(ONES, process_set=s),
    "reducescatter": lambda s: hvd.reducescatter(ONES, process_set=s),
    "grouped_reducescatter": lambda s: hvd.grouped_reducescatter([ONES], process_set=s),
    "barrier": lambda s: hvd.barrier(process_set=s),
    "size_op": lambda s: hvd.size_op(s.process_set_id),
    "process_set_included_op": lambda s: hvd.process_set_included_op(s.process_set_id),
}


def test_a_process_set_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its size was 0, and each collective had an error of its own."""
    unknown = hvd.ProcessSet([0])
    unknown.process_set_id = 77
    for call in ON_A_SET.values():
        with pytest.raises(ValueError, match="process_set_id=77, which no set has"):
            call(unknown)
    kept = hvd.ProcessSet([0])
    kept.process_set_id = 1
    monkeypatch.setitem(process_sets._added_in, kept, lambda: None)
    with pytest.raises(ValueError, match=r"added again after shutdown.*session that has ended"):
        hvd.allreduce(ONES, process_set=kept)
    assert not hvd.remove_process_set(kept)
    with pytest.raises(ValueError, match=r"process_set should be a ProcessSet .*Received: \[0\]"):
        hvd.allreduce(ONES, process_set=[0])


def test_slices_with_factors_and_of_integers() -> None:
    """Regression: gradient_predivide_factor failed, and an average of integers became floating-point."""
    size = hvd.size()
    for dtype, rest in ((tf.float32, 0.5), (tf.int8, 0)):
        slices = tf.IndexedSlices(tf.constant([[100], [3]], dtype), tf.constant([0, 2]), tf.constant([4, 1]))
        found = hvd.allreduce(slices, op=hvd.Sum, prescale_factor=0.5)
        assert found.values.dtype == dtype
        np.testing.assert_array_equal(found.values, [[50], [1 + 2 * rest * 0.5]] * size)
    variable = tf.Variable(np.ones((3, 2), np.float32))
    with hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0) as tape:
        loss = tf.reduce_sum(tf.gather(variable, [1])) * (hvd.rank() + 1.0)
    found = tf.convert_to_tensor(tape.gradient(loss, variable))
    np.testing.assert_allclose(found, [[0, 0], [(size + 1) / 2] * 2, [0, 0]], rtol=1e-6)
    for call in (hvd.allreduce, hvd.allgather):
        with pytest.raises(ValueError, match=r"take dense tensors.*Received: SparseTensor"):
            call(tf.sparse.from_dense([1.0]))


def test_optimizers_that_would_reduce_wrongly() -> None:
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(), op=hvd.Sum)
    for wrap in (hvd.DistributedOptimizer, hvd_keras.PartialDistributedOptimizer):
        with pytest.raises(ValueError, match="should be called once"):
            wrap(optimizer, op=hvd.Sum)
    for factor in (0.0, -1.0):
        with pytest.raises(ValueError, match="gradient_predivide_factor should be above 0"):
            hvd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=factor)


def test_every_optimizer_has_local_variables() -> None:
    size, mine = hvd.size(), hvd.rank() + 1.0
    for options in ({}, {"op": hvd.Sum}):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        kept, shared = (keras.Variable(np.zeros(1, "float32")) for _ in range(2))
        optimizer.register_local_var(kept)
        optimizer.apply([tf.constant([mine]), tf.constant([mine])], [kept, shared])
        total = size * (size + 1) / 2
        np.testing.assert_allclose(kept.numpy(), [-mine / size])
        np.testing.assert_allclose(shared.numpy(), [-total if options else -total / size])


def test_names_of_tensorflow_1() -> None:
    for module in (hvd, hvd_keras, hvd_of_keras):
        with pytest.raises(RuntimeError, match="broadcast_variables"):
            module.broadcast_global_variables(0)
    with pytest.raises(AttributeError, match=r"TensorFlow 1\. Use broadcast_variables"):
        _ = hvd.BroadcastGlobalVariablesHook
    with pytest.raises(ValueError, match="legacy_opts should be False"):
        hvd_of_keras.load_model("model.keras", legacy_opts=True)


def test_objects_in_a_graph() -> None:
    """Regression: "SymbolicTensor has no attribute numpy"."""
    for function in (hvd.allgather_object, hvd.broadcast_object, hvd.broadcast_object_fn()):
        with pytest.raises(HvpipeError, match=r"outside of graphs and tf.function"):
            tf.function(lambda call=function: call({"a": 1}) and 0, autograph=False)()
        with tf.Graph().as_default(), pytest.raises(HvpipeError, match="outside of graphs"):
            function({"a": 1})


def small_model() -> Any:
    model = keras.Sequential(
        [keras.Input([2]), keras.layers.Dense(2, name="a"), keras.layers.Dense(1, name="b")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def test_arguments_in_horovods_order() -> None:
    """Regression: TypeError for what Horovod takes."""
    model = small_model()
    state = hvd_keras.elastic.KerasState(model, model.optimizer, batch=1)
    assert (state.optimizer, state.batch) == (model.optimizer, 1)
    hvd_keras.callbacks.MetricAverageCallback("")
    best = hvd_of_keras.callbacks.BestModelCheckpoint("loss", 0, "max")
    assert best.mode == "max"
    weights = hvd_keras.callbacks.BestModelCheckpoint("loss", 0, True)
    assert weights.filepath == "best.weights.h5"
    optimizer = hvd_of_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0), None, "", "", hvd.Compression.none, False, 1.0, hvd.Sum, 2, None
    )
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer.apply([tf.ones([2])], [variable])
    np.testing.assert_array_equal(variable.numpy(), np.full(2, -float(hvd.size())))


def test_local_variables_keep_each_ranks_values() -> None:
    model = small_model()
    for variable in model.variables:
        variable.assign(np.full(variable.shape, hvd.rank() + 1.0, "float32"))
    local = model.layers[0].trainable_variables
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(hvd.size() - 1, "", local)
    callback.set_model(model)
    callback.on_train_begin()
    found = [float(v.numpy().ravel()[0]) for v in model.variables]
    assert found == [hvd.rank() + 1.0] * 2 + [float(hvd.size())] * 2
    with pytest.raises(ValueError, match=r"local_variables should be variables. Received: 'kernel'"):
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, "", ["kernel"])
    hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=local[0])
