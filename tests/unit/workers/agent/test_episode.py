"""A trajectory that is carried on by another agent, from any point: is it the one it would have been, or is it said?"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import EnvironmentFailed
from rollfab.fabric.contract.records import Int32, Rollout, RunConfig, Span, TrajectoryJob, TurnJob, TurnResult
from rollfab.fabric.contract.sampling import turn_seed
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.fabric.ports.queue import TrajectoryClaim
from rollfab.workers.agent.episode import Episode, Limits
from rollfab.workers.environments.registry import Registry
from tests.support.records import result_of

TEXT = CharTokenizer()
KINDS = {"replay": "Scripted", "snapshot": "ScriptedBySnapshot", "restart": "ScriptedByRestart"}
TWINS = {"inside": "Inside", "process": "InAProcess"}
PAIRS = [f"{kind}=tests.support.worlds.scripted_world:{name}" for kind, name in KINDS.items()]
PAIRS += [f"{kind}=tests.support.worlds.twin_worlds:{name}" for kind, name in TWINS.items()]
REGISTRY = Registry(PAIRS)
JOB = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={}, seed=7)
LIFE_COUNT_MAX = 50
RUN_SEED = 7


class Killed(BaseException):
    """The agent is gone from one moment to the next."""


@dataclass
class Broker:
    """What outlives an agent: turns asked for, turns settled, the last snapshot. `kills`: events that end a life."""

    kills: set[int] = field(default_factory=set)
    asked: dict[str, TurnJob] = field(default_factory=dict)
    settled: list[TurnResult] = field(default_factory=list)
    snapshot: bytes | None = None
    event_count: int = 0

    def live(self) -> None:
        """Something is about to happen: perhaps not any more."""
        self.event_count += 1
        if self.event_count in self.kills:
            raise Killed

    async def ask(self, claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes]) -> TurnResult:
        self.live()
        first = self.asked.setdefault(job.turn_id, job)  # a turn that is under way stays the one it is
        assert job.sampling == first.sampling
        self.live()
        known = {result.turn_id: result for result in self.settled}
        if job.turn_id not in known:
            self.settled.append(made(first))
        self.live()
        return self.settled[int(job.turn_id.rsplit(".", 1)[1])]

    async def save(self, claim: TrajectoryClaim, snapshot: bytes) -> None:
        self.live()
        self.snapshot = snapshot
        self.live()

    def claim(self) -> TrajectoryClaim:
        facts: dict[str, Any] = {"worker_id": "a"} if "worker_id" in TrajectoryClaim.__slots__ else {}
        return TrajectoryClaim(
            job=JOB, fence=1, attempt=0, loss=0, snapshot=self.snapshot, turns=tuple(self.settled), **facts
        )


def policy(context: Int32) -> tuple[Int32, np.ndarray]:
    """What a greedy policy writes in a context, and how likely: 1 to 4 characters."""
    digest = hashlib.blake2b(context.astype("<i4").tobytes()).digest()
    ids = np.array([5 + byte % 95 for byte in digest[1 : 2 + digest[0] % 4]], np.int32)
    return ids, -np.frombuffer(digest, np.uint8, len(ids), 8).astype(np.float32) / 64 - np.float32(0.01)


def made(job: TurnJob) -> TurnResult:
    ids, logprobs = policy(job.prompt_ids)
    return result_of(
        job.turn_id,
        ids,
        finish_reason="length",
        spans=(Span(0, len(ids), "w", len(ids)),),
        logprobs=logprobs,
        context_digest=job.context_digest,
    )


def run_through(kind: str, options: dict[str, Any], broker: Broker) -> Rollout:
    """Live on, as often as it takes."""

    async def live(life: int) -> Rollout:
        config = RunConfig(
            run_id="r",
            model="tiny",
            environment=kind,
            environment_options={**options, "life": life},
            sampling={"seed": RUN_SEED},
        )
        limits = Limits(agent_id="a", call_timeout_s=5.0)
        return await Episode(config, broker.claim(), REGISTRY, TEXT, limits, broker).run()  # type: ignore[arg-type]

    for life in range(LIFE_COUNT_MAX):
        try:
            return asyncio.run(live(life))
        except Killed:
            continue
    raise AssertionError("it never came to an end")


def seeds_of(broker: Broker) -> dict[str, int | None]:
    return {name: job.sampling.seed for name, job in broker.asked.items()}


def check_same(one: Rollout, other: Rollout) -> None:
    for name in ("prompt_ids", "completion_ids", "logprobs", "completion_mask"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    for name in ("reward", "spans", "finish_reason", "turn_count", "attempt", "info"):
        assert getattr(one, name) == getattr(other, name), name


def check_one_piece(rollout: Rollout) -> None:
    """Every turn is what the policy writes in the very context before it."""
    assert len(rollout.turn_ms) == 3 * rollout.turn_count, "asked for, answered, stepped"
    assert rollout.turn_ms == sorted(rollout.turn_ms) and rollout.turn_ms[0] >= 0
    tokens = np.concatenate((rollout.prompt_ids, rollout.completion_ids))
    offset = len(rollout.prompt_ids)
    for span in rollout.spans:
        ids, logprobs = policy(tokens[: offset + span.start])
        assert np.array_equal(ids, tokens[offset + span.start : offset + span.end])
        assert np.array_equal(logprobs, rollout.logprobs[span.start : span.end])


scripts = st.lists(st.tuples(st.text("abc ", max_size=3), st.floats(-1, 1, width=32)).map(list), min_size=1, max_size=6)
kill_points = st.sets(st.integers(1, 60), max_size=6)


@given(
    script=scripts,
    end=st.sampled_from(["terminated", "truncated", "turns"]),
    kind=st.sampled_from(["replay", "snapshot"]),
    kills=kill_points,
)
def test_killed_anywhere_and_anyhow_often_it_is_the_same_trajectory(
    script: list[list[Any]], end: str, kind: str, kills: set[int]
) -> None:
    options = {"script": script, "end": end}
    whole, broken = Broker(), Broker(kills)
    expected = run_through(kind, options, whole)
    check_one_piece(expected)
    check_same(run_through(kind, options, broken), expected)
    assert [result.turn_id for result in broken.settled] == [result.turn_id for result in whole.settled]
    assert seeds_of(broken) == seeds_of(whole)


SCRIPT = [["a", 0.25], ["", 0.5], ["c", 0.0], ["d", 1.0]]
EVENTS = 3  # of a turn: about to be asked for, asked for, settled


@pytest.mark.parametrize("what", ["text", "reward", "over"])
def test_a_replay_that_goes_another_way_is_said_and_never_mixed(what: str) -> None:
    said_count = 0
    for index in range(-1 if what == "text" else 0, len(SCRIPT) - 1):
        for kill in range(1, EVENTS * len(SCRIPT) + 1):
            # Given a world whose second life differs in turn `index`, and an agent that is killed at some moment
            broker = Broker({kill})
            options = {"script": SCRIPT, "changes": (index, what)}
            # Whether the difference had been seen: then the next turn had been asked for, with what came before it
            seen_at = EVENTS * (index + 1) + (3 if what == "over" else 2)
            if kill < seen_at:
                check_one_piece(run_through("replay", options, broker))
                continue
            # When it goes on elsewhere, then that is said
            said_count += 1
            with pytest.raises(EnvironmentFailed, match="diverged") as caught:
                run_through("replay", options, broker)
            assert caught.value.facts["reason"] == "diverged"
    assert said_count


def test_one_that_restarts_as_it_says_is_not_told_to_say_so() -> None:
    said = []
    for kill in range(1, EVENTS + 1):
        # Given a world that begins otherwise in its second life, and an agent killed before a turn is settled
        try:
            run_through("restart", {"script": SCRIPT, "changes": (-1, "text")}, Broker({kill}))
        except EnvironmentFailed as error:
            said.append(str(error))
    diverged = [text for text in said if "diverged" in text]
    assert diverged and all("Nothing is wrong with it" in text and "mend" not in text for text in diverged)


def test_a_restart_is_said_as_soon_as_a_turn_is_settled() -> None:
    options = {"script": [["a", 0.0], ["b", 1.0]]}
    with pytest.raises(EnvironmentFailed) as caught:
        run_through("restart", options, Broker({4}))
    assert caught.value.facts["reason"] == "restart"
    assert run_through("restart", options, Broker({2})).turn_count == 2  # nothing was settled, nothing is lost


def test_a_snapshot_that_cannot_be_restored_fails_the_attempt() -> None:
    options = {"script": [["a", 0.0], ["b", 1.0]], "changes": (9, "cannot")}
    with pytest.raises(EnvironmentFailed, match="restore raised OSError: that state is of another version") as caught:
        run_through("snapshot", options, Broker({6}))
    assert caught.value.facts["reason"] == "restore"


@pytest.mark.parametrize("snapshot", [b"{", b"[]", b"{}", b'{"texts": [], "rewards": [], "prompt_ids": []}'])
def test_a_snapshot_that_cannot_be_read_fails_the_attempt(snapshot: bytes) -> None:
    broker = Broker({6})
    broker.save = _keep(broker, snapshot)  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFailed, match="snapshot cannot be read"):
        run_through("snapshot", {"script": [["a", 0.0], ["b", 1.0]]}, broker)


@pytest.mark.parametrize(("kind", "rewards"), [("replay", [1e308, 1e308]), ("snapshot", [-1e308, 0.0, -1e308])])
def test_rewards_of_steps_that_overflow_are_named_with_their_environment(kind: str, rewards: list[float]) -> None:
    script = [["a", reward] for reward in rewards]
    says = f"environment {kind!r}: the rewards of its {len(rewards)} steps overflow, their sum is .?inf"
    with pytest.raises(EnvironmentFailed, match=says) as caught:
        run_through(kind, {"script": script}, Broker(set()))
    assert caught.value.facts["reason"] == "reward"


def _keep(broker: Broker, snapshot: bytes) -> Any:
    async def save(claim: TrajectoryClaim, _: bytes) -> None:
        broker.snapshot = snapshot

    return save


def test_a_result_made_in_another_context_is_not_taken() -> None:
    # Given a broker that answers with a turn of some other trajectory
    broker = Broker()

    async def mixed_up(claim: TrajectoryClaim, job: TurnJob, files: Mapping[str, bytes]) -> TurnResult:
        return made(
            TurnJob(
                turn_id=job.turn_id,
                agent_id="a",
                sampling=job.sampling,
                prompt_ids=TEXT.encode("other"),
                context_digest="00",
            )
        )

    broker.ask = mixed_up  # type: ignore[method-assign]
    with pytest.raises(EnvironmentFailed, match="turn 0 was made in another context"):
        run_through("replay", {"script": [["a", 0.0]]}, broker)


def test_every_turn_has_a_seed_of_its_own_that_follows_from_the_runs() -> None:
    broker, unseeded = Broker(), Broker()
    run_through("replay", {"script": SCRIPT}, broker)
    assert seeds_of(broker) == {f"g.0.{index}": turn_seed(RUN_SEED, "g.0", index) for index in range(len(SCRIPT))}
    assert len(set(seeds_of(broker).values())) == len(SCRIPT)
    _live_once(unseeded, script=SCRIPT)
    assert set(seeds_of(unseeded).values()) == {None}


def test_rewards_that_differ_in_their_last_digits_are_the_same() -> None:
    # A sum of floats may come out otherwise on another machine; that is no other world
    script = [["a", 0.1 + 0.2], ["b", 1.0], ["c", 1.0]]
    other = [["a", 0.3], ["b", 1.0], ["c", 1.0]]
    broker = Broker({6})
    with pytest.raises(Killed):
        _live_once(broker, script=script)
    assert _live_once(broker, script=other).turn_count == 3


def _live_once(broker: Broker, kind: str = "replay", task: dict[str, Any] | None = None, **options: Any) -> Rollout:
    async def live() -> Rollout:
        async with Registry(PAIRS) as registry:
            config = RunConfig(run_id="r", model="tiny", environment=kind, environment_options=options)
            claim = broker.claim()
            claim = dataclasses.replace(claim, job=dataclasses.replace(claim.job, task=task or {}))
            limits = Limits(agent_id="a", call_timeout_s=20.0)
            return await Episode(config, claim, registry, TEXT, limits, broker).run()  # type: ignore[arg-type]

    return asyncio.run(live())


@pytest.mark.parametrize("kind", TWINS)
def test_sampling_may_be_a_dict_wherever_a_world_runs(kind: str) -> None:
    broker = Broker()
    rollout = _live_once(broker, kind, sampling={"max_tokens": 3, "stop": ["."]}, turn_count_max=2, recovery=None)
    assert rollout.turn_count == 2
    assert {(job.sampling.max_tokens, job.sampling.stop) for job in broker.asked.values()} == {(3, (".",))}


@pytest.mark.parametrize(
    ("late", "says"),
    [
        ({"turn_count_max": 0}, "turn_count_max is 0, expected a whole number from 1"),
        ({"sampling": "greedy"}, "sampling is 'greedy', expected a dict"),
    ],
)
def test_settings_that_a_world_states_at_its_reset_are_checked_too(late: dict[str, Any], says: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"environment 'inside': {says}"):
        _live_once(Broker(), "inside", {"late": late})
