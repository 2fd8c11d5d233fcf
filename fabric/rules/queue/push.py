"""Answers pushes, and words their refusals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...contract.errors import FabricError, InputError, QueueFull, RunUnknown, VersionConflict
from ...contract.ids import NAME, NAME_LETTERS_MAX
from ...contract.text import counted, did_you_mean

if TYPE_CHECKING:  # the command line shows refusals, and needs no arrays for that
    from ...contract.records import RunConfig

DEAD_COUNT_MAX = 10_000  # per shard; each holds a task and a traceback, so this bounds them to tens of megabytes


def too_many_open(run: RunConfig, depth: int, limit: int, need: int) -> QueueFull:
    """Make the error for a run that cannot hold `need` more trajectories; of a shard, if it has several."""
    return QueueFull(
        f"{_holder(run)} {counted(depth, 'trajectory')} not yet consumed, its limit is {limit}, and the "
        f"group has {need}: consume groups, or raise trajectory_count_max{_total(run, run.trajectory_count_max)}",
        depth=depth,
        limit=limit,
        need=need,
    )


def _holder(run: RunConfig) -> str:
    return f"run {run.run_id!r} {'holds' if run.shard_count == 1 else f'in one of its {run.shard_count} shards holds'}"


def _total(run: RunConfig, limit: int) -> str:
    return "" if run.shard_count == 1 else f" (it is {limit}, for all shards together)"


def never_fits(run_id: str, limit: int, need: int) -> QueueFull:
    """Make the error for a group that is larger than the run may ever hold."""
    return QueueFull(
        f"run {run_id!r} may hold {counted(limit, 'trajectory')}, and the group has {need}: it would never fit; "
        "push smaller groups, or raise trajectory_count_max",
        limit=limit,
        need=need,
    )


def too_many_bytes(run: RunConfig, size: int, limit: int, need: int) -> QueueFull:
    """Make the error for a run that cannot hold `need` bytes more."""
    return QueueFull(
        f"{_holder(run)} {size} bytes of jobs and rollouts not yet consumed, its limit is {limit}, and the group "
        f"has {need}: consume groups, or raise memory_bytes_max{_total(run, run.memory_bytes_max)}",
        depth=size,
        limit=limit,
        need=need,
    )


def evaluates_another(run: RunConfig, pinned: str, own: str) -> VersionConflict:
    """Make the error for an evaluation that somebody has taken on to another version than the caller's."""
    return VersionConflict(
        f"run {run.run_id!r} evaluates version {pinned} by now: it was opened anew since this handle of version {own} "
        "was. Open it again, or evaluate that version beside it: give that evaluation a name",
    )


def evaluates_only(run: RunConfig, pinned: int, version: int) -> VersionConflict:
    """Make the error for a version that is published to an evaluation, which holds one alone."""
    return VersionConflict(
        f"run {run.run_id!r} is an evaluation, of version {pinned} alone: publish version {version} to the run that it "
        "stands beside, and evaluate it there",
        version=version,
        head=pinned,
    )


def too_many_dead(run: RunConfig, depth: int, limit: int) -> QueueFull:
    """Make the error for a run that has as many dead letters as are kept."""
    return QueueFull(
        f"run {run.run_id!r} has {counted(depth, 'dead letter')}, the limit is {limit}: see `rollfab dead ls --run "
        f"{run.run_id}`, then retry or discard some: `rollfab dead retry`",
        depth=depth,
        limit=limit,
    )


def another_group(run_id: str, group_id: str, what: str) -> InputError:
    """Make the error for a group whose name the run knows for one with something else: another task, or size."""
    return InputError(
        f"group {group_id!r} is in run {run_id!r} already, with {what}: give this one a name of its own in "
        "group_ids, or leave group_ids out",
        group_id=group_id,
    )


def no_such_run(
    run_id: str, deleted_ago_ms: int | None = None, *, known: Iterable[str] = (), is_made_again: bool = False
) -> RunUnknown:
    """Make the error for a run that was never created, or was deleted.

    deleted_ago_ms: None: nobody knows that it was deleted. known: runs that exist. is_made_again: one of its name does.
    """
    if is_made_again:
        ended = "lost by its broker" if deleted_ago_ms is None else f"deleted {deleted_ago_ms / 1000:.0f} s ago"
        facts = {} if deleted_ago_ms is None else {"deleted_ago_ms": deleted_ago_ms}
        return RunUnknown(
            f"run {run_id!r} was {ended}, with all that it had, and made again: open it again, and repeat the call",
            run_id=run_id,
            **facts,
        )
    if deleted_ago_ms is not None:
        return RunUnknown(
            f"run {run_id!r} was deleted {deleted_ago_ms / 1000:.0f} s ago, with all that it had on this broker: "
            "create it again with fabric.run(…), or use another name",
            run_id=run_id,
            deleted_ago_ms=deleted_ago_ms,
        )
    if not NAME.match(run_id):
        text = (
            f"run {run_id!r:.100} does not exist, and none can have that name: it has 1 to {NAME_LETTERS_MAX} letters, "
        )
        return RunUnknown(text + "digits, '-' or '_', and begins with a letter or digit", run_id=run_id)
    names = list(known)
    hint = f"; {did_you_mean(run_id, names)}" if names else ": create it with fabric.run(…)"
    return RunUnknown(f"run {run_id!r:.100} does not exist on this broker{hint}", run_id=run_id)


def waiting(entry_count: int, depth: int, claimed_count: int) -> int:
    """Bound the jobs of a kind that wait: entries of cancelled ones stay in the streams until they are read.

    Args:
        entry_count: in the ready streams, and among the suspects.
        depth: trajectories that may still have such a job; each has one at most.
        claimed_count: those that are claimed.
    """
    return max(0, min(entry_count, depth - claimed_count))


def outcome(answers: Mapping[str, bool | FabricError], doubtful: Sequence[str] = ()) -> list[bool]:
    """Return the answer to a push of several groups: for each, whether it was new.

    Args:
        answers: by group, in the order of the push: whether it was new, or why it is not in.
        doubtful: groups of which nobody knows whether they are in, since the answer was lost or not confirmed.

    Raises:
        FabricError: the first one. Facts: taken, refused and doubtful, the ids of groups that are in (new, or known
            before), that are not, and that may be.
    """
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, FabricError)}
    if not errors:
        return [answer is True for answer in answers.values()]
    first = next(iter(errors.values()))
    facts = {
        "taken": [name for name in answers if name not in errors],
        "refused": [name for name in errors if name not in doubtful],
        "doubtful": list(doubtful),
    }
    raise type(first)(first.message, **{**first.facts, **facts}) from first
