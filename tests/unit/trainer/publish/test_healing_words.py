"""What healing says while the broker cannot be asked: why, once, and again after a minute."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from rollfab.fabric.contract.errors import BrokerError
from rollfab.trainer.publish.healing import TELL_S, TICK_S, Healing


class Seconds:
    """A clock that every sleep moves on, to its end."""

    def __init__(self, end_s: float) -> None:
        self._now_s, self._end_s = 0.0, end_s

    def now_s(self) -> float:
        return self._now_s

    async def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s
        if self._now_s > self._end_s:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


class Away:
    """A store whose broker is away."""

    async def head(self, run_id: str) -> Any:
        raise BrokerError("the broker is away")


async def test_a_broker_that_stays_away_is_told_of_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    looks_after = Healing(
        cast(Any, Away()),
        "r",
        cast(Any, None),
        lock=asyncio.Lock(),
        charge=lambda: 1,
        clock=cast(Any, Seconds(2.5 * TELL_S)),
        bytes_per_s=0,
    )
    with caplog.at_level(logging.WARNING), pytest.raises(asyncio.CancelledError):
        await looks_after._go()
    told = [each for each in caplog.records if each.getMessage() == "weights.not_looked_after"]
    assert len(told) == 3
    assert TICK_S < TELL_S
