"""Pods without Kubernetes: a manifest's commands, run in namespaces as a kubelet would run them.

A pod has a network, host name, /etc, /tmp, /dev/shm, /proc and processes of its own. Its first
process is the container's command, as the manifest's user. It mounts folders of this machine. It needs root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.cluster import network
from bench.cluster.spec import ClusterSpec, HostSpec
from bench.errors import BenchError
from manifests import IMAGE_FILES, Pods, PodSpec

ROOT = Path(__file__).parents[2]
IMAGE_HOME = Path("/home/train")
# What the image of hvpipe sets. Nothing of the machine's own environment reaches a container.
_IMAGE_ENV = {
    "PATH": "/opt/hvpipe/bin:/usr/local/bin:/usr/bin:/bin",
    "HOME": str(IMAGE_HOME),
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
_OWN_FOLDERS = {"/tmp": "1777", "/dev/shm": "1777", "/home": "755", "/opt": "755"}

_SETUP = """set -e
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
{stage}
cp -a /etc /mnt/etc
{hide}
mount --bind /mnt/etc /etc
: > /etc/resolv.conf
mount -t sysfs sysfs /sys
sed -i '/^[^:]*:[^:]*:{user}:/d' /etc/passwd
echo 'train:x:{user}:{group}::{home}:/bin/sh' >> /etc/passwd
install -d -o {user} -g {group} {home}
{mount}
echo {name} > /proc/sys/kernel/hostname
cd {home}
exec "$@"
"""


def why_not() -> str | None:
    """Return, in a line, what pods need and this machine lacks; None if it has all."""
    if os.geteuid() != 0:
        return "pods need root, for namespaces"
    packages = {"/usr/sbin/sshd": "openssh-server", "ssh": "openssh-client", "setpriv": "util-linux"}
    for tool, package in packages.items():
        if shutil.which(tool) is None:
            return f"pods need {tool}: apt-get install {package}"
    try:
        network.require_privileges()
    except BenchError as error:
        return " ".join(str(error).split())
    done = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return None if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.decode().strip()}"


def needed_folders() -> list[Path]:
    """Return the folders with Python, its packages and this checkout; none lies in another."""
    found = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, ROOT, *sys.path) if place}
    folders = sorted(place for place in found if place.is_dir())
    return [each for each in folders if not any(other in each.parents for other in folders)]


def closed_parent(folder: Path) -> Path | None:
    """Return the highest folder above this one that other users cannot enter; None if all let them in."""
    closed = [each for each in folder.parents if not each.stat().st_mode & 0o001]
    return closed[-1] if closed else None


@dataclass
class Pod:
    """One pod, whose container may be started again.

    Attributes:
        spec: What the operator has made.
        namespace: The name of its network.
        mounts: The folders and files of this machine that it mounts, by their paths in the pod.
        log: The file with all that its containers have printed.
    """

    spec: PodSpec
    namespace: str
    mounts: Mapping[str, Path]
    log: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, *more: str) -> None:
        """Start the container; `more` are arguments after those of the manifest."""
        assert self._process is None or self._process.poll() is not None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),  # nothing outlives the tests
                    *("nsenter", f"--net=/run/netns/{self.namespace}"),
                    *("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child"),
                    *("--mount-proc", "sh", "-c", self._setup(), "sh"),
                    *self._as_user([*self.spec.command, *more]),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ran(self) -> str:
        """All that has been printed."""
        return self.log.read_text(errors="replace")

    def exec(self, *command: str, limit_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, as `kubectl exec` does."""
        return subprocess.run(
            ["nsenter", f"--target={self._first()}", "--all", *self._as_user(command)],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the container's first process. With SIGKILL all others end, too."""
        with suppress(ProcessLookupError, AssertionError):
            os.kill(self._first(), number)

    def evict(self) -> subprocess.CompletedProcess[str] | None:
        """End the pod as a kubelet does: the hook, SIGTERM, and SIGKILL at the end of the grace.

        Returns:
            What the hook did; None without one. The hook may end its container, and itself with it.
        """
        ends_s = time.monotonic() + self.spec.spec["terminationGracePeriodSeconds"]
        hook = self.spec.container.get("lifecycle", {}).get("preStop", {}).get("exec")
        done = self.exec(*hook["command"], limit_s=ends_s - time.monotonic()) if hook else None
        self.kill(signal.SIGTERM)
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, ends_s - time.monotonic()))
        self.kill()
        return done

    def wait(self, limit_s: float) -> int:
        """Wait for the end of the container; return its exit code."""
        assert self._process is not None
        code = self._process.wait(limit_s)
        return code if code >= 0 else 128 - code

    def end(self) -> None:
        """Kill what is left."""
        if self._process is not None and self._process.poll() is None:
            self.kill()
            self._process.kill()
            self._process.wait(20)

    def _first(self) -> int:
        """Return the PID, on this machine, of the container's first process."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.spec.name} has ended: {self.ran[-3000:]}"
        pid = self._process.pid
        deadline_s = time.monotonic() + 20.0
        while not (children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            assert time.monotonic() < deadline_s, f"{self.spec.name} does not start"
            time.sleep(0.05)
        return int(children[0])

    def _as_user(self, command: Sequence[str]) -> list[str]:
        context = self.spec.spec["securityContext"]
        user, group = context["runAsUser"], context["runAsGroup"]
        environ = {**_IMAGE_ENV, "HOSTNAME": self.spec.name, **self.spec.env}
        return [
            *("setpriv", f"--reuid={user}", f"--regid={group}", f"--groups={context['fsGroup']}"),
            *(
                "--no-new-privs",
                "--inh-caps=-all",
                "--bounding-set=-all",
                "env",
                "-i",
                f"--chdir={IMAGE_HOME}",
            ),
            *(f"{name}={value}" for name, value in environ.items()),
            *command,
        ]

    def _setup(self) -> str:
        """Return the shell script that makes the container's file system, and then becomes its command."""
        needed = needed_folders()
        hidden = dict(_OWN_FOLDERS)
        hidden |= {str(parent): "755" for folder in needed if (parent := closed_parent(folder))}
        mounts = [(folder, str(folder)) for folder in needed]
        mounts += [(Path(sys.prefix), "/opt/hvpipe"), *((place, to) for to, place in self.mounts.items())]
        stage, mount = [], []
        for number, (source, target) in enumerate(mounts):
            make = "mkdir -p" if source.is_dir() else "touch"
            stage.append(f"{make} /mnt/{number} && mount --rbind '{source}' /mnt/{number}")
            parent = Path(target).parent
            mount.append(f"mkdir -p '{parent}' && {{ [ -e '{target}' ] || {make} '{target}'; }}")
            mount.append(f"mount --rbind /mnt/{number} '{target}'")
        context = self.spec.spec["securityContext"]
        return _SETUP.format(
            stage="\n".join(stage),
            hide="\n".join(f"mount -t tmpfs -o mode={mode} tmpfs {path}" for path, mode in hidden.items()),
            mount="\n".join(mount),
            user=context["runAsUser"],
            group=context["runAsGroup"],
            home=IMAGE_HOME,
            name=self.spec.name,
        )


@dataclass
class Cluster:
    """The pods of a job, on a network of their own.

    Attributes:
        launcher: The launcher's pod.
        workers: The others.
        checkpoints: What the claim of checkpoints.yaml has mounted.
        addresses: The pods' addresses, by their names.
        names: The file in which all pods look names up.
    """

    launcher: Pod
    workers: list[Pod]
    checkpoints: Path
    addresses: Mapping[str, str]
    names: Path

    def resolve(self, *without: Pod) -> None:
        """Let the pods find each other by name, except for these. Kubernetes forgets a pod that has gone."""
        lines = ["127.0.0.1 localhost"]
        for pod in (*self.workers, self.launcher):
            if pod not in without:
                lines.append(f"{self.addresses[pod.spec.name]} {pod.spec.address} {pod.spec.name}")
        self.names.write_text("\n".join(lines) + "\n")  # in place: it is mounted

    def start_workers(self, limit_s: float = 60.0) -> None:
        """Start the workers that do not run, and wait until they are ready."""
        self.resolve()
        for pod in self.workers:
            if pod._process is None or pod._process.poll() is not None:
                pod.start()
        for pod in self.workers:
            port = pod.spec.container["readinessProbe"]["tcpSocket"]["port"]
            ready = [
                *("nsenter", f"--net=/run/netns/{pod.namespace}"),
                "bash",
                "-c",
                f"</dev/tcp/127.0.0.1/{port}",
            ]
            wait_until(
                lambda ready=ready: subprocess.run(ready, capture_output=True).returncode == 0,  # type: ignore[misc]
                limit_s,
                f"{pod.spec.name} to be ready",
                pod,
            )


def wait_until(is_so: Callable[[], bool], limit_s: float, what: str, pod: Pod) -> None:
    """Wait for something; fail after `limit_s` with what the pod has printed."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, (
            f"waited {limit_s:g} s for {what}. {pod.spec.name}:\n{pod.ran[-6000:]}"
        )
        time.sleep(0.2)


@contextmanager
def cluster(job: Pods, folder: Path) -> Iterator[Cluster]:
    """Make the pods of a job, and end them afterwards. None of them runs yet.

    Args:
        job: The pods.
        folder: Where their volumes and logs are.
    """
    name = f"pods{os.getpid()}"
    specs = list(job)
    numbered = ClusterSpec(tuple(HostSpec(f"p{number}") for number in range(len(specs))))
    volumes = _volumes(job, folder)
    with ExitStack() as stack:
        stack.callback(network.remove, name)
        network.build(name, numbered)
        names = folder / "hosts"
        names.touch()
        pods = []
        for number, spec in enumerate(specs):
            mounts = {"/etc/hosts": names, **_mounts(spec, volumes)}
            pod = Pod(spec, network.namespace(name, f"p{number}"), mounts, folder / f"{spec.name}.log")
            stack.callback(pod.end)
            pods.append(pod)
        addresses = {spec.name: network.address(number) for number, spec in enumerate(specs)}
        yield Cluster(pods[-1], pods[:-1], volumes["hvpipe-checkpoints"], addresses, names)


def _volumes(job: Pods, folder: Path) -> dict[str, Path]:
    """Make what the manifests name, and what an operator adds: keys and the hostfile."""
    group = job.launcher.spec["securityContext"]["fsGroup"]
    made = {name: folder / name for name in ("hvpipe-script", "hvpipe-checkpoints", "keys", "mpi")}
    for place in made.values():
        place.mkdir()
    shutil.copy(ROOT / "examples" / "train.py", made["hvpipe-script"])
    # as fsGroup does it
    os.chown(made["hvpipe-checkpoints"], 0, group)
    made["hvpipe-checkpoints"].chmod(0o2775)
    assert job.launcher.hostfile is not None
    (made["mpi"] / "hostfile").write_text(job.launcher.hostfile)
    key = made["keys"] / "id_rsa"
    generate = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(key)]
    subprocess.run(generate, check=True, timeout=60)
    shutil.copy(f"{key}.pub", made["keys"] / "authorized_keys")
    for place in made["keys"].iterdir():
        os.chown(place, 0, group)
        place.chmod(0o640)
    return made


def _mounts(spec: PodSpec, volumes: Mapping[str, Path]) -> dict[str, Path]:
    found: dict[str, Path] = {**IMAGE_FILES, spec.ssh_folder: volumes["keys"]}
    if spec.hostfile is not None:
        found["/etc/mpi"] = volumes["mpi"]
    kinds: dict[str, Any] = {volume["name"]: volume for volume in spec.spec["volumes"]}
    for mount in spec.container["volumeMounts"]:
        volume = kinds[mount["name"]]
        if "emptyDir" in volume:  # a pod's /dev/shm is its own anyway
            assert mount["mountPath"] == "/dev/shm", mount
            continue
        place = volumes[
            volume.get("configMap", {}).get("name") or volume["persistentVolumeClaim"]["claimName"]
        ]
        found[mount["mountPath"]] = place
    return found
