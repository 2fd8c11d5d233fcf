"""What turns in flight do when weights change, as their run wishes: go on, or finish first and never mix versions."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import numpy as np
import pytest

from rollfab.fabric.contract.errors import ChainBroken, DigestMismatch, InputError
from rollfab.fabric.contract.records import Lease, RunConfig, Sampling, Span, TokenLog, TurnResult
from rollfab.fabric.contract.sampling import sampling_from
from rollfab.fabric.ports.queue import TurnProgress
from rollfab.trainer.checks import check_run
from rollfab.workers.rollout.weights import ApplyReport, AtCommit
from tests.support.leases import set_lease
from tests.support.queue.played_worker import RUN, Stage
from tests.support.until import until

PURE = dataclasses.replace(RUN, may_mix_versions=False)
FINISHING = dataclasses.replace(RUN, turns_at_commit="finish")


def log_of(*versions: int) -> TokenLog:
    """A token of each version."""
    count = len(versions)
    spans = tuple(Span(n, n + 1, "other", version) for n, version in enumerate(versions))
    return TokenLog(
        spans=spans, completion_ids=np.arange(count, dtype=np.int32), logprobs=np.full(count, -1.0, np.float32)
    )


async def turn_with(stage: Stage, log: TokenLog, sampling: Sampling | None = None) -> str:
    """A turn that another worker gave back."""
    (name,) = await stage.ask(1, sampling)
    other = Lease(worker_id="other", run_id="r1", lease_epoch=1, slot_count=1, lease_until_ms=None)
    await set_lease(stage.fabric.board, other, None)
    exchange = await stage.turns.exchange("other", want=1, lease_epoch=1, active_version=0)
    await stage.turns.release("other", [TurnProgress(claim=exchange.claims[0], log=log)])
    return name


async def gone_on_with(stage: Stage, log: TokenLog, kept: int, sampling: Sampling | None = None) -> TurnResult:
    """What becomes of a turn that a worker takes with the tokens of another one, of which its engine is given some."""
    name = await turn_with(stage, log, sampling)
    await stage.lease(1, 1)
    async with stage.worker():
        await until(lambda: stage.engine.turns)
        assert stage.engine.prior_counts[name] == kept
        stage.engine.end()
        (result,) = await stage.turns.results("a", 1.0)
    assert len(result.completion_ids) == kept + 3
    return result


@pytest.mark.parametrize(
    ("run", "versions", "kept"),
    [(PURE, (0, 0), 2), (PURE, (7, 0), 0), (PURE, (7, 7), 0), (RUN, (7, 7), 2)],
)
async def test_tokens_of_another_version_are_dropped_only_where_they_may_not_be_mixed(
    run: object, versions: tuple[int, ...], kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollfab.workers.rollout.turns")
    await gone_on_with(Stage(run), log_of(*versions), kept)  # type: ignore[arg-type]
    dropped = [record.__dict__["token_count"] for record in caplog.records if record.message == "worker.log_dropped"]
    assert dropped == ([] if kept else [2])


@pytest.mark.parametrize(("field", "kept"), [("presence_penalty", 0), ("top_k", 2)])
async def test_tokens_that_an_engine_cannot_count_are_dropped_and_the_turn_begins_anew(field: str, kept: int) -> None:
    stage = Stage()
    stage.engine.cannot_resume = frozenset({"presence_penalty", "frequency_penalty"})
    result = await gone_on_with(stage, log_of(0, 0), kept, sampling_from({field: 1}))
    assert result.resumed == bool(kept)
    assert {span.worker_id for span in result.spans} == ({"other", "w"} if kept else {"w"})


async def test_a_turn_that_its_engine_cannot_do_is_refused_and_no_error_of_the_engine() -> None:
    stage = Stage()
    stage.engine.cannot = {"guided_json": "it is played"}
    (name,) = await stage.ask(1, Sampling(guided_json="{}"))
    await stage.lease(1, 1)
    async with stage.worker():
        (result,) = await stage.turns.results("a", 5.0)
    assert (result.turn_id, result.finish_reason) == (name, "refused")
    assert result.error is not None and "it is played" in result.error


@pytest.mark.parametrize("run", [PURE, FINISHING])
async def test_new_weights_wait_until_no_turn_runs_and_no_turn_begins_before_them(run: RunConfig) -> None:
    # Given turns that run and others that wait
    stage = Stage(run)
    async with stage.at_work(4, 2):
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


@pytest.mark.parametrize(("run", "kept"), [(PURE, 0), (FINISHING, 3)])
async def test_turns_that_do_not_finish_in_time_go_on_elsewhere_with_their_tokens(run: RunConfig, kept: int) -> None:
    # Given a turn that makes no end
    stage = Stage(run)
    async with stage.at_work(1, 1, finish_s=0.2) as (name,):
        # When new weights have waited for it long enough
        async with stage.receivers[0].gate():
            # Then it is given back with its tokens, and they are written without it
            assert stage.turns.returned == [(name, False)] and stage.engine.turns == []
            assert len(stage.logs[name].completion_ids) == 3
            assert stage.table.records[name].loss == 0
            stage.engine.version = stage.receivers[0].version = 1

        # And whoever goes on with it uses its tokens, where versions may be mixed
        await until(lambda: stage.engine.turns == [name])
        assert stage.engine.prior_counts[name] == kept
        stage.engine.end()
        (result,) = await stage.turns.results("a", 1.0)
    assert {span.policy_version for span in result.spans} == ({0, 1} if kept else {1})


async def test_a_commit_after_one_that_was_overdue_waits_again() -> None:
    stage = Stage(FINISHING)
    async with stage.at_work(1, 1, finish_s=0.2):
        async with stage.receivers[0].gate():
            pass
        await until(lambda: stage.engine.turns)
        stage.engine.end()
        async with stage.receivers[0].gate():
            assert stage.engine.turns == []
    assert len(stage.turns.returned) == 1


@pytest.mark.parametrize("wish", ["keep", "recompute"])
async def test_where_turns_go_on_new_weights_wait_for_nothing(wish: str) -> None:
    stage = Stage(dataclasses.replace(RUN, turns_at_commit=wish))
    async with stage.at_work(1, 1), stage.receivers[0].gate():
        assert len(stage.engine.turns) == 1


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ({}, AtCommit(turns="keep")),
        ({"may_reuse_prefix": True}, AtCommit(turns="keep", may_reuse_prefix=True)),
        ({"turns_at_commit": "recompute"}, AtCommit(turns="recompute")),
        ({"turns_at_commit": "finish"}, AtCommit(turns="recompute")),
        (
            {"turns_at_commit": "finish", "may_reuse_prefix": True},
            AtCommit(turns="keep", may_reuse_prefix=True),
        ),
    ],
)
async def test_the_receiver_commits_as_the_run_wishes(wishes: dict[str, object], expected: AtCommit) -> None:
    stage = Stage(dataclasses.replace(RUN, **wishes))  # type: ignore[arg-type]
    async with stage.at_work(1, 1):
        assert stage.receivers[0].at_commit == expected


@pytest.mark.parametrize("run", [dataclasses.replace(PURE, may_reuse_prefix=True), FINISHING])
async def test_a_changed_wish_counts_from_the_next_commit_and_interrupts_no_turn(run: RunConfig) -> None:
    # Given a turn that runs where turns go on
    stage = Stage(RUN)
    async with stage.at_work(1, 1, runs_s=0.01) as (name,):
        (receiver,) = stage.receivers

        # When the trainer starts again, and wants turns to finish
        await stage.fabric.board.create_run(run)
        await until(lambda: receiver.at_commit != AtCommit())
        assert stage.engine.turns == [name]

        # Then new weights wait for it, and nothing was given back
        gate = receiver.gate()
        committing = asyncio.create_task(gate.__aenter__())
        await asyncio.sleep(0.1)
        assert (committing.done(), stage.engine.turns) == (False, [name])
        stage.engine.end()
        await committing
        await gate.__aexit__(None, None, None)
        assert (stage.engine.aborted, stage.turns.returned, stage.receivers) == ([], [], [receiver])


@pytest.mark.parametrize(
    ("name", "value"), [("turns_at_commit", "wait"), ("turns_at_commit", None), ("may_reuse_prefix", "yes")]
)
def test_a_run_with_another_wish_is_refused_with_what_there_is(name: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"{name} is .*expected"):
        check_run(dataclasses.replace(RUN, **{name: value}))  # type: ignore[arg-type]


def test_a_run_that_recomputes_and_yet_reuses_is_refused() -> None:
    with pytest.raises(InputError, match="nothing that older weights computed is left"):
        check_run(dataclasses.replace(RUN, turns_at_commit="recompute", may_reuse_prefix=True))


@pytest.mark.parametrize("is_sound", [True, False])
async def test_a_worker_that_cannot_apply_a_version_says_why_and_takes_no_turns_until_it_can(is_sound: bool) -> None:
    # Given a worker with a turn of its own, and others that wait
    stage = Stage(RUN)
    async with stage.at_work(3, 2):
        (receiver,) = stage.receivers

        # When the next version cannot be applied
        receiver.head_version, receiver.error = 4, DigestMismatch("these are not the weights of version 4")
        receiver.note, receiver.is_sound = "it computes KV caches again", is_sound
        await until(lambda: stage.info.error is not None)
        # It is lost to others only if what it holds may be wrong, too
        assert stage.info.state == ("ready" if is_sound else "failed")
        stage.engine.end()
        await asyncio.sleep(0.2)

        # Then it takes no other turn, and says so
        assert stage.engine.turns == [] and len(stage.ready) == 1
        assert stage.info.error is not None and "not the weights of version 4" in stage.info.error
        assert (stage.info.head_version, stage.info.active_version) == (4, 0)
        assert stage.info.weights_note == "it computes KV caches again"

        # And when it can, it goes on, and says what that took
        receiver.version, receiver.error, receiver.is_sound = 4, None, True
        receiver.last = ApplyReport(
            version=4, kinds=("delta",), payload_bytes=900, changed_count=9, stage_s=0.5, pause_s=0.01234
        )
        await until(lambda: len(stage.engine.turns) == 1)
        await until(lambda: stage.info.state == "ready" and stage.info.stage_ms is not None)
        assert (stage.info.stage_ms, stage.info.pause_ms, stage.info.payload_bytes) == (500, 12.34, 900)
        stage.engine.end()


async def _results(stage: Stage, count: int) -> list[object]:
    found: list[object] = []
    while len(found) < count:
        found += await stage.turns.results("a", 1.0)
    return found


async def test_a_worker_that_may_lag_takes_turns_while_a_version_does_not_come_and_says_why() -> None:
    # Given a worker at version 0, as old as the run allows
    stage = Stage(RUN)
    async with stage.at_work(3, 2):
        (receiver,) = stage.receivers

        # When the next version cannot be had
        receiver.head_version = RUN.staleness
        receiver.error = ChainBroken("chunk 0 of version 1 (delta) is not held any more")
        await until(lambda: stage.info.weights_note is not None)

        # Then it goes on with what it has
        stage.engine.end()
        await until(lambda: len(stage.engine.turns) == 1 and not stage.ready)
        assert (stage.info.state, stage.info.error) == ("ready", None)
        assert "version 0 stays live, the head is 1: chunk 0 of version 1" in str(stage.info.weights_note)
