"""mpirun's command lines, compared word by word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from hvpipe.commands import launch_options
from hvpipe.commands.hosts import HostSlots
from hvpipe.commands.launch import (
    LaunchSpec,
    exported_names,
    launcher_settings,
    mpirun_command,
    thread_settings,
)
from hvpipe.commands.mpirun import Mpirun
from hvpipe.errors import LaunchError

OPEN_MPI_5 = Mpirun("/mpi5/mpirun", "Open MPI", (5, 0, 11))
OPEN_MPI_4 = Mpirun("/mpi4/mpirun", "Open MPI", (4, 1, 8))
MPICH = Mpirun("/mpich/mpirun", "MPICH", (4, 2, 3))
INTEL = Mpirun("/intel/mpirun", "Intel MPI", (2021, 19, 0))
HOSTS = (HostSlots("a", 2), HostSlots("b", 2))
SPEC = LaunchSpec(OPEN_MPI_5, 2, ("python", "-u", "train.py"), cores=8)


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
        pytest.param(  # Open MPI's daemon takes each port that it may have
            replace(SPEC, hosts=HOSTS, ports=range(40_000, 40_101)),
            "/mpi5/mpirun -np 2 --host a:2,b:2 --bind-to none "
            "--prtemca oob_tcp_dynamic_ipv4_ports 40000 --mca btl_tcp_port_min_v4 40001 "
            "--mca btl_tcp_port_range_v4 100 --prtemca oob_tcp_dynamic_ipv6_ports 40000 "
            "--mca btl_tcp_port_min_v6 40001 --mca btl_tcp_port_range_v6 100 python -u train.py",
            id="ports",
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
            replace(SPEC, mpirun=INTEL, hosts=HOSTS, rsh_agent="/agent", network="eth1"),
            "/intel/mpirun -np 2 -hosts a,b -ppn 2 -launcher rsh -launcher-exec /agent -iface eth1 "
            "python -u train.py",
            id="hosts, agent and interface, Intel MPI",
        ),
        pytest.param(
            replace(SPEC, mpirun=INTEL, hosts=(HostSlots("a", 1), HostSlots("b", 2))),
            "/intel/mpirun -np 2 -hosts a,b,b -ppn 1 python -u train.py",
            id="unequal hosts, Intel MPI",
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


def test_more_ranks_than_slots() -> None:
    with pytest.raises(LaunchError, match=r"need 5 slots.*Received: -np 5 with 4 slots on a:2,b:2"):
        replace(SPEC, ranks=5, hosts=HOSTS)


def test_a_lone_colon_is_refused() -> None:
    """mpirun would run the words after the colon as another program, or drop them."""
    with pytest.raises(LaunchError, match=r"a lone colon, .* Received: python args.py a : b"):
        LaunchSpec(OPEN_MPI_5, 2, ("python", "args.py", "a", ":", "b"))


@pytest.mark.parametrize("option", ["--host", "-H", "--hostfile", "-machinefile"])
def test_hosts_in_mpirun_arguments_are_other_machines(option: str) -> None:
    spec = LaunchSpec(OPEN_MPI_5, 2, ("python",), export=("HVPIPE_TRACE",), launcher_args=(option, "a,b"))
    command = " ".join(mpirun_command(spec))
    assert "-x HVPIPE_TRACE" in command
    assert thread_settings(spec, {}) == {}


def test_ranks_on_other_hosts_learn_the_job_folder() -> None:
    """Regression: nothing that they told of a loss or of the job's end reached `hvpipe run`."""
    commands: list[str] = []

    def supervised(command: Sequence[str], environ: Mapping[str, str]) -> int:
        commands.append(" ".join(command))
        return 0

    launch_options.start(replace(SPEC, hosts=HOSTS, ranks=4), {}, {}, dry_run=False, supervised=supervised)
    assert "-x HVPIPE_JOB_FOLDER" in commands[0]


def test_no_ranks() -> None:
    with pytest.raises(LaunchError, match="Received: ranks=0"):
        replace(SPEC, ranks=0)


def test_an_unknown_binding() -> None:
    with pytest.raises(LaunchError, match=r"none, core, numa, socket. Received: bind='hwthread'"):
        replace(SPEC, bind="hwthread")


def test_more_bound_ranks_than_cores() -> None:
    with pytest.raises(LaunchError, match="Received: 9 ranks on 8 cores"):
        replace(SPEC, ranks=9, bind="core")


def test_mpich_needs_an_interface_name() -> None:
    with pytest.raises(LaunchError, match=r"Received: --net '10.0.0.0/24'"):
        mpirun_command(replace(SPEC, mpirun=MPICH, network="10.0.0.0/24"))


def test_names_of_networks() -> None:
    """A name with a dash would be an option of mpirun."""
    for name in ("-x", "--allow-run-as-root", "", "eth0;id", "a b"):
        with pytest.raises(
            LaunchError, match=f"--net should name interfaces or networks.* Received: --net '{name}'"
        ):
            replace(SPEC, network=name)
    for name in ("eth0", "ib0,ib1", "10.0.0.0/24", "eth0.7", "fd00::/8"):
        replace(SPEC, network=name)


def test_settings_for_what_hydra_has_no_flags_for() -> None:
    assert launcher_settings(replace(SPEC, network="eth1", allocated=True), {}) == {}
    mpich = replace(SPEC, mpirun=MPICH, network="eth1")
    network = {
        "UCX_NET_DEVICES": "eth1",
        "UCX_TLS": "tcp,sm,self",
        "FI_PROVIDER": "tcp",
        "FI_TCP_IFACE": "eth1",
        "HVPIPE_NET": "eth1",
    }
    assert launcher_settings(mpich, {}) == network
    assert "UCX_TLS" not in launcher_settings(mpich, {"UCX_TLS": "all"})
    ports = launcher_settings(replace(SPEC, mpirun=MPICH, ports=range(40_000, 40_101)), {})
    assert ports["MPIEXEC_PORT_RANGE"] == ports["MPIR_CVAR_CH3_PORT_RANGE"] == "40000:40100"
    assert (ports["FI_TCP_PORT_LOW_RANGE"], ports["FI_TCP_PORT_HIGH_RANGE"]) == ("40000", "40100")
    assert ports["UCX_TCP_PORT_RANGE"] == "40001-40100"
    in_slurm = launcher_settings(replace(SPEC, mpirun=MPICH, allocated=True), {"SLURM_MPI_TYPE": "pmix"})
    assert in_slurm == {"SLURM_MPI_TYPE": "none"}


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("none", {"I_MPI_PIN": "off"}),
        ("core", {"I_MPI_PIN_DOMAIN": "4"}),
        ("socket", {"I_MPI_PIN_DOMAIN": "socket"}),
    ],
)
def test_intel_mpi_binds_by_settings(bind: str, expected: Mapping[str, str]) -> None:
    assert launcher_settings(replace(SPEC, mpirun=INTEL, bind=bind), {}) == expected


def test_ranks_share_the_cores_of_a_host() -> None:
    both = {"OMP_NUM_THREADS": "4", "TF_NUM_INTRAOP_THREADS": "4"}
    assert thread_settings(SPEC, {}) == both
    assert thread_settings(SPEC, {"OMP_NUM_THREADS": "3"}) == {"TF_NUM_INTRAOP_THREADS": "4"}
    assert set(thread_settings(replace(SPEC, ranks=16), {}).values()) == {"1"}
    assert thread_settings(replace(SPEC, hosts=(HostSlots("localhost", 2),)), {}) == both


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, ranks=1),
        replace(SPEC, hosts=HOSTS),
        replace(SPEC, bind="core"),
        replace(SPEC, allocated=True),
    ],
)
def test_thread_settings_are_left_alone(spec: LaunchSpec) -> None:
    assert thread_settings(spec, {}) == {}


def test_variables_exported_to_other_hosts() -> None:
    environ = dict.fromkeys(
        [
            *("PATH", "HVPIPE_TRACE", "DATA_DIR", "CUDA_DEVICE_ORDER"),
            *("HOME", "_", "SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "CUDA_VISIBLE_DEVICES", "BASH_FUNC_a%%"),
            *("K_MPI_JOB_ROLE", "JOB_COMPLETION_INDEX", "NVIDIA_DRIVER_CAPABILITIES"),
        ],
        "x",
    )
    assert exported_names(environ) == ("CUDA_DEVICE_ORDER", "DATA_DIR", "HVPIPE_TRACE", "PATH")


def test_arguments_of_an_agent_are_settings_of_hydra() -> None:
    """Regression: Hydra took the whole command for the name of a program."""
    spec = replace(SPEC, mpirun=MPICH, hosts=HOSTS, rsh_agent="/ssh -p 22")
    assert "-launcher-exec /ssh -bind" in words(spec) or "-launcher-exec /ssh python" in words(spec)
    assert launcher_settings(spec, {}) == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22"}
    intel = launcher_settings(replace(spec, mpirun=INTEL), {})
    assert intel["I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"] == "-p 22"
    with pytest.raises(LaunchError, match=r"splits --rsh-agent at any of ' '.* Received: 'a b'"):
        launcher_settings(replace(spec, rsh_agent="/ssh -i 'a b'"), {})


@pytest.mark.parametrize("word", ["a b", "bastion:22"])
def test_an_agent_that_open_mpi_would_split_is_refused(word: str) -> None:
    with pytest.raises(LaunchError, match=rf"Open MPI splits --rsh-agent .* Received: '{word}'"):
        words(replace(SPEC, hosts=HOSTS, rsh_agent=f"/ssh -i '{word}'"))
