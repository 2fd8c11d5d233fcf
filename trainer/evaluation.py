"""Which run an evaluation is, and which version it may hold: rules over plain values.

An evaluation's run has the name of the run beside it, and an ending of its own: so no call can mean a run that is
trained, and change its settings or publish to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..fabric.contract.errors import ConfigError, InputError, VersionConflict
from ..fabric.contract.ids import NAME_LETTERS_MAX, check_name
from ..fabric.contract.records import RunConfig
from ..fabric.contract.text import counted
from ..fabric.rules.queue.runs import FIXED, check_same_run
from .checks import check_settings

SUFFIX = "-eval"
SHARE = 0.1  # of what the run itself gets of the workers


def name_of(trained: str, name: str | None) -> str:
    """Return the name of an evaluation's run. Raises ConfigError: it is no name, or becomes too long."""
    own = f"{trained}{SUFFIX}"
    if name is None:
        return check_name("run", own)
    check_name("evaluation", name)
    if (room := NAME_LETTERS_MAX - len(own) - 1) < len(name):
        raise ConfigError(
            f"evaluation {name!r} of run {trained!r} would be run {own}-{name}, whose name is too long: "
            + (f"it may have {room} letters" if room > 0 else "evaluate without a name, or give the run a shorter one"),
            kind="evaluation",
            name=name,
        )
    return f"{own}-{name}"


def evaluation_of(
    trained: RunConfig, name: str, settings: Mapping[str, Any], own: RunConfig | None, *, is_under_way: bool
) -> RunConfig:
    """Return the settings of the run `name`, an evaluation of another one.

    Args:
        settings: that were given.
        own: that it has; None: it does not exist. What was not given is as it was, where that cannot change, or while
            it has work.

    Raises:
        InputError: a setting does not exist, or cannot be another one.
        RunMismatch: the evaluation exists with other settings that cannot change.
    """
    check_settings(name, settings)
    for fixed in ("model", "dtype"):
        if settings.get(fixed, getattr(trained, fixed)) != getattr(trained, fixed):
            raise InputError(
                f"run {name!r}: {fixed} is {settings[fixed]!r:.100}, of an evaluation it is that of run "
                f"{trained.run_id!r}, {getattr(trained, fixed)!r}: leave it out"
            )
    staleness = settings.get("staleness", 0)
    if staleness != 0:
        raise InputError(f"run {name!r}: staleness is {staleness!r}, of an evaluation it is 0: leave it out")
    if own is not None:
        fixed_now = {each: settings[each] for each in FIXED if each in settings}
        step = f"Give the evaluation that differs a name of its own, or delete this one: `rollfab runs rm --run {name}`"
        check_same_run(own, replace(own, **fixed_now), step)
    if own is not None and is_under_way:
        return replace(own, **settings)
    kept = {} if own is None else {each: getattr(own, each) for each in FIXED if each not in ("model", "dtype")}
    return replace(trained, **{"weight": SHARE * trained.weight, "staleness": 0, **kept, **settings}, run_id=name)


def taken_up(config: RunConfig, trained: RunConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an evaluation has of an earlier call, as it cannot change: not of its run, nor given now."""
    return {
        name: getattr(config, name)
        for name in FIXED
        if name not in settings and getattr(config, name) != getattr(trained, name)
    }


def check_existing(existing: RunConfig, trained: str) -> None:
    """Require that a run is an evaluation. Raises ConfigError: somebody trains it."""
    if existing.staleness != 0:
        raise ConfigError(
            f"run {existing.run_id!r} is no evaluation of run {trained!r}: its staleness is {existing.staleness}, so "
            f"somebody made it for another purpose. Give an evaluation beside it a name",
            run_id=existing.run_id,
        )


def goal_of(name: str, trained: str, version: int | None, *, head: int, held: int, depth: int) -> int:
    """Choose the version that an evaluation holds from now on.

    Args:
        name: of its run.
        trained: the run that is evaluated.
        version: what was asked for; None: its own, while there is work of it, else the head.
        head: of the run that is evaluated.
        held: by the evaluation; -1: none yet.
        depth: trajectories of the evaluation that are not consumed.

    Raises:
        VersionConflict: there is work of another version, or a newer version.
    """
    goal = version if version is not None else held if depth else head
    step = f"or evaluate version {goal} of run {trained!r} beside it: give that evaluation a name"
    if depth and held != goal:
        raise VersionConflict(
            f"run {name!r} evaluates version {held}, of which {counted(depth, 'trajectory', 'is', 'are')} not consumed "
            f"yet: take its groups, or cancel them, {step}",
            version=goal,
            head=held,
        )
    if goal >= 0 and held > goal:
        raise VersionConflict(
            f"run {name!r} has evaluated version {held}, and cannot go back to {goal}: evaluate a newer one, {step}",
            version=goal,
            head=held,
        )
    return goal


def check_same_weights(name: str, trained: str, version: int, *, head: int, own: str, theirs: str) -> None:
    """Require that an evaluation and the run beside it mean the same weights by a version.

    head: of the run beside it. own, theirs: digests of what the two hold; "" if one does not hold it any more.

    Raises:
        VersionConflict: the run was deleted, and made again under its name.
    """
    if own and own != theirs and (theirs or version > head):
        found = "other weights as" if theirs else "no"
        raise VersionConflict(
            f"run {name!r} evaluates version {version} of a run {trained!r} that was deleted: the one of that name now "
            f"has {found} version {version}. Delete the evaluation, `rollfab runs rm --run {name}`, or give another "
            "one a name",
            version=version,
        )
