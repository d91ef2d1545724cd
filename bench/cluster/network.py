"""The network of a virtual cluster: namespaces, veth pairs to a bridge, and a rate limit on each link."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from bench.cluster.spec import ClusterSpec
from bench.errors import BenchError

INTERFACE = "eth0"  # of every host
_NAMES = Path("/etc/netns")
_TOOLS = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
}


def require_privileges() -> None:
    """Raise BenchError, which says what to do, if namespaces cannot be made."""
    if os.geteuid() != 0:
        raise BenchError(
            "A virtual cluster needs root: it makes network namespaces and limits their links. "
            "Run it with sudo, or measure on plain loopback with --ranks. "
            f"Received: uid={os.geteuid()}"
        )
    missing = {tool: package for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        packages = " ".join(sorted(set(missing.values())))
        raise BenchError(
            f"A virtual cluster needs {', '.join(_TOOLS)} on PATH. Received: no {', '.join(missing)}. "
            f"On Debian or Ubuntu: apt-get install {packages}"
        )


def namespace(cluster: str, host: str) -> str:
    """Return the network namespace of a host. The bridge is in the namespace of the host "switch"."""
    return f"{cluster}-{host}"


def address(index: int) -> str:
    return f"10.77.0.{index + 1}"


def hosts_file(cluster: str, host: str) -> Path:
    """Return the file that maps names inside a host. `ip netns exec` mounts it over /etc/hosts."""
    return _NAMES / namespace(cluster, host) / "hosts"


def build(cluster: str, spec: ClusterSpec) -> None:
    """Make the namespaces, links and limits.

        h0 namespace        switch namespace        h1 namespace
        eth0 (tbf) ======== p0 (tbf) br0 p1 (tbf) ======== eth0 (tbf)

    Each direction of a link is limited where it begins: at the host for sending, at the switch for receiving.
    """
    switch = namespace(cluster, "switch")
    _call("ip", "netns", "add", switch)
    _call("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    _call("ip", "-n", switch, "link", "set", "br0", "up")
    names = "127.0.0.1 localhost\n" + "".join(
        f"{address(i)} {host.name}\n" for i, host in enumerate(spec.hosts)
    )
    for index, host in enumerate(spec.hosts):
        inside, port = namespace(cluster, host.name), f"p{index}"
        _call("ip", "netns", "add", inside)
        peer = ("peer", "name", INTERFACE, "netns", inside)
        _call("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
        _call("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
        _call("ip", "-n", inside, "addr", "add", f"{address(index)}/24", "dev", INTERFACE)
        _call("ip", "-n", inside, "link", "set", INTERFACE, "up")
        _call("ip", "-n", inside, "link", "set", "lo", "up")
        if host.rate_bits_per_s is not None:
            _limit(switch, port, host.rate_bits_per_s)
            _limit(inside, INTERFACE, host.rate_bits_per_s)
        names_path = hosts_file(cluster, host.name)
        names_path.parent.mkdir(parents=True, exist_ok=True)
        names_path.write_text(names)


def _limit(inside: str, device: str, bits_per_s: float) -> None:
    rate = f"{bits_per_s:.0f}bit"
    try:
        _call(
            "tc", "-n", inside, "qdisc", "add", "dev", device, "root",
            "tbf", "rate", rate, "burst", "256kb", "latency", "20ms",
        )  # fmt: skip
    except BenchError as error:
        raise BenchError(
            f"{error} The kernel may lack the token bucket filter: try `modprobe sch_tbf`, or a cluster "
            "without rates."
        ) from error


def existing_namespaces(cluster: str) -> list[str]:
    """Return the cluster's namespaces that exist now, whoever made them."""
    listing = _call("ip", "netns", "list")
    names = [line.split()[0] for line in listing.splitlines() if line.strip()]
    return [name for name in names if name.startswith(f"{cluster}-")]


def processes(cluster: str) -> list[int]:
    found: list[int] = []
    for name in existing_namespaces(cluster):
        result = subprocess.run(
            ["ip", "netns", "pids", name], check=False, capture_output=True, text=True, timeout=30
        )
        found += [int(pid) for pid in result.stdout.split()]
    return found


def remove(cluster: str) -> None:
    """End the processes inside and delete the namespaces, and with them links, bridge and limits."""
    _end_processes(cluster)
    for name in existing_namespaces(cluster):
        _call("ip", "netns", "del", name)
    for directory in _NAMES.glob(f"{cluster}-*"):
        shutil.rmtree(directory, ignore_errors=True)
    with suppress(OSError):  # others have names there, or another process was first
        _NAMES.rmdir()


def _end_processes(cluster: str, patience_s: float = 2.0) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + patience_s
        for pid in processes(cluster):
            if pid != os.getpid():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        while time.monotonic() < deadline:
            if not processes(cluster):
                return
            time.sleep(0.05)


def _call(*command: str) -> str:
    try:
        result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"`{' '.join(command)}` did not end within {error.timeout:g} s.") from error
    if result.returncode != 0:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        raise BenchError(f"`{' '.join(command)}` failed: {said}.")
    return result.stdout
