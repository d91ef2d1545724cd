"""Ranks that train different layers of equal shapes: they end, instead of averaging these with each other."""

from __future__ import annotations

from pathlib import Path

from distributed import expect_fatal

IN_FIT = """
import keras
import numpy as np
import hvpipe
import hvpipe.keras as hk

class Branches(keras.Model):
    def build(self, shape):
        self.branches = [keras.layers.Dense(4), keras.layers.Dense(4)]
        for branch in self.branches:
            branch.build(shape)

    def call(self, x):
        return self.branches[hvpipe.rank()](x)

hvpipe.init()
model = Branches()
model.build((None, 4))
model.compile("sgd", "mse")
hk.data_parallel(model)
model.fit(np.ones((8, 4)), np.ones((8, 4)), verbose=0)
"""


IN_A_LOOP = """
import tensorflow as tf
import hvpipe
import hvpipe.keras as hk

hvpipe.init()
branches = [tf.Variable([1.0], name="kernel"), tf.Variable([1.0], name="kernel")]
gradient = tf.constant([1.0])
for branch in branches:  # there is a plan for each branch alone
    hk.average_gradients([gradient], [branch])
mine = [gradient if rank == hvpipe.rank() else None for rank in range(2)]
hk.average_gradients(mine, branches)
"""


def test_ranks_that_train_different_branches(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text(IN_FIT)
    expect_fatal(2, script, says=r"The ranks disagree.*training step 1 of sgd", within_s=90)


def test_ranks_that_average_different_branches(tmp_path: Path) -> None:
    """Regression: they averaged these, if each branch had been averaged alone before."""
    script = tmp_path / "case.py"
    script.write_text(IN_A_LOOP)
    expect_fatal(2, script, says=r"The ranks disagree.*of gradients", within_s=90)
