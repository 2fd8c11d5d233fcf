"""`rollfab.connect()` for asyncio: the same surface, with `await`. It starts no private broker: a URL must be known."""

from .trainer.aio import connect

__all__ = ["connect"]
