"""A turn's tokens are saved in parts: what is read is what was made up to some token, and little is written for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract import sides
from rollfab.fabric.contract.records import Side, Span, TokenLog
from rollfab.fabric.rules.queue import token_parts
from rollfab.fabric.rules.queue.token_parts import NOTHING_SAVED, PART_COUNT, Saved, next_save, whole

Parts = list[TokenLog | None]


def log_of(count: int, seed: int = 0, *, prompt: int = 0) -> TokenLog:
    """The first `count` tokens of a turn that is the same for a seed; with prompt: all that is known beside them.

    What a token's experts were is known once it was read: of the last one, not yet.
    """
    ids = np.arange(count, dtype=np.int32) * 7 + seed
    told: tuple[Side, ...] = ()
    if prompt:
        read, counts = np.arange(-prompt, count - 1, dtype=np.int32), np.arange(count, dtype=np.int32) % 3
        told = (
            Side(name="kept_ids", start=0, end=count, array=np.repeat(ids, counts), counts=counts),
            Side(name="prompt_logprobs", start=-prompt, end=0, array=read[:prompt].astype(np.float32)),
            Side(name="routed_experts", start=-prompt, end=count - 1, array=np.stack([read, -read], 1)),
            Side(name="top_ids", start=0, end=count, array=np.stack([ids, ids + 1], 1)),
        )
    edges = [*range(0, count, 300), count]
    spans = tuple(Span(a, b, "w1", version) for version, (a, b) in enumerate(pairwise(edges)))
    return TokenLog(spans=spans, completion_ids=ids, logprobs=ids.astype(np.float32) / 8, sides=told)


def same(found: TokenLog | None, expected: TokenLog) -> None:
    assert found is not None and (found.start, found.base) == (0, "")
    assert found.spans == expected.spans
    np.testing.assert_array_equal(found.completion_ids, expected.completion_ids)
    np.testing.assert_array_equal(found.logprobs, expected.logprobs)
    assert [(each.name, each.start, each.end) for each in found.sides] == [
        (each.name, each.start, each.end) for each in sides.joined(expected.sides)
    ]
    for one, other in zip(found.sides, sides.joined(expected.sides), strict=True):
        np.testing.assert_array_equal(one.array, other.array)
        assert (one.counts is None) == (other.counts is None)
        assert one.counts is None or np.array_equal(one.counts, other.counts)


def carried(log: TokenLog) -> TokenLog:
    """The log as the wire carries it."""
    return TokenLog.decode(log.encode())


Step = tuple[int, str]  # tokens made since the last save; what becomes of the save


@given(
    claims=st.lists(
        st.lists(
            st.tuples(st.integers(1, 60), st.sampled_from(["kept", "kept", "kept", "never came", "answer lost"])),
            min_size=1,
            max_size=25,
        ),
        min_size=1,
        max_size=3,
    ),
    prompt=st.sampled_from([0, 5]),
)
def test_whatever_is_lost_on_the_way_what_is_read_is_the_beginning_of_one_turn(
    claims: Sequence[Sequence[Step]], prompt: int
) -> None:
    # Given parts that are full early, and claims that each begin the turn anew, with other tokens
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_parts, "SECOND_TOKENS_MAX", 200)
        patch.setattr(token_parts, "THIRD_TOKENS_MAX", 40)
        kept: Parts = [None] * PART_COUNT
        for number, steps in enumerate(claims):
            saved, count, sure = NOTHING_SAVED, 0, 0
            for made, fate in steps:
                count += made
                save = next_save(log_of(count, number, prompt=prompt), saved, f"{number}.{count}")
                if fate != "never came":
                    kept[save.place] = carried(save.log)
                if fate == "kept":
                    saved, sure = save.saved, count
                found = whole(kept)
                # Then all that the broker said it has is read, nothing of another claim, and nothing else
                if sure:
                    assert found is not None and sure <= len(found.completion_ids) <= count
                    same(found, log_of(len(found.completion_ids), number, prompt=prompt))


def test_a_long_turn_is_written_a_few_times_over_and_not_hundreds_of_times() -> None:
    saved, parts, written = NOTHING_SAVED, [None] * PART_COUNT, 0
    for count in range(25, 32_769, 25):
        save = next_save(log_of(count), saved, f"1.{count}")
        saved, parts[save.place] = save.saved, save.log
        written += len(save.log.completion_ids)
    same(whole(parts), log_of(count))
    assert written < 20 * count  # whole each time: 650 times


def test_a_turn_that_is_given_back_whole_has_no_parts_of_before() -> None:
    saved, parts = NOTHING_SAVED, list[TokenLog | None]([None] * PART_COUNT)
    for count in (10, 20, 30):
        save = next_save(log_of(count), saved, f"1.{count}")
        saved, parts[save.place] = save.saved, save.log
    same(whole(parts), log_of(30))
    same(whole([log_of(20), *parts[1:]]), log_of(20))
    assert whole([None, *parts[1:]]) is None
    same(whole([replace(log_of(10), start=7), None, None]), log_of(10))  # somebody wrote it there
    same(whole([replace(log_of(10), base="2.10"), *parts[1:]]), log_of(10))


def test_what_is_told_late_of_the_context_is_written_with_the_first_part_again() -> None:
    first = next_save(log_of(10), NOTHING_SAVED, "1.10")
    assert (first.place, next_save(log_of(12), first.saved, "1.12").place) == (0, 2)
    late = next_save(log_of(12, prompt=3), first.saved, "1.12")
    assert late.place == 0 and late.saved == Saved(base="1.12", ends=(12, 12), context_bytes=late.saved.context_bytes)
    same(whole([late.log, None, None]), log_of(12, prompt=3))
