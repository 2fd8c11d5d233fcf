"""Where stored bits are: on the host as numpy arrays, or on a device as torch tensors, with kernels of their own."""

from __future__ import annotations

import numpy as np

from .protocol import Bits, DeviceKernels, Flat


def load_torch() -> DeviceKernels:
    """The kernels for tensors on a device; who has those has loaded torch."""
    from . import torch_loops

    return torch_loops


def is_on_device(flat: Flat) -> bool:
    """Whether these are a tensor's bits, which are compared and kept where they are."""
    return not isinstance(flat, np.ndarray)


def on_host(flat: Flat) -> Bits:
    """The bits as numpy's; no copy where they are in the host's memory."""
    return load_torch().on_host(flat) if is_on_device(flat) else flat
