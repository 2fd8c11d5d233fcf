"""Groups in files, and out of them again: JSON lines, and Parquet where pyarrow is installed (`rollfab[parquet]`).

- What is read is equal to what was written, arrays to the bit (but for the payloads of NaN), and is checked as if it
  came over the wire. A rollout's group_id and task_id are its group's.
- A `.jsonl` file has a group per line, whose `rollouts` are rows. A `.parquet` file has a row per rollout, with its
  group's fields beside it; a group without rollouts has one row, whose trajectory_id is null. Arrays are lists.
- JSON has no word for what is no finite number: the texts "NaN", "Infinity" and "-Infinity" stand there, as in
  Protocol Buffers' mapping. Rows of bytes (images) are base64.
- A file is there whole or not at all: it gets its name when all of it is on the disk.
- Files that were written before `turn_ms` and `traceparent` were kept are read with neither.
"""

from __future__ import annotations

import base64
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..fabric.contract.errors import ConfigError, FabricError, InputError, WireError
from ..fabric.contract.records import Failure, Group, Rollout, Side, nodes_from, spans_from
from ..fabric.contract.sides import DTYPES
from ..fabric.contract.text import DAMAGED
from ..fabric.contract.wire import ARRAY_DTYPES, dump_json, load_json
from ..fabric.host.directories import replacing
from ..fabric.rules.filters import Keep, check_refill, find_filter
from .checks import check_count_max, check_wait

ROW_GROUP_BYTES = 32 << 20  # of arrays, that a writer or reader of Parquet holds at once, and one group
FACTS = ("trajectory_id", "reward", "finish_reason", "turn_count", "attempt", "seed")
LATER: dict[str, Any] = {"turn_ms": [], "traceparent": ""}  # facts that older files do not have, as they were then
# Of plain rows, as pyarrow names them; null may stand in each.
COLUMNS: dict[Any, str] = {int: "int64", float: "float64", str: "string", str | None: "string"}
WORDS: dict[str, Callable[..., Any]] = {"NaN": np.isnan, "Infinity": np.isposinf, "-Infinity": np.isneginf}
KINDS = {dtype.name: dtype for dtype in DTYPES.values()}  # of side arrays
UNFIT = (AttributeError, KeyError, TypeError, ValueError, OverflowError)  # what a row of another shape causes


def write_groups(path: str | Path, groups: Iterable[Group]) -> int:
    """Write groups to a new file, `.jsonl` or `.parquet`, as they come; return how many. No file if there are none.

    Raises:
        InputError: it is there already, its name ends otherwise, or a group holds what JSON cannot carry.
        ConfigError: Parquet is asked for, and pyarrow is not installed.
        OSError: as the system says.
    """
    path = Path(path)
    check_new(path)
    if path.suffix == ".parquet":
        return _whole(path, lambda new: _write_parquet(new, groups))
    return _whole(path, lambda new: _write_lines(new, map(group_row, groups)))


def write_rows(path: Path, rows: Iterable[dict[str, Any]], columns: Mapping[str, Any]) -> int:
    """Write plain rows to a new file, `.jsonl` or `.parquet`; return how many. No file if there are none.

    columns: by name int, float or str; or columns themselves, for a list of such rows. Raises as write_groups.
    """
    check_new(path)
    if path.suffix == ".jsonl":
        return _whole(path, lambda new: _write_lines(new, rows))
    pa = _pyarrow()

    def write(new: Path) -> int:
        table = pa.Table.from_pylist(list(rows), pa.schema({name: _column(pa, each) for name, each in columns.items()}))
        pa.parquet.write_table(table, new, compression="zstd")
        return int(table.num_rows)

    return _whole(path, write)


def _column(pa: Any, kind: Any) -> Any:
    if isinstance(kind, Mapping):
        return pa.list_(pa.struct({name: _column(pa, each) for name, each in kind.items()}))
    return getattr(pa, COLUMNS[kind])()


def _whole(path: Path, write: Callable[[Path], int]) -> int:
    """Let `write` write beside the path and return how many; the file gets its name once it is on the disk."""
    with replacing(path) as new:
        count = write(new)
        if not count:
            new.unlink(missing_ok=True)
    return count


def read_groups(path: str | Path) -> Iterator[Group]:
    """Read the groups of a `.jsonl` or `.parquet` file, one by one.

    Raises:
        InputError: it cannot be read, or one of its rows is no group; names the row.
        ConfigError: it is a Parquet file, and pyarrow is not installed.
    """
    path = Path(path)
    _check_kind(path)
    read: Callable[[Path], Iterator[Group]] = {".jsonl": _read_lines, ".parquet": _read_parquet}[path.suffix]
    if not path.is_file():
        raise InputError(f"{path} is no file")
    return read(path)


def check_new(path: Path) -> None:
    """Require that a file can be written, before anything is read for it. Raises as write_groups."""
    _check_kind(path)
    if not path.parent.is_dir():
        raise InputError(f"the directory of {path} is not there: make it first")
    if path.exists():
        raise InputError(f"{path} is there already: name another file, or move it away")


def _check_kind(path: Path) -> None:
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{path} ends in {path.suffix or 'no suffix'}: name it .jsonl or .parquet")
    if path.suffix == ".parquet":
        _pyarrow()


# ---------------------------------------------------------------- a group as plain values


def group_row(group: Group) -> dict[str, Any]:
    """Return a group as JSON carries it."""
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "failures": [each._asdict() for each in group.failures],
        "cancelled": list(group.cancelled),
        "ended_by": group.ended_by,
        "redelivered": group.redelivered,
        "rollouts": [_rollout_row(each) for each in group.rollouts],
    }


def group_from(row: Any) -> Group:
    """Return the group of a `group_row`. Raises InputError: it is none."""
    try:
        rollouts = [
            _made(each, row["group_id"], row["task_id"], map(_side_from, each["sides"])) for each in row["rollouts"]
        ]
        return _group(row, rollouts)
    except (*UNFIT, WireError) as error:
        raise InputError(f"this is no group of rollfab: {_unfit(error)}") from error


def _unfit(error: Exception) -> str:
    """Say why a row is no group, in plain words."""
    if isinstance(error, FabricError):
        return error.message
    is_name = isinstance(error, KeyError)
    return f"{error.args[0]!r} is missing, or not known here" if is_name else "a field holds another kind of value"


def _group(row: Any, rollouts: Iterable[Rollout]) -> Group:
    return Group(
        group_id=row["group_id"],
        task_id=row["task_id"],
        rollouts=tuple(rollouts),
        failures=tuple(Failure(**each) for each in row["failures"]),
        cancelled=tuple(row["cancelled"]),
        ended_by=row["ended_by"],
        redelivered=row["redelivered"],
    )


def _rollout_row(rollout: Rollout) -> dict[str, Any]:
    return {
        **{name: getattr(rollout, name) for name in (*FACTS, *LATER)},
        "policy_version": rollout.policy_version,
        **{name: _plain(getattr(rollout, name)) for name in Rollout.ARRAYS},
        "spans": [asdict(each) for each in rollout.spans],
        "info": rollout.info,
        "nodes": [asdict(each) for each in rollout.nodes],
        "sides": [_side_row(each) for each in rollout.sides],
    }


def _made(row: Any, group_id: str, task_id: str, sides: Iterable[Side]) -> Rollout:
    """Return a rollout of plain values, or of arrays, checked and read-only as it would come over the wire."""
    arrays: dict[str, Any] = {name: np.array(row[name], ARRAY_DTYPES[code]) for name, code in Rollout.ARRAYS.items()}
    rollout = Rollout(
        **{name: row[name] for name in (*FACTS, "info")},
        **{name: default if row.get(name) is None else row[name] for name, default in LATER.items()},
        **arrays,
        group_id=group_id,
        task_id=task_id,
        spans=spans_from(row["spans"]),
        nodes=nodes_from(row["nodes"]),
        sides=tuple(sides),
    )
    return Rollout.decode(rollout.encode())


def _plain(array: NDArray[Any]) -> Any:
    """Return an array as lists; WORDS for what is no finite number."""
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    found = array.astype(object)
    for word, is_such in WORDS.items():
        found[is_such(array)] = word
    return found.tolist()


def _side_row(side: Side) -> dict[str, Any]:
    """Return a side array with a row for each token; of a ragged one, a list of rows, or base64 of bytes."""
    found: Any
    if side.counts is None:
        found = _plain(side.array)
    else:
        per_token = np.split(side.array, np.cumsum(side.counts)[:-1]) if len(side.counts) else []
        is_bytes = side.array.dtype == np.uint8 and side.array.ndim == 1
        found = [base64.b64encode(each.tobytes()).decode() if is_bytes else _plain(each) for each in per_token]
    return {
        "name": side.name,
        "start": side.start,
        "end": side.end,
        "dtype": side.array.dtype.name,
        "shape": list(side.array.shape[1:]),
        "is_ragged": side.counts is not None,
        "rows": found,
    }


def _side_from(row: Any) -> Side:
    dtype, shape, found = KINDS[row["dtype"]], tuple(row["shape"]), row["rows"]
    places = {name: row[name] for name in ("name", "start", "end")}
    if not row["is_ragged"]:
        return Side(**places, array=np.array(found, dtype).reshape(len(found), *shape))
    if found and all(isinstance(each, str) for each in found):
        parts = [np.frombuffer(base64.b64decode(each), np.uint8) for each in found]
    else:
        parts = [np.array(each, dtype).reshape(len(each), *shape) for each in found]
    counts = np.array([len(each) for each in parts], np.int32)
    array = np.concatenate([np.zeros((0, *shape), dtype), *parts])
    return Side(**places, array=array, counts=counts)


# ---------------------------------------------------------------- JSON lines


def _write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    count = 0
    with path.open("wb") as file:
        for row in rows:
            file.write(dump_json(row) + b"\n")
            count += 1
    return count


def _read_lines(path: Path) -> Iterator[Group]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield group_from(load_json(line))
            except (WireError, InputError) as error:
                text = f"line {number} of {path}: {error.message}. Mend the line, or leave it out"
                raise InputError(text, line=number) from error


# ---------------------------------------------------------------- Parquet


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed here: pip install 'rollfab[parquet]', or take .jsonl"
        ) from error
    return pyarrow


def _schema(pa: Any) -> Any:
    failure = pa.struct({"trajectory_id": pa.string(), "reason": pa.string()})
    span = pa.struct({"start": pa.int64(), "end": pa.int64(), "worker_id": pa.string(), "policy_version": pa.int64()})
    node = pa.struct({"parent": pa.int64(), "end": pa.int64(), "messages": pa.string()})
    side = {"name": pa.string(), "start": pa.int64(), "end": pa.int64(), "dtype": pa.string()}
    side |= {"shape": pa.list_(pa.int64()), "counts": pa.list_(pa.int32())}
    side |= {"ints": pa.list_(pa.int32()), "floats": pa.list_(pa.float32()), "data": pa.binary()}
    arrays = {"i4": pa.list_(pa.int32()), "f4": pa.list_(pa.float32()), "u1": pa.list_(pa.uint8())}
    return pa.schema(
        {
            "group_index": pa.int64(),  # in the file: two groups may have one name, where one came again
            "group_id": pa.string(),
            "task_id": pa.string(),
            "failures": pa.list_(failure),
            "cancelled": pa.list_(pa.string()),
            "ended_by": pa.string(),
            "redelivered": pa.bool_(),
            "trajectory_id": pa.string(),
            "reward": pa.float64(),
            "finish_reason": pa.string(),
            "turn_count": pa.int64(),
            "attempt": pa.int64(),
            "seed": pa.int64(),
            "policy_version": pa.int64(),
            **{name: arrays[code] for name, code in Rollout.ARRAYS.items()},
            "spans": pa.list_(span),
            "info": pa.string(),  # JSON
            "nodes": pa.list_(node),
            "sides": pa.list_(pa.struct(side)),
            "turn_ms": pa.list_(pa.int64()),
            "traceparent": pa.string(),
        }
    )


def _parquet_rows(index: int, group: Group) -> Iterator[dict[str, Any]]:
    shared = {"group_index": index, **group_row(replace(group, rollouts=()))}
    del shared["rollouts"]
    if not group.rollouts:
        yield shared
    for rollout in group.rollouts:
        yield {
            **shared,
            **{name: getattr(rollout, name) for name in (*FACTS, "policy_version", *Rollout.ARRAYS, *LATER)},
            "spans": [asdict(each) for each in rollout.spans],
            "info": dump_json(rollout.info).decode(),
            "nodes": [{**asdict(each), "messages": dump_json(each.messages).decode()} for each in rollout.nodes],
            "sides": [_parquet_side(each) for each in rollout.sides],
        }


def _parquet_side(side: Side) -> dict[str, Any]:
    """Return a side array with its numbers flat, by their type; of other types than int32 and float32, as bytes."""
    flat = np.ascontiguousarray(side.array, side.array.dtype.newbyteorder("<")).reshape(-1)
    home = {"int32": "ints", "float32": "floats"}.get(side.array.dtype.name, "data")
    return {
        **{name: getattr(side, name) for name in ("name", "start", "end", "counts")},
        "dtype": side.array.dtype.name,
        "shape": list(side.array.shape),
        home: flat.tobytes() if home == "data" else flat,
    }


def _write_parquet(path: Path, groups: Iterable[Group]) -> int:
    pa, count = _pyarrow(), 0
    schema = _schema(pa)
    with pa.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        size_bytes = 0
        for count, group in enumerate(groups, 1):
            rows += _parquet_rows(count - 1, group)
            size_bytes += sum(_size_bytes(each) for each in group.rollouts)
            if size_bytes >= ROW_GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows, size_bytes = [], 0
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return count


def _size_bytes(rollout: Rollout) -> int:
    arrays: int = sum(getattr(rollout, name).nbytes for name in Rollout.ARRAYS)
    return arrays + sum(each.size_bytes for each in rollout.sides)


def _read_parquet(path: Path) -> Iterator[Group]:
    pa = _pyarrow()
    try:
        with pa.parquet.ParquetFile(path) as file:
            parts = (file.read_row_group(index) for index in range(file.num_row_groups))
            rows = ({name: part[name][at] for name in part.column_names} for part in parts for at in range(len(part)))
            for _, of_group in itertools.groupby(rows, lambda row: row["group_index"].as_py()):
                yield _parquet_group(list(of_group))
    except (pa.ArrowException, OSError) as error:  # an OSError of Arrow's has no strerror
        why = getattr(error, "strerror", None)
        raise InputError(f"{path} cannot be read{f': {why}' if why else f' as Parquet. {DAMAGED}'}") from error
    except (*UNFIT, WireError) as error:
        raise InputError(f"{path} holds no groups of rollfab: {_unfit(error)}") from error


def _parquet_group(rows: list[dict[str, Any]]) -> Group:
    shared = ("group_id", "task_id", "failures", "cancelled", "ended_by", "redelivered")
    first = {name: rows[0][name].as_py() for name in shared}
    made = (row for row in rows if row["trajectory_id"].is_valid)
    return _group(first, [_parquet_rollout(row, first["group_id"], first["task_id"]) for row in made])


def _parquet_rollout(row: dict[str, Any], group_id: str, task_id: str) -> Rollout:
    plain = {name: row[name].as_py() for name in (*FACTS, "spans", *(set(LATER) & set(row)))}
    arrays = {name: row[name].values.to_numpy() for name in Rollout.ARRAYS}
    nodes = [{**each, "messages": load_json(each["messages"])} for each in row["nodes"].as_py()]
    made = {**plain, **arrays, "info": load_json(row["info"].as_py()), "nodes": nodes}
    return _made(made, group_id, task_id, map(_parquet_side_from, row["sides"]))


def _parquet_side_from(row: Any) -> Side:
    dtype, data = KINDS[row["dtype"].as_py()], row["data"]
    flat: NDArray[Any]
    if data.is_valid:
        flat = np.frombuffer(data.as_py(), dtype)
    else:
        flat = row["ints" if dtype == np.int32 else "floats"].values.to_numpy()
    counts = row["counts"].values.to_numpy() if row["counts"].is_valid else None
    places = {name: row[name].as_py() for name in ("name", "start", "end")}
    return Side(**places, array=flat.reshape(row["shape"].as_py()), counts=counts)


# ---------------------------------------------------------------- a recorded run


class Recording:
    """A file of groups in place of a run, for a training loop that is developed without a fabric.

    `recording.groups(…)` gives what `run.groups(…)` would; the next call goes on where the last one ended. Nothing is
    acknowledged, because nobody waits for it; a `with` block that raises gives its groups back, marked `redelivered`.
    """

    def __init__(self, path: str | Path) -> None:
        """Raise as read_groups does."""
        self.path = Path(path)
        self._groups = read_groups(path)
        self._again: deque[Group] = deque()

    def groups(
        self,
        *,
        timeout: float | None = None,
        consumer: str = "trainer",
        count: int | None = None,
        keep: str | Keep | None = None,
        refill: Any = None,
        takeover: float = 0.0,
    ) -> RecordedGroups:
        """Yield groups as AsyncRun.groups does, by `count` and `keep`; its other arguments change nothing here.

        Raises:
            InputError: as AsyncRun.groups.
        """
        check_wait("groups", timeout)
        check_count_max("groups", count)
        check_refill(keep, refill)
        return RecordedGroups(self, count, find_filter(keep))

    def take(self) -> Group | None:
        """Return the next group; None: there are no more."""
        return self._again.popleft() if self._again else next(self._groups, None)

    def put_back(self, groups: Iterable[Group]) -> None:
        """Have groups come again, in their order, before all others."""
        self._again.extendleft(replace(each, redelivered=True) for each in reversed(list(groups)))


class RecordedGroups:
    """Groups out of a file, with the surface of client.Groups."""

    def __init__(self, recording: Recording, count: int | None, keep: Keep) -> None:
        self._recording = recording
        self._count = self._left = count
        self._keep = keep
        self._held: list[Group] | None = None
        self.dropped_count = 0
        self.ended_why = ""

    def __iter__(self) -> RecordedGroups:
        return self

    def __next__(self) -> Group:
        if self._left == 0:
            self.ended_why = f"all {self._count} groups came"
            raise StopIteration
        while (group := self._recording.take()) is not None and not self._keep(group):
            self.dropped_count += 1
        if group is None:
            self.ended_why = f"{self._recording.path} holds no more groups"
            raise StopIteration
        if self._left is not None:
            self._left -= 1
        if self._held is not None:
            self._held.append(group)
        return group

    def __enter__(self) -> RecordedGroups:
        self._held = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        held, self._held = self._held or [], None
        if error is not None:
            self._recording.put_back(held)
