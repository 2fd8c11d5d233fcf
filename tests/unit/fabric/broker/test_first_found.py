"""Waits at several shards: nothing that was found is lost, and no wait outlives the call."""

from __future__ import annotations

import asyncio

import pytest

from rollfab.fabric.broker.clients.waiting import first_found
from rollfab.fabric.contract.errors import BrokerError

LONG_S = 3600.0


async def wait(passes: int, found: list[int] | BrokerError | None) -> list[int] | None:
    """A wait that ends after so many turns of the loop."""
    for _ in range(passes):
        await asyncio.sleep(0)
    if isinstance(found, BrokerError):
        raise found
    return found


async def test_what_several_waits_find_together_is_all_returned() -> None:
    assert await first_found([wait(1, [1]), wait(1, None), wait(1, [2, 3])]) == [1, 2, 3]


async def test_empty_waits_end_nothing() -> None:
    assert await first_found([wait(0, None), wait(1, []), wait(5, [7])]) == [7]
    assert await first_found([wait(0, None), wait(2, None)]) == []


async def test_the_first_find_ends_the_other_waits() -> None:
    # Given waits that note how they end
    ended: list[str] = []

    async def patient() -> None:
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    # When one finds something, or the caller is cancelled
    assert await first_found([patient(), wait(2, [1]), patient()]) == [1]
    assert ended == ["cancelled"] * 2
    waiting = asyncio.create_task(first_found([patient(), patient()]))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    # Then none is left
    assert ended == ["cancelled"] * 4


async def test_an_error_is_raised_unless_another_wait_has_found_something() -> None:
    assert await first_found([wait(1, BrokerError("lost")), wait(1, [1])]) == [1]
    for waits in ([wait(0, BrokerError("lost"))], [wait(0, BrokerError("lost")), wait(3, [1])]):
        with pytest.raises(BrokerError, match="lost"):
            await first_found(waits)
