"""The manifests of examples/kubernetes, and what the operators make of them: pods, hostfiles, variables.

Written after kubeflow/mpi-operator's mpi_job_controller.go and kubeflow/trainer's plugins/mpi/mpi.go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
NAMESPACE = "default"
SSHD_CONFIG, SSH_CONFIG = "/etc/hvpipe/sshd_config", "/etc/ssh/ssh_config.d/hvpipe.conf"
IMAGE_FILES = {
    SSHD_CONFIG: FOLDER.parents[1] / "docker" / "sshd_config",
    SSH_CONFIG: FOLDER.parents[1] / "docker" / "ssh_config",
}
"""Files of the image, by their paths there; tests/test_image.py compares them with the Dockerfile."""

# What both operators set in a launcher for Open MPI.
_OPEN_MPI = {
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


def load(name: str) -> dict[str, Any]:
    """Return the only document of a file of examples/kubernetes."""
    found: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return found


@dataclass(frozen=True)
class PodSpec:
    """A pod as an operator makes it: with one container, and what the operator adds.

    Attributes:
        name: Its host name.
        address: The name by which other pods reach it.
        spec: The `spec` of the pod template.
        env: The variables of the container, the operator's included.
        ssh_folder: Where the operator mounts the keys.
        hostfile: What it mounts as /etc/mpi/hostfile; None: nothing.
        restart_policy: The policy that counts.
    """

    name: str
    address: str
    spec: Mapping[str, Any]
    env: Mapping[str, str]
    ssh_folder: str
    hostfile: str | None = None
    restart_policy: str = "Never"

    @property
    def container(self) -> Mapping[str, Any]:
        """The only container."""
        (found,) = self.spec["containers"]
        return found  # type: ignore[no-any-return]

    @property
    def command(self) -> list[str]:
        """The words that the container runs."""
        return [*self.container["command"], *self.container.get("args", [])]


@dataclass(frozen=True)
class Pods:
    """All pods of a job."""

    launcher: PodSpec
    workers: Sequence[PodSpec] = field(default_factory=tuple)

    def __iter__(self) -> Iterator[PodSpec]:
        """Yield the pods, the launcher last."""
        yield from (*self.workers, self.launcher)


def of_mpijob(job: Mapping[str, Any]) -> Pods:
    """Return the pods that the MPI Operator 0.6 makes of an MPIJob."""
    name, spec = job["metadata"]["name"], job["spec"]
    replicas, slots = spec["mpiReplicaSpecs"], spec["slotsPerWorker"]
    assert not spec.get("runLauncherAsWorker"), "not written: a launcher with ranks"

    def pod(role: str, suffix: str, env: Mapping[str, str], hostfile: str | None = None) -> PodSpec:
        own, kind = f"{name}-{suffix}", replicas[role]
        return PodSpec(
            own,
            f"{own}.{name}.{NAMESPACE}.svc",
            kind["template"]["spec"],
            {**_env_of(kind["template"]["spec"]), **env},
            spec["sshAuthMountPath"],
            hostfile,
            kind["restartPolicy"],
        )

    workers = [
        pod("Worker", f"worker-{i}", {"K_MPI_JOB_ROLE": "worker"})
        for i in range(replicas["Worker"]["replicas"])
    ]
    env = {
        "K_MPI_JOB_ROLE": "launcher",
        **_OPEN_MPI,
        "OMPI_MCA_orte_set_default_slots": str(slots),
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
    }
    hostfile = "".join(f"{each.address} slots={slots}\n" for each in workers)
    return Pods(pod("Launcher", "launcher", env, hostfile), tuple(workers))


def of_trainjob(job: Mapping[str, Any], runtime: Mapping[str, Any]) -> Pods:
    """Return the pods that Kubeflow Trainer 2 makes of a TrainJob and its runtime."""
    name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
    mpi = runtime["spec"]["mlPolicy"]["mpi"]
    assert mpi["runLauncherAsNode"], "not written: a launcher without ranks"
    slots, nodes = trainer["numProcPerNode"], max(trainer["numNodes"] - 1, 1)
    pods: dict[str, list[PodSpec]] = {"launcher": [], "node": []}
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    launchers = runtime["spec"]["mlPolicy"]["numNodes"]  # of the job with the label of the trainer's step
    assert launchers == 1, f"wanted: one launcher. Received: numNodes: {launchers} in the runtime's mlPolicy"
    for each in jobs:
        spec = copy.deepcopy(each["template"]["spec"]["template"]["spec"])
        if "trainjob-ancestor-step" in str(each["template"].get("metadata")):
            (container,) = spec["containers"]
            container.update({key: trainer[key] for key in ("image", "command", "args") if key in trainer})
            container["env"] = [*container.get("env", []), *trainer.get("env", [])]
            container["resources"] = trainer["resourcesPerNode"]
        for index in range(nodes if each["name"] == "node" else 1):
            own = f"{name}-{each['name']}-0-{index}"
            policy = spec["restartPolicy"]
            found = PodSpec(own, f"{own}.{name}", spec, _env_of(spec), mpi["sshAuthMountPath"], None, policy)
            pods[each["name"]].append(found)
    hostfile = "".join(f"{pod.address} slots={slots}\n" for each in jobs for pod in pods[each["name"]])
    (launcher,) = pods["launcher"]
    env = {**launcher.env, **_OPEN_MPI, "OMPI_MCA_orte_set_default_slots": str(slots)}
    made = PodSpec(
        launcher.name,
        launcher.address,
        launcher.spec,
        env,
        launcher.ssh_folder,
        hostfile,
        launcher.restart_policy,
    )
    return Pods(made, tuple(pods["node"]))


def _env_of(spec: Mapping[str, Any]) -> dict[str, str]:
    (container,) = spec["containers"]
    return {each["name"]: each["value"] for each in container.get("env", [])}
