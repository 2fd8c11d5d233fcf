"""What a record read from the broker may hold is bounded in its decoder, whoever wrote it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rollfab.fabric.contract.errors import WireError
from rollfab.fabric.contract.records import RunConfig, Sampling, TurnJob, WorkerInfo
from rollfab.fabric.contract.wire import HEADER, Record
from tests.fuzz.targets import RECORDS

RUN = RunConfig(run_id="r", model="tiny", environment="e")
WORKER = WorkerInfo(worker_id="w", role="serving", pid=1, host="box")
TURN = next(each for each in RECORDS if isinstance(each, TurnJob))


def altered(record: Record, **values: Any) -> bytes:
    """A record as somebody else than this program may write it."""
    data = record.encode()
    *head, length = HEADER.unpack_from(data)
    meta = json.loads(data[HEADER.size : HEADER.size + length]) | values
    text = json.dumps(meta).encode()
    text += b" " * (-(HEADER.size + len(text)) % 8)
    return HEADER.pack(*head, len(text)) + text + data[HEADER.size + length :]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shard_count", 0),
        ("shard_count", -1),
        ("shard_count", 10**9),
        ("turn_count_max", 10**9),
        ("trajectory_count_max", 0),
        ("memory_bytes_max", -1),
        ("attempt_count_max", 1 << 60),
        ("staleness", -1),
        ("weight", 0.0),
        ("weight", -1.0),
        ("weight", 1e-300),
        ("when_stale", "drop"),
        ("turns_at_commit", ""),
        ("weight_carrier", "pigeon"),
    ],
)
def test_a_run_with_an_impossible_setting_is_no_run(name: str, value: Any) -> None:
    with pytest.raises(WireError, match=f"RunConfig: {name} is .*expected"):
        RunConfig.decode(altered(RUN, **{name: value}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_count", -1),
        ("slot_count", 1 << 40),
        ("running_count", -5),
        ("token_count", -1),
        ("active_version", -2),
        ("headroom_fraction", 1.5),
        ("open_fraction", -0.1),
        ("wake_ms", -1),
        ("tokens_per_s", -1.0),
        ("payload_bytes", 1 << 60),
    ],
)
def test_a_number_s_unit_bounds_it(name: str, value: Any) -> None:
    with pytest.raises(WireError, match=f"WorkerInfo: {name} is .*expected from"):
        WorkerInfo.decode(altered(WORKER, **{name: value}))


def test_parts_of_a_record_are_bounded_too() -> None:
    sampling = dataclasses.asdict(Sampling()) | {"temperature": 1e9}
    with pytest.raises(WireError, match=r"TurnJob.sampling: temperature is .*expected"):
        TurnJob.decode(altered(TURN, sampling=sampling))


def test_what_is_within_its_bounds_is_read_as_it_was_sent() -> None:
    assert RunConfig.decode(RUN.encode()) == RUN
    assert WorkerInfo.decode(altered(WORKER, headroom_fraction=-3.5)).headroom_fraction == -3.5
    assert all(type(each).decode(each.encode()) is not None for each in RECORDS)
