"""Is what a world inside the agent gives measured before anybody carries it, and said to be whose it is?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from rollfab.fabric.contract.errors import EnvironmentFailed
from rollfab.fabric.contract.limits import INFO_BYTES_MAX, OBSERVATION_BYTES_MAX
from rollfab.fabric.contract.records import Rollout, RunConfig, TrajectoryJob, TurnJob, TurnResult, check_reward
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.workers.agent.episode import Episode, Limits
from rollfab.workers.environments.answers import weigh
from rollfab.workers.environments.base import Environment, Observation, Step
from rollfab.workers.environments.failures import REASON_LENGTH_MAX, TRACEBACK_LENGTH_MAX, dead_letter
from rollfab.workers.environments.pool import FREE_FAILURES, PAUSE_S_MAX, pause_s
from rollfab.workers.environments.registry import Registry
from tests.support.records import result_of
from tests.support.worlds.attack_worlds import OddError

MIB = 1 << 20
JOB = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={}, seed=7)
SAYS: dict[str, Callable[[], Any]] = {}


class Inside(Environment):
    """Trusted by its own word; says what the test puts into SAYS."""

    isolation = "none"
    recovery = "snapshot"

    async def reset(self, task: dict[str, Any], seed: int) -> Observation:
        return Observation(SAYS.get("reset", lambda: "?")())

    async def step(self, action: str) -> Step:
        return Step(SAYS.get("text", lambda: "")(), 1.0, "snapshot" not in SAYS, info=SAYS.get("info", dict)())

    async def snapshot(self) -> dict[str, Any]:
        return SAYS["snapshot"]()  # type: ignore[no-any-return]


class OddExit(BaseException):
    """None of those that Python knows."""


class Caller:
    async def ask(self, claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes]) -> TurnResult:
        return result_of(job.turn_id, (7,), finish_reason="length")

    async def save(self, claim: TrajectoryClaim, snapshot: bytes) -> None:
        raise AssertionError("it was too large to be saved")


async def play(monkeypatch: pytest.MonkeyPatch, **says: Callable[[], Any]) -> Rollout:
    monkeypatch.setattr(f"{__name__}.SAYS", says)
    claim = TrajectoryClaim(job=JOB, worker_id="a", fence=1, attempt=0, loss=0)
    config = RunConfig(run_id="r", model="tiny", environment="inside")
    limits = Limits(agent_id="a", call_timeout_s=20.0)
    registry = Registry([f"inside={__name__}:Inside"])
    registry.make("inside")  # known, so that no process need be asked where it runs
    return await Episode(config, claim, registry, CharTokenizer(), limits, Caller()).run()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("where", "says", "reason"),
    [
        ("reset", lambda: "x" * (5 * MIB), "reset: its text is 5,242,880 bytes as UTF-8, the limit is 1,048,576"),
        ("reset", lambda: "é" * (MIB - 10), "reset: its text is 2,097,132 bytes"),
        ("reset", lambda: "\ud800", "reset: its text is no Unicode"),
        ("info", lambda: {"log": "x" * (20 * MIB)}, "its info is more than 1,048,576 bytes as JSON"),
        ("info", lambda: dict.fromkeys(map(str, range(10**6)), ""), "its info is more than 1,048,576 bytes as JSON"),
        ("info", lambda: {"log": "\0" * (MIB // 4)}, "its info is 1,572,8.. bytes as JSON, the limit is 1,048,576"),
        ("info", lambda: {"number": 10**100}, "info cannot be sent"),
        ("info", lambda: {"name": "\udfff"}, "its info is no Unicode"),
        ("snapshot", lambda: {"log": "x" * (20 * MIB)}, "its snapshot is more than 8,388,608 bytes as JSON"),
    ],
)
async def test_what_is_too_large_or_odd_fails_its_own_attempt_by_name(
    monkeypatch: pytest.MonkeyPatch, where: str, says: Callable[[], Any], reason: str
) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment 'inside'.*{reason}"):
        await play(monkeypatch, **{where: says})


async def test_what_is_as_large_as_it_may_be_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"log": "x" * (INFO_BYTES_MAX - len('{"log":""}'))}
    rollout = await play(monkeypatch, reset=lambda: "x" * (OBSERVATION_BYTES_MAX - 8), info=lambda: info)
    assert len(rollout.prompt_ids) == OBSERVATION_BYTES_MAX - 8
    assert rollout.info["log"] == info["log"]


async def test_an_error_of_any_size_that_cannot_be_read_makes_a_small_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, told in ((ValueError("x" * (80 * MIB)), "ValueError: xxx"), (OddError(), "OddError: (its text cannot")):

        def fail(error: Exception = error) -> str:
            raise error

        with pytest.raises(EnvironmentFailed) as caught:
            await play(monkeypatch, reset=fail)
        letter = dead_letter(caught.value, JOB, run_id="r", worker_id="a", attempt=0)
        assert told in letter.reason and len(letter.reason) <= REASON_LENGTH_MAX
        assert "in fail" in letter.traceback and len(letter.traceback) <= TRACEBACK_LENGTH_MAX


@pytest.mark.parametrize(
    "raised",
    [
        GeneratorExit(),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        BaseExceptionGroup("a", [OddExit()]),
    ],
)
async def test_whatever_a_world_raises_ends_its_call_alone(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException
) -> None:
    def leave() -> str:
        raise raised

    for is_inline in (False, True):
        monkeypatch.setattr(Inside, "inline", is_inline)
        with pytest.raises(EnvironmentFailed, match=f"reset raised RuntimeError: {type(raised).__name__}.* left the"):
            await play(monkeypatch, reset=leave)


def test_a_reward_of_any_size_is_named_briefly() -> None:
    for reward in (10**400, "x" * MIB, [0] * MIB):
        with pytest.raises(EnvironmentFailed, match="not a number") as caught:
            check_reward(reward, "environment 'inside'")
        assert len(str(caught.value)) < 500


def test_weighing_something_huge_ends_soon_after_its_limit() -> None:
    assert 1000 < weigh([[0] * 1000] * 10**6, 1000) < 2000
    assert 1000 < weigh({"a": dict.fromkeys(range(10**6))}, 1000) < 2000
    assert weigh({"a": ["b", 1, None]}, 1000) < 30


def test_who_fails_again_and_again_waits_before_each_start() -> None:
    assert [pause_s(count) for count in range(FREE_FAILURES)] == [0.0] * FREE_FAILURES
    assert 0 < pause_s(FREE_FAILURES) < pause_s(FREE_FAILURES + 1) < PAUSE_S_MAX
    assert pause_s(10**6) == PAUSE_S_MAX
