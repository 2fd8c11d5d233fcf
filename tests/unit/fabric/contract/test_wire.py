"""Records survive the wire exactly, and nothing else is accepted."""

from __future__ import annotations

import contextlib
import functools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import InputError, PayloadTooLarge, SchemaUnknown, WireError
from rollfab.fabric.contract.lease_plan import LeasePlan
from rollfab.fabric.contract.records import (
    RunConfig,
    Sampling,
    Span,
    TokenLog,
    TurnJob,
    TurnResult,
    WorkerInfo,
)
from rollfab.fabric.contract.wire import check_size, dump_json, load_json
from tests.support.records import new_rollout

token = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)
spans = st.lists(st.builds(Span, st.integers(0, 9), st.integers(0, 9), st.text(max_size=5), st.integers(-1, 9)))


@given(st.lists(st.tuples(token, floats), max_size=40), spans)
def test_a_token_log_comes_back_bit_for_bit(tokens: list[tuple[int, float]], made: list[Span]) -> None:
    log = TokenLog(
        spans=tuple(made),
        completion_ids=np.array([each for each, _ in tokens], np.int32),
        logprobs=np.array([each for _, each in tokens], np.float32),
    )
    again = TokenLog.decode(log.encode())
    assert again.spans == log.spans
    assert again.completion_ids.tobytes() == log.completion_ids.tobytes()
    assert again.logprobs.tobytes() == log.logprobs.tobytes()


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused_and_nothing_else_happens(data: bytes) -> None:
    with pytest.raises(WireError):
        TurnResult.decode(data)


@given(st.data())
def test_a_damaged_record_is_refused_or_reads_as_some_record(data: st.DataObject) -> None:
    raw = bytearray(TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=np.arange(9)).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        TurnJob.decode(bytes(raw))


@given(st.integers(0, 400))
def test_a_cut_off_record_is_refused(length: int) -> None:
    raw = TurnJob(turn_id="g.0.0", agent_id="a", sampling=Sampling(), prompt_ids=np.arange(60)).encode()
    if length < len(raw):
        with pytest.raises(WireError):
            TurnJob.decode(raw[:length])


def test_a_record_of_a_newer_schema_says_what_to_do() -> None:
    raw = bytearray(TokenLog().encode())
    raw[2] = 9
    with pytest.raises(SchemaUnknown, match="upgrade the older side"):
        TokenLog.decode(bytes(raw))


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(WireError, match="kind"):
        TokenLog.decode(new_rollout(()).encode())


def test_decoded_arrays_are_read_only_views() -> None:
    raw = TokenLog(completion_ids=np.arange(4, dtype=np.int32), logprobs=np.zeros(4, np.float32)).encode()
    with pytest.raises(ValueError, match="read-only"):
        TokenLog.decode(raw).completion_ids[0] = 1


def test_nan_in_metadata_is_refused_where_json_would_make_it_null() -> None:
    rollout = new_rollout((), reward=math.nan)
    with pytest.raises(InputError, match="reward"):
        rollout.encode()
    for seed in (None, 7):
        sampling = Sampling(temperature=math.nan, seed=seed)
        with pytest.raises(InputError, match=r"sampling\.temperature is nan"):
            TurnJob(turn_id="g.0.0", agent_id="a", sampling=sampling, prompt_ids=np.arange(3)).encode()


def test_the_oldest_span_is_the_policy_version() -> None:
    log = (Span(0, 1, "w", 4), Span(1, 2, "w", 3))
    assert min(span.policy_version for span in log) == 3


def test_json_that_is_none_is_refused() -> None:
    with pytest.raises(WireError):
        load_json(b"{")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (
            {"a": {"b": [1, np.int64(3)]}},
            r"^value.a.b\[1\] cannot be sent as JSON: .*numpy.int64: give plain",
        ),
        ({"a": 2**70}, "^value.a cannot be sent as JSON: Integer exceeds 64-bit range: give plain"),
        ({"a": {1: 2}}, "^value.a cannot be sent as JSON: Dict key must be str: give plain .* texts as keys"),
        (functools.reduce(lambda inner, _: [inner], range(9000), 1), "^value cannot .* let it be flatter, at most 254"),
    ],
)
def test_what_json_has_no_word_for_is_told_with_its_place(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        dump_json(value)


def test_a_payload_above_its_limit_names_itself() -> None:
    with pytest.raises(PayloadTooLarge, match="task 3 is 11 bytes, the limit is 10") as caught:
        check_size("task 3", b"x" * 11, 10)
    assert caught.value.facts == {"size_bytes": 11, "limit_bytes": 10}


def test_what_an_older_or_a_newer_worker_says_of_itself_is_read() -> None:
    class Newer(WorkerInfo):
        """A subclass with one more field, of the same kind."""

    info = WorkerInfo(worker_id="w", role="dedicated", pid=1, host="h", engine="vllm 9", wake_ms=3, sleep_note="no")
    assert WorkerInfo.decode(info.encode()) == info
    fields = dict(info.__dict__)
    newer = object.__new__(Newer)
    newer.__dict__.update({**fields, "mood": "fine"})
    assert WorkerInfo.decode(newer.encode()) == info
    older = object.__new__(Newer)
    older.__dict__.update({name: fields[name] for name in ("worker_id", "role", "pid", "host", "state")})
    assert WorkerInfo.decode(older.encode()) == WorkerInfo(worker_id="w", role="dedicated", pid=1, host="h")


def test_a_plan_of_an_older_controller_is_read_and_advises_nothing() -> None:
    plan = LeasePlan(controller_id="c", term=1, made_at_ms=2)
    older = object.__new__(LeasePlan)
    older.__dict__.update({name: value for name, value in vars(plan).items() if name != "extra_requests"})
    assert b"extra_requests" not in older.encode()
    assert LeasePlan.decode(older.encode()) == plan


def test_a_field_that_nobody_declared_is_refused_elsewhere() -> None:
    config = object.__new__(RunConfig)
    config.__dict__.update({"run_id": "r", "model": "m", "environment": "e", "mood": "fine"})
    with pytest.raises(WireError, match="mood"):
        RunConfig.decode(config.encode())


def test_settings_of_a_run_come_back_as_they_were() -> None:
    config = RunConfig(run_id="r", model="m", environment="e", environment_options={"a": [1, 2.5, None]})
    assert RunConfig.decode(config.encode()) == config
