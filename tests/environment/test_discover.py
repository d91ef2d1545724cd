"""Who launched a process, as read from the environments of each launcher, and the options of Open MPI."""

from __future__ import annotations

import os

import pytest

from hvpipe.environment.discover import Launch, discover, eager_bytes, networks_asked, prepare_open_mpi
from hvpipe.errors import InitError

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
GLOO = {
    "HOROVOD_RANK": "3",
    "HOROVOD_SIZE": "4",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
STEP = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77"}
BATCH_SCRIPT = {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}
A_SHELL = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Launch("none", 0, 1, 0, 1), id="nobody"),
        pytest.param(OPEN_MPI, Launch("mpirun", 3, 4, 1, 2), id="Open MPI"),
        pytest.param(HYDRA, Launch("mpirun", 1, 2, 1, 2), id="MPICH"),
        pytest.param(STEP, Launch("srun", 5, 8, 1, None), id="srun"),
        pytest.param({**STEP, "PMIX_RANK": "5"}, Launch("srun", 5, 8, 1, None), id="srun with PMIx"),
        pytest.param(
            {**STEP, "PMI_RANK": "5", "PMI_SIZE": "8"}, Launch("srun", 5, 8, 1, None), id="srun with PMI-2"
        ),
        pytest.param({**STEP, **OPEN_MPI}, Launch("mpirun", 3, 4, 1, 2), id="Open MPI inside SLURM"),
        pytest.param({**STEP, **HYDRA}, Launch("mpirun", 1, 2, 1, 2), id="MPICH inside SLURM"),
        pytest.param(BATCH_SCRIPT, Launch("none", 0, 1, 0, 1), id="a batch script, no step"),
        pytest.param({**STEP, **A_SHELL}, Launch("none", 0, 1, 0, 1), id="a shell of salloc"),
        pytest.param(
            {**STEP, **A_SHELL, "PMI_RANK": "0", "PMI_SIZE": "1"}, Launch("none", 0, 1, 0, 1), id="with PMI-2"
        ),
        pytest.param(
            {**STEP, **A_SHELL, "PMIX_RANK": "0"}, Launch("srun", 0, 1, 0, None), id="perhaps not alone"
        ),
        pytest.param({**STEP, **A_SHELL, **OPEN_MPI}, Launch("mpirun", 3, 4, 1, 2), id="mpirun in it"),
        pytest.param({"SLURM_JOB_ID": "77"}, Launch("none", 0, 1, 0, 1), id="a SLURM allocation"),
        pytest.param({"PMIX_RANK": "2"}, Launch("mpirun", 2, None, None, None), id="another PMIx launcher"),
        pytest.param(
            {**OPEN_MPI, "HOROVOD_FUSION_THRESHOLD": "0"},
            Launch("mpirun", 3, 4, 1, 2),
            id="horovodrun --mpi",
        ),
        pytest.param({**OPEN_MPI, **GLOO}, Launch("horovodrun", 3, 4, 1, 2), id="horovodrun --gloo"),
    ],
)
def test_discover(environ: dict[str, str], expected: Launch) -> None:
    assert discover(environ) == expected


@pytest.mark.parametrize("text", ["", "one", "-1"])
def test_bad_launcher_variables_are_named(text: str) -> None:
    with pytest.raises(InitError, match=f"OMPI_COMM_WORLD_SIZE.*Received: OMPI_COMM_WORLD_SIZE='{text}'"):
        discover({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": text})


@pytest.mark.parametrize(
    ("library", "environ", "wanted"),
    [
        ("Open MPI v5.0.11", {}, 65536),
        ("Open MPI v5.0.11", {"OMPI_MCA_btl_tcp_eager_limit": "262144"}, 262144),
        ("Open MPI v5.0.11", {"OMPI_MCA_btl_tcp_eager_limit": "much"}, 65536),
        ("MPICH Version: 4.2.3", {"OMPI_MCA_btl_tcp_eager_limit": "262144"}, 65536),
    ],
)
def test_the_eager_limit_matches_the_setting_of_open_mpi(
    library: str, environ: dict[str, str], wanted: int
) -> None:
    assert eager_bytes(library, environ) == wanted


@pytest.mark.parametrize(
    ("chosen", "limit", "most"),
    [
        ({}, "262144", "262144"),
        ({"OMPI_MCA_btl_tcp_eager_limit": "1000"}, "1000", None),
        ({"OMPI_MCA_btl_tcp_max_send_size": "1000"}, None, "1000"),
    ],
)
def test_open_mpi_settings_of_the_user_are_kept(
    chosen: dict[str, str], limit: str | None, most: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"OMPI_MCA_{name}" for name in ("osc", "btl_tcp_eager_limit", "btl_tcp_max_send_size")]
    for name in names:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    prepare_open_mpi()
    assert [os.environ.get(name) for name in names] == ["^ucx", limit, most]


@pytest.mark.parametrize("asked", ["1", ""])
def test_mpi_finalize_has_no_barrier_if_ranks_may_be_lost(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_MCA_osc", "OMPI_MCA_btl_tcp_eager_limit", "OMPI_MCA_btl_tcp_max_send_size"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_mpi_ft_enable", asked)
    without_barrier = "OMPI_MCA_async_mpi_finalize"
    monkeypatch.setenv(without_barrier, "")  # so that monkeypatch restores it
    monkeypatch.delenv(without_barrier)
    prepare_open_mpi()
    assert os.environ.get(without_barrier) == (asked or None)


def test_what_mpi_was_told_about_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("OMPI_MCA", "UCX", "FI_", "I_MPI", "MPIR")):
            monkeypatch.delenv(name)
    assert networks_asked() == ""
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    monkeypatch.setenv("UCX_TLS", "rc\n")
    assert networks_asked() == "OMPI_MCA_btl=tcp,self, UCX_TLS=rc?"
    cards = ["mlx5_0:1," * 200, "mlx5_0:1," * 200 + "mlx5_9:1"]
    found = []
    for card in cards:
        monkeypatch.setenv("UCX_NET_DEVICES", card)
        found.append(networks_asked())
    assert max(map(len, found)) < 140
    assert found[0] != found[1]
