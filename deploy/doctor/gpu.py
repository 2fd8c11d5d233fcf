"""Reads from NVML what the GPUs of this machine do: the only place that imports pynvml.

- No NVML, no driver, no permission, a GPU that is lost: normal cases. Each becomes a note; nothing here raises.
- A figure that a GPU does not tell is None, and a note says why, unless that is the rule for its kind.
- Looked at when asked for; nothing is kept open in between. A look costs milliseconds: not for control loops.
- Unverified on a GPU: tests run it on a fake NVML.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

INSTALL = "nvidia-ml-py is not installed: pip install nvidia-ml-py"
MPS_SERVER = "nvidia-cuda-mps-server"
MACHINE_IDS = "pid:[4026531836]"  # the namespace of a machine's own process ids: Linux' PROC_PID_INIT_INO
UNKNOWN_BYTES = 1 << 63  # NVML's "not available" is the largest number of 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProcess:
    """A process that holds memory of a GPU. memory_bytes: None where the driver does not say (containers, MIG)."""

    pid: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The facts of one GPU now.

    busy_fraction: of the driver's last sampling period, in which any kernel ran; memory_busy_fraction: in which its
    memory was read or written. mig: whether it is split into instances; None: it cannot be. uses_mps: some of its
    processes share it through MPS. notes: what could not be read, and why.
    """

    index: int
    name: str = ""
    uuid: str = ""
    busy_fraction: float | None = None
    memory_busy_fraction: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    mig: bool | None = None
    uses_mps: bool = False
    processes: tuple[GpuProcess, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """All GPUs of this machine. note: why there are none, or not all; "": all was read.

    has_mps: this process, or one on a GPU, uses MPS.
    """

    driver: str = ""
    gpus: tuple[GpuFacts, ...] = ()
    has_mps: bool = False
    note: str = ""


def look_at_gpus(nvml: Any = None, environment: Mapping[str, str] | None = None) -> GpuReport:
    """Take one look.

    Args:
        nvml: the module pynvml, or one like it; None: the one installed.
        environment: of this process; None: its own.
    """
    if nvml is None:
        try:
            import pynvml
        except ImportError:
            return GpuReport(note=INSTALL)
        nvml = pynvml
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport(note=f"no NVIDIA driver answers: {error}")
    try:
        return _report(nvml, os.environ if environment is None else environment)
    finally:
        _Asked(nvml).value("closing", nvml.nvmlShutdown)


def device_bytes(pids: Collection[int], nvml: Any = None, namespace: str = "/proc/self/ns/pid") -> int | None:
    """Return the memory of all GPUs that these processes hold; None: none, or nobody says.

    The driver knows processes by the ids of the machine. In a container, which has ids of its own, this is what torch
    has reserved in this process; None, if that is another process'.
    """
    gpus = look_at_gpus(nvml).gpus if _target(namespace) == MACHINE_IDS else ()
    processes = [each for gpu in gpus for each in gpu.processes if each.pid in pids]
    known = [each.memory_bytes for each in processes if each.memory_bytes is not None]
    if known:
        return sum(known)
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count())) or None


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _report(nvml: Any, environment: Mapping[str, str]) -> GpuReport:
    asked = _Asked(nvml)
    driver = asked.value("driver version", nvml.nvmlSystemGetDriverVersion)
    count = asked.value("number of GPUs", nvml.nvmlDeviceGetCount) or 0
    gpus = tuple(_gpu(nvml, index) for index in range(count))
    has_mps = "CUDA_MPS_PIPE_DIRECTORY" in environment or any(gpu.uses_mps for gpu in gpus)
    note = "; ".join(asked.notes) or ("" if gpus else "the driver knows of no GPU")
    return GpuReport(driver=_text(driver), gpus=gpus, has_mps=has_mps, note=note)


def _gpu(nvml: Any, index: int) -> GpuFacts:
    asked = _Asked(nvml)
    handle = asked.value("GPU", nvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return GpuFacts(index=index, notes=tuple(asked.notes))
    memory = asked.value("memory", nvml.nvmlDeviceGetMemoryInfo, handle)
    power_mw = asked.value("power", nvml.nvmlDeviceGetPowerUsage, handle)
    limit_mw = asked.value("power limit", nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    mig = asked.value("MIG", nvml.nvmlDeviceGetMigMode, handle, is_optional=True)
    is_split = None if mig is None else bool(mig[0])
    busy = asked.value("utilisation", nvml.nvmlDeviceGetUtilizationRates, handle, is_optional=bool(is_split))
    processes, uses_mps = _processes(nvml, asked, handle)
    return GpuFacts(
        index=index,
        name=_text(asked.value("name", nvml.nvmlDeviceGetName, handle)),
        uuid=_text(asked.value("UUID", nvml.nvmlDeviceGetUUID, handle)),
        busy_fraction=None if busy is None else busy.gpu / 100,
        memory_busy_fraction=None if busy is None else busy.memory / 100,
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        power_w=None if power_mw is None else power_mw / 1000,
        power_limit_w=None if limit_mw is None else limit_mw / 1000,
        mig=is_split,
        uses_mps=uses_mps,
        processes=processes,
        notes=tuple(asked.notes),
    )


def _processes(nvml: Any, asked: _Asked, handle: Any) -> tuple[tuple[GpuProcess, ...], bool]:
    """List the processes that compute, and tell whether some of them do by MPS."""
    plain = asked.value("processes", nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
    by_mps = asked.value("MPS", nvml.nvmlDeviceGetMPSComputeRunningProcesses, handle, is_optional=True) or []
    found = {}
    for row in [*plain, *by_mps]:
        name = _text(_Asked(nvml).value("name", nvml.nvmlSystemGetProcessName, row.pid))
        used = row.usedGpuMemory
        is_known = used is not None and used < UNKNOWN_BYTES
        found[row.pid] = GpuProcess(pid=int(row.pid), name=name, memory_bytes=int(used) if is_known else None)
    uses_mps = bool(by_mps) or any(MPS_SERVER in process.name for process in found.values())
    return tuple(found.values()), uses_mps


class _Asked:
    """Asks NVML, and notes what it did not answer."""

    def __init__(self, nvml: Any) -> None:
        self.notes: list[str] = []
        self._nvml = nvml

    def value(self, what: str, ask: Callable[..., T], *arguments: Any, is_optional: bool = False) -> T | None:
        """Ask NVML; None where there is no answer. is_optional: "not supported" is an answer that needs no note."""
        nvml = self._nvml
        try:
            return ask(*arguments)
        except nvml.NVMLError as error:
            if not (is_optional and isinstance(error, (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound))):
                self.notes.append(f"{what}: {error}")
            return None


def _text(value: str | bytes | None) -> str:
    """Return a text; older libraries answer in bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value or ""


def gpu_line(gpu: GpuFacts) -> str:
    """Describe one GPU in a line, for people."""
    parts = [gpu.name or f"GPU {gpu.index}"]
    if gpu.memory_used_bytes is not None and gpu.memory_total_bytes is not None:
        parts.append(f"{gpu.memory_used_bytes / 2**30:.1f} of {gpu.memory_total_bytes / 2**30:.1f} GiB used")
    if gpu.busy_fraction is not None:
        parts.append(f"{gpu.busy_fraction:.0%} busy")
    if gpu.power_w is not None:
        limit = f" of {gpu.power_limit_w:.0f}" if gpu.power_limit_w is not None else ""
        parts.append(f"{gpu.power_w:.0f}{limit} W")
    if gpu.processes:
        parts.append(f"{len(gpu.processes)} process{'es' if len(gpu.processes) > 1 else ''}")
    parts += ["MIG on"] * bool(gpu.mig) + ["MPS"] * gpu.uses_mps
    return ", ".join([*parts, *gpu.notes])
