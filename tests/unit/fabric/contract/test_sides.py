"""Side arrays: cut, joined and read back; on the wire, each of equal bytes once."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import WireError
from rollfab.fabric.contract.records import NO_IDS, NO_LOGPROBS, Branch, Node, Rollout, Side, TokenLog, TurnResult
from rollfab.fabric.contract.sides import dense, joined, parts, rows
from tests.support.records import new_rollout
from tests.support.tried import tried

DTYPES = ("u1", "i4", "f4", "i8", "f8")


@st.composite
def sides(draw: Any, start: int = -20, end: int = 20) -> Side:
    low = draw(st.integers(start, end))
    high = draw(st.integers(low, end))
    counts = None
    count = high - low
    if draw(st.booleans()):
        counts = np.array(draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)), np.int32)
        count = int(counts.sum())
    shape = (count, *draw(st.lists(st.integers(0, 3), max_size=2)))
    dice = np.random.default_rng(draw(st.integers(0, 3)))  # few seeds: equal bytes come
    array = dice.integers(0, 200, shape).astype(draw(st.sampled_from(DTYPES)))
    return Side(name=draw(st.sampled_from(["top_ids", "kept_ids"])), start=low, end=high, array=array, counts=counts)


def same(one: Side, other: Side) -> bool:
    heads = [(each.name, each.start, each.end, each.array.dtype, each.array.shape) for each in (one, other)]
    are_counts = (one.counts is None) == (other.counts is None)
    return heads[0] == heads[1] and are_counts and all(map(np.array_equal, *map(arrays, (one, other))))


def arrays(side: Side) -> list[Any]:
    return [side.array] if side.counts is None else [side.array, side.counts]


@given(st.lists(sides(), max_size=6))
def test_they_come_back_as_they_were_sent(given_sides: list[Side]) -> None:
    ids = np.arange(20, dtype=np.int32)
    log = TokenLog(completion_ids=ids, logprobs=ids.astype(np.float32), sides=tuple(given_sides))
    read = TokenLog.decode(log.encode())
    assert len(read.sides) == len(given_sides) and all(map(same, given_sides, read.sides))
    assert not any(side.array.flags.writeable for side in read.sides)


@given(sides(), st.integers(-25, 25), st.integers(-25, 25))
def test_what_is_cut_apart_and_joined_again_is_the_same(side: Side, one: int, other: int) -> None:
    low, high = sorted((one, other))
    cut = [part for place in ((-30, low), (low, high), (high, 30)) for part in parts([side], *place, by=7)]
    assert sum(part.end - part.start for part in cut) == side.end - side.start
    again = joined(cut)
    if side.start < side.end:
        assert len(again) == 1 and same(again[0], next(iter(parts([side], -30, 30, by=7))))


def test_equal_arrays_travel_once() -> None:
    array = np.random.default_rng(0).integers(0, 1 << 30, (1000, 20)).astype(np.int32)
    one = Side(name="top_ids", start=0, end=1000, array=array)
    two = Side(name="teacher_ids", start=0, end=1000, array=array.copy())
    ids = np.zeros(1000, np.int32)

    size, twice = (
        len(TokenLog(completion_ids=ids, logprobs=ids.astype(np.float32), sides=each).encode())
        for each in ((one,), (one, two))
    )

    assert array.nbytes < size and twice < size + 100


def test_rows_are_filled_up_where_nothing_is_known() -> None:
    narrow = Side(name="top_ids", start=0, end=2, array=np.array([[1], [2]], np.int32))
    wide = Side(name="top_ids", start=3, end=4, array=np.array([[3, 4]], np.int32))
    assert dense([wide, narrow], "top_ids", -1, 5).tolist() == [  # type: ignore[union-attr]
        [-1, -1],
        [1, -1],
        [2, -1],
        [-1, -1],
        [3, 4],
        [-1, -1],
    ]
    assert dense([wide], "top_ids", 0, 3) is None and dense([wide], "other", 0, 9) is None
    ragged = Side(name="kept_ids", start=1, end=4, array=np.arange(5), counts=np.array([2, 0, 3], np.int32))
    assert [None if row is None else row.tolist() for row in rows([ragged], "kept_ids", 0, 5)] == [
        None,
        [0, 1],
        [],
        [2, 3, 4],
        None,
    ]
    with pytest.raises(ValueError, match="ragged"):
        dense([ragged], "kept_ids", 0, 4)


@given(st.data())
@settings(max_examples=tried(150))
def test_damage_is_refused_and_never_read(data: st.DataObject) -> None:
    log = TokenLog(sides=(data.draw(sides(end=0)), data.draw(sides(end=0))))
    raw = bytearray(log.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(8, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = TokenLog.decode(bytes(raw))
    except WireError:
        return
    for side in read.sides:
        assert side.size_bytes <= len(raw) + 64 * 3
        assert len(rows([side], side.name, side.start, side.end)) == side.end - side.start


@pytest.mark.parametrize(
    "row",
    [
        ["top_ids", 0, 1, "i4", [1 << 40], 0, -1],  # more than there is
        ["top_ids", 0, 1 << 60, "i4", [2], 0, -1],
        ["top_ids", 0, 1, "i4", [2], 0, -1],  # two rows for a token
        ["top_ids", 1, 0, "i4", [0], 0, -1],
        ["top_ids", 0, 2, "i4", [-1, -2], 0, -1],
        ["top_ids", 0, 1, "i4", [], 0, -1],
        ["top_ids", 0, 1, "O", [1], 0, -1],
        ["Top ids", 0, 1, "i4", [1], 0, -1],
        ["top_ids", 0, 1, "i4", [1], 1, -1],
        ["top_ids", 0, 1, "i4", [1], True, -1],
        ["top_ids", 0, 1],
        None,
    ],
)
def test_rows_that_cannot_be_are_refused(row: Any) -> None:
    good = TokenLog(sides=(Side(name="top_ids", start=-1, end=0, array=np.zeros(1, np.int32)),))
    raw = good.encode()
    import orjson

    head = {"spans": [], "completion_ids": ["i4", 0], "logprobs": ["f4", 0], "sides": [row]}
    text = orjson.dumps(head)
    text += b" " * (-(8 + len(text)) % 8)
    with pytest.raises(WireError):
        TokenLog.decode(raw[:4] + len(text).to_bytes(4, "little") + text + bytes(8))


def test_arrays_of_tokens_that_a_record_has_not_are_refused() -> None:
    beyond = (Side(name="top_ids", start=0, end=1, array=np.zeros(1, np.int32)),)
    result = TurnResult(
        turn_id="g.0.0", finish_reason="stop", spans=(), completion_ids=NO_IDS, logprobs=NO_LOGPROBS, sides=beyond
    )
    with pytest.raises(WireError, match=r"top_ids speaks of \[0, 1\)"):
        TurnResult.decode(result.encode())
    twice = tuple(Side(name="a", start=0, end=2, array=np.zeros(2, np.int32)) for _ in range(2))
    rollout = new_rollout([4, 5])
    with pytest.raises(WireError, match="overlap"):
        Rollout.decode(Rollout(**{**rollout.__dict__, "sides": twice}).encode())


def test_branches_have_the_arrays_of_their_tokens() -> None:
    # prompt 9 9 9, then 0 1 | 2 3 and, behind 0 1, 4 5 6
    ids = np.arange(7, dtype=np.int32)
    mask = np.array([0, 1, 1, 1, 0, 1, 1], np.uint8)
    base = new_rollout([1]).__dict__
    number = Side(name="number", start=-3, end=7, array=np.arange(-3, 7, dtype=np.int32))
    some = Side(name="some", start=5, end=7, array=np.array([[5.0], [6.0]], np.float32))
    rollout = Rollout(
        **{
            **base,
            "prompt_ids": np.full(3, 9, np.int32),
            "completion_ids": ids,
            "logprobs": np.zeros(7, np.float32),
            "completion_mask": mask,
            "spans": (),
            "nodes": (Node(-1, 2), Node(0, 4), Node(0, 7)),
            "sides": (number, some),
        }
    )

    first, second = Rollout.decode(rollout.encode()).branches()

    def told(branch: Branch, **options: bool) -> Any:
        found = branch.side("number", **options)
        assert found is not None
        return found.tolist()

    assert told(first) == first.completion_ids.tolist() == [1, 2, 3] and told(first, of_prompt=True) == [-3, -2, -1, 0]
    assert told(second) == second.completion_ids.tolist() == [1, 4, 5, 6]
    assert first.side("some") is None and second.side("some").tolist() == [  # type: ignore[union-attr]
        [-np.inf],
        [-np.inf],
        [5],
        [6],
    ]
    (line,) = new_rollout([4, 5]).branches()
    assert line.sides == () and line.side("number") is None
