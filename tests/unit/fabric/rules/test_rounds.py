"""Rounds of which what takes long is put off: every task is trained on, once, wherever a training is interrupted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollfab
from rollfab.fabric.contract.errors import ConfigError, InputError
from rollfab.fabric.rules.rounds import Round, TailRounds


@dataclass(frozen=True)
class Done:
    group_id: str
    task: int = 0


def rounds(count: int = 50, *, state: Any = None, groups: int = 8, spare: float = 0.25, keep: Any = None) -> Any:
    return TailRounds(range(count), group_count=groups, group_size=4, spare=spare, keep=keep, state=state)


def first(made: Round[int]) -> list[Done]:
    """The first groups that are complete: here, in the order in which they were pushed."""
    return [Done(name) for name in made.group_ids[: made.needed]]


def test_a_short_round_has_more_and_what_it_leaves_fills_a_long_one() -> None:
    made = rollfab.TailRounds(range(1000), group_count=8, group_size=4)
    for number in range(4):
        short = made.next()
        assert short is not None and short is made.next(), "until it has ended"
        assert short.push == {
            "tasks": list(range(10 * number, 10 * number + 10)),
            "group_size": 5,
            "quorum": 4,
            "group_ids": [f"round-{number}-{index}" for index in range(10)],
        }
        assert (short.needed, short.is_long) == (8, False)
        assert made.end(first(short)) == [f"round-{number}-8", f"round-{number}-9"]
        assert made.end(first(short)) == [], "once"
    long = made.next()
    assert long is not None and long.is_long
    assert (long.tasks, long.group_size, long.quorum, long.needed) == ((8, 9, 18, 19, 28, 29, 38, 39), 4, None, 8)
    assert long.has(Done("round-4-7")) and not long.has(Done("round-3-9"))
    assert made.end(first(long)) == []


@given(
    count=st.integers(0, 60),
    groups=st.integers(1, 7),
    spare=st.sampled_from([0.01, 0.25, 0.5, 1.0]),
    dice=st.randoms(use_true_random=False),
)
def test_every_task_is_trained_on_once_whenever_it_is_begun_again(
    count: int, groups: int, spare: float, dice: Any
) -> None:
    trained: list[int] = []
    names: set[str] = set()
    made = rounds(count, groups=groups, spare=spare)
    while (now := made.next()) is not None:
        assert 1 <= now.needed <= min(groups, len(now.tasks))
        assert now.needed == groups or (now.is_long and not list(made._tasks)), "less than a step only at the end"
        if dice.random() < 0.5:  # killed while the round is under way: the same again
            made = rounds(count, groups=groups, spare=spare, state=json.loads(json.dumps(made.state())))
            assert made.next() == now
        done = dice.sample(range(len(now.tasks)), now.needed)
        trained += [now.tasks[index] for index in done]
        assert not names & set(now.group_ids)
        names.update(now.group_ids)
        left = made.end([Done(now.group_ids[index]) for index in done])
        assert len(left) == len(now.tasks) - now.needed
        if dice.random() < 0.5:
            made = rounds(count, groups=groups, spare=spare, state=json.loads(json.dumps(made.state())))
    assert sorted(trained) == list(range(count))


@given(
    count=st.integers(0, 60),
    groups=st.integers(1, 7),
    vain=st.sets(st.integers(0, 59)),
    spare=st.sampled_from([0.01, 0.25, 1.0]),
    dice=st.randoms(use_true_random=False),
)
def test_what_teaches_nothing_makes_way_for_others_whenever_a_round_is_begun_again(
    count: int, groups: int, vain: set[int], spare: float, dice: Any
) -> None:
    pushed: dict[str, int] = {}  # what the run has, by name
    trained: list[int] = []
    dropped: set[int] = set()

    def begun(state: Any = None) -> Any:
        return rounds(count, groups=groups, spare=spare, keep=lambda group: group.task not in vain, state=state)

    def push(batch: Any) -> list[str]:
        new = [name for name in batch.group_ids if name not in pushed]
        for name, task in zip(batch.group_ids, batch.tasks, strict=True):
            assert pushed.setdefault(name, task) == task, "the same task whenever it is pushed"
        return new

    def of_round(made: Any) -> list[str]:
        return [name for name in pushed if name.startswith(f"round-{made.state()['round']}-")]

    made = begun()
    while (now := made.next()) is not None:
        coming, done = push(now), []
        while not made.is_over:
            if (fate := dice.random()) < 0.2:  # killed, or interrupted and gone on with: all groups come again
                made = begun(json.loads(json.dumps(made.state()))) if fate < 0.1 else made
                push(made.next())
                coming, done = of_round(made), []
            name = coming.pop(dice.randrange(len(coming)))
            if made.takes(Done(name, pushed[name])):
                done.append(Done(name, pushed[name]))
            dropped |= {pushed[name]} & vain
            assert made.takes(Done(name, pushed[name])) == (done[-1:] == [Done(name, pushed[name])]), "however often"
            if (more := made.more()) is not None:
                coming += push(more)
        assert len(done) == now.needed or not list(made._tasks)
        trained += [each.task for each in done]
        made.end(done)
    assert sorted([*trained, *dropped]) == list(range(count))
    assert dropped == vain & set(range(count))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"group_count": 0}, "group_count is 0, expected a whole number, 1 or more"),
        ({"group_size": 2.5}, r"group_size is 2\.5"),
        ({"spare": 25}, "spare is 25, expected a part, above 0 and at most 1"),
        ({"spare": "0.25"}, "spare is '0.25'"),
        ({"state": {"round": 1}}, "give back what they said"),
        ({"state": [1, 2]}, "give back what they said"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        TailRounds([], **{"group_count": 4, "group_size": 4, **wrong})


def test_a_name_that_cannot_begin_others_is_refused() -> None:
    with pytest.raises(ConfigError, match="round 'a b' is not a valid name"):
        TailRounds([], group_count=1, group_size=1, name="a b")
