"""What rollfab adds to every vLLM process of its environment (entry point group `vllm.general_plugins`).

- It names our weight-transfer backend, "rollfab". Servers that do not ask for that backend are as they were.
- With ROLLFAB_PROBE set, the engine shows what it does in that page (serving_probe.py).
- A process of vLLM must not outlive the worker that it computes for, however that ended: from its first moment on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BACKEND = "rollfab"
CHECK_S = 0.5
PR_SET_PDEATHSIG = 1  # linux/prctl.h
OWNER = "ROLLFAB_VLLM_OWNER"  # environment variable: the process whose children die with it


def register() -> None:
    """Called by vLLM once in every process; may be called again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from .dice import place_dice
    from .packing import keep_weights_live
    from .serving_probe import install

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, f"{__package__}.transfer", "Transfer")
    keep_weights_live()
    place_dice()
    let_llvmlite_be_scanned()
    install()
    owner = os.environ.get(OWNER)
    if owner is not None and int(owner) == os.getppid():
        _die_with(int(owner))


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
    before the kernel was told.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    never = threading.Event()

    def watch() -> None:
        while os.getppid() == parent_pid:
            never.wait(CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
