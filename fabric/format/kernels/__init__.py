"""The inner loops of codec and digest (protocol.py): numba's where it is, else numpy's; on a device torch's."""

from __future__ import annotations

from functools import cache

from ...contract.errors import ConfigError
from .protocol import NUMBA, NUMPY, Kernels


@cache
def load(make: str | None = None) -> Kernels:
    """Return the kernels of a make, NUMBA or NUMPY; by default the faster one that is installed.

    Raises:
        ConfigError: numba is asked for and is not there.
    """
    assert make in (None, NUMBA, NUMPY)
    if make != NUMPY:
        try:
            from . import numba_loops

            return numba_loops
        except ImportError as error:
            if make == NUMBA:
                raise ConfigError(f"numba cannot be used: {error}. pip install numba, or take numpy") from error
    from . import numpy_loops

    return numpy_loops
