"""Waits for what nobody announces: ask again and again, up to a limit; what never came is named."""

from __future__ import annotations

import asyncio
import inspect
import linecache
import time
from collections.abc import Callable
from typing import Any

PATIENCE = (
    3.0  # times as slow as a quiet machine may one be that others use too: all waits of tests are that much longer
)
LIMIT_S = 50.0  # of a quiet machine; it ends before the test does: so what never came is named
What = str | Callable[[], object]  # what is waited for, or what tells it (and whatever else helps) once it has not come


async def until(condition: Callable[[], Any], what: What = "", limit_s: float = LIMIT_S, every_s: float = 0.005) -> Any:
    """Return what the condition says, or what it awaits, once that is true; the loop turns meanwhile."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + PATIENCE * limit_s
    while True:
        said = condition()
        if inspect.isawaitable(said):
            said = await said
        if said:
            return said
        assert loop.time() < end_s, _told(condition, what, limit_s)
        await asyncio.sleep(every_s)


def wait_until(condition: Callable[[], Any], what: What = "", limit_s: float = LIMIT_S, every_s: float = 0.005) -> Any:
    """Return what the condition says, once that is true; block meanwhile."""
    end_s = time.monotonic() + PATIENCE * limit_s
    while not (said := condition()):
        assert time.monotonic() < end_s, _told(condition, what, limit_s)
        time.sleep(every_s)
    return said


def _told(condition: Callable[[], Any], what: What, limit_s: float) -> str:
    code = getattr(condition, "__code__", None)
    asked = linecache.getline(code.co_filename, code.co_firstlineno).strip() if code else repr(condition)
    return f"after {PATIENCE * limit_s:g} s still not: {(what() if callable(what) else what) or asked}"
