"""A Slurm of two nodes on one machine, each with a network, a name, processes, /tmp and /dev/shm of its own.

.ci/slurm.sh runs the tests that use it in namespaces, which end everything that is started here.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

NODES = {"n1": "10.98.0.1", "n2": "10.98.0.2"}
_HEAD = "10.98.0.9"
SLOTS = 2
"""Of each node, and the number of GPUs that Slurm believes it has."""

_CONF = """\
ClusterName=test
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
ReturnToService=2
SlurmdTimeout=15
KillWait=20
KillOnBadExit=1
SchedulerParameters=sched_interval=2,bf_interval=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=usual Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF
"""

_NODE = """\
set -e
hostname {name}
mount --make-rprivate /
mount -t tmpfs tmpfs /dev/shm
{own_tmp}
ip link set lo up
ip addr add {address}/24 dev eth0
ip link set eth0 up
exec slurmd -D -N {name}
"""


@dataclass(frozen=True)
class Job:
    """A job of the queue.

    Attributes:
        number: As sbatch said it.
        state: As "RUNNING" or "COMPLETED".
        exit_code: Of the script: 0 until it has ended.
        restarts: How often it was requeued.
    """

    number: str
    state: str
    exit_code: int
    restarts: int


class Slurm:
    """The cluster. Commands run on its head.

    Args:
        folder: For its files; short, because it holds sockets.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until both nodes are idle."""
        self._configure()
        _do("hostname", "head")
        _do("ip", "link", "set", "lo", "up")
        _do("ip", "link", "add", "br0", "type", "bridge")
        _do("ip", "addr", "add", f"{_HEAD}/24", "dev", "br0")
        _do("ip", "link", "set", "br0", "up")
        munge = self.folder / "munge"
        self._spawn(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket"),
            *(f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"),
        )
        wait_for("munged's socket", (munge / "socket").exists, 20)
        self._spawn("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        self.wait_idle()

    def wait_idle(self) -> None:
        """Wait until both nodes are idle."""
        wait_for("two idle nodes", lambda: set(self("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, 60)

    def start_node(self, name: str) -> None:
        """Start a node, with the network that it had."""
        _do("ip", "netns", "add", name)
        _do("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0", "netns", name)
        _do("ip", "link", "set", f"to-{name}", "master", "br0", "up")
        spool = self.folder / f"spool-{name}"  # with sockets of the tasks that the node ran when it was lost
        shutil.rmtree(spool, ignore_errors=True)
        spool.mkdir()
        # A checkout there is shared by the nodes.
        own_tmp = "" if Path.cwd().is_relative_to("/tmp") else "mount -t tmpfs tmpfs /tmp"
        script = _NODE.format(name=name, address=NODES[name], own_tmp=own_tmp)
        alone = ("unshare", "--uts", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
        self._spawn(name, "nsenter", f"--net=/run/netns/{name}", *alone, "sh", "-c", script)

    def lose_node(self, name: str) -> None:
        """Kill all processes of a node at once, and remove its network, as if its power failed."""
        _do("ip", "link", "del", f"to-{name}")
        process = self._processes.pop(name)
        process.kill()
        process.wait()
        _do("ip", "netns", "del", name)

    def stop(self) -> None:
        """End all daemons. What their jobs left ends with the nodes."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()

    def __call__(self, *command: str | Path, cwd: Path | None = None, limit_s: float = 60) -> str:
        """Run a command on the head; return what it printed."""
        done = subprocess.run(
            list(map(str, command)),
            cwd=cwd,
            text=True,
            capture_output=True,
            timeout=limit_s,
            env=self.environment(),
        )
        assert done.returncode == 0, f"{command} exited {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str | Path, cwd: Path) -> str:
        """Submit a job from a folder; return its number."""
        return self("sbatch", "--parsable", *arguments, cwd=cwd).strip()

    def job(self, number: str) -> Job:
        """Return what the queue says of a job."""
        told = self("scontrol", "-o", "show", "job", number)
        found = dict(re.findall(r"(\w+)=(\S+)", told))
        code, _, signal = found["ExitCode"].partition(":")
        exit_code = int(code) or (128 + int(signal) if signal != "0" else 0)
        return Job(number, found["JobState"], exit_code, int(found["Restarts"]))

    def wait(self, number: str, limit_s: float, *states: str) -> Job:
        """Wait until a job is in one of these states; without states, until it has ended."""
        ended = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
        wait_for(
            f"job {number} in {' or '.join(ended)}",
            lambda: self.job(number).state in ended,
            limit_s,
            lambda: f"{self('squeue')}\n{self.log()}",
        )
        return self.job(number)

    def log(self) -> str:
        """Return the ends of the daemons' logs."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)

    def processes(self, word: str) -> list[str]:
        """Return the command lines with a word of all processes of all nodes."""
        found = self("ps", "-e", "-ww", "-o", "args=").splitlines()
        return [line for line in found if word in line]

    def environment(self) -> dict[str, str]:
        """Return the environment of a person on the head."""
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PMIX_MCA_gds": "hash"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return {**kept, **quiet, "SLURM_CONF": f"{self.folder}/slurm.conf"}

    def _configure(self) -> None:
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "munge" / "key").write_bytes(os.urandom(128))
        (self.folder / "munge" / "key").chmod(0o400)
        nodes = (
            f"NodeName={name} NodeAddr={address} CPUs={SLOTS} Gres=gpu:{SLOTS} State=UNKNOWN"
            for name, address in NODES.items()
        )
        text = _CONF.format(head=_HEAD, folder=self.folder, nodes="\n".join(nodes))
        (self.folder / "slurm.conf").write_text(text)
        for number in range(SLOTS):
            (self.folder / f"gpu{number}").touch()
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-{SLOTS - 1}]\n")
        (self.folder / "cgroup.conf").write_text(
            f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={self.folder}/cgroup\n"
        )
        hosts = self.folder / "hosts"
        names = {"localhost": "127.0.0.1", "head": _HEAD, **NODES}
        hosts.write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        _do("mount", "--bind", str(hosts), "/etc/hosts")

    def _spawn(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment()
            )


@contextlib.contextmanager
def running() -> Iterator[Slurm]:
    """Yield a cluster; end it afterwards."""
    folder = Path("/run/slurm")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    slurm = Slurm(folder)
    try:
        slurm.start()
        yield slurm
    except AssertionError:
        print(slurm.log())
        raise
    finally:
        slurm.stop()


def wait_for(
    what: str, holds: Callable[[], object], limit_s: float, more: Callable[[], str] = lambda: ""
) -> None:
    """Wait until `holds()`, at most `limit_s`."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, f"wanted: {what} within {limit_s} s. {more()}"
        time.sleep(0.3)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
