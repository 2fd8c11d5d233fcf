"""How many turns a KV cache has room for: against counting token by token, and by what was learned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.rules.queue.room import ENDED_COUNT, LIKELY_TOKENS, Holding, KvRoom

FAR = 10**6


def learned(*ended: int, context: int = 100, left: int = FAR) -> KvRoom:
    room = KvRoom()
    room.note_begun(context, left)
    for count in ended:
        room.note_ended(count)
    return room


def test_a_turn_is_expected_to_make_what_those_made_that_came_as_far() -> None:
    room = learned(100, 200, 600)
    made = (0, 99, 100, 150, 200, 599)
    assert [room.rest(Holding(0, count, FAR)) for count in made] == [300, 201, 300, 250, 400, 1]
    # beyond all, as many again; never more than it may make
    far = [(600, FAR), (600, 7), (0, 20)]
    assert [room.rest(Holding(0, count, left)) for count, left in far] == [600, 7, 20]


def test_a_turn_that_ends_later_counts_too() -> None:
    room = learned(100)
    assert room.rest(Holding(0, 0, FAR)) == 100
    room.note_ended(300)
    assert room.rest(Holding(0, 0, FAR)) == 200


def test_before_any_has_ended_a_turn_is_expected_to_make_a_few_hundred() -> None:
    assert [learned().rest(Holding(0, made, FAR)) for made in (0, 100, 2000)] == [LIKELY_TOKENS, LIKELY_TOKENS, 2000]


def test_only_the_last_turns_count() -> None:
    room = learned(*[9000] * 10, *[50] * ENDED_COUNT)
    assert room.rest(Holding(0, 0, FAR)) == 50


def test_the_most_that_turns_may_make_takes_no_room_of_those_that_are_likely_to_make_less() -> None:
    room = learned(200, context=100, left=30_000)
    assert room.count([], 3000) == 10
    # nine that have just begun leave room for one, and nine near their end for two
    assert room.count([Holding(100, 0, 30_000)] * 9, 3000) == 1
    assert room.count([Holding(290, 190, 30_000)] * 9, 3000) == 2


def test_without_a_turn_that_ever_began_nothing_is_known() -> None:
    assert KvRoom().count([], FAR) is None


def test_prefixes_that_turns_share_are_no_room_of_the_next_one() -> None:
    room = learned(100, context=900)
    assert room.count([], 10_000) == 10
    assert room.count([], 10_000, held_fraction=1 / 9) == 50


turns = st.lists(st.builds(Holding, st.integers(0, 60), st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(turns, st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 60), st.integers(0, 700))
def test_so_many_fit_at_every_moment_if_all_make_what_is_expected_and_one_more_would_not(
    running: list[Holding], ended: list[int], context: int, kv_tokens_max: int
) -> None:
    room = learned(*ended, context=context)
    new = Holding(context, 0, FAR)

    def peak(count: int) -> float:
        """The most that is held at a moment in which the new ones still run: the ends of turns are all that counts."""
        all_turns = [*running, *[new] * count]
        ends = [room.rest(turn) for turn in all_turns if room.rest(turn) <= room.rest(new)]
        held = [[turn.held_tokens + at for turn in all_turns if room.rest(turn) >= at] for at in ends]
        return max(map(sum, held), default=0.0)

    count = room.count(running, kv_tokens_max)
    assert count is not None
    assert count == 0 or peak(count) <= kv_tokens_max + 1e-6
    assert peak(count + 1) > kv_tokens_max - 1e-6 or context < 1  # what holds nothing at some moment counts as a token
