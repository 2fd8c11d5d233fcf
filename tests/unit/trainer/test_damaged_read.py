"""A read of weights waits while their publisher mends them, and no longer."""

from __future__ import annotations

from typing import Any

import pytest

from rollfab.fabric.contract.errors import ChainBroken, VersionUnknown
from rollfab.fabric.contract.records import RunConfig
from rollfab.trainer import aio
from tests.standin.fabric import StandInFabric

RUN = RunConfig(run_id="r1", model="any", environment="any")


async def open_run(monkeypatch: pytest.MonkeyPatch, errors: list[Exception]) -> aio.AsyncRun:
    """A run whose weights are damaged as often as there are errors."""

    async def fetch(*_: Any) -> str:
        if errors:
            raise errors.pop(0)
        return "weights"

    monkeypatch.setattr(aio, "fetch_weights", fetch)
    monkeypatch.setattr(aio, "HEAL_LOOK_S", 0.001)
    return aio.AsyncRun(StandInFabric(), RUN)  # type: ignore[arg-type]


async def test_a_read_waits_while_a_living_publisher_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await open_run(monkeypatch, [ChainBroken("gone")] * 3)
    await run._ports.weights.tend("r1", 1, 60.0)
    assert await run.weights() == "weights"


async def test_a_read_fails_at_once_where_nobody_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = await open_run(monkeypatch, [ChainBroken("gone")] * 3)
    with pytest.raises(ChainBroken):
        await run.weights()


async def test_a_version_that_is_not_there_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [VersionUnknown("never"), ChainBroken("gone")]
    run = await open_run(monkeypatch, errors)
    await run._ports.weights.tend("r1", 1, 60.0)
    with pytest.raises(VersionUnknown):
        await run.weights()
    assert len(errors) == 1
