"""Retries and discards dead letters, or says what would become of them; chosen by name, or by cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ..contract.errors import InputError
from ..contract.records import DeadLetter, RunConfig
from ..ports.queue import RolloutStream
from ..rules.queue.dead import CauseCount, DeadOutcome, causes_of, of_cause, outcome_of
from ..rules.queue.push import DEAD_COUNT_MAX

DeadAction = Literal["retry", "discard"]


async def deal_with_dead(
    stream: RolloutStream,
    run: RunConfig,
    action: DeadAction,
    trajectory_ids: Sequence[str] | None,
    *,
    cause: str | None = None,
    is_dry: bool = False,
) -> DeadOutcome:
    """Retry or discard dead letters, each once, whoever does so besides.

    Args:
        trajectory_ids: those meant; None: all of the run.
        cause: of all, only those whose reason has this text in it.
        is_dry: change nothing, and tell what would become of them.

    Raises:
        InputError: both names and a cause are given.
    """
    if trajectory_ids is not None and cause is not None:
        raise InputError("a cause chooses among all dead letters: give it without names", cause=cause)
    if trajectory_ids is None:
        trajectory_ids = [each.trajectory_id for each in of_cause(await all_dead(stream, run), cause)]
    do = stream.retry if action == "retry" else stream.discard
    return outcome_of(await do(trajectory_ids, is_dry=is_dry))


async def all_dead(stream: RolloutStream, run: RunConfig) -> list[DeadLetter]:
    """Return all dead letters of a run, of which a shard keeps a bounded number."""
    return await stream.dead_letters(DEAD_COUNT_MAX * run.shard_count)


async def count_causes(stream: RolloutStream, run: RunConfig) -> list[CauseCount]:
    """Count a run's dead letters by cause."""
    return causes_of(await all_dead(stream, run))
