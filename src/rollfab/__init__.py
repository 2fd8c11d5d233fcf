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
    from .fabric.rules.rounds import TailRounds
    from .trainer.client import connect
    from .trainer.publish.megatron import megatron_slices
    from .trainer.publish.slices import Slice

__version__ = "0.1.0"
__all__ = ["Slice", "TailRounds", "aio", "connect", "errors", "megatron_slices", "__version__"]

# By name: an import statement here would count as the fabric importing the trainer wherever it reads __version__.
_HOMES = {
    "Slice": ".trainer.publish.slices",
    "TailRounds": ".fabric.rules.rounds",
    "connect": ".trainer.client",
    "megatron_slices": ".trainer.publish.megatron",
}


def __getattr__(name: str) -> Any:
    """Load what is public when it is first asked for."""
    if name in ("aio", "errors"):
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)
