"""Are groups that come out of a file the ones that went in, and does a recorded run give them as a run would?"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import InputError
from rollfab.fabric.contract.records import Failure, Group, Node, Rollout, Side, Span
from rollfab.trainer import files
from rollfab.trainer.files import Recording, read_groups, write_groups
from tests.support.records import new_rollout
from tests.support.tried import tried

SUFFIXES = (".jsonl", ".parquet")
FLOATS = st.floats(-100, 0, width=32) | st.sampled_from([-np.inf, np.inf, np.nan])
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


def numbers(dtype: str, shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray[Any, Any]]:
    size = int(np.prod(shape))
    one = FLOATS if dtype.startswith("f") else st.integers(0, 255)
    return st.lists(one, min_size=size, max_size=size).map(lambda found: np.array(found, dtype).reshape(shape))


@st.composite
def sides(draw: st.DrawFn, name: str, first: int, end: int) -> Side:
    """One stretch of an array of any type and shape, ragged or not."""
    start = draw(st.integers(first, end))
    dtype = draw(st.sampled_from(["u1", "i4", "f4", "i8", "f8", "u8"]))
    shape = draw(st.sampled_from([(), (2,), (2, 3), (0,)]))
    if draw(st.booleans()):
        counts = np.array(draw(st.lists(st.integers(0, 3), min_size=end - start, max_size=end - start)), np.int32)
        array = draw(numbers(dtype, (int(counts.sum()), *shape)))
        return Side(name=name, start=start, end=end, array=array, counts=counts)
    return Side(name=name, start=start, end=end, array=draw(numbers(dtype, (end - start, *shape))))


@st.composite
def rollouts(draw: st.DrawFn, index: int) -> Rollout:
    """A rollout that may branch, with anything beside its tokens."""
    ends = sorted(draw(st.lists(st.integers(0, 6), max_size=3)))
    size = ends[-1] if ends else draw(st.integers(0, 6))
    messages = st.lists(st.fixed_dictionaries({"role": WORDS, "content": PLAIN}), max_size=2)
    nodes = [Node(draw(st.integers(-1, at - 1)), end, draw(messages)) for at, end in enumerate(ends)]
    middle = draw(st.integers(0, size))
    return new_rollout(
        draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)),
        trajectory_id=f"g.{index}",
        reward=draw(st.none() | st.floats(-1e6, 1e6)),
        finish_reason=draw(st.sampled_from(["terminated", "truncated", "turns"])),
        seed=draw(st.integers(0, 2**32)),
        logprobs=draw(numbers("f4", (size,))),
        completion_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)), np.uint8),
        spans=(Span(0, middle, "w/é", 3), Span(middle, size, "w2", draw(st.integers(-1, 2**53)))),
        info=draw(st.dictionaries(WORDS, PLAIN, max_size=3)),
        nodes=tuple(nodes),
        turn_ms=draw(st.lists(st.integers(0, 2**53), max_size=6)),
        traceparent=draw(st.sampled_from(["", f"00-{'a' * 32}-{'b' * 16}-01"])),
        sides=tuple(
            draw(sides(name, -3, size)) for name in draw(st.sets(st.sampled_from("abc"), max_size=3).map(sorted))
        ),
    )


@st.composite
def groups(draw: st.DrawFn) -> Group:
    count = draw(st.integers(0, 3))
    return Group(
        group_id="g",
        task_id="t",
        rollouts=tuple(draw(rollouts(index)) for index in range(count)),
        failures=tuple(Failure(f"g.{index}", draw(WORDS)) for index in range(draw(st.integers(0, 2)))),
        cancelled=tuple(draw(st.lists(WORDS, max_size=2))),
        ended_by=draw(st.sampled_from(["all", "quorum", "deadline"])),
        redelivered=draw(st.booleans()),
    )


def bits(group: Group) -> tuple[Any, ...]:
    """All of a group, arrays as their bytes."""
    facts = {name: value for name, value in vars(group).items() if name != "rollouts"}
    return facts, [each.encode() for each in group.rollouts]


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=tried(25))
@given(found=st.lists(groups(), min_size=1, max_size=3))
def test_what_is_read_is_what_was_written(suffix: str, found: list[Group]) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory, f"groups{suffix}")
        assert write_groups(path, iter(found)) == len(found)
        assert list(map(bits, read_groups(path))) == list(map(bits, found))


def group(name: str, *rewards: float) -> Group:
    made = [new_rollout(trajectory_id=f"{name}.{n}", group_id=name, reward=each) for n, each in enumerate(rewards)]
    return Group(group_id=name, task_id="t", rollouts=tuple(made))


GROUPS = [group("a", 0.0, 1.0), group("b", 1.0, 1.0), group("c"), group("d", 1.0, 0.0)]


def written(directory: Path, suffix: str) -> Path:
    path = directory / f"groups{suffix}"
    write_groups(path, GROUPS)
    return path


def test_a_parquet_file_of_many_row_groups_is_read_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "ROW_GROUP_BYTES", 1)
    path = written(tmp_path, ".parquet")
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 3  # a group without arrays waits for the next one
    assert list(map(bits, read_groups(path))) == list(map(bits, GROUPS))


def test_files_of_before_turn_ms_and_traceparent_are_read_with_neither(tmp_path: Path) -> None:
    rollout = new_rollout(turn_ms=[1, 2, 3], traceparent="00-a-b-01", trajectory_id="a.0", group_id="a")
    now = Group(group_id="a", task_id="t", rollouts=(rollout,))
    then = replace(now, rollouts=(replace(rollout, turn_ms=[], traceparent=""),))
    for suffix in SUFFIXES:
        write_groups(tmp_path / f"new{suffix}", [now])
    row = json.loads((tmp_path / "new.jsonl").read_text())
    del row["rollouts"][0]["turn_ms"], row["rollouts"][0]["traceparent"]
    (tmp_path / "old.jsonl").write_text(json.dumps(row))
    table = pyarrow.parquet.read_table(tmp_path / "new.parquet")
    pyarrow.parquet.write_table(table.drop_columns(["turn_ms", "traceparent"]), tmp_path / "old.parquet")
    for suffix in SUFFIXES:
        assert list(map(bits, read_groups(tmp_path / f"new{suffix}"))) == [bits(now)]
        assert list(map(bits, read_groups(tmp_path / f"old{suffix}"))) == [bits(then)]


def test_others_read_rows_of_rollouts_with_lists_of_numbers(tmp_path: Path) -> None:
    table = pyarrow.parquet.read_table(written(tmp_path, ".parquet"))
    assert table.column("trajectory_id").to_pylist() == ["a.0", "a.1", "b.0", "b.1", None, "d.0", "d.1"]
    assert table.column("group_id").to_pylist() == ["a", "a", "b", "b", "c", "d", "d"]
    types = {name: str(table.schema.field(name).type) for name in ("completion_ids", "logprobs", "reward")}
    assert types == {
        "completion_ids": "list<element: int32>",
        "logprobs": "list<element: float>",
        "reward": "double",
    }
    (first, *_) = map(json.loads, written(tmp_path, ".jsonl").read_text().splitlines())
    assert first["rollouts"][1]["reward"] == 1.0 and first["rollouts"][1]["completion_ids"] == [4, 5]


def test_images_are_base64_in_json_and_numbers_that_are_none_are_words(tmp_path: Path) -> None:
    images = Side(
        name="images", start=0, end=2, array=np.frombuffer(b"PNG", np.uint8), counts=np.array([3, 0], np.int32)
    )
    rollout = new_rollout(sides=(images,), logprobs=np.array([np.nan, -np.inf], np.float32))
    write_groups(tmp_path / "g.jsonl", [Group(group_id="g", task_id="t", rollouts=(rollout,))])
    (row,) = json.loads((tmp_path / "g.jsonl").read_text())["rollouts"]
    assert row["sides"][0]["rows"] == ["UE5H", ""] and row["logprobs"] == ["NaN", "-Infinity"]


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, suffix: str) -> None:
    # Given groups that end in an error, or in nothing
    def broken() -> Iterator[Group]:
        yield GROUPS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_groups(tmp_path / f"x{suffix}", broken())
    assert write_groups(tmp_path / f"x{suffix}", []) == 0
    assert list(tmp_path.iterdir()) == []

    # Then what is there is never written over
    path = written(tmp_path, suffix)
    with pytest.raises(InputError, match="is there already"):
        write_groups(path, GROUPS)


def test_what_is_no_file_of_groups_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"x.csv ends in \.csv: name it .jsonl or .parquet"):
        write_groups(tmp_path / "x.csv", [])
    with pytest.raises(InputError, match=r"the directory of .*none/x.jsonl is not there: make it first"):
        write_groups(tmp_path / "none" / "x.jsonl", [])
    with pytest.raises(InputError, match="is no file"):
        read_groups(tmp_path / "x.jsonl")
    whole = written(tmp_path, ".jsonl").read_text()
    (tmp_path / "torn.jsonl").write_text(whole[:-30])
    with pytest.raises(InputError, match=r"line 4 of .*torn.jsonl: not JSON: it is cut off at column \d+. Mend"):
        list(read_groups(tmp_path / "torn.jsonl"))
    (tmp_path / "odd.jsonl").write_text('{"group_id": "g"}\n')
    with pytest.raises(InputError, match=r"line 1 of .*: this is no group of rollfab: 'rollouts' is missing"):
        list(read_groups(tmp_path / "odd.jsonl"))
    (tmp_path / "odd.jsonl").write_text(whole.replace('"completion_mask":[1,1]', '"completion_mask":[1]'))
    with pytest.raises(InputError, match=r"line 1 of .*differ in length"):
        list(read_groups(tmp_path / "odd.jsonl"))
    images = Side(name="images", start=0, end=1, array=np.zeros(1, np.uint8))
    write_groups(tmp_path / "kind.jsonl", [replace(GROUPS[0], rollouts=(new_rollout(sides=(images,)),))])
    (tmp_path / "odd.jsonl").write_text((tmp_path / "kind.jsonl").read_text().replace('"uint8"', '"object"'))
    with pytest.raises(InputError, match="this is no group of rollfab: 'object' is missing, or not known here"):
        list(read_groups(tmp_path / "odd.jsonl"))
    (tmp_path / "odd.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(InputError, match=r"odd.parquet cannot be read as Parquet. The file is damaged, "):
        list(read_groups(tmp_path / "odd.parquet"))
    pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), tmp_path / "other.parquet")
    with pytest.raises(InputError, match="holds no groups of rollfab: 'group_index' is missing"):
        list(read_groups(tmp_path / "other.parquet"))
    whole = written(tmp_path, ".parquet").read_bytes()
    (tmp_path / "odd.parquet").write_bytes(whole[:10] + bytes(200) + whole[210:])
    with pytest.raises(InputError, match=r"odd.parquet cannot be read as Parquet. The file is damaged, "):
        list(read_groups(tmp_path / "odd.parquet"))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from rollfab.trainer.files import write_groups\n"
        f"write_groups({str(tmp_path / 'x.parquet')!r}, [])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (
        "ConfigError: Parquet needs pyarrow, which is not installed here: pip install 'rollfab[parquet]'" in done.stderr
    )


# ---------------------------------------------------------------- a recorded run


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_recorded_run_goes_on_where_the_last_loop_ended(tmp_path: Path, suffix: str) -> None:
    run = Recording(written(tmp_path, suffix))
    with run.groups(count=1, timeout=60, consumer="trainer") as found:
        assert [each.group_id for each in found] == ["a"] and found.ended_why == "all 1 groups came"
    rest = run.groups(keep="varied")
    assert [each.group_id for each in rest] == ["d"] and rest.dropped_count == 2
    assert rest.ended_why.endswith("holds no more groups")
    assert list(run.groups()) == []


def test_a_step_that_fails_gives_a_recorded_runs_groups_back(tmp_path: Path) -> None:
    run = Recording(written(tmp_path, ".jsonl"))

    def step() -> None:
        with run.groups(count=2) as found:
            assert len(list(found)) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step()
    again = [(each.group_id, each.redelivered) for each in run.groups()]
    assert again == [("a", True), ("b", True), ("c", False), ("d", False)]
