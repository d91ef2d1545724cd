"""`hvpipe run` with a real mpirun: ranks, exit codes, Ctrl-C, other hosts."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from distributed import Run, environment, run

LIMIT_S = 90.0
WORLD = """
import os, sys, time
from pathlib import Path
from hvpipe.world.open import open_world
from hvpipe.environment.discover import discover
from hvpipe.environment.settings import settings
world = open_world(discover(), settings())
last = world.rank == world.size - 1
"""


def hvpipe_run(tmp_path: Path, script: str, *options: str, limit_s: float = LIMIT_S) -> Run:
    """Run a script with two arguments under `hvpipe run`."""
    path = tmp_path / "script.py"
    path.write_text(script)
    result = run(
        [sys.executable, "-m", "hvpipe", "run", *options, str(path), "--epochs", "7"], limit_s=limit_s
    )
    assert not result.timed_out, result.describe()
    return result


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_get_their_arguments(size: int, tmp_path: Path) -> None:
    script = "print('rank', world.rank, 'of', world.size, sys.argv[1:])"
    result = hvpipe_run(tmp_path, WORLD + script, "-np", str(size))
    assert result.returncode == 0, result.describe()
    said = sorted(line for line in result.output.splitlines() if line.startswith("rank"))
    assert said == [f"rank {rank} of {size} ['--epochs', '7']" for rank in range(size)]


def test_a_failed_job_says_which_files_are_missing(tmp_path: Path) -> None:
    """An earlier job has written one of the two."""
    trace, utilization = tmp_path / "trace.json", tmp_path / "utilization.json"
    utilization.write_text("[]")
    script = "import os, hvpipe\nhvpipe.init()\nos._exit(3)"
    files = ("--trace", str(trace), "--utilization", str(utilization))
    result = hvpipe_run(tmp_path, script, "-np", "2", *files)
    assert result.returncode == 3, result.describe()
    for path in (trace, utilization):
        assert f"{path} is not written: the ranks write it together" in result.output, result.describe()


@pytest.mark.parametrize(
    ("ending", "code", "says"),
    [
        (
            "last and os._exit(5)\ntime.sleep(60)",
            5,
            "Rank 1 ended with exit code 5: see what it printed last",
        ),
        ("last and world.abort(9)\ntime.sleep(60)", 9, ""),
        ("last and os.kill(os.getpid(), 11)\ntime.sleep(60)", 139, ""),
        ("raise SystemExit(3)", 3, r"Rank [01] ended with exit code 3: .* where it raises SystemExit"),
        (
            "note_exits()\nsys.exit(3)",
            3,
            r"Rank 0 ended with exit code 3: sys.exit\(3\) in script.py, line 11",
        ),
    ],
)
def test_exit_codes(ending: str, code: int, says: str, tmp_path: Path) -> None:
    noting = "from hvpipe.failures.noted_exit import note_exits\n"
    result = hvpipe_run(tmp_path, WORLD + noting + ending, "-np", "2", limit_s=30.0)
    assert result.returncode == code, result.describe()
    if says:
        *_, last = result.output.strip().splitlines()
        assert re.match(f"hvpipe run: {says}", last), result.describe()
        assert "prterun detected" not in result.output


# Prints the ports at which this rank and the launcher listen, except on loopback.
LISTENING = """
import glob, os, hvpipe
from hvpipe.world import tcp
make, shown = tcp.Setup, []
def listening(process):
    own = {os.readlink(path)[8:-1] for path in glob.glob(f"/proc/{process}/fd/*") if os.path.islink(path)}
    rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").readlines()[1:]]
    where = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in own]
    return [int(port, 16) for address, port in where if address != "0100007F"]
def setup(*arguments):
    shown.extend(listening(os.getpid()))
    return make(*arguments)
tcp.Setup = setup
hvpipe.init()
after = [port for port in listening(os.getpid()) if port not in shown]
closed = [port for port in shown if port not in listening(os.getpid())]
print("ports", hvpipe.rank(), sorted({*shown, *after, *listening(os.getppid())}), len(closed), flush=True)
"""


def test_all_listen_at_the_ports_that_are_given(tmp_path: Path) -> None:
    """hvpipe's own listener closes when all ranks are connected."""
    first = random.randrange(20_000, 32_000)
    options = ("-np", "2", "--ports", f"{first}-{first + 19}", "--no-summary")
    over_tcp = f"import os; os.environ['HVPIPE_BACKEND'] = 'tcp'\n{LISTENING}"
    result = hvpipe_run(tmp_path, over_tcp, *options, "--launcher-args", "--mca btl tcp,self --mca pml ob1")
    assert result.returncode == 0, result.describe()
    found = re.findall(r"^ports \d \[([\d, ]+)\] (\d)$", result.output, re.MULTILINE)
    assert len(found) == 2, result.describe()
    for listed, closed in found:
        ports = [int(port) for port in listed.split(", ")]
        assert len(ports) == 3, result.describe()  # of hvpipe, MPI and its launcher
        assert all(first <= port < first + 20 for port in ports), result.describe()
        assert closed == "1", result.describe()
    result = hvpipe_run(tmp_path, WORLD, "-np", "2", "--ports", "40000")
    assert "--ports should be a range of ports from 1 to 65535" in result.output
    result = hvpipe_run(tmp_path, WORLD, "-np", "2", "--ports", "40000-40001")
    assert "a port for the launcher and two for each rank of a host" in result.output


@pytest.mark.parametrize("caller", ['exec "$@" <&- >&- 2>&-', 'exec "$@" >&-', 'unset HOME; exec "$@"'])
def test_a_caller_without_streams_or_home(caller: str, tmp_path: Path) -> None:
    """As some services and cron jobs are."""
    script = tmp_path / "script.py"
    says = "print('out'); print('err', file=sys.stderr)\n"
    script.write_text(
        f"{WORLD}{says}world.allgather_object(None)\n"
        f"Path('{tmp_path}/' + str(world.rank)).touch()\nsys.exit(3)"
    )
    command = ["sh", "-c", caller, "sh", sys.executable, "-m", "hvpipe", "run", "-np", "2", str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 3, ended
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()
    assert ended.stderr.count("err") == 2 * ("2>" not in caller)


def test_an_import_error_before_hvpipe_ends_all_ranks(tmp_path: Path) -> None:
    script = "import os, time\nif os.environ['OMPI_COMM_WORLD_RANK'] == '1': import absent\ntime.sleep(60)"
    result = hvpipe_run(tmp_path, script, "-np", "2", limit_s=30.0)
    assert result.returncode == 1, result.describe()
    assert "No module named 'absent'" in result.output


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(0)", 0), ("os.kill(os.getpid(), 11)", 139)],
)
def test_output_of_each_rank_in_files(ending: str, code: int, tmp_path: Path) -> None:
    script = (
        WORLD + "print('rank', world.rank, 'prints'); print('rank', world.rank, 'warns', file=sys.stderr)\n"
        f"world.allgather_object(None)\nif last:\n  print('x' * 200_000, file=sys.stderr)\n  {ending}\n"
        f"time.sleep({60 if code else 0})"
    )
    logs = tmp_path / "new" / "logs"
    result = hvpipe_run(tmp_path, script, "-np", "2", "--output-filename", str(logs), limit_s=30.0)
    assert result.returncode == code, result.describe()
    for rank in (0, 1):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == f"rank {rank} prints\n"
        assert f"rank {rank} warns\n" in (logs / f"rank.{rank}" / "stderr").read_text()
        assert f"rank {rank} prints" in result.output
    assert "x" * 200_000 in (logs / "rank.1" / "stderr").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_start(number: signal.Signals, tmp_path: Path) -> None:
    """Regression: as the first process of a container, `hvpipe run` had no handler then, and went on."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\ntouch ready\nexec sleep 60\n")
    mpirun.chmod(0o755)
    command = [sys.executable, "-m", "hvpipe", "run", "-np", "2", "--mpirun", str(mpirun), __file__]
    with subprocess.Popen(command, cwd=tmp_path, env=environment()) as process:
        deadline_s = time.monotonic() + LIMIT_S
        while not (tmp_path / "ready").exists() and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(number)
        try:
            assert process.wait(30) == 128 + number  # not -number: a handler has ended it
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "options"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["--output-filename", "logs"])],
)
def test_a_signal_ends_all_ranks(number: signal.Signals, options: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        WORLD + "Path(f'pid.{world.rank}').write_text(str(os.getpid()))\nworld.allgather_object(None)\n"
        "Path(f'ready.{world.rank}').touch()\ntime.sleep(60)"
    )
    command = [sys.executable, "-m", "hvpipe", "run", "-np", "2", *options, "script.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment())
    try:
        deadline_s = time.monotonic() + LIMIT_S
        while len(list(tmp_path.glob("ready.*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    finally:
        process.kill()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid.*")]
    assert len(pids) == 2
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_more_ranks_than_slots_start_no_process(tmp_path: Path) -> None:
    started = tmp_path / "started"
    result = hvpipe_run(tmp_path, f"open({str(started)!r}, 'w')", "-np", "3", "--hosts", "localhost:2")
    assert result.returncode == 2, result.describe()
    assert "Received: -np 3 with 2 slots on localhost:2" in result.output
    assert not started.exists()


def can_unshare() -> bool:
    """Return whether a process can get its own host name."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("hostname") is None:
        return False
    return (
        subprocess.run(["unshare", "-u", "true"], check=False, capture_output=True, timeout=20).returncode
        == 0
    )


@pytest.mark.skipif(not can_unshare(), reason="needs root, and unshare -u")
def test_two_hosts_through_a_launch_agent(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\nhost=$1; shift\nexec unshare -u sh -c "hostname $host; $*"\n')
    agent.chmod(0o755)
    script = (
        WORLD + "print('rank', world.rank, 'of', world.size, world.host, world.local_rank, world.local_size,"
        " os.environ['HVPIPE_TIMEOUT'])"
    )
    here = socket.gethostname()
    options = ["--hosts", f"{here}:1,elsewhere:2", "--rsh-agent", str(agent), "--timeout", "44"]
    options += ["--output-filename", str(tmp_path / "logs")]
    result = hvpipe_run(tmp_path, script, *options)
    assert result.returncode == 0, result.describe()
    assert sorted(line for line in result.output.splitlines() if line.startswith("rank")) == [
        f"rank 0 of 3 {here} 0 1 44",
        "rank 1 of 3 elsewhere 0 2 44",
        "rank 2 of 3 elsewhere 1 2 44",
    ]
    assert (tmp_path / "logs" / "rank.2" / "stdout").read_text() == "rank 2 of 3 elsewhere 1 2 44\n"
