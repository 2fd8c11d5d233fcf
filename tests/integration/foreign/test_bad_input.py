"""Bad input is refused where it is given, with a text that names the thing, the cause and the next step, and with
nothing half-applied."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from redis import Redis

import rollfab
import rollfab.aio
from rollfab.deploy.cli.options import with_ports
from rollfab.fabric.contract.errors import (
    BrokerError,
    ConfigError,
    EnvironmentUnknown,
    FabricError,
    InputError,
    LayoutMismatch,
    PayloadTooLarge,
    QueueFull,
    RewardUnknown,
    RunMismatch,
    RunUnknown,
    VersionConflict,
)
from rollfab.trainer.agreement import FLOAT32
from rollfab.trainer.checks import plain_facts
from rollfab.trainer.client import Fabric, Run
from rollfab.trainer.files import Recording

pytestmark = pytest.mark.redis

WEIGHTS = {"layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "layer.bias": np.zeros(3, np.float32)}


@pytest.fixture
def fabric(url: str) -> Iterator[Fabric]:
    with rollfab.connect(url) as fabric:
        yield fabric


@pytest.fixture
def run(redis: Redis, fabric: Fabric) -> Run:
    return fabric.run("r", model="any", environment="frozenlake", trajectory_count_max=8)


def contents(redis: Redis) -> dict[bytes, bytes | None]:
    """Everything in the broker, but for what a living publisher says of itself again and again."""
    return {key: redis.dump(key) for key in redis.scan_iter(count=1000) if not key.endswith(b":tending")}


def check_refused(redis: Redis, kind: type[FabricError], texts: list[str], action: Callable[[], Any]) -> FabricError:
    """The action is refused with exactly this kind of error and these words, and nothing was written."""
    before = contents(redis)
    with pytest.raises(kind) as caught:
        action()
    assert type(caught.value) is kind
    for text in texts:
        assert re.search(text, str(caught.value)), f"{text!r} is not in: {caught.value}"
    assert contents(redis) == before
    return caught.value


# ---- runs

RUN = {"model": "tiny", "environment": "frozenlake"}
BAD_RUNS: dict[str, tuple[str, dict[str, Any], type[FabricError], list[str]]] = {
    "unknown run": (
        "nobody",
        {},
        RunUnknown,
        ["run 'nobody' does not exist", "Give a model and an environment to create it"],
    ),
    "only a model": ("nobody", {"model": "tiny"}, RunUnknown, ["'nobody'", "an environment to create it"]),
    "unknown environment": (
        "r",
        {**RUN, "environment": "frozenlace"},
        EnvironmentUnknown,
        [
            "environment 'frozenlace' is offered by no agent",
            r"did you mean frozenlake\? If",
            "--environment frozenlace=module:attr",
        ],
    ),
    "a gateway's, without one": (
        "r",
        {**RUN, "environment": "gateway"},
        EnvironmentUnknown,
        ["'gateway' is offered by no agent", "Start `rollfab gateway` first"],
    ),
    "dotted environment": ("r", {**RUN, "environment": "os.system"}, EnvironmentUnknown, ["'os.system'"]),
    "bad name": ("a run", RUN, ConfigError, ["run 'a run' is not a valid name", "1 to 63 letters, digits"]),
    "empty name": ("", RUN, ConfigError, ["run '' is not a valid name"]),
    "name with a brace": ("r{x}", RUN, ConfigError, ["'r{x}'"]),
    "name too long": ("r" * 64, RUN, ConfigError, ["1 to 63"]),
    "unknown setting": (
        "r",
        {**RUN, "stalenes": 1},
        InputError,
        ["run 'r'", "'stalenes': did you mean staleness"],
    ),
    "misspelt preset": ("r", {**RUN, "model": "tinny"}, ConfigError, ["no model 'tinny': did you mean 'tiny'?"]),
    "misspelt reward": ("r", {**RUN, "reward": "environment-smu"}, RewardUnknown, ["did you mean environment-sum"]),
    "misspelt sampling": (
        "r",
        {**RUN, "sampling": {"temprature": 1}},
        InputError,
        ["sampling has no 'temprature': did you mean temperature?"],
    ),
    "negative staleness": ("r", {**RUN, "staleness": -1}, InputError, ["run 'r': staleness is -1", "at least 0"]),
    "text for a number": ("r", {**RUN, "staleness": "one"}, InputError, ["run 'r': staleness is 'one'", "number"]),
    "NaN weight": ("r", {**RUN, "weight": float("nan")}, InputError, ["run 'r': weight is nan"]),
    "infinite weight": ("r", {**RUN, "weight": float("inf")}, InputError, ["run 'r': weight is inf"]),
    "weight above every float": ("r", {**RUN, "weight": 10**400}, InputError, ["run 'r': weight is 1000"]),
    "no attempts": ("r", {**RUN, "attempt_count_max": 0}, InputError, ["attempt_count_max is 0"]),
    "part of a shard": ("r", {**RUN, "shard_count": 1.5}, InputError, ["shard_count is 1.5", "number"]),
    "no shards": ("r", {**RUN, "shard_count": 0}, InputError, ["shard_count is 0"]),
    "fewer places than shards": (
        "r",
        {**RUN, "shard_count": 4, "trajectory_count_max": 3},
        InputError,
        ["trajectory_count_max is 3"],
    ),
    "options are a list": (
        "r",
        {**RUN, "environment_options": [1]},
        InputError,
        [r"environment_options is \[1\]", "dict"],
    ),
    "options with an object": (
        "r",
        {**RUN, "environment_options": {"map": object()}},
        InputError,
        ["run 'r'", "JSON"],
    ),
    "seed is no number": ("r", {**RUN, "sampling": {"seed": True}}, InputError, ["run 'r': sampling: seed is True"]),
    "reward is a function": ("r", {**RUN, "reward": len}, InputError, ["run 'r': reward", "name"]),
}


@pytest.mark.parametrize("case", BAD_RUNS)
def test_a_bad_run_is_refused(redis: Redis, fabric: Fabric, case: str) -> None:
    run_id, settings, kind, texts = BAD_RUNS[case]

    check_refused(redis, kind, texts, lambda: fabric.run(run_id, **settings))

    assert fabric.runs() == {}


def test_a_run_is_not_reopened_with_other_settings(redis: Redis, fabric: Fabric, run: Run) -> None:
    check_refused(
        redis,
        RunMismatch,
        ["run 'r' exists", "environment is 'frozenlake', not 'guess-the-number'", "another name, or delete it"],
        lambda: fabric.run("r", model="any", environment="guess-the-number"),
    )


def test_of_a_run_that_exists_what_is_given_holds(redis: Redis, fabric: Fabric, run: Run) -> None:
    refused: list[tuple[dict[str, Any], type[FabricError], str]] = [
        ({"model": "small"}, RunMismatch, "model is 'any', not 'small'"),
        ({"environment": "guess-the-number"}, RunMismatch, "environment is 'frozenlake'"),
        ({"staleness": "two"}, InputError, "staleness"),
        ({"environment": "frozenlake", "sampling": {"bogus": 1}}, InputError, "bogus"),
    ]
    for settings, error, text in refused:
        check_refused(redis, error, [text], partial(fabric.run, "r", **settings))

    assert fabric.run("r", staleness=2).config == replace(run.config, staleness=2)
    assert fabric.run("r").config.staleness == 2


def test_settings_that_two_people_change_at_once_both_hold(url: str, run: Run) -> None:
    async def change() -> None:
        async with await rollfab.aio.connect(url) as first, await rollfab.aio.connect(url) as second:
            for number in range(2, 22):
                changes = first.run("r", weight=float(number)), second.run("r", staleness=number)
                await asyncio.gather(*changes)
                config = (await first.runs())["r"]
                assert (config.weight, config.staleness) == (number, number)

    asyncio.run(change())


def test_a_run_that_is_described_anew_says_what_has_its_default_again(
    fabric: Fabric, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    fabric.run("r", weight=3.0)
    assert caplog.records == []
    config = fabric.run("r", model="any", environment="frozenlake", staleness=4, trajectory_count_max=8).config
    assert (config.weight, config.staleness) == (1.0, 4)
    (record,) = caplog.records
    assert "run 'r': weight is 1.0 (it was 3.0): " in record.getMessage()
    assert "leave out the model or the environment" in record.getMessage()


def test_a_trainer_comes_back_to_its_run_while_nobody_offers_its_environment(
    redis: Redis, url: str, fabric: Fabric
) -> None:
    # Given runs that were made while an agent and a gateway were there
    for name in ("mine", "gateway"):
        made = replace(fabric.run("frozen", **RUN).config, run_id=f"r-{name}", environment=name)
        with_ports(url, lambda ports, made=made: ports.board.create_run(made))
    # When their trainer starts again before these do, then it has its runs
    for name in ("mine", "gateway"):
        assert fabric.run(f"r-{name}", model="tiny", environment=name).config.environment == name
    # And a new run still needs somebody who offers its environment, and an old one its own
    for name, error in (("new", EnvironmentUnknown), ("r-mine", RunMismatch)):
        with pytest.raises(error):
            fabric.run(name, model="tiny", environment="other")


@pytest.mark.parametrize("environment", [5, b"x", True, ["good"], ""])
def test_an_environment_that_is_no_name_is_refused_by_name(redis: Redis, fabric: Fabric, environment: Any) -> None:
    texts = [f"run 'new': environment is {re.escape(repr(environment))}, expected the name of an environment"]
    check_refused(redis, InputError, texts, lambda: fabric.run("new", model="tiny", environment=environment))


def test_a_run_that_was_deleted_takes_no_tasks(redis: Redis, fabric: Fabric, run: Run) -> None:
    for key in redis.scan_iter():
        redis.delete(key)

    check_refused(redis, RunUnknown, ["run 'r' does not exist", "create it"], lambda: run.submit([{}]))
    check_refused(redis, RunUnknown, ["run 'r' does not exist", "create it"], run.status)


OLD_CALLS: dict[str, Callable[[Run], Any]] = {
    "submit": lambda run: run.submit([{}]),
    "groups": lambda run: next(run.groups(timeout=0.1)),
    "peek": Run.peek,
    "cancel": lambda run: run.cancel("g1"),
    "report": lambda run: run.report(loss=1.0),
    "compare": lambda run: run.compare([], []),
    "publish": lambda run: run.publish(WEIGHTS, version=1),
    "weights": Run.weights,
    "head_version": Run.head_version,
    "status": Run.status,
}


@pytest.mark.parametrize("does", OLD_CALLS)
def test_who_opened_a_run_that_was_deleted_does_not_reach_one_of_its_name(
    redis: Redis, url: str, fabric: Fabric, run: Run, does: str
) -> None:
    # Given a run that somebody has opened, and that another one deletes and makes again
    with_ports(url, lambda ports: ports.board.delete_run("r"))
    with rollfab.connect(url) as other:
        new = other.run("r", model="any", environment="frozenlake", trajectory_count_max=8)
        new.submit([{}], group_ids=["g1"])
        new.publish(WEIGHTS, version=0)
        # Then whatever the first one asks of his run is refused, and changes nothing of the new one
        texts = ["run 'r' was deleted", "made again: open it again"]
        check_refused(redis, RunUnknown, texts, lambda: OLD_CALLS[does](run))
        # When he opens it again he is answered
        assert fabric.run("r").head_version() == 0 and new.cancel("g1")


# ---- tasks

LOOP: dict[str, Any] = {}
LOOP["self"] = LOOP
BAD_TASKS: dict[str, tuple[Any, type[FabricError], list[str]]] = {
    "text": ("go", InputError, ["task 1 is str, expected a dict with string keys"]),
    "nothing": (None, InputError, ["task 1 is NoneType"]),
    "a mapping that is no dict": (MappingProxyType({}), InputError, ["task 1 is mappingproxy"]),
    "number as key": ({1: "a"}, InputError, ["task 1", "string keys"]),
    "number as key further in": ({"a": {1: "b"}}, InputError, ["task 1", "key must be str"]),
    "NaN": ({"x": [0.0, float("nan")]}, InputError, ["task 1", r"value\.x\[1\] is nan", "finite"]),
    "infinity": ({"x": float("-inf")}, InputError, ["task 1", "-inf"]),
    "bytes": ({"x": b"raw"}, InputError, ["task 1", "JSON", "bytes"]),
    "an array": ({"x": np.zeros(3)}, InputError, ["task 1", "JSON", "ndarray"]),
    "an object": ({"x": object()}, InputError, ["task 1", "JSON", "object"]),
    "a number of 65 bits": ({"x": 1 << 64}, InputError, ["task 1", "64-bit"]),
    "half a surrogate": ({"x": "\ud800"}, InputError, ["task 1", "surrogate"]),
    "itself": (LOOP, InputError, ["task 1"]),
    "too large": (
        {"text": "x" * (1 << 20)},
        PayloadTooLarge,
        [r"task 1 is 1,048,587 bytes, the limit is 1,048,576", "send a reference"],
    ),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_bad_task_is_refused_with_all_that_came_with_it(redis: Redis, run: Run, case: str) -> None:
    task, kind, texts = BAD_TASKS[case]

    error = check_refused(redis, kind, texts, lambda: run.submit([{"seed": 0}, task, {"seed": 2}], group_size=2))

    if kind is PayloadTooLarge:
        assert (error.facts["size_bytes"], error.facts["limit_bytes"]) == (1_048_587, 1_048_576)
    assert run.status().depth == 0


BAD_GROUPS: dict[str, tuple[dict[str, Any], type[FabricError], list[str]]] = {
    "none": ({"group_size": 0}, InputError, ["group_size is 0, expected a whole number of at least 1"]),
    "fewer than none": ({"group_size": -3}, InputError, ["group_size is -3"]),
    "half": ({"group_size": 1.5}, InputError, ["group_size is 1.5"]),
    "too few names": ({"group_ids": ["a"]}, InputError, ["1 group_ids for 2 tasks"]),
    "one name twice": ({"group_ids": ["a", "a"]}, InputError, ["group_ids", "'a'", "twice"]),
    "a bad name": ({"group_ids": ["a", "b.0"]}, ConfigError, ["group 'b.0' is not a valid name"]),
    "a priority with a point": ({"priority": 1.0}, InputError, [r"priority is 1\.0", "whole number 0 "]),
    "a priority of numpy's": ({"priority": np.int64(1)}, InputError, ["priority is", "whole number 0 "]),
    "a priority that is no number": ({"priority": True}, InputError, ["priority is True", "whole number 0 "]),
    "a priority after the last": ({"priority": 3}, InputError, ["priority is 3"]),
    "a deadline above every float": ({"deadline": 10**400}, InputError, ["deadline is 1000", "seconds above 0"]),
    "a deadline that nobody lives to see": ({"deadline": 1e300}, InputError, [r"deadline is 1e\+300", "ten years"]),
    "a timeout below 0": ({"timeout": -1}, InputError, ["submit: timeout is -1, expected seconds of at least 0; 0 "]),
    "a timeout that is no number": ({"timeout": float("nan")}, InputError, ["submit: timeout is nan"]),
    "text instead of names": ({"group_ids": "ab"}, InputError, ["group_ids", "'ab'", "list"]),
}


@pytest.mark.parametrize("case", BAD_GROUPS)
def test_a_bad_group_is_refused(redis: Redis, run: Run, case: str) -> None:
    settings, kind, texts = BAD_GROUPS[case]

    check_refused(redis, kind, texts, lambda: run.submit([{}, {}], **settings))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timeout", -1),
        ("timeout", float("nan")),
        ("timeout", True),
        ("timeout", "1"),
        ("count", -1),
        ("count", 1.5),
        ("count", True),
    ],
)
def test_a_loop_over_groups_refuses_what_makes_no_sense_before_it_asks(
    redis: Redis, run: Run, tmp_path: Path, name: str, value: Any
) -> None:
    wishes = {name: value}
    check_refused(redis, InputError, [f"^groups: {name} is {value!r}, expected "], lambda: run.groups(**wishes))
    (tmp_path / "groups.jsonl").touch()
    recording = Recording(tmp_path / "groups.jsonl")
    check_refused(redis, InputError, [f"^groups: {name} is "], lambda: recording.groups(**wishes))


BAD_CALLS: dict[str, tuple[Callable[[Any], object], str]] = {
    "a filter that is none": (lambda run: run.groups(keep=5), "groups: keep is int, expected varied, or a function"),
    "a refill that is none": (lambda run: run.groups(refill=5), "refill is int, expected a list or an iterator"),
    "one task to refill with": (lambda run: run.groups(refill={"seed": 1}), "refill is dict, expected a list"),
    "a refill of what nobody drops": (lambda run: run.groups(refill=[{}]), "there is no keep: give keep="),
    "a task to refill with that is none": (lambda run: run.groups(refill=[{}, 5]), "task 1 is int, expected a dict"),
    "no group of ranks": (
        lambda run: run.publish(WEIGHTS, version=0, group=5),
        "publish: group is int, expected one of torch.distributed",
    ),
    "metrics of a number": (lambda run: run.metrics(5), "metrics: groups is int, expected a list of groups"),
    "metrics of rollouts": (lambda run: run.metrics([5]), r"metrics: groups\[0\] is int, expected a group"),
    "a comparison of nothing": (lambda run: run.compare(None, None), "compare: groups is NoneType, expected a list"),
    "a comparison with nothing": (lambda run: run.compare([], None, version=1, rule=FLOAT32), "logprobs is NoneType"),
    "a version that is text": (lambda run: run.weights("head"), "version is 'head', expected a whole number"),
    "a version below 0": (lambda run: run.weights(-1), "version is -1, expected a whole number of at least 0, or None"),
    "a version beyond all": (lambda run: run.weights(10**400), f"version is 1{'0' * 99}…, expected"),
    "a version that Python writes not": (
        lambda run: run.weights(10**5000),
        "version is of type int, and cannot be written",
    ),
    "names that are none": (lambda run: run.submit([{}], group_ids=5), "group_ids is 5, expected a list of names"),
    "a flag that is text": (
        lambda run: run.publish(WEIGHTS, 5, allow_nonfinite="no"),
        "allow_nonfinite is 'no', expected",
    ),
    "another that is none": (lambda run: run.publish(WEIGHTS, 5, keyframe=None), "keyframe is None, expected True or"),
    "a place that is none": (
        lambda run: run.publish(WEIGHTS, 5, compares_on="gpu"),
        "compares_on is 'gpu', expected auto",
    ),
    "a fact that is none": (lambda run: run.report(loss=[object()]), "report: loss is list, expected a number, a text"),
    "facts of many numbers": (lambda run: run.report(loss=np.zeros(2)), "report: loss is ndarray, expected a number"),
    "a prefix that is none": (lambda run: run.metrics([], prefix=5), "metrics: prefix is 5, expected a text"),
    "no group's name": (lambda run: run.cancel(None), "group None is not a valid name"),
    "no directory": (lambda _: rollfab.connect(data_directory=5), "data_directory is int, expected a path"),
    "no URL": (lambda _: rollfab.connect(5), "the broker's URL is int, expected a text: write redis://"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_a_call_refuses_an_argument_of_another_kind_at_once_and_by_name(redis: Redis, run: Run, case: str) -> None:
    call, text = BAD_CALLS[case]
    kind = ConfigError if case in ("no group's name", "no URL", "no directory") else InputError
    check_refused(redis, kind, [text], lambda: call(run))


def test_a_loss_is_reported_as_its_number(run: Run) -> None:
    import torch

    facts = {"step": 1, "loss": torch.tensor(0.5, requires_grad=True), "mean": np.float32(0.25), "note": "first"}
    run.report(**facts)
    assert plain_facts("report", facts) == {"step": 1, "loss": 0.5, "mean": 0.25, "note": "first"}


def test_a_loop_over_groups_may_look_once_wait_for_ever_and_take_none(run: Run) -> None:
    assert list(run.groups(timeout=0)) == []
    assert run.groups(timeout=float("inf")) is not run.groups(timeout=None)
    assert list(run.groups(timeout=5, count=0)) == []


@pytest.mark.parametrize("tasks", [None, 7, {"seed": 1}, "tasks"])
def test_what_is_no_list_of_tasks_is_refused(redis: Redis, run: Run, tasks: Any) -> None:
    check_refused(redis, InputError, ["task", "list of dicts|expected a dict"], lambda: run.submit(tasks))


def test_a_full_run_takes_no_more_and_says_so(redis: Redis, run: Run) -> None:
    # Given a run with room for two more
    run.submit([{}, {}, {}], group_size=2)

    # When a group of three is pushed, Then it waits for its time and is refused whole
    started_s = time.monotonic()
    texts = ["run 'r' holds 6 trajectories not yet consumed, its limit is 8", "consume groups, or raise"]
    error = check_refused(redis, QueueFull, texts, lambda: run.submit([{}], group_size=3, timeout=0.3))
    assert 0.3 <= time.monotonic() - started_s < 2.0
    assert (error.facts["depth"], error.facts["limit"]) == (6, 8)

    # And one that fits is taken
    assert len(run.submit([{}], group_size=2)) == 1
    assert run.status().depth == 8


# ---- weights

BAD_WEIGHTS: dict[str, tuple[Any, int, type[FabricError], list[str]]] = {  # more: tests/unit/trainer/publish
    "another name": (
        {"layer.weight": WEIGHTS["layer.weight"], "layer.bais": WEIGHTS["layer.bias"]},
        5,
        LayoutMismatch,
        ["layer.bais"],
    ),
    "an iterator used up": (iter(()), 5, InputError, ["no tensors", "used up"]),
    "the head again, changed": (
        {**WEIGHTS, "layer.bias": np.ones(3, np.float32)},
        4,
        VersionConflict,
        ["version 4", "newer"],
    ),
    "a negative version": (WEIGHTS, -1, InputError, ["version -1 is below 0"]),
}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["same trainer", "restarted trainer"])
@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused_and_the_head_stays(
    redis: Redis, fabric: Fabric, run: Run, case: str, is_restarted: bool
) -> None:
    # Given a published version
    named, version, kind, texts = BAD_WEIGHTS[case]
    run.publish(WEIGHTS, version=4)
    trainer = fabric.run("r") if is_restarted else run
    before = contents(redis)

    # When something else is published, Then it is refused
    with pytest.raises(kind) as caught:
        trainer.publish(list(named) if case == "an iterator used up" else named, version=version)
    assert type(caught.value) is kind
    for text in texts:
        assert re.search(text, str(caught.value)), f"{text!r} is not in: {caught.value}"

    # And nothing was written: the head is what it was, bit by bit, and can be followed
    assert contents(redis) == before
    assert trainer.head_version() == 4
    held = trainer.weights()
    assert {name: tensor.tobytes() for name, tensor in held.items()} == {
        name: tensor.tobytes() for name, tensor in WEIGHTS.items()
    }
    assert trainer.publish(WEIGHTS, version=5).version == 5


@pytest.mark.parametrize("version", ["5", 5.0, None, True])
def test_a_version_that_is_no_whole_number_is_refused(redis: Redis, run: Run, version: Any) -> None:
    run.publish(WEIGHTS, version=0)

    texts = [f"version is {re.escape(repr(version))}", "whole number"]
    check_refused(redis, InputError, texts, lambda: run.publish(WEIGHTS, version=version))


def test_a_name_that_is_another_tasks_is_refused_and_nobody_is_told_to_repeat_that(run: Run) -> None:
    run.submit([{"q": 1}], group_ids=["a"])

    with pytest.raises(InputError, match=r"leave group_ids out; 1 of 2 groups of this submit were taken in$"):
        run.submit([{"q": 2}, {"q": 3}], group_ids=["a", "b"])


def test_the_ranks_that_publish_stay_the_same(redis: Redis, run: Run) -> None:
    run.publish(WEIGHTS, version=0)

    text = "publish: group is 5, and was None when this run was first published to from here: give the same each time"
    check_refused(redis, InputError, [text], lambda: run.publish(WEIGHTS, version=1, group=5))


def test_a_call_after_the_end_of_the_connection_names_itself(url: str) -> None:
    fabric = rollfab.connect(url)
    run = fabric.run("closed", model="tiny", environment="frozenlake")
    groups = run.groups(timeout=0)
    fabric.close()

    for name, call in {"Run.submit": lambda: run.submit([{}]), "the next of Run.groups": lambda: next(groups)}.items():
        with pytest.raises(ConfigError, match=f"^{name}: this connection is closed; make another with rollfab.connect"):
            call()


# ---- brokers

BAD_URLS: dict[str, tuple[str, type[FabricError], list[str]]] = {
    "another scheme": ("http://localhost:6379", ConfigError, ["http", "redis, rediss or unix", "write redis://"]),
    "no port": ("redis://localhost:99999", ConfigError, ["a port is a number of at most 65535"]),
    "unknown setting": ("redis://localhost?retry=1", ConfigError, ["unknown setting 'retry'"]),
    "nobody there": ("redis://:hunter2@127.0.0.1:1", BrokerError, ["127.0.0.1:1"]),
}


@pytest.mark.parametrize("case", BAD_URLS)
def test_a_bad_broker_url_is_refused_soon_and_no_password_is_shown(case: str) -> None:
    given, kind, texts = BAD_URLS[case]
    started_s = time.monotonic()

    with pytest.raises(kind) as caught:
        rollfab.connect(given)

    assert type(caught.value) is kind
    for text in texts:
        assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert time.monotonic() - started_s < 5.0


async def test_an_asyncio_client_takes_the_url_of_the_environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFAB_URL", url)

    async with await rollfab.aio.connect() as fabric:
        assert fabric.url == url


@pytest.mark.parametrize("known", [None, ""])
async def test_an_asyncio_client_that_knows_no_url_says_so(known: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLFAB_URL", raising=False)
    if known is not None:
        monkeypatch.setenv("ROLLFAB_URL", known)

    with pytest.raises(ConfigError, match="no broker: give its URL, or set ROLLFAB_URL"):
        await rollfab.aio.connect()


def test_a_submit_that_is_interrupted_while_it_waits_says_what_was_taken_in(fabric: Fabric, redis: Redis) -> None:
    # Given a run with room for four groups, and a submit of ten that waits for more room
    run = fabric.run("small", model="tiny", environment="frozenlake", trajectory_count_max=4)
    names = [f"g{index}" for index in range(10)]
    threading.Timer(1.0, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()

    # When Ctrl-C is pressed, Then what it says is so
    with pytest.raises(KeyboardInterrupt) as caught:
        run.submit([{}] * 10, group_ids=names)
    (note,) = caught.value.__notes__
    assert note.startswith("4 of 10 groups of this submit were taken in: repeat it with the same group_ids")
    assert run.status().depth == 4

    # And the connection goes on
    with pytest.raises(QueueFull, match="4 of 10 groups of this submit were taken in"):
        run.submit([{}] * 10, group_ids=names, timeout=0.1)
    assert run.status().counters["groups_submitted"] == 4
