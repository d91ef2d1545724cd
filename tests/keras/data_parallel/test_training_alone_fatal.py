"""A rank that alone trains what nobody averages, or uses a copy of a model that all ranks train."""

from __future__ import annotations

import re
from pathlib import Path

from distributed import expect_fatal, launch

HEAD = """
import keras
import numpy as np
import hvpipe
import hvpipe.keras as hk

hvpipe.init()
"""

MODEL = """
if hvpipe.rank() == 1:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="probe")
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
hvpipe.barrier()
"""


def test_a_rank_that_alone_trains_a_model(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text(HEAD + MODEL)
    result = launch(2, [script], limit_s=90)
    assert result.returncode == 0, result.describe()
    assert len(re.findall("hvpipe: model probe trains alone on this rank", result.output)) == 1, result.output
    says = r"rank 1 of 2 on \S+ failed:\n(?s:.*)HvpipeError: model probe trains alone on this rank"
    expect_fatal(2, script, says=says, within_s=90, env={"HVPIPE_STRICT": "1"})


COPY = """
model = hk.data_parallel(keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)], name="net"))
if hvpipe.rank() == 0:
    best = keras.models.clone_model(model)
    best.compile("sgd", "mse")
    best.evaluate(np.ones((8, 3)), np.ones((8, 2)), verbose=0)
hvpipe.barrier()
"""


def test_a_rank_that_alone_uses_a_copy_learns_what_it_is(tmp_path: Path) -> None:
    script = tmp_path / "case.py"
    script.write_text(HEAD + COPY)
    says = (
        r"Model net is a copy of a data_parallel model: its evaluate needs all ranks.*`with hk\.alone\(\):`"
    )
    expect_fatal(2, script, says=says, within_s=90)
