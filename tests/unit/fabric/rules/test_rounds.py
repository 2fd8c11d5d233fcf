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


def rounds(count: int = 50, *, state: Any = None, groups: int = 8, size: int = 4, spare: float = 0.25) -> Any:
    return TailRounds(range(count), group_count=groups, group_size=size, spare=spare, state=state)


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
