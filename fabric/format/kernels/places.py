"""The places of stored bits: on the host as numpy arrays, or on a device as torch tensors, with their own kernels."""

from __future__ import annotations

import numpy as np

from .protocol import Bits, DeviceKernels, Flat


def load_torch() -> DeviceKernels:
    """Load the kernels for tensors on a device; a caller with such tensors has loaded torch."""
    from . import torch_loops

    return torch_loops


def is_on_device(flat: Flat) -> bool:
    """Tell whether these are bits of a tensor on a device, which are compared and kept there."""
    return not isinstance(flat, np.ndarray)


def on_host(flat: Flat) -> Bits:
    """Return the bits as numpy's; no copy where they are in the host's memory."""
    return load_torch().on_host(flat) if is_on_device(flat) else flat
