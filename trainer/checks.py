"""Checks of a caller's input before anything is written: settings of a run, tasks, groups.

- A refusal names the thing, the given value and the expected one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any
from zlib import crc32

from ..fabric.contract.errors import InputError
from ..fabric.contract.fields import WHOLE_MAX, bounds_of
from ..fabric.contract.ids import check_name, new_group_id, trajectory_id
from ..fabric.contract.limits import GROUP_SIZE_MAX, TASK_BYTES_MAX
from ..fabric.contract.records import Group, RunConfig, TrajectoryJob, check_task
from ..fabric.contract.sampling import check_sampling, is_whole
from ..fabric.contract.text import did_you_mean
from ..fabric.contract.wire import check_size, dump_json, load_json
from ..fabric.ports.inference import INFERENCE
from ..fabric.ports.queue import GroupPush

CONSUMER_LENGTH_MAX = 200
PEEK_COUNT_MAX = 1000  # groups looked at in one call: all of them are in memory at once
FLOAT_MAX = sys.float_info.max
SHOWN_LENGTH_MAX = 100  # of a value in a refusal
DEADLINE_S_MAX = 10 * 365 * 86_400.0

Check = tuple[str, Callable[[Any], bool]]  # the expectation in words, and whether a value meets it


def check_settings(run_id: str, names: Iterable[str]) -> None:
    """Require that a run has these settings.

    Raises:
        InputError: names the setting that does not exist, and those that do.
    """
    known = sorted(field.name for field in fields(RunConfig))
    for name in names:
        if name == "model_digest":
            raise InputError(
                f"run {run_id!r}: model_digest is no setting: it is read from the model's files", name=name
            )
        if name not in known:
            raise InputError(f"run {run_id!r}: there is no setting {name!r}: {did_you_mean(name, known)}", name=name)


def check_played(config: RunConfig) -> None:
    """Require that somebody plays the run. Raises InputError: its turns are requests, and a task would vanish there."""
    if config.environment == INFERENCE:
        raise InputError(
            f"run {config.run_id!r} answers requests at `rollfab gateway --inference`, and plays no tasks: submit them "
            "to a run with an environment",
            environment=INFERENCE,
        )


def check_run(config: RunConfig) -> RunConfig:
    """Require values that make sense, so that no worker finds out later; return them as JSON carries them.

    Raises:
        InputError: names the setting, its value and the expectation.
    """
    where = f"run {config.run_id!r}"
    for name, check in _CHECKS.items():
        _require(where, name, getattr(config, name), check)
    sampling = check_sampling(config.sampling, f"{where}: sampling")
    if config.trajectory_count_max < config.shard_count:
        raise InputError(
            f"{where}: trajectory_count_max is {config.trajectory_count_max}, expected at least one for each of "
            f"{config.shard_count} shards"
        )
    if config.may_reuse_prefix and config.turns_at_commit == "recompute":
        raise InputError(
            f"{where}: may_reuse_prefix is True and turns_at_commit 'recompute': nothing that older weights computed is"
            " left to reuse. Set one of them otherwise",
            name="may_reuse_prefix",
        )
    try:
        dump_json(config.environment_options)
    except InputError as error:
        raise InputError(f"{where}: environment_options: {error}") from error
    return replace(config, sampling=sampling)


def check_view(consumer: str, takeover_s: float) -> None:
    """Require a consumer's name and time that make sense.

    Raises:
        InputError: names the argument, its value and the expectation.
    """
    is_name = isinstance(consumer, str) and bool(consumer.strip()) and len(consumer) <= CONSUMER_LENGTH_MAX
    is_name = is_name and consumer.isprintable()
    expected = f"a name of 1 to {CONSUMER_LENGTH_MAX} printable characters"
    _require("groups", "consumer", consumer, (expected, lambda _: is_name))
    _require("groups", "takeover", takeover_s, ("seconds above 0", lambda value: _is_number(value) and value > 0))


def check_wait(where: str, timeout_s: float | None) -> None:
    """Require a time that a call may wait, 0 to infinity; None, too, is for ever. Raises InputError."""
    may_be = ("seconds of at least 0, or None to wait for ever", lambda value: value is None or _is_wait(value))
    _require(where, "timeout", timeout_s, may_be)


def check_deadline(timeout_s: float) -> None:
    """Require a time that a submit may wait, 0 to infinity. Raises InputError."""
    _require("submit", "timeout", timeout_s, ("seconds of at least 0; 0 tries once", _is_wait))


def check_count_max(where: str, count: int | None) -> None:
    """Require a number of groups to end after; None is any. Raises InputError."""
    expected, is_fine = _whole(0)
    may_be = (f"{expected}, or None for as many as come", lambda value: value is None or is_fine(value))
    _require(where, "count", count, may_be)


def check_counts(where: str, **counts: int) -> None:
    """Require that each of these is a number of things, at least 1. Raises InputError."""
    for name, count in counts.items():
        _require(where, name, count, _whole(1))


def check_peek(count: int) -> None:
    """Require a number of groups that can be looked at together. Raises InputError."""
    _require("peek", "count", count, _whole(1, PEEK_COUNT_MAX))


def check_version(version: Any) -> None:
    """Require a version's number, or None. Raises InputError."""
    if version is not None and not (is_whole(version) and 0 <= version <= WHOLE_MAX):
        raise InputError(
            f"version is {_shown(version)}, expected a whole number of at least 0, or None", name="version"
        )


def check_given(where: str, **given: Any) -> None:
    """Require that these settings of a run, where given, are of their kind. Raises InputError."""
    for name, value in given.items():
        if value is not None:
            _require(where, name, value, _CHECKS[name])


def check_flags(where: str, **flags: Any) -> None:
    """Require that each of these is True or False. Raises InputError."""
    for name, value in flags.items():
        _require(where, name, value, ("True or False", lambda value: isinstance(value, bool)))


def check_text(where: str, name: str, value: Any) -> None:
    """Require a text. Raises InputError."""
    _require(where, name, value, ("a text", lambda value: isinstance(value, str)))


def check_choice(where: str, name: str, value: Any, choices: Sequence[str]) -> None:
    """Require one of some words. Raises InputError."""
    _require(where, name, value, (" or ".join(choices), lambda value: isinstance(value, str) and value in choices))


def plain_facts(where: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts as JSON carries them; what holds one number, such as a loss, counts as it. Raises InputError."""
    found = {}
    for name, value in facts.items():
        try:
            found[name] = value.item() if hasattr(value, "item") else value
            dump_json(found[name])
        except Exception as error:  # its class may raise anything when asked; the caller gets it as InputError
            raise InputError(
                f"{where}: {name} is {type(value).__name__}, expected a number, a text, or what JSON carries", name=name
            ) from error
    return found


def check_same_group(group: Any, first: Any) -> None:
    """Require the ranks that published first: a model is published by the same ones each time. Raises InputError."""
    if type(group) is not type(first):
        raise InputError(
            f"publish: group is {_shown(group)}, and was {_shown(first)} when this run was first published to from "
            "here: give the same each time",
            name="group",
        )


def check_groups(where: str, groups: Any) -> list[Group]:
    """Require groups as the run delivers them, and return them as a list. Raises InputError: names what is none."""
    if isinstance(groups, Group) or not isinstance(groups, Iterable):
        raise InputError(f"{where}: groups is {type(groups).__name__}, expected a list of groups", name="groups")
    found = list(groups)
    for index, each in enumerate(found):
        if not isinstance(each, Group):
            raise InputError(f"{where}: groups[{index}] is {type(each).__name__}, expected a group", name="groups")
    return found


def check_tasks(where: str, tasks: Any) -> Iterator[Any]:
    """Require something to take tasks from; return the iterator. Raises InputError."""
    if isinstance(tasks, (str, bytes, Mapping)) or not isinstance(tasks, Iterable):
        raise InputError(f"{where} is {type(tasks).__name__}, expected a list or an iterator of dicts", name=where)
    for index, task in enumerate(tasks if isinstance(tasks, (list, tuple)) else ()):
        check_task(task, index)
    return iter(tasks)


def make_groups(tasks: Any, group_size: int, group_ids: Sequence[str] | None = None, **wishes: Any) -> list[GroupPush]:
    """Make the groups of some tasks, checked. `wishes`: quorum, priority, deadline_s of GroupPush.

    Raises:
        InputError, PayloadTooLarge: names the task and what is wrong with it.
    """
    if isinstance(tasks, (str, bytes, Mapping)) or not isinstance(tasks, Iterable):
        raise InputError(f"tasks are {type(tasks).__name__}, expected a list of dicts, one per group")
    given = list(tasks)
    if not is_whole(group_size) or group_size < 1:
        raise InputError(f"group_size is {group_size!r}, expected a whole number of at least 1")
    if group_size > GROUP_SIZE_MAX:
        raise InputError(
            f"group_size is {group_size:,}, the limit is {GROUP_SIZE_MAX:,}: push several groups of the task"
        )
    _check_wishes(group_size, **wishes)
    names = None if group_ids is None else _check_group_ids(group_ids, len(given))
    groups: list[GroupPush] = []
    for index, each in enumerate(given):
        task = check_task(each, index)
        try:
            raw = dump_json(task)
        except InputError as error:
            raise InputError(f"task {index}: {error}", index=index) from error
        check_size(f"task {index}", raw, TASK_BYTES_MAX)
        task = load_json(raw)  # a copy: it may be pushed again later, and the caller may change its own
        group_id = new_group_id() if names is None else names[index]
        task_id = str(task.get("task_id", f"task-{crc32(raw):08x}"))
        groups.append(replace(_group(group_id, task, group_size, task_id), **wishes))
    return groups


def _check_wishes(
    group_size: int, *, quorum: int | None = None, priority: int = 1, deadline_s: float | None = None
) -> None:
    if quorum is not None:
        _require("groups", "quorum", quorum, _whole(1, group_size))
    _require("groups", "priority", priority, ("the whole number 0 (first), 1 or 2 (last)", _whole(0, 2)[1]))
    if deadline_s is not None:
        may_be = f"seconds above 0, at most {DEADLINE_S_MAX:.0f} (ten years)"
        _require(
            "groups", "deadline", deadline_s, (may_be, lambda value: _is_number(value) and 0 < value <= DEADLINE_S_MAX)
        )


def _check_group_ids(group_ids: Sequence[str], count: int) -> list[str]:
    if isinstance(group_ids, (str, bytes)) or not isinstance(group_ids, Iterable):
        raise InputError(f"group_ids is {_shown(group_ids)}, expected a list of names")
    names = [check_name("group", name) for name in group_ids]
    if len(names) != count:
        raise InputError(f"{len(names)} group_ids for {count} tasks: one each, please")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"group_ids hold {name!r} twice: the second group would be taken for the first", name=name)
        seen.add(name)
    return names


def _group(group_id: str, task: dict[str, Any], group_size: int, task_id: str) -> GroupPush:
    seed = task.get("seed")
    jobs = tuple(
        TrajectoryJob(
            trajectory_id=trajectory_id(group_id, index),
            group_id=group_id,
            task_id=task_id,
            index=index,
            task=task,
            seed=int(seed) if isinstance(seed, int) else crc32(f"{group_id}.{index}".encode()),
        )
        for index in range(group_size)
    )
    return GroupPush(group_id=group_id, task_id=task_id, task=task, jobs=jobs)


# ---- expectations of values


def _require(where: str, name: str, value: Any, check: Check) -> None:
    expected, is_fine = check
    if not is_fine(value):
        raise InputError(f"{where}: {name} is {_shown(value)}, expected {expected}", name=name)


def _shown(value: Any) -> str:
    """Write a value for people: as it is, or its beginning."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - repr() is foreign code; the caller's message goes on without it
        return f"of type {type(value).__name__}, and cannot be written out ({type(error).__name__})"
    return text if len(text) <= SHOWN_LENGTH_MAX else f"{text[:SHOWN_LENGTH_MAX]}…"


def _is_wait(value: Any) -> bool:
    """Tell whether it is a time to wait: not negative, and not NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= FLOAT_MAX


def _whole(least: int, most: int | None = None) -> Check:
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return f"a whole number {bounds}", lambda value: is_whole(value) and least <= value <= (most or value)


def _bounded(name: str) -> Check:
    """Return the check of a field's bounds in the run's record: its readers refuse a value outside."""
    numbers, words = bounds_of(RunConfig)
    if name in words:
        *others, last = (f'"{word}"' for word in words[name])
        return f"{', '.join(others)} or {last}", lambda value: isinstance(value, str) and value in words[name]
    least, most = numbers[name]
    if not isinstance(least, int):
        return f"a number from {least:g} to {most:g}", lambda value: _is_number(value) and least <= value <= most
    expected, _ = _whole(int(least), int(most) if most < WHOLE_MAX else None)
    return expected, lambda value: is_whole(value) and least <= value <= most


_CHECKS: dict[str, Check] = {
    "model": ("a preset, path or hub name", lambda value: isinstance(value, str) and bool(value)),
    "model_digest": ("a text", lambda value: isinstance(value, str)),
    "environment": ("the name of an environment", lambda value: isinstance(value, str) and bool(value)),
    "environment_options": ("a dict", lambda value: isinstance(value, dict)),
    "reward": ("the name of a reward function, or None", lambda value: value is None or isinstance(value, str)),
    "sampling": ("a dict", lambda value: isinstance(value, dict)),
    **{
        field.name: ("True or False", lambda value: isinstance(value, bool))
        for field in fields(RunConfig)
        if field.type == "bool"
    },
    **{name: _bounded(name) for name in RunConfig.BOUNDS},
    "memory_bytes_max": _whole(1 << 20, WHOLE_MAX),
}
