"""Readings of a rank's GPU, from a fake driver: no GPU is needed."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from fake_nvml import LOST, NO_PERMISSION, NOT_SUPPORTED, FakeGpu, FakeInstance, FakeNvml
from hvpipe.monitor import gpu_meter, nvml
from hvpipe.monitor.gpu_meter import GpuMeter
from hvpipe.monitor.nvml import NvmlMissing, list_gpus
from hvpipe.trace.sample import GpuReading

POWER, ENERGY, NVLINK_OUT, NVLINK_IN, PCIE_OUT, PCIE_IN = 186, 83, 138, 139, 197, 198
FIELDS = {POWER: 300_000, ENERGY: 5_000, NVLINK_OUT: 10, NVLINK_IN: 20, PCIE_OUT: 1_000, PCIE_IN: 2_000}


@pytest.fixture(autouse=True)
def host_pids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the driver and this process use the same PIDs."""
    monkeypatch.setattr(gpu_meter, "_in_host_pid_namespace", lambda: True)


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, starts: int = 0) -> FakeNvml:
    fake = FakeNvml(list(gpus), starts)
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


def test_the_fake_matches_the_real_nvml() -> None:
    real = pytest.importorskip("pynvml")
    names = [name for name in vars(FakeNvml) if name.startswith(("nvml", "NVML_"))]
    assert len(names) > 25
    for name in names:
        assert hasattr(real, name), name
        if name.startswith("NVML_"):
            assert getattr(real, name) == getattr(FakeNvml, name), name
    assert [real.NVMLError(code).value for code in (NOT_SUPPORTED, LOST)] == [NOT_SUPPORTED, LOST]
    assert real.NVMLError(NOT_SUPPORTED) == real.NVMLError_NotSupported()
    assert real.NVMLError(NO_PERMISSION) == real.NVMLError_NoPermission()
    assert real.NVMLError(LOST) == real.NVMLError_GpuIsLost()


def test_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS), processes={os.getpid(): 700, 1: 200})
    gpu.process_samples = [
        SimpleNamespace(pid=os.getpid(), timeStamp=5, smUtil=10),
        SimpleNamespace(pid=os.getpid(), timeStamp=9, smUtil=35),
        SimpleNamespace(pid=1, timeStamp=10, smUtil=60),
    ]
    fake = install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    first = meter.look(100.0)
    assert first.power_w == 300.0
    assert first.energy_j == 0.0
    assert first.pcie_sent_bytes_per_s is None  # a rate needs two readings
    assert first.process_share == 0.35
    # Half a second later.
    gpu.fields.update({ENERGY: 155_000, NVLINK_OUT: 30, NVLINK_IN: 20, PCIE_OUT: 1_500, PCIE_IN: 2_100})
    gpu.process_samples.append(SimpleNamespace(pid=1, timeStamp=20, smUtil=50))
    assert meter.look(100.5) == GpuReading(
        share=0.40,
        memory_share=0.20,
        memory_bytes=1000,
        sm_mhz=1500,
        power_w=300.0,
        energy_j=150.0,
        celsius=61,
        pcie_sent_bytes_per_s=1000.0,
        pcie_received_bytes_per_s=200.0,
        nvlink_sent_bytes_per_s=20 * 1024 / 0.5,
        nvlink_received_bytes_per_s=0.0,
        process_share=0.0,  # other processes were sampled since then, this one was not
        process_memory_bytes=700,
    )
    assert meter.look(101.0).process_share is None  # no process was sampled
    assert meter.uuid == "GPU-0aaa"
    assert meter.notes() == []
    meter.close()
    assert fake.opened == 0


def test_a_counter_that_was_reset_gives_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS))
    install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    meter.look(1.0)
    gpu.fields[PCIE_OUT] = 100
    assert meter.look(2.0).pcie_sent_bytes_per_s is None
    gpu.fields[PCIE_OUT] = 400
    assert meter.look(3.0).pcie_sent_bytes_per_s == 300.0
    meter.close()


def test_unsupported_figures_are_skipped_and_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(0, fields={POWER: 300_000, ENERGY: 1, PCIE_OUT: 1, PCIE_IN: 1})
    gpu.fails = {"nvmlDeviceGetTemperature": NOT_SUPPORTED, "nvmlDeviceGetProcessUtilization": NOT_SUPPORTED}
    gpu.process_samples = [SimpleNamespace(pid=1, timeStamp=1, smUtil=1)]
    fake = install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    for now_s in (1.0, 2.0, 3.0):
        reading = meter.look(now_s)
    assert reading.celsius is None
    assert reading.nvlink_sent_bytes_per_s is None
    assert reading.power_w == 300.0
    assert fake.asked.count("nvmlDeviceGetTemperature") == 1
    assert meter.notes() == [
        "Made-up GPU gives no temperature, NVLink sending, NVLink receiving, process utilization: "
        "Not Supported"
    ]
    meter.close()


def test_an_older_driver_is_read_by_older_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    later = ("nvmlDeviceGetFieldValues", "nvmlDeviceGetMemoryInfo_v2")
    gpu = FakeGpu(0, fails=dict.fromkeys(later, NOT_SUPPORTED))
    fake = install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    meter.look(1.0)
    reading = meter.look(2.0)
    assert (reading.power_w, reading.energy_j) == (250.0, 0.0)
    assert (reading.pcie_sent_bytes_per_s, reading.pcie_received_bytes_per_s) == (30e3, 31e3)
    assert reading.memory_bytes == 1500
    assert [fake.asked.count(call) for call in later] == [1, 1]
    assert meter.notes() == ["Made-up GPU gives no NVLink sending, NVLink receiving: Not Supported"]
    meter.close()


def test_an_older_nvidia_ml_py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "NVML_FI_DEV_POWER_INSTANT")
    gpu = FakeGpu(0, fields={id_: value for id_, value in FIELDS.items() if id_ != POWER})
    install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    assert meter.look(1.0).power_w == 250.0
    assert meter.notes() == []
    meter.close()


def test_without_permission_the_other_figures_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS), processes={os.getpid(): 1})
    gpu.fails = {"nvmlDeviceGetComputeRunningProcesses": NO_PERMISSION, POWER: NO_PERMISSION}
    gpu.fails["nvmlDeviceGetPowerUsage"] = NO_PERMISSION
    install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    for now_s in (1.0, 2.0):
        reading = meter.look(now_s)
    assert (reading.process_memory_bytes, reading.power_w, reading.share) == (None, None, 0.4)
    assert meter.notes() == ["Made-up GPU gives no process memory, power: Insufficient Permissions"]
    meter.close()


def test_no_permission_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(0, fails={"all": NO_PERMISSION}))
    meter = GpuMeter(None, 0)
    assert meter.look(1.0) == GpuReading()
    (note,) = meter.notes()
    assert "no GPU figures" in note
    meter.close()


def test_a_mig_device_has_its_own_memory_and_the_power_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS))
    gpu.instances = [FakeInstance(0, place=0), FakeInstance(0, place=1, processes={os.getpid(): 60})]
    gpu.instances[1].fails = {"nvmlDeviceGetUtilizationRates": NOT_SUPPORTED}
    fake = install(monkeypatch, gpu)
    meter = GpuMeter("MIG-0b1", 0)
    reading = meter.look(1.0)
    assert (reading.share, reading.memory_bytes, reading.process_memory_bytes) == (None, 100, 60)
    assert (reading.power_w, reading.sm_mhz) == (300.0, 1500)
    assert meter.uuid == "GPU-0aaa"
    assert "nvmlDeviceGetUtilizationRates" not in fake.asked
    assert meter.notes() == [
        "a MIG device of Made-up GPU: clock, power, energy, temperature, PCIe and NVLink are the whole GPU's",
        "a MIG device of Made-up GPU gives no utilization, process utilization: NVML has none in MIG mode",
    ]
    meter.close()


@pytest.mark.parametrize("by_field", [True, False])
def test_a_gpu_lost_while_running(by_field: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS))
    fake = install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    assert meter.look(1.0).share == 0.4
    gpu.fails = {POWER: LOST} if by_field else {"all": LOST}
    meter.look(2.0)
    asked = len(fake.asked)
    assert meter.look(3.0) == GpuReading()
    assert len(fake.asked) == asked
    assert meter.notes() == ["Made-up GPU stopped answering: GPU is lost"]
    meter.close()
    assert fake.opened == 0


def test_a_figure_that_failed_temporarily_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(0, fields=dict(FIELDS), fails={"nvmlDeviceGetTemperature": 10})  # a timeout
    install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    assert meter.look(1.0).celsius is None
    gpu.fails = {}
    assert meter.look(2.0).celsius == 61
    assert meter.notes() == []
    meter.close()


def test_a_rank_reads_the_gpu_of_its_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, FakeGpu(0), FakeGpu(1), FakeGpu(2))
    for visible, local_rank, index in ((None, 1, 1), ("2,0", 0, 2), ("2,0", 1, 0), ("GPU-1", 0, 1)):
        meter = GpuMeter(visible, local_rank)
        assert meter.look(1.0).share == pytest.approx(0.4 + index / 100), (visible, local_rank)
        meter.close()
    assert fake.opened == 0


def test_a_rank_without_a_visible_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(0))
    meter = GpuMeter("", 0)
    assert meter.look(1.0) == GpuReading()
    assert meter.uuid is None
    assert meter.notes() == [
        "no GPU figures: CUDA shows this rank no GPU (NVML lists 1, CUDA_VISIBLE_DEVICES is '')"
    ]
    meter.close()


def test_in_a_container_there_are_no_figures_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_meter, "_in_host_pid_namespace", lambda: False)
    gpu = FakeGpu(0, fields=dict(FIELDS), processes={os.getpid(): 1})  # another process, on the host
    install(monkeypatch, gpu)
    meter = GpuMeter(None, 0)
    assert meter.look(1.0).process_memory_bytes is None
    assert meter.notes() == [
        "Made-up GPU gives no process utilization, process memory: "
        "the driver numbers processes as the host does"
    ]
    meter.close()


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(0), starts=9)
    with pytest.raises(NvmlMissing, match="NVML does not start: Driver Not Loaded"):
        GpuMeter(None, 0)
    assert list_gpus() == []


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlMissing, match="nvidia-ml-py is not installed"):
        nvml.Nvml()
    assert list_gpus() == []


def test_gpus_are_listed_with_their_mig_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(1)
    gpu.instances = [FakeInstance(1, place=0)]
    fake = install(monkeypatch, FakeGpu(0, fails={"nvmlDeviceGetMigMode": NOT_SUPPORTED}), gpu)
    whole, parted = list_gpus()
    assert (whole.name, whole.memory_bytes, whole.instances) == ("Made-up GPU", 8000, ())
    assert [one.uuid for one in parted.instances] == ["MIG-1b0"]
    assert fake.opened == 0
