"""One process of a round, started by bench.rounds: ``python -m bench.rounds.rank_process DIRECTORY [RANK]``.

DIRECTORY/job.json says what to do; DIRECTORY/rank-N.json gets what rank N measured.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.rounds.job import RankJob
from bench.rounds.record import RankRound, Task
from hvpipe.atomic_file import atomic_file


def main(words: list[str]) -> None:
    """Train as one rank. An error ends the process at once, so that its launcher notices."""
    try:
        _run(Path(words[0]), int(words[1]) if len(words) > 1 else None)
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _run(directory: Path, rank: int | None) -> None:
    what: dict[str, Any] = json.loads((directory / "job.json").read_text())
    os.environ.update(what["environment"])
    if rank is None:
        from hvpipe.environment.discover import discover

        launch = discover()
        rank, local_rank_and_size = launch.rank or 0, (launch.local_rank or 0, launch.local_size or 1)
    else:
        local_rank_and_size = tuple(what["local_ranks_and_sizes"][rank])
    job = RankJob(Task(**what["task"]), rank, what["size"], what["options"], directory, local_rank_and_size)
    importlib.import_module(f"bench.systems.{what['adapter']}").train(job)
    for number, found in (job.by_rank or {rank: job.watch.rank_round()}).items():
        _write(job, number, replace(found, gradient_bytes=job.gradient_bytes))


def _write(job: RankJob, rank: int, found: RankRound) -> None:
    import keras

    if tensorflow := sys.modules.get("tensorflow"):
        job.versions = {"TensorFlow": tensorflow.__version__, **job.versions}
    versions = {"Keras": keras.__version__, **job.versions}
    with atomic_file(job.directory / f"rank-{rank}.json") as file:
        file.write(json.dumps({"rank": asdict(found), "versions": versions}).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
