"""Runs a benchmark's worker on ranks of this host, a virtual cluster or real hosts.

A worker is a module with a function `measure`, which every rank calls with the same arguments. After
hvpipe.init() an uncaught error on any rank ends them all.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from bench import ROOT
from bench.cluster.spec import named_cluster
from bench.cluster.virtual_cluster import VirtualCluster
from bench.errors import BenchError
from bench.hosts.hosts import Hosts, ThisHost
from bench.hosts.real_hosts import RealHosts
from hvpipe.environment.discover import discover


def hosts_of(cluster: str | None, hosts: str | None) -> Hosts:
    """Return the virtual cluster of that name, or the real hosts, or this host alone."""
    if cluster is not None and hosts is not None:
        raise BenchError(f"Give --hosts or --cluster. Received: {hosts!r} and {cluster!r}")
    if hosts is not None:
        real = RealHosts(hosts)
        real.require_answers()
        return real
    return ThisHost() if cluster is None else VirtualCluster(named_cluster(cluster, Path())[1])


def run_on_ranks(
    worker: str,
    arguments: Mapping[str, Any],
    hosts: Hosts,
    ranks: int | None = None,
    timeout_s: float = 3600.0,
    python: str = sys.executable,
) -> Any:
    """Let ranks (default: every slot) call the worker's `measure`, and return the result of rank 0."""
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="hvpipe-ranks-", dir=hosts.shared_folder) as name:
        folder = Path(name)
        (folder / "arguments").write_bytes(pickle.dumps(arguments))
        command = [python, "-m", "bench.hosts.rank_benchmark", worker, name]
        count, env = ranks or hosts.spec.slots, {"PYTHONPATH": str(ROOT)}
        try:
            status = hosts.run(count, command, timeout_s=timeout_s, env=env, capture=False).returncode
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"The ranks must end. Received: none after {timeout_s:g} s") from error
        if status != 0 or not (folder / "result").exists():
            raise BenchError(f"The ranks failed with status {status}: see their output")
        return pickle.loads((folder / "result").read_bytes())


def warn_if_busy() -> None:
    """Warn if other processes use the cores, because figures measured beside them are worth little."""
    share = psutil.cpu_percent(interval=0.5) / 100
    if share > 0.1:
        say(f"other processes use {share:.0%} of the cores: expect noise")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _be_a_rank(worker: str, folder: Path) -> None:
    arguments = pickle.loads((folder / "arguments").read_bytes())
    result = importlib.import_module(worker).measure(**arguments)
    if discover().rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _be_a_rank(sys.argv[1], Path(sys.argv[2]))
