"""When a push is refused, and in which words; Redis and memory say the same."""

from __future__ import annotations

from ..errors import QueueFull, RunUnknown

DEAD_COUNT_MAX = 10_000  # per shard; each holds a task and a traceback, so this bounds them to tens of megabytes


def too_many_open(run_id: str, depth: int, limit: int) -> QueueFull:
    """The run holds as many trajectories as it may."""
    return QueueFull(
        f"run {run_id!r} holds {depth} trajectories not yet consumed, its limit is {limit}: "
        "consume groups, or raise trajectory_count_max",
        depth=depth,
        limit=limit,
    )


def too_many_bytes(run_id: str, size: int, limit: int) -> QueueFull:
    """The run holds as much as it may."""
    return QueueFull(
        f"run {run_id!r} holds {size} bytes of jobs and rollouts not yet consumed, its limit is {limit}: "
        "consume groups, or raise memory_bytes_max",
        depth=size,
        limit=limit,
    )


def too_many_dead(run_id: str, depth: int, limit: int) -> QueueFull:
    """The run has as many dead letters as are kept."""
    return QueueFull(
        f"run {run_id!r} has {depth} dead letters, the limit is {limit}: see `rollfab dead ls --run {run_id}`, then "
        f"`rollfab dead retry` or `rollfab dead discard`",
        depth=depth,
        limit=limit,
    )


def no_such_run(run_id: str) -> RunUnknown:
    """The run was never created, or was deleted."""
    return RunUnknown(f"run {run_id!r} does not exist on this broker: create it with fabric.run(…)", run_id=run_id)
