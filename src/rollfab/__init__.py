"""rollfab: trainers push tasks, lent GPUs pull turns, nothing is lost or done twice.

    fabric = rollfab.connect()

This package is only the import name; the rooms beside it (fabric, workers, api, trainer, deploy) are links
to the top of the repository. Importing it loads none of them: a trainer pays for what it uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import aio, errors
    from .trainer.client import connect

__version__ = "0.1.0"
__all__ = ["aio", "connect", "errors", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the client, or the errors, when they are first asked for."""
    if name not in ("aio", "connect", "errors"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # By name: an import statement here would count as the fabric importing the trainer wherever it reads __version__.
    if name in ("aio", "errors"):
        return import_module(f".{name}", __name__)
    return import_module(".trainer.client", __name__).connect
