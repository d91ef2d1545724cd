"""The program of each rank of `hvpipe doctor --all-hosts`: gathers the facts of all hosts."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from hvpipe.commands.host_comparison import Facts, Row, compare, to_text
from hvpipe.commands.host_facts import cores_of_host, cores_of_this_rank, facts_of_this_host
from hvpipe.environment.discover import Launch, discover
from hvpipe.environment.settings import Settings, settings
from hvpipe.errors import HvpipeError

_BEGIN, _END = "==> hvpipe doctor: the hosts", "==> hvpipe doctor: the end, "
_REPORT = re.compile(rf"[^\n]*{_BEGIN}\n(.*\n)[^\n]*{_END}([01])\n?", re.DOTALL)


def main(words: list[str]) -> None:
    """Print what rank 0 finds, for `split`. All ranks end with 0: launchers comment on anything else."""
    text, matters = compared(as_json="--json" in words, colours="--colours" in words)
    if text:
        print(f"{_BEGIN}\n{text}\n{_END}{matters:d}", flush=True)


def split(output: str) -> tuple[str, bool | None, str]:
    """Return what `main` found, whether something of it matters, and what others have printed.

    Args:
        output: The launcher's stdout. Without a whole report, all of it is what others have printed.
    """
    found = _REPORT.search(output)
    if found is None:
        return "", None, output
    return found[1], found[2] == "1", output[: found.start()] + output[found.end() :]


def compared(*, as_json: bool, colours: bool) -> tuple[str, bool]:
    """Compare the hosts of the ranks that a launcher has started. Collective.

    Returns:
        What to print, on rank 0 only, and whether something matters, the same on all ranks.
    """
    rank, hosts, network, failure = _gathered(discover(), settings())
    rows = compare(hosts, failure)
    matters = any(row.state == "problem" for row in rows)
    if rank != 0:
        return "", matters
    if as_json:
        return json.dumps(to_json(hosts, rows, network), indent=2), matters
    return to_text(hosts, rows, network, colours), matters


def to_json(hosts: list[Facts], rows: list[Row], network: str) -> dict[str, Any]:
    """Return the comparison, and the facts that it is made of, as JSON."""
    ok = all(row.state != "problem" for row in rows)
    return {"ok": ok, "network": network, "rows": [row.to_json() for row in rows], "hosts": hosts}


def _gathered(launch: Launch, asked: Settings) -> tuple[int, list[Facts], str, str]:
    """Join the ranks. Returns this rank, all hosts' facts, what carries the data, and "" or why nothing does.

    The ranks join as those of a training do, but before hvpipe refuses other versions and builds.
    """
    from hvpipe.world import ethernet, mpi

    ranks = mpi.open_world(launch, asked.timeout_s, asked.longest_shutdown_s)
    offset_s = ranks.clock_offset_s()
    clocks: list[float] = ranks.allgather_object(time.time() - time.monotonic() - offset_s)
    per_host = asked.ranks_per_host or ranks.local_size  # HVPIPE_RANKS_PER_HOST pretends several hosts
    is_first = ranks.local_rank % per_host == 0
    own = ranks.first_on_host, ranks.local_rank // per_host
    bound = [cores for host, cores in ranks.allgather_object((own, cores_of_this_rank())) if host == own]
    mine = {
        "host": ranks.host
        if per_host >= ranks.local_size
        else f"{ranks.host}/{ranks.local_rank // per_host}",
        "ranks": min(per_host, ranks.local_size),
        "size": ranks.size,
        "MPI": ranks.library_version,
        "cores": cores_of_host(bound),
        "clock_s": clocks[ranks.rank] - clocks[0],
        **facts_of_this_host(asked),
    }
    everyone = ranks.allgather_object(mine if is_first else None)
    hosts = [facts for facts in everyone if facts is not None]
    try:
        world = ethernet.over_tcp(ranks, launch, asked)
    except HvpipeError as error:  # on all ranks
        return ranks.rank, hosts, "nothing", str(error)
    network = world.network
    world.close()
    return ranks.rank, hosts, network, ""


if __name__ == "__main__":
    main(sys.argv[1:])
