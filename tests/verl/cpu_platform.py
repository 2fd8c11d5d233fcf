"""The CPU as a device of verl's, so that its whole trainer runs in a test: verl knows accelerators alone.

verl imports this by VERL_USE_EXTERNAL_MODULES in each of its processes, and takes it by its own `set_platform`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

NONE = dict.fromkeys(
    "empty_cache ipc_collect reset_peak_memory_stats manual_seed manual_seed_all set_device synchronize".split(),
    lambda *_, **__: None,
)
ZERO = dict.fromkeys(
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split(), lambda *_, **__: 0
)
MEMORY_BYTES = 8 << 30


class PlatformCPU(PlatformCUDA):  # type: ignore[misc]
    """verl's platform, on which nothing is a GPU's."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = SimpleNamespace(
        **NONE,
        **ZERO,
        mem_get_info=lambda *_: (MEMORY_BYTES, MEMORY_BYTES),
        get_device_name=lambda *_: "cpu",
        is_available=lambda: False,
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_ipc_supported(self) -> bool:
        return False

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


for name in "set_device synchronize manual_seed manual_seed_all set_allocator_settings empty_cache".split():
    setattr(PlatformCPU, name, _nothing)
for name in ("profiler_start", "profiler_stop"):
    setattr(PlatformCPU, name, _nothing)

_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *given: Any, **settings: Any) -> None:
    """Do the same as torch; verl asks for "cpu:gloo," and the device's, which is the CPU's again."""
    _init_process_group("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *given, **settings)


torch.distributed.init_process_group = init_process_group
set_platform(PlatformCPU())
