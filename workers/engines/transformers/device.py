"""Looks whether this machine has the device that the engine is to run on, before a model is loaded for it."""

from __future__ import annotations

import re

from ....fabric.contract.errors import ConfigError
from ....fabric.contract.text import counted

NAME = re.compile(r"cpu|(cuda|mps|xpu)(?::(\d{1,4}))?")


def check_device(device: str) -> None:
    """Require a device that is here. Imports torch, but for the CPU's name and for a name that no device has.

    Raises:
        ConfigError: names the device, the cause and what to give instead.
    """
    found = NAME.fullmatch(device)
    if found is None:
        raise ConfigError(
            f"device {device!r} is none: give cpu, cuda, mps or xpu, the second of a kind as cuda:1",
            option="--device",
        )
    kind, index = found[1], int(found[2] or 0)
    if kind is None:
        return
    import torch

    module = getattr(torch, kind)
    if not module.is_available():
        if kind == "cuda" and torch.version.cuda is None:
            why = f"torch {torch.__version__} is built without CUDA: install its build for CUDA (deploy/lock/cuda.txt)"
        else:
            why = f"torch {torch.__version__} finds no {kind} device on this machine: see `rollfab doctor`"
        raise ConfigError(f"device {device!r} is not there: {why}, or give --device cpu", option="--device")
    count = module.device_count()
    if index >= count:
        raise ConfigError(
            f"device {device!r} is not there: this machine shows {counted(count, 'device')}, from {kind}:0 to "
            f"{kind}:{count - 1}. Give --device with one of them",
            option="--device",
        )
