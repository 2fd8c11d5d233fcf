"""Makes vLLM's build for CPUs schedule a step while the one before it runs, as vLLM does on GPUs and it never does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Engines that are configured meanwhile, in this process, do it."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_go_ahead(cls: type, config: Any) -> None:
        original.__func__(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_go_ahead)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original
