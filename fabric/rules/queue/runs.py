"""Decides whether two descriptions of a run are of the same run, whether workers can do what it asks of them, and
whose prompts share KV cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache

from ...contract.errors import RunMismatch
from ...contract.ids import trajectory_of
from ...contract.records import RunConfig, WorkerInfo
from ...contract.sampling import sampling_from
from ...contract.text import told
from ..lending.capacity_facts import is_same_model

# The rest may change between starts.
FIXED = ("model", "environment", "environment_options", "reward", "shard_count", "dtype")


def is_same_run(existing: RunConfig, wanted: RunConfig) -> bool:
    """Tell whether two descriptions differ at most in what may change between starts."""
    return not _differing(existing, wanted)


def check_same_run(existing: RunConfig, wanted: RunConfig, step: str = "") -> None:
    """Refuse to continue a run under settings that would make its rollouts incomparable.

    Args:
        step: what to do, if it is not to delete the run.

    Raises:
        RunMismatch: names each differing setting, with both values.
    """
    differing = [
        f"{name} is {told(getattr(existing, name), repr)}, not {told(getattr(wanted, name), repr)}"
        for name in _differing(existing, wanted)
    ]
    if differing:
        step = step or f"Use another name, or delete it first: `rollfab runs rm --run {wanted.run_id}`"
        raise RunMismatch(f"run {wanted.run_id!r} exists with other settings: {'; '.join(differing)}. {step}")


def undoable(config: RunConfig, workers: Iterable[WorkerInfo]) -> dict[str, list[str]]:
    """Fields of the run's sampling that none of some workers can do, each with their engines; none where none are."""
    each = list(workers)
    engines = list(dict.fromkeys(info.engine or info.worker_id for info in each))
    wanted = sampling_from(dict(config.sampling)).row()  # without what has its default
    return {name: engines for name in wanted if each and all(name in info.cannot for info in each)}


def cache_salt(config: RunConfig, turn_id: str) -> str:
    """Return what a turn's prompt shares KV cache by: 32 hexadecimal digits, the same for those that may share.

    A hash: vLLM takes no salt above 128 characters.
    """
    is_alone = config.prefix_cache == "trajectory"
    return _salt(f"{config.run_id} {trajectory_of(turn_id)}" if is_alone else config.run_id)


@lru_cache(maxsize=4096)
def _salt(sharers: str) -> str:
    return hashlib.sha256(sharers.encode()).hexdigest()[:32]


def _differing(existing: RunConfig, wanted: RunConfig) -> list[str]:
    """Name the fixed settings that differ.

    A model may be reached by another path; under the same name its files may have changed.
    """
    names = [name for name in FIXED if getattr(existing, name) != getattr(wanted, name)]
    is_same = is_same_model(existing.model, existing.model_digest, wanted.model, wanted.model_digest)
    return [name for name in names if name != "model" or not is_same]
