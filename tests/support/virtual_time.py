"""Tests on a loop whose time passes at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from tests.sim.virtual_loop import on_virtual_time

P = ParamSpec("P")


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on virtual time; to pytest it is a plain function."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        on_virtual_time(test(*args, **kwargs))

    return run
