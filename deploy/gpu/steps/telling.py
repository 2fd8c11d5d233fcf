"""Reads what every step is told, and tells what it found."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ..child import FIGURES, SKIPPED

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a step was told. device: torch's name. is_tiny: sizes of a rehearsal."""

    device: str
    is_tiny: bool

    @property
    def is_gpu(self) -> bool:
        return self.device != "cpu"


def asked(parser: argparse.ArgumentParser | None = None) -> tuple[Asked, argparse.Namespace]:
    """Read what this process was told. parser: with what a step takes beside that."""
    parser = parser or argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    return Asked(device=options.device, is_tiny=options.tiny), options


def tell(**figures: Any) -> None:
    """Tell figures; may be called again, for more."""
    print(FIGURES + json.dumps(figures), flush=True)


def skip(reason: str) -> NoReturn:
    """Tell that there is nothing to show here, and end the process."""
    print(SKIPPED + reason, flush=True)
    sys.exit(0)


def wait_for(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def timed(device: str, work: Callable[[], T]) -> tuple[T, float]:
    """Return what `work` returns, and its seconds on the device."""
    wait_for(device)
    began_s = time.perf_counter()
    result = work()
    wait_for(device)
    return result, time.perf_counter() - began_s


def peak_bytes(device: str) -> int | None:
    """Return the most that torch held on the device since `forget_peak`; None on a CPU."""
    if device == "cpu":
        return None
    import torch

    return int(torch.cuda.max_memory_allocated(device))


def forget_peak(device: str) -> None:
    """Begin to measure `peak_bytes` from what is held now."""
    if device != "cpu":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
