"""`rollfab.connect()` for asyncio: the same surface, with `await`."""

from .trainer.aio import connect

__all__ = ["connect"]
