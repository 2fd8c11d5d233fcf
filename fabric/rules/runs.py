"""When two descriptions of a run are the same run."""

from __future__ import annotations

from ..errors import RunMismatch
from ..records import RunConfig

FIXED = ("model", "environment", "environment_options", "reward", "shard_count")  # the rest may change between starts


def is_same_run(existing: RunConfig, wanted: RunConfig) -> bool:
    """Whether they differ at most in what may change between starts."""
    return all(getattr(existing, name) == getattr(wanted, name) for name in FIXED)


def check_same_run(existing: RunConfig, wanted: RunConfig) -> None:
    """Refuse to continue a run under settings that would make its rollouts incomparable.

    Raises:
        RunMismatch: names each differing setting, with both values.
    """
    differing = [
        f"{name} is {getattr(existing, name)!r}, not {getattr(wanted, name)!r}"
        for name in FIXED
        if getattr(existing, name) != getattr(wanted, name)
    ]
    if differing:
        raise RunMismatch(
            f"run {wanted.run_id!r} exists with other settings: {'; '.join(differing)}. "
            f"Use another name, or delete it first: rollfab runs rm {wanted.run_id}"
        )
