"""The parts of `rollfab bench chaos`: its schedule, its relays, its verdict, and when it takes work for recovered."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.records import Failure, Group, Rollout
from tests.bench.chaos.calls import KIND_COUNT, judge_calls
from tests.bench.chaos.claims import HeldClaim, is_over
from tests.bench.chaos.journal import Journal, judge, read_journal
from tests.bench.chaos.report import CALL_PROMISES, PROMISES, complain
from tests.bench.chaos.schedule import BAGS, BROKER, LONG_S, ROLES, faults
from tests.bench.chaos.trainer import flaw
from tests.support.brokers.tcp_relay import Relay
from tests.support.records import new_rollout

CLAIM_S = 2.0


def first(seed: int, role: str, count: int) -> list[Any]:
    return list(itertools.islice(faults(seed, role, instance_count=2, pause_s=(0.1, 0.5)), count))


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize("role", ROLES)
def test_the_same_seed_gives_the_same_faults_and_another_one_others(role: str) -> None:
    assert first(7, role, 200) == first(7, role, 200)
    assert first(7, role, 20) != first(8, role, 20)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("seed", range(5))
def test_every_kind_comes_before_the_bag_is_filled_again(role: str, seed: int) -> None:
    bag = BAGS[role]
    assert sorted(fault.kind for fault in first(seed, role, len(bag))) == sorted(bag)


def test_every_role_is_killed_frozen_and_cut_off_and_every_instance_is_hit() -> None:
    for role in ROLES:
        found = first(0, role, 60)
        assert {"kill", "freeze", "cut"} <= {fault.kind for fault in found}
        assert {fault.instance for fault in found} == {0, 1}
        assert all(0.1 <= fault.pause_s <= 0.5 for fault in found)


def test_freezes_last_sometimes_longer_and_mostly_shorter_than_a_claim() -> None:
    durations = [fault.duration_s for fault in first(3, "agent", 400) if fault.kind == "freeze"]
    long = [each for each in durations if each > CLAIM_S]
    assert 0 < len(long) < len(durations) / 2
    assert max(durations) <= LONG_S[1]
    assert all(fault.duration_s <= 1.0 for fault in first(3, BROKER, 100))


# ---------------------------------------------------------------- a relay


class Echo:
    """A server that answers what it is told, and remembers it."""

    def __init__(self) -> None:
        self.heard = b""
        self.server: asyncio.Server | None = None

    async def start(self) -> int:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while part := await reader.read(65536):
                self.heard += part
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@pytest.fixture
async def world() -> AsyncIterator[tuple[Echo, Relay, int]]:
    echo = Echo()
    relay = Relay(await echo.start())
    port = await relay.start()
    yield echo, relay, port
    await relay.close()
    assert echo.server is not None
    echo.server.close()
    await asyncio.sleep(0.05)  # connections close on the loop


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def is_refused(port: int) -> bool:
    try:
        reader, writer = await connect(port)
        writer.write(b"refuse me")
        return not await reader.read(1)
    except ConnectionError:
        return True


async def test_a_relay_passes_everything_on(world: tuple[Echo, Relay, int]) -> None:
    _, _, port = world
    reader, writer = await connect(port)
    payload = bytes(range(256)) * 40_000  # 10 MB: more than any buffer on the way

    async def send() -> None:
        writer.write(payload)
        await writer.drain()

    _, answer = await asyncio.gather(send(), reader.readexactly(len(payload)))
    assert answer == payload
    writer.close()


async def test_a_cut_resets_what_is_open_and_what_comes(world: tuple[Echo, Relay, int]) -> None:
    # Given an open connection
    echo, relay, port = world
    reader, writer = await connect(port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"

    # When it is cut
    relay.cut("test")

    # Then it is reset, and so is a new one, and nothing more arrives
    with pytest.raises(ConnectionResetError):
        await reader.read(1)
    assert await is_refused(port)
    assert echo.heard == b"one"

    # And once healed new ones pass
    relay.heal("test")
    reader, writer = await connect(port)
    writer.write(b"three")
    assert await reader.readexactly(5) == b"three"
    writer.close()


async def test_a_hold_delays_and_loses_nothing(world: tuple[Echo, Relay, int]) -> None:
    # Given an open connection, held up
    echo, relay, port = world
    reader, writer = await connect(port)
    writer.write(b"one")
    await reader.readexactly(3)
    relay.hold("test")

    # When more is sent, on it and on a new one
    writer.write(b"two")
    late, late_writer = await connect(port)
    late_writer.write(b"late")

    # Then nothing passes
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    assert echo.heard == b"one"

    # And once healed all of it does
    relay.heal("test")
    assert await reader.readexactly(3) == b"two"
    assert await late.readexactly(4) == b"late"
    writer.close()
    late_writer.close()


async def test_two_who_hold_a_relay_up_do_not_heal_each_other(world: tuple[Echo, Relay, int]) -> None:
    echo, relay, port = world
    reader, writer = await connect(port)
    relay.hold("one")
    relay.hold("other")
    writer.write(b"x")
    relay.heal("one")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    assert echo.heard == b""
    relay.heal("other")
    assert await reader.readexactly(1) == b"x"
    writer.close()


async def test_a_relay_to_nobody_resets() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        relay = Relay(taken.getsockname()[1])  # bound, not listening
        port = await relay.start()
        reader, _ = await connect(port)
        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await relay.close()


# ---------------------------------------------------------------- the verdict


class Story:
    """A trainer's journal, written by hand."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def tell(self, event: str, *groups: str) -> Story:
        self.lines.append({"at_ns": len(self.lines), "event": event, "groups": list(groups)})
        return self

    def receive(self, group: str, *, again: bool = False, digest: str = "d", flaw: str = "") -> Story:
        facts = {
            "is_redelivered": again,
            "flaw": flaw,
            "seed": 1,
            "token_count": 5,
            "turn_count": 3,
            "digests": [digest],
        }
        self.lines.append({"at_ns": len(self.lines), "event": "received", "group": group, **facts})
        return self

    def once(self, group: str, **facts: Any) -> Story:
        return self.tell("submitted", group).receive(group, **facts).tell("acking", group).tell("acked", group)


def test_a_group_that_came_once_is_neither_lost_nor_duplicated() -> None:
    verdict = judge([Story().once("a").once("b").lines])
    assert verdict.is_clean
    assert (verdict.submitted, verdict.token_count, verdict.rollout_count) == ({"a", "b"}, 10, 2)
    assert (verdict.turn_count, verdict.rollouts) == (6, [("a", 1, "d"), ("b", 1, "d")])


@pytest.mark.parametrize(
    "story",
    [
        Story().tell("submitted", "a"),
        Story().tell("submitted", "a").receive("a"),
        Story().tell("submitted", "a").receive("a").tell("acking", "a").receive("a", again=True),
    ],
    ids=["never came", "came and was never acknowledged", "acknowledged in doubt, and left when it came again"],
)
def test_what_nobody_used_is_lost(story: Story) -> None:
    assert judge([story.lines]).lost == ["a"]


def test_a_group_that_was_never_accepted_cannot_be_lost() -> None:
    assert judge([Story().tell("submitting", "a").lines]).lost == []


def test_what_comes_again_with_its_mark_before_an_acknowledgement_is_as_promised() -> None:
    # Given a trainer that was killed with a group in hand, and one that was killed while it acknowledged
    story = Story().tell("submitted", "a", "b").receive("a").receive("b").tell("acking", "b")

    # When both come again, marked, and are acknowledged
    story.receive("a", again=True).receive("b", again=True).tell("acking", "a", "b").tell("acked", "a", "b")

    # Then that is no duplicate
    verdict = judge([story.lines])
    assert verdict.is_clean
    assert verdict.redelivered_count == 2


@pytest.mark.parametrize("again", [True, False])
def test_what_comes_after_its_confirmed_acknowledgement_is_a_duplicate(again: bool) -> None:
    story = Story().once("a")
    other = [{**line, "at_ns": 100} for line in Story().receive("a", again=again).lines]  # at another trainer, later
    assert judge([story.lines, other]).duplicated == ["a"]


def test_what_comes_twice_unmarked_is_a_duplicate() -> None:
    story = Story().tell("submitted", "a").receive("a").receive("a").tell("acking", "a").tell("acked", "a")
    assert judge([story.lines]).duplicated == ["a"]


def test_rollouts_of_one_seed_that_differ_have_diverged() -> None:
    story = Story().once("a").once("b").once("c", digest="other")
    assert judge([story.lines]).diverged_rollout_count == 1


# ---------------------------------------------------------------- chat calls


CALM_DIGESTS = dict.fromkeys(range(KIND_COUNT), "d")


class Life:
    """An agent's journal, written by hand. seed: says which kind of talk it is."""

    def __init__(self, trajectory: str, seed: int = 1) -> None:
        self.lines: list[dict[str, Any]] = []
        self._who = {"trajectory": trajectory, "kind": seed}

    def tell(self, event: str, **facts: Any) -> Life:
        who = {} if event == "error" else self._who
        self.lines.append({"event": event, **who, **facts})
        return self

    def call(self, index: int, answer: str = "") -> Life:
        """A call, and what it was answered; nothing: its client died before."""
        self.tell("call", index=index)
        return self.tell("answer", index=index, answer=answer) if answer else self


def count_calls(*lives: Life, story: Story | None = None) -> dict[str, Any]:
    """What is found where kind 1 was answered "x" and "y" before the first fault, and its rollout has the digest d."""
    lines = [line for life in (Life("calm-1").call(0, "x").call(1, "y"), *lives) for line in life.lines]
    return judge_calls(lines, judge([(story or Story()).lines]), CALM_DIGESTS, turn_count=3)


def test_calls_that_a_later_life_asks_again_are_the_same_calls() -> None:
    found = count_calls(Life("a").call(0, "x").call(1), Life("a").call(0, "x").call(1, "y"))
    assert (found["calls"], found["calls_completed"], found["calls_lost"], found["calls_again"]) == (2, 2, 0, 2)
    assert found["answers_differing"] == found["errors_final"] == 0


def test_a_call_that_no_life_got_an_answer_to_is_lost() -> None:
    found = count_calls(Life("a").call(0, "x").call(1), Life("a").call(0, "x"))
    assert (found["calls_lost"], found["call_examples"]) == (1, ["call 1 of a has no answer"])


def test_answers_and_rollouts_other_than_undisturbed_ones_are_counted() -> None:
    story = Story().once("a").once("b", digest="other")
    found = count_calls(Life("a").call(0, "x").call(1, "x"), Life("b").call(0, "x").call(1, "y"), story=story)
    assert found["answers_differing"] == 2
    assert found["call_examples"] == ["call 1 of a has another answer", "the rollout of b is another"]
    assert found["turns_doubled"] == 0


def test_turns_beyond_one_for_each_call_are_doubled() -> None:
    assert judge_calls([], judge([Story().once("a").once("b").lines]), CALM_DIGESTS, turn_count=2)["turns_doubled"] == 2


@pytest.mark.parametrize(
    ("status", "sort"),
    [
        ("ConnectError", "retryable"),
        (0, "retryable"),
        (429, "retryable"),
        (503, "retryable"),
        (401, "over"),
        (410, "over"),
        (400, "final"),
        (404, "final"),
    ],
)
def test_errors_are_told_apart_by_what_a_client_may_do(status: int | str, sort: str) -> None:
    life = Life("a").tell("error", status=status).call(0).tell("failed", index=0, status=status, error="!")
    found = count_calls(life)
    assert found["errors_retryable"] == ({str(status): 1} if sort == "retryable" else {})
    assert (found["sessions_over"], found["errors_final"]) == (sort == "over", sort == "final")
    assert found["calls_given_up"] == (sort == "retryable")
    assert ("!" in str(found["call_examples"])) == (sort == "final")


# ---------------------------------------------------------------- journals, groups, complaints


def test_a_broken_promise_is_told_with_the_seed() -> None:
    clean = dict.fromkeys((*PROMISES, *CALL_PROMISES), 0)
    assert complain({**clean, "examples": []}, "again") == ""
    assert complain({**dict.fromkeys(PROMISES, 0), "examples": []}, "again") == ""  # a run without chat calls
    for name in clean:
        text = complain({**clean, name: 2, "examples": ["t0-7"]}, "rollfab bench chaos --seed 3")
        assert f"2 {name}" in text
        assert "--seed 3" in text
        assert "t0-7" in text


def test_a_journal_is_read_without_its_torn_end(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    Journal(path).write("submitted", groups=["a"])
    with path.open("ab") as file:
        file.write(b'{"at_ns": 3, "ev')
    (line,) = read_journal(path)
    assert (line["event"], line["groups"]) == ("submitted", ["a"])
    assert read_journal(tmp_path / "none") == []


def test_a_group_is_checked_whole() -> None:
    def rollout(index: int, *, turns: int = 2, reward: float = 2.0) -> Rollout:
        return new_rollout(trajectory_id=f"g.{index}", turn_count=turns, reward=reward)

    def group(*rollouts: Rollout, failures: tuple[Failure, ...] = ()) -> Group:
        return Group(group_id="g", task_id="t", rollouts=rollouts, failures=failures)

    assert flaw(group(rollout(0), rollout(1)), 2, 2) == ""
    assert flaw(group(rollout(0)), 2, 2)
    assert flaw(group(rollout(0), rollout(0)), 2, 2)
    assert "g.1: it raised" in flaw(group(rollout(0), failures=(Failure("g.1", "it raised"),)), 2, 2)
    assert flaw(group(rollout(0), rollout(1, turns=1)), 2, 2)
    assert flaw(group(rollout(0), rollout(1, reward=0.0)), 2, 2)


# ---------------------------------------------------------------- recovered or not


@pytest.mark.parametrize(
    ("record", "deadline_ms", "is_recovered"),
    [
        (b"claimed 3 0 0 worker", 1000.0, False),  # as at the fault
        (b"claimed 3 0 0 worker", 1500.0, True),  # its holder is back and has renewed it
        (b"ready 3 0 1 -", None, False),  # taken back, waits
        (b"claimed 4 0 1 other", 3000.0, True),
        (b"settled 3 0 0 worker", None, True),
        (b"scoring 3 0 0 worker", 2000.0, True),  # an agent's trajectory that it had settled after all
        (None, None, True),  # ended and forgotten
    ],
)
def test_a_claim_waits_until_it_is_held_by_somebody_who_lives(
    record: bytes | None, deadline_ms: float | None, is_recovered: bool
) -> None:
    assert is_over(HeldClaim("job", "claimed", 3, 1000.0), record, deadline_ms) is is_recovered


def test_a_reward_is_not_there_because_it_was_asked_for_again() -> None:
    claim = HeldClaim("job", "scoring", 3, 1000.0)
    assert not is_over(claim, b"scoring 3 0 1 -", 3000.0)
    assert is_over(claim, b"completed 3 0 1 -", None)
