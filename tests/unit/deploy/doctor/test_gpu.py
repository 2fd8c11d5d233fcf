"""GPU facts on a fake NVML: what it tells, and everything that it may refuse to."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollfab.deploy.doctor.command import gpu_findings
from rollfab.deploy.doctor.gpu import (
    INSTALL,
    MACHINE_IDS,
    GpuFacts,
    GpuProcess,
    GpuReport,
    device_bytes,
    gpu_line,
    look_at_gpus,
)

GIB = 2**30


class FakeNvml:
    """The functions of pynvml that are called, over GPUs of the test's.

    Attributes:
        refused: function → error that it raises instead of answering. open_count: inits without a shutdown.
    """

    class NVMLError(Exception):
        """Any."""

    class NVMLError_NotSupported(NVMLError):
        """This GPU does not tell."""

    class NVMLError_FunctionNotFound(NVMLError):
        """This driver does not know."""

    class NVMLError_GpuIsLost(NVMLError):
        """It has fallen off the bus."""

    def __init__(self, gpu_count: int = 1) -> None:
        self.refused: dict[str, Exception] = {}
        self.open_count = 0
        self.mps: list[Any] = []
        self.mig = [0, 0]
        self._answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": "575.1",
            "nvmlDeviceGetCount": gpu_count,
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": b"GPU-1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=70 * GIB, total=140 * GIB),
            "nvmlDeviceGetPowerUsage": 350_000,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetComputeRunningProcesses": [
                SimpleNamespace(pid=7, usedGpuMemory=60 * GIB),
                SimpleNamespace(pid=8, usedGpuMemory=None),
                SimpleNamespace(pid=9, usedGpuMemory=2**64 - 1),
            ],
        }

    def __getattr__(self, function: str) -> Any:
        def ask(*arguments: Any) -> Any:
            if function in self.refused:
                raise self.refused[function]
            if function == "nvmlSystemGetProcessName":
                return f"process {arguments[0]}"
            return {
                **self._answers,
                "nvmlDeviceGetHandleByIndex": "handle",
                "nvmlDeviceGetMigMode": self.mig,
                "nvmlDeviceGetMPSComputeRunningProcesses": self.mps,
            }[function]

        if not function.startswith("nvml"):
            raise AttributeError(function)
        return ask

    def nvmlInit(self) -> None:
        if "nvmlInit" in self.refused:
            raise self.refused["nvmlInit"]
        self.open_count += 1

    def nvmlShutdown(self) -> None:
        self.open_count -= 1


def look(nvml: FakeNvml, **environment: str) -> GpuReport:
    report = look_at_gpus(nvml, environment)
    assert nvml.open_count == 0
    return report


def test_all_that_a_gpu_tells_is_told() -> None:
    report = look(FakeNvml())
    assert (report.driver, report.has_mps, report.note) == ("575.1", False, "")
    assert report.gpus == (
        GpuFacts(
            index=0,
            name="NVIDIA H200",
            uuid="GPU-1",
            busy_fraction=0.87,
            memory_busy_fraction=0.4,
            memory_used_bytes=70 * GIB,
            memory_total_bytes=140 * GIB,
            power_w=350.0,
            power_limit_w=700.0,
            mig=False,
            processes=(
                GpuProcess(pid=7, name="process 7", memory_bytes=60 * GIB),
                GpuProcess(pid=8, name="process 8", memory_bytes=None),
                GpuProcess(pid=9, name="process 9", memory_bytes=None),
            ),
        ),
    )
    assert gpu_line(report.gpus[0]) == "NVIDIA H200, 70.0 of 140.0 GiB used, 87% busy, 350 of 700 W, 3 processes"


def test_a_machine_without_a_driver_is_a_normal_case() -> None:
    nvml = FakeNvml()
    nvml.refused["nvmlInit"] = nvml.NVMLError("NVML Shared Library Not Found")
    assert look(nvml) == GpuReport(note="no NVIDIA driver answers: NVML Shared Library Not Found")


def test_a_machine_without_the_library_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert look_at_gpus() == GpuReport(note=INSTALL)


def test_this_machine_can_be_looked_at() -> None:
    report = look_at_gpus()
    assert report.gpus or report.note


@pytest.mark.parametrize(
    ("function", "fields", "what"),
    [
        ("nvmlDeviceGetPowerUsage", ["power_w"], "power"),
        ("nvmlDeviceGetMemoryInfo", ["memory_used_bytes", "memory_total_bytes"], "memory"),
        ("nvmlDeviceGetUtilizationRates", ["busy_fraction", "memory_busy_fraction"], "utilisation"),
        ("nvmlDeviceGetMigMode", ["mig"], "MIG"),
    ],
)
def test_a_figure_that_may_not_be_read_is_none_with_a_note_and_the_others_are_there(
    function: str, fields: list[str], what: str
) -> None:
    nvml = FakeNvml()
    nvml.refused[function] = nvml.NVMLError("Insufficient Permissions")
    (gpu,) = look(nvml).gpus
    missing = [name for name in GpuFacts.__dataclass_fields__ if getattr(gpu, name) is None]
    assert (missing, gpu.notes) == (fields, (f"{what}: Insufficient Permissions",))
    assert gpu_line(gpu).endswith(f"{what}: Insufficient Permissions")


def test_what_a_kind_of_gpu_never_has_needs_no_note() -> None:
    nvml = FakeNvml()
    nvml.refused["nvmlDeviceGetMigMode"] = nvml.NVMLError_NotSupported("Not Supported")
    nvml.refused["nvmlDeviceGetMPSComputeRunningProcesses"] = nvml.NVMLError_FunctionNotFound("Function Not Found")
    (gpu,) = look(nvml).gpus
    assert (gpu.mig, gpu.notes) == (None, ())


def test_a_gpu_in_instances_has_no_utilisation_of_its_own() -> None:
    nvml = FakeNvml()
    nvml.mig = [1, 1]
    nvml.refused["nvmlDeviceGetUtilizationRates"] = nvml.NVMLError_NotSupported("Not Supported")
    (gpu,) = look(nvml).gpus
    assert (gpu.mig, gpu.busy_fraction, gpu.notes) == (True, None, ())
    assert "MIG on" in gpu_line(gpu)


def test_a_gpu_that_is_lost_hides_no_other() -> None:
    nvml = FakeNvml(gpu_count=2)
    answer, lost = nvml.nvmlDeviceGetHandleByIndex, nvml.NVMLError_GpuIsLost("GPU is lost")

    def handle(index: int) -> Any:
        if index == 0:
            raise lost
        return answer(index)

    nvml.__dict__["nvmlDeviceGetHandleByIndex"] = handle
    first, second = look(nvml).gpus
    assert first == GpuFacts(index=0, notes=("GPU: GPU is lost",))
    assert (second.index, second.notes) == (1, ())
    assert gpu_line(first) == "GPU 0, GPU: GPU is lost"


def test_mps_is_seen_by_its_processes_and_by_the_environment() -> None:
    nvml = FakeNvml()
    nvml.mps = [SimpleNamespace(pid=11, usedGpuMemory=GIB)]
    report = look(nvml)
    assert report.has_mps and report.gpus[0].uses_mps
    assert {process.pid for process in report.gpus[0].processes} == {7, 8, 9, 11}
    alone = look(FakeNvml(), CUDA_MPS_PIPE_DIRECTORY="/tmp/mps")
    assert (alone.has_mps, alone.gpus[0].uses_mps) == (True, False)


def test_the_doctor_shows_each_gpu_and_misses_none_where_there_is_no_driver() -> None:
    findings = gpu_findings(look(FakeNvml(gpu_count=2)), has_driver=True)
    assert [finding.what for finding in findings] == ["GPU 0", "GPU 1"]
    assert "70.0 of 140.0 GiB used" in findings[0].found
    none = GpuReport(note="no NVIDIA driver answers: Driver Not Loaded")
    assert [each.is_fine for each in gpu_findings(none, has_driver=False)] == [True]
    (broken,) = gpu_findings(none, has_driver=True)
    assert (broken.is_fine, broken.is_optional) == (False, True)
    assert broken.found == "nvidia-smi found, but no NVIDIA driver answers: Driver Not Loaded"


# ---------------------------------------------------------------- what a worker's processes hold


def test_device_memory_is_of_the_processes_that_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "machine").symlink_to(MACHINE_IDS)
    (tmp_path / "container").symlink_to("pid:[4026532001]")
    machine = str(tmp_path / "machine")
    assert device_bytes({7, 99}, FakeNvml(), machine) == 60 * GIB
    assert device_bytes({7}, FakeNvml(gpu_count=2), machine) == 120 * GIB
    assert device_bytes({8, 9, 99}, FakeNvml(), machine) is None, "the driver does not say"
    # In a container, process 7 is another one than the driver's
    assert device_bytes({7}, FakeNvml(), str(tmp_path / "container")) is None
    assert device_bytes({7}, FakeNvml(), str(tmp_path / "none")) is None


def test_where_the_driver_does_not_say_torch_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reserved = {0: 3 * GIB, 1: GIB}
    cuda = SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 2, memory_reserved=reserved.__getitem__)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert device_bytes({7}, FakeNvml(), str(tmp_path / "none")) == 4 * GIB
    cuda.is_initialized = lambda: False
    assert device_bytes({7}, FakeNvml(), str(tmp_path / "none")) is None
