"""`hvpipe tune` on this host, and jobs that use its file."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from distributed import Run, launch, run
from hvpipe.specs.tuning import Tuning

SCRIPT = """
import hvpipe
import numpy as np
hvpipe.init()
before = hvpipe.counters()["bytes_sent"]
total = hvpipe.allreduce(np.full(1000, hvpipe.rank() + 1.0), op="sum")
assert total[0] == 6.0
if hvpipe.rank() == 0:
    print("sent:", hvpipe.counters()["bytes_sent"] - before)
"""


def tune(*options: str) -> Run:
    return run([sys.executable, "-m", "hvpipe", "tune", *options], limit_s=120.0)


def test_a_job_uses_the_file_of_its_cluster_and_no_other(tmp_path: Path) -> None:
    file, script = tmp_path / "all-reduce.json", tmp_path / "script.py"
    script.write_text(SCRIPT)

    def job() -> Run:
        env = {"HVPIPE_ALL_REDUCE": str(file), "HVPIPE_SHARED_MEMORY": "0"}
        return launch(3, [script], limit_s=60.0, env=env)

    def sent(told: str = "") -> str:
        done = job()
        assert done.returncode == 0, done.describe()
        assert re.findall(r"hvpipe: .*(?=\n)", done.output) == ([told] if told else [])
        return done.output.partition("sent: ")[2]

    tuned = tune("-np", "3", "-o", str(file))
    assert tuned.returncode == 0, tuned.describe()
    found = Tuning.read(file)
    assert found.ranks == 3
    assert re.fullmatch(r"MPI \(.+\) on one host", found.network)
    assert sent()
    ring = {8000: {"ring": 1e-5}}
    Tuning(3, found.network, ring).write(file)
    by_ring = sent()
    Tuning(2, found.network, ring).write(file)
    told = f"hvpipe: only sums of 2 ranks or hosts use HVPIPE_ALL_REDUCE={file}. Received: ranks=3, hosts=1"
    by_model = sent(told)
    assert by_model != by_ring, "doubling is for small arrays, and sends more"
    Tuning(3, "TCP", ring).write(file)
    told = f"hvpipe: HVPIPE_ALL_REDUCE={file} is not used: it is of TCP. Received: {found.network}"
    assert sent(told) == by_model
    file.write_text("")
    done = job()
    assert done.returncode == 1
    assert "HVPIPE_ALL_REDUCE should name a file of `hvpipe tune`" in done.output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("-np", "1"), "tune needs at least 2 ranks. Received: 1"),
        (("-np", "2", "-o", "rows"), "--output should end in .json. Received: --output 'rows'"),
    ],
)
def test_what_cannot_be_measured_or_used_is_refused(options: tuple[str, ...], said: str) -> None:
    refused = tune(*options)
    assert refused.returncode == 2
    assert said in refused.output
