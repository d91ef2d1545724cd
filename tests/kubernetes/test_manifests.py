"""examples/kubernetes against the published schemas, and its files against each other."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hvpipe.cli import make_parser
from manifests import (
    FOLDER,
    IMAGE_FILES,
    SSH_CONFIG,
    SSHD_CONFIG,
    Pods,
    PodSpec,
    load,
    of_mpijob,
    of_trainjob,
)

SCHEMAS = yaml.safe_load(Path(__file__).with_name("schemas.yaml").read_text())
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
PORT = 2222
# What the image has, and what users make by the commands of docs/kubernetes.md.
IMAGE = "hvpipe:0.1.0"
SCRIPT = "hvpipe-script"
MADE_ELSEWHERE = {("configMap", SCRIPT)}


def check(document: dict[str, Any]) -> None:
    """Raise ValidationError unless a document is what the published schema of its kind takes."""
    schema = {**SCHEMAS["kinds"][document["kind"]], "$defs": SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(document)


def jobs() -> dict[str, Pods]:
    return {
        "MPIJob": of_mpijob(load("mpijob.yaml")),
        "TrainJob": of_trainjob(load("trainjob.yaml"), load("runtime.yaml")),
    }


def pods() -> Iterator[PodSpec]:
    for job in jobs().values():
        yield from job


@pytest.mark.parametrize("name", FILES)
def test_a_manifest_is_what_its_schema_takes(name: str) -> None:
    check(load(name))


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("mpijob.yaml", "spec.slotsPerWorker", "2"),
        ("mpijob.yaml", "spec.launcherCreationPolicy", "Later"),
        ("mpijob.yaml", "spec.slotPerWorker", 2),
        ("mpijob.yaml", "spec.mpiReplicaSpecs.Launcher.replicas", 2),
        ("mpijob.yaml", "spec.mpiReplicaSpecs.Worker.template.spec.gracePeriod", 3),
        ("runtime.yaml", "spec.mlPolicy.mpi.mpiImplementation", "Intel"),
        ("trainjob.yaml", "spec.trainer.numNodes", "2"),
        ("checkpoints.yaml", "spec.resources.requests.storage", "10 GB"),
    ],
)
def test_a_mistake_is_found(name: str, path: str, value: object) -> None:
    document = copy.deepcopy(load(name))
    *parents, last = path.split(".")
    place = document
    for key in parents:
        place = place[key]
    place[last] = value
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_what_pods_mount_is_there() -> None:
    there = {
        ("persistentVolumeClaim", load("checkpoints.yaml")["metadata"]["name"]),
        *MADE_ELSEWHERE,
    }
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        mounted = pod.container["volumeMounts"]
        assert {mount["name"] for mount in mounted} == set(volumes), pod.name
        for volume in volumes.values():
            kind = next(key for key in volume if key != "name")
            wanted = volume[kind].get("name") or volume[kind].get("claimName")
            assert wanted is None or (kind, wanted) in there, pod.name


def test_the_reader_sees_the_folder_of_the_jobs() -> None:
    reader, launcher = load("reader.yaml")["spec"], jobs()["MPIJob"].launcher
    (container,) = reader["containers"]
    assert container["image"] == IMAGE
    assert reader["securityContext"] == launcher.spec["securityContext"]
    assert all(each in launcher.container["volumeMounts"] for each in container["volumeMounts"])
    assert all(each in launcher.spec["volumes"] for each in reader["volumes"])


def test_all_pods_of_a_job_see_scripts_and_checkpoints_at_the_same_paths() -> None:
    for job in jobs().values():
        for name in ("script", "run"):
            paths = {
                mount["mountPath"]
                for pod in job
                for mount in pod.container["volumeMounts"]
                if mount["name"] == name
            }
            assert len(paths) == 1, (name, paths)
            (path,) = paths
            words = [word for word in job.launcher.command if word.startswith(f"{path}/")]
            assert words, f"wanted: the launcher to use {path}. Received: {job.launcher.command}"


def test_ssh_and_sshd_agree_on_port_and_keys() -> None:
    sshd, ssh = (dict(settings(IMAGE_FILES[path])) for path in (SSHD_CONFIG, SSH_CONFIG))
    assert ssh["Port"] == sshd["Port"] == str(PORT)
    for pod in pods():
        assert sshd["HostKey"] == f"{pod.ssh_folder}/id_rsa"
        assert sshd["AuthorizedKeysFile"] == f"{pod.ssh_folder}/authorized_keys"
    for job in jobs().values():
        for worker in job.workers:
            container = worker.container
            assert {port["containerPort"] for port in container["ports"]} == {PORT}
            assert container["readinessProbe"]["tcpSocket"]["port"] == PORT
            assert worker.command[0] == "/usr/sbin/sshd"
            assert worker.command[worker.command.index("-f") + 1] == SSHD_CONFIG


def settings(file: Path) -> Iterator[list[str]]:
    """Yield the name and the value of each line of a file of settings of ssh."""
    for line in file.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line.split(maxsplit=1)


def hook(pod: PodSpec) -> list[str]:
    """Return the words of the command of hvpipe before a pod's end; none without a hook."""
    words = pod.container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    if not words:
        return []
    shell, option, script = words
    command, *last = script.split("; ")
    assert (shell, option, last) == ("/bin/sh", "-c", ["kill -QUIT 1", "sleep 10"])
    return shlex.split(command)


def test_commands_are_ones_that_hvpipe_has() -> None:
    parser = make_parser()
    for pod in pods():
        assert pod.container["image"] == IMAGE
        for command in (pod.command, hook(pod)):
            if command and command[0].endswith("/hvpipe"):
                parser.parse_args(command[1:])


def test_pods_get_longer_than_the_checkpoint() -> None:
    for job in jobs().values():
        launcher = make_parser().parse_args(job.launcher.command[1:])
        assert launcher.grace < job.launcher.spec["terminationGracePeriodSeconds"]
        assert launcher.hostfile == "/etc/mpi/hostfile"
        for worker in job.workers:
            assert (
                make_parser().parse_args(hook(worker)[1:]).wait < worker.spec["terminationGracePeriodSeconds"]
            )


def test_nothing_runs_as_root() -> None:
    for pod in pods():
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["runAsUser"] == 1000
        assert pod.container["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_operators_name_the_hosts() -> None:
    """Expected values: kubeflow/trainer's own tests, and mpi-operator's newConfigMap."""
    found = jobs()
    assert found["MPIJob"].launcher.hostfile == (
        "digits-worker-0.digits.default.svc slots=2\ndigits-worker-1.digits.default.svc slots=2\n"
    )
    assert found["TrainJob"].launcher.hostfile == (
        "digits-trainer-node-0-0.digits-trainer slots=2\ndigits-trainer-launcher-0-0.digits-trainer slots=2\n"
    )
