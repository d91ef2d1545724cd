"""The program of each rank of `hvpipe doctor --all-hosts`: gathers the facts of all hosts."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from hvpipe.commands.host_comparison import Facts, Row, compare, to_text
from hvpipe.commands.host_facts import facts_of_this_host
from hvpipe.environment.discover import Launch, discover
from hvpipe.environment.settings import Settings, settings
from hvpipe.errors import HvpipeError

DIFFERS = 3
"""What a rank that `hvpipe doctor` has started ends with if something matters: launchers use 1 and 2."""


def main(words: list[str]) -> int:
    """Print what rank 0 finds. Returns 0, or DIFFERS."""
    return DIFFERS if print_hosts(as_json="--json" in words, colours="--colours" in words) else 0


def print_hosts(*, as_json: bool, colours: bool) -> bool:
    """Compare the hosts of the ranks that a launcher has started; rank 0 prints. Collective.

    Returns:
        Whether something matters, the same on all ranks.
    """
    asked = settings()
    rank, hosts, network, failure = _gathered(discover(), asked)
    rows = compare(hosts)
    if failure:
        rows.append(Row("data", "problem", ((failure, tuple(str(facts["host"]) for facts in hosts)),)))
    if rank == 0 and as_json:
        print(json.dumps(to_json(hosts, rows, network), indent=2))
    elif rank == 0:
        print(to_text(hosts, rows, network, colours))
    return any(row.state == "problem" for row in rows)


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
    mine = {
        "host": ranks.host
        if per_host >= ranks.local_size
        else f"{ranks.host}/{ranks.local_rank // per_host}",
        "ranks": min(per_host, ranks.local_size),
        "size": ranks.size,
        "MPI": ranks.library_version,
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
    sys.exit(main(sys.argv[1:]))
