"""How long a turn waits for its home, and what a worker knows of its own speed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rollfab
from rollfab.fabric.contract.fields import WHOLE_MAX
from rollfab.fabric.contract.records import RunConfig, Span
from rollfab.fabric.rules.queue import placement
from rollfab.fabric.rules.queue.placement import (
    GRACE_MS,
    NO_HOME,
    PATIENCE_MS_MAX,
    US_PER_TOKEN,
    US_PER_TOKEN_MAX,
    Home,
    Homes,
    PrefillSpeed,
)

RUN = RunConfig(run_id="r", model="tiny", environment="frozenlake", prefix_affinity=True)
LUA = Path(rollfab.__file__).parents[2] / "fabric/queue/lua/jobs/use/strays.lua"


def test_the_bounds_are_those_of_the_script() -> None:
    found = re.search(r"local LOOK_COUNT, PATIENCE_MS_MAX, GRACE_MS = \d+, (\d+), (\d+)", LUA.read_text())
    assert found is not None and found.groups() == (str(PATIENCE_MS_MAX), str(GRACE_MS))


def test_a_worker_learns_what_a_token_costs_it_whatever_every_turn_costs_anyway() -> None:
    speed, chance = PrefillSpeed(), random.Random(1)
    for _ in range(200):
        tokens = chance.randrange(0, 4000)
        speed.note(tokens, 0.3 + tokens * 700e-6 + chance.gauss(0, 0.02))
    assert speed.us_per_token == pytest.approx(700, rel=0.1)


def test_a_worker_that_grows_slower_knows_it_soon() -> None:
    speed, chance = PrefillSpeed(), random.Random(2)
    for us_per_token in (100, 900):
        for _ in range(300):
            tokens = chance.randrange(0, 1000)
            speed.note(tokens, tokens * us_per_token / 1e6)
    assert speed.us_per_token == pytest.approx(900, rel=0.05)


def test_before_it_knows_it_takes_what_is_usual() -> None:
    speed = PrefillSpeed()
    assert speed.us_per_token == US_PER_TOKEN
    for _ in range(100):
        speed.note(64, 0.5)  # turns of one length say nothing of another one
    assert speed.us_per_token == US_PER_TOKEN


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.floats(0, 1e4)), max_size=40))
def test_whatever_it_sees_it_tells_a_speed_within_bounds(seen: list[tuple[int, float]]) -> None:
    speed = PrefillSpeed()
    for tokens, seconds in seen:
        speed.note(tokens, seconds)
    assert 1 <= speed.us_per_token <= US_PER_TOKEN_MAX


def test_whoever_made_a_turn_is_home_once_until_the_next_is_made() -> None:
    homes = Homes()
    homes.note(RUN, "g.0", Span(0, 4, "w1", 3))
    assert homes.leave("g.0") == Home("w1", 3)
    assert homes.leave("g.0") == NO_HOME


def test_caches_that_outlive_weights_are_homes_for_ever_and_without_affinity_there_are_none() -> None:
    homes = Homes()
    homes.note(RunConfig(**{**RUN.__dict__, "may_reuse_prefix": True}), "g.0", Span(0, 4, "w1", 3))
    assert homes.leave("g.0") == Home("w1", WHOLE_MAX)
    homes.note(RunConfig(**{**RUN.__dict__, "prefix_affinity": False}), "g.0", Span(0, 4, "w1", 3))
    assert homes.leave("g.0") == NO_HOME


def test_the_homes_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "HOME_COUNT_MAX", 2)
    homes = Homes()
    for index in range(3):
        homes.note(RUN, f"g.{index}", Span(0, 4, "w1", 0))
    assert [homes.leave(f"g.{index}").worker_id for index in range(3)] == ["", "w1", "w1"]
