"""The commands of examples/kubernetes in namespaces: training, eviction, a lost worker, and its return.

`make kubernetes-test` runs them. Each trains on two pods of two ranks, whose ssh and sshd run without root.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import pods
from manifests import load, of_mpijob, of_trainjob
from pods import Cluster, Pod, cluster, wait_until

LIMIT_S = 400.0
WHY_NOT = pods.why_not()
pytestmark = [
    pytest.mark.part,
    pytest.mark.pods,
    pytest.mark.timeout(900),
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
]


def mpijob(folder: Path, *options: str) -> AbstractContextManager[Cluster]:
    """Make the pods of mpijob.yaml, with more options of `hvpipe run`."""
    job = load("mpijob.yaml")
    (container,) = job["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    container["args"][1:1] = options
    return cluster(of_mpijob(job), folder)


def trainjob(folder: Path) -> AbstractContextManager[Cluster]:
    return cluster(of_trainjob(load("trainjob.yaml"), load("runtime.yaml")), folder)


def reach_epoch(pod: Pod, epoch: int, of: int, since: int = 0) -> None:
    """Wait until the launcher has printed the beginning of an epoch."""
    wait_until(lambda: f"Epoch {epoch}/{of}" in pod.ran[since:], LIMIT_S, f"epoch {epoch}", pod)


def epochs(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"Epoch (\d+)/", text)]


@pytest.mark.parametrize("make", [mpijob, trainjob])
def test_training(make: Callable[[Path], AbstractContextManager[Cluster]], tmp_path: Path) -> None:
    with make(tmp_path) as made:
        made.start_workers()
        made.launcher.start()
        assert made.launcher.wait(LIMIT_S) == 0, made.launcher.ran
        assert re.search(r"4 ranks, .*test accuracy 9\d\.\d+%", made.launcher.ran), made.launcher.ran
        words = made.launcher.spec.command
        saved = words[words.index("--save") + 1]
        assert (made.checkpoints / Path(saved).name).stat().st_uid == 1000
        assert f"saved model: {saved}" in made.launcher.ran


LONG = ("--epochs", "60")


@pytest.mark.parametrize("make", [mpijob, trainjob])
def test_evicted_pods(make: Callable[[Path], AbstractContextManager[Cluster]], tmp_path: Path) -> None:
    """First a worker's, later the launcher's, which has ranks of its own under Kubeflow Trainer only."""
    with make(tmp_path) as made:
        made.start_workers()
        launcher = made.launcher
        launcher.start(*LONG)
        reach_epoch(launcher, 2, 60)
        hook = made.workers[-1].evict()
        made.resolve(made.workers[-1])
        assert hook is not None
        assert "2 ranks write a checkpoint and end" in hook.stdout, hook.stderr
        assert made.workers[-1].wait(LIMIT_S) == 255  # Kubernetes makes no pod again that has ended with 0
        assert launcher.wait(LIMIT_S) == 75, launcher.ran
        last, before = epochs(launcher.ran)[-1], len(launcher.ran)

        made.start_workers()
        launcher.start(*LONG)
        wait_until(lambda: len(epochs(launcher.ran[before:])) > 1, LIMIT_S, "two epochs more", launcher)
        assert epochs(launcher.ran[before:])[0] in (last, last + 1), launcher.ran
        launcher.evict()
        assert launcher.wait(LIMIT_S) == 75, launcher.ran
        assert epochs(launcher.ran)[-1] < 60, launcher.ran


def test_a_lost_worker_and_its_return(tmp_path: Path) -> None:
    with mpijob(tmp_path, "--elastic") as made:
        made.start_workers()
        launcher, lost = made.launcher, made.workers[1]
        launcher.start(*LONG)
        reach_epoch(launcher, 2, 60)
        lost.kill()
        made.resolve(lost)
        without = f"the job goes on with 2 ranks on {made.workers[0].spec.address}:2"
        wait_until(lambda: without in launcher.ran, LIMIT_S, "the job to go on", launcher)
        last, before = epochs(launcher.ran)[-1], len(launcher.ran)
        wait_until(lambda: len(epochs(launcher.ran[before:])) > 1, LIMIT_S, "two epochs on 2 ranks", launcher)
        assert epochs(launcher.ran[before:])[0] in (last - 1, last, last + 1), launcher.ran

        made.start_workers()
        done = launcher.exec("hvpipe", "join", f"{lost.spec.address}:2", limit_s=120)
        assert done.returncode == 0, done.stderr
        again = f"the job goes on with 4 ranks on {made.workers[0].spec.address}:2,{lost.spec.address}:2"
        wait_until(lambda: again in launcher.ran, LIMIT_S, "the job to go on", launcher)
        before = launcher.ran.rindex(again)
        wait_until(lambda: len(epochs(launcher.ran[before:])) > 2, LIMIT_S, "epochs on 4 ranks", launcher)
        launcher.evict()
        assert launcher.wait(LIMIT_S) == 75, launcher.ran
