"""How one agent's places are shared between runs: the rule, and places that come and go."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.share import Sharer, entitled, more, owed
from rollfab.workers.agent.slots import Places


def sharer(
    run_id: str, held: int = 0, weight: float = 1.0, *, work: bool = True, served: float = 0.0, stalled: bool = False
) -> Sharer:
    return Sharer(run_id=run_id, weight=weight, held=held, may_have_work=work, served=served, is_stalled=stalled)


def test_a_stalled_run_owes_what_is_above_its_share_whether_others_have_work_or_not() -> None:
    assert owed(100, [sharer("a", 100, stalled=True), sharer("b")]) == {"a": 50}
    assert owed(100, [sharer("a", 100, stalled=True), sharer("b", work=False)]) == {"a": 50}
    assert owed(100, [sharer("a", 100), sharer("b")]) == {}  # it gets on
    assert owed(100, [sharer("a", 100, stalled=True)]) == {}  # it is alone
    assert owed(1, [sharer("a", 1, stalled=True), sharer("b", work=False)]) == {}  # a place cannot be divided


def test_a_stalled_run_takes_no_more_than_its_share_and_others_take_all_that_is_left() -> None:
    runs = [sharer("a", 20, stalled=True), sharer("b", work=False), sharer("c", 5)]
    assert (more(90, runs, "a"), more(90, runs, "c")) == (10, 55)


def test_places_are_divided_by_weight() -> None:
    assert entitled(100, [sharer("a", weight=3.0), sharer("b"), sharer("c", work=False)]) == {"a": 75, "b": 25, "c": 0}


def test_one_place_goes_to_the_run_that_was_served_least_for_its_weight() -> None:
    assert entitled(1, [sharer("a", served=3.0), sharer("b", served=2.0)]) == {"a": 0, "b": 1}


sharers = st.lists(
    st.builds(
        Sharer,
        run_id=st.uuids().map(str),
        weight=st.floats(0.1, 10),
        held=st.integers(0, 40),
        may_have_work=st.booleans(),
        served=st.floats(0, 100),
        is_stalled=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


@given(st.integers(1, 100), sharers)
def test_never_more_than_there_are_and_none_stays_empty_while_there_is_work(total: int, runs: list[Sharer]) -> None:
    free = total - sum(run.held for run in runs)
    wanted = {run.run_id: more(total, runs, run.run_id) for run in runs if run.may_have_work}
    assert all(0 <= count <= max(0, free) for count in wanted.values())
    if free > 0 and any(run.may_have_work and not run.is_stalled for run in runs):
        assert sum(wanted.values()) >= free


@given(st.integers(1, 100), sharers)
def test_a_stalled_run_comes_to_hold_no_more_than_its_share(total: int, runs: list[Sharer]) -> None:
    weights, owing = sum(run.weight for run in runs), owed(total, runs)
    for run in runs:
        if run.is_stalled:
            wanted = more(total, runs, run.run_id) if run.may_have_work else 0
            assert 0 <= run.held - owing.get(run.run_id, 0) + wanted <= max(1, total * run.weight / weights) + 1


def test_a_stalled_run_of_a_small_share_keeps_one_place_as_long_as_nobody_who_gets_on_wants_it() -> None:
    others = [sharer("busy", weight=5.0, work=False, served=9.0), *(sharer(f"old{n}", work=False) for n in range(4))]
    assert owed(8, [sharer("a", 8, stalled=True), *others]) == {"a": 7}
    assert more(8, [sharer("a", stalled=True), *others], "a") == 1
    both = [sharer("a", 4, stalled=True), sharer("b", 4, stalled=True)]  # each is seen to get on by one of its own
    assert owed(8, [*both, *(sharer(f"old{n}", work=False) for n in range(30))]) == {"a": 3, "b": 3}
    busy = sharer("busy", weight=5.0, served=9.0)
    assert owed(1, [sharer("a", 1, stalled=True), busy]) == {"a": 1}
    assert more(1, [sharer("a", stalled=True), busy], "a") == 0


@given(st.integers(1, 100), sharers)
def test_a_run_below_its_share_gets_to_it_as_others_end(total: int, runs: list[Sharer]) -> None:
    weights = sum(run.weight for run in runs)
    for run in runs:
        if run.may_have_work:
            assert entitled(total, runs)[run.run_id] >= int(total * run.weight / weights - 1e-6)


def play(total: int, weights: Mapping[str, float], rounds: int) -> dict[str, int]:
    """Runs that always have work, whose trajectories end in turn; how many each was given."""
    places = Places(total)
    for name, weight in weights.items():
        places.join(name, weight)
    held: list[str] = []
    given_count = dict.fromkeys(weights, 0)
    for _ in range(rounds):
        for name in weights:
            count = places.take(name)
            places.used(name, count, count)
            given_count[name] += count
            held += [name] * count
        assert places.held_count == len(held) <= total
        places.give(held.pop(0))
    return given_count


def test_runs_that_always_have_work_come_to_have_places_by_weight() -> None:
    for total, rounds in ((1, 600), (2, 600), (12, 3000), (64, 6000)):
        got = play(total, {"a": 2.0, "b": 1.0}, rounds)
        assert abs(got["a"] / (got["a"] + got["b"]) - 2 / 3) < 0.02


def test_a_run_that_comes_back_is_not_paid_for_the_time_it_had_no_work() -> None:
    # Given one place, and a run that wanted nothing while the other was served a thousand times
    places = Places(1)
    places.join("b", 1.0)
    places.used("b", places.take("b"), 0)
    places.join("a", 1.0)
    for _ in range(1000):
        assert places.take("a") == 1
        places.used("a", 1, 1)
        places.give("a")
    # When it has work again, then they take turns
    got = []
    for _ in range(10):
        for name in ("b", "a"):
            if places.take(name):
                places.used(name, 1, 1)
                got.append(name)
                break
        places.take("a" if got[-1] == "b" else "b")
        places.give(got[-1])
    assert got.count("b") == 5
