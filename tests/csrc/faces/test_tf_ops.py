"""TensorFlow kernels when memory is used up, or of an old graph: an error, and the process goes on."""

from __future__ import annotations

from pathlib import Path

from distributed import launch
from native_build import build

PLAN = """
import numpy as np
import tensorflow as tf
import hvpipe
from hvpipe.keras.ops import library
from hvpipe.plan.buckets import Gradient, plan_buckets
from hvpipe.session import current

hvpipe.init()
gradients = [Gradient(name, (1000,), "float32") for name in ("a", "b")]
plan = current().engine.add_plan("model", plan_buckets(gradients, 4000))
ones, ops = tf.ones(1000), library()
"""
OUT_OF_MEMORY = (
    PLAN
    + """
named = dict(call="c", process_set=0)
calls = {
    "begin": lambda: ops.hvpipe_begin_step(samples=1.0, announced=1, reduces=True, plan=plan),
    "submit": lambda: ops.hvpipe_submit(scale=1.0, tensors=[ones], plan=plan, bucket=0),
    "collect": lambda: ops.hvpipe_collect(token=1, plan=plan, bucket=0, shapes=[[1000]], T=tf.float32, N=1),
    "unpack": lambda: ops.hvpipe_collect(token=1, plan=plan, bucket=1, shapes=[[1000]], T=tf.float32, N=1),
    "send": lambda: ops.hvpipe_send_message(number=0, tensor=ones),
    "take": lambda: ops.hvpipe_take_message(number=0, shape=[1000], T=tf.float32),
    "named": lambda: ops.hvpipe_named_allreduce(
        tensors=[ones], factors=tf.ones(2, tf.float64), reduce_op=1, **named
    ),
}
for name, call in calls.items():
    try:
        call()
    except tf.errors.InternalError as error:
        assert "Out of host memory on this rank" in error.message, error.message
        print(name, "failed", flush=True)
"""
)
OTHER_MODEL = (
    PLAN
    + """
doubles = tf.ones(1000, tf.float64)
collect = dict(token=1, plan=plan, bucket=0, N=1)
calls = [
    lambda: ops.hvpipe_submit(scale=1.0, tensors=[doubles], plan=plan, bucket=0),
    lambda: ops.hvpipe_submit_rows(scale=1.0, rows=[0], values=ones, plan=plan, bucket=0),
    lambda: ops.hvpipe_collect(shapes=[[1000]], T=tf.float64, **collect),
    lambda: ops.hvpipe_collect(shapes=[[999]], T=tf.float32, **collect),
    lambda: ops.hvpipe_collect_rows(token=1, plan=plan, bucket=0, shapes=[[10, 10]], T=tf.float32),
]
for call in calls:
    try:
        call()
    except tf.errors.InvalidArgumentError as error:
        assert "traced before hvpipe.init(): its bucket should be" in error.message, error.message
        print("refused", flush=True)
"""
)


def test_a_kernel_without_memory_is_an_error_of_its_op(tmp_path: Path) -> None:
    """Regression: std::bad_alloc left the kernel and terminated the process."""
    script = tmp_path / "out_of_memory.py"
    script.write_text(OUT_OF_MEMORY)
    result = launch(1, [script], limit_s=120, env={"LD_PRELOAD": str(build("out_of_memory.cc"))})
    assert result.returncode == 0, result.describe()
    kernels = ("begin", "submit", "collect", "unpack", "send", "take", "named")
    assert {f"{kernel} failed" for kernel in kernels} <= set(result.output.splitlines()), result.describe()


def test_a_kernel_of_another_models_plan_is_refused(tmp_path: Path) -> None:
    """Regression: only numbers of elements were compared, so it read memory of the wrong size."""
    script = tmp_path / "other_model.py"
    script.write_text(OTHER_MODEL)
    result = launch(1, [script], limit_s=120)
    assert result.returncode == 0, result.describe()
    assert result.output.splitlines().count("refused") == 5, result.describe()
