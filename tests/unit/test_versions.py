"""Turns that may not mix policy versions: tokens of another one are dropped, and weights change between turns."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from rollfab.fabric.ports import TurnProgress
from rollfab.fabric.records import Lease, Span, TokenLog
from tests.unit.played_worker import RUN, Stage, until

PURE = dataclasses.replace(RUN, may_mix_versions=False)


def log_of(*versions: int) -> TokenLog:
    """A token of each version."""
    count = len(versions)
    spans = tuple(Span(n, n + 1, "other", version) for n, version in enumerate(versions))
    return TokenLog(
        spans=spans, completion_ids=np.arange(count, dtype=np.int32), logprobs=np.full(count, -1.0, np.float32)
    )


async def turn_with(stage: Stage, log: TokenLog) -> str:
    """A turn that another worker gave back."""
    (name,) = await stage.ask(1)
    other = Lease(worker_id="other", run_id="r1", lease_epoch=1, slot_count=1, lease_until_ms=None)
    await stage.fabric.board.set_lease(other, None)
    exchange = await stage.turns.exchange("other", want=1, lease_epoch=1, active_version=0)
    await stage.turns.release("other", [TurnProgress(claim=exchange.claims[0], log=log)])
    return name


@pytest.mark.parametrize(
    ("run", "versions", "kept"),
    [(PURE, (0, 0), 2), (PURE, (7, 0), 0), (PURE, (7, 7), 0), (RUN, (7, 7), 2)],
)
async def test_tokens_of_another_version_are_dropped_only_where_they_may_not_be_mixed(
    run: object, versions: tuple[int, ...], kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollfab.workers.rollout")
    stage = Stage(run)  # type: ignore[arg-type]
    name = await turn_with(stage, log_of(*versions))
    await stage.lease(1, 1)
    async with stage.worker():
        await until(lambda: stage.engine.turns)
        assert stage.engine.prior_counts[name] == kept
        stage.engine.end()
        (result,) = await stage.turns.results("a", 1.0)
    assert len(result.completion_ids) == kept + 3
    dropped = [record.__dict__["token_count"] for record in caplog.records if record.message == "worker.log_dropped"]
    assert dropped == ([] if kept else [2])


async def test_new_weights_wait_until_no_turn_runs_and_no_turn_begins_before_them() -> None:
    # Given a turn that runs and others that wait
    stage = Stage(PURE)
    await stage.ask(4)
    await stage.lease(1, 2)
    async with stage.worker():
        await until(lambda: len(stage.engine.turns) == 2)
        (receiver,) = stage.receivers
        seen: list[list[str]] = []

        async def commit() -> None:
            async with receiver.gate():
                seen.append(stage.engine.turns)
                stage.engine.version = receiver.version = 1

        # When new weights are there
        task = asyncio.create_task(commit())
        await asyncio.sleep(0.2)
        assert (seen, len(stage.engine.turns)) == ([], 2)
        stage.engine.end()

        # Then they are written when the running turns have ended, before others begin
        await task
        assert seen == [[]]
        await until(lambda: len(stage.engine.turns) == 2)
        stage.engine.end()
        results = await _results(stage, 4)
    assert [{span.policy_version for span in result.spans} for result in results] == [{0}, {0}, {1}, {1}]


async def test_where_versions_may_be_mixed_new_weights_wait_for_nothing() -> None:
    stage = Stage(RUN)
    await stage.ask(1)
    await stage.lease(1, 1)
    async with stage.worker():
        await until(lambda: stage.engine.turns)
        async with stage.receivers[0].gate():
            assert len(stage.engine.turns) == 1


async def _results(stage: Stage, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        found += await stage.turns.results("a", 1.0)
    return found
