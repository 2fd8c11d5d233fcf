"""The probe's page: what a serving engine shows is what the guard reads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from rollfab.fabric.errors import ConfigError
from rollfab.fabric.rules.serving import ServingState, StepWork
from rollfab.workers.serving.page import REQUEST_COUNT_MAX, RING, ProbeWriter
from rollfab.workers.serving.reader import LOOK_AGAIN_S, ProbeReader

S = 1_000_000_000
STEP = StepWork(prefill_tokens=64, decode_count=2, context_tokens=300)


def shown(writer: ProbeWriter, **changes: object) -> None:
    fields: dict[str, object] = {
        "waiting": [(1 * S, 100)],
        "running": [(2 * S, 7, 150)],
        "step": (3 * S, STEP),
        "known": 2,
        "kv_used": 450,
        "kv_capacity": 10_000,
    }
    writer.show(**(fields | changes))  # type: ignore[arg-type]
    writer.alive(4 * S)


def read(reader: ProbeReader, now_s: float = 4.0) -> ServingState:
    state = reader.read(now_s)
    assert state is not None
    return state


def test_requests_step_and_memory_read_as_they_were_written(tmp_path: Path) -> None:
    writer = ProbeWriter(tmp_path / "page")
    writer.arrived(1 * S, 100)
    writer.arrived(1 * S, 100)
    shown(writer)

    state = read(ProbeReader(tmp_path / "page"))

    assert [(one.arrived_at_s, one.prefill_tokens) for one in state.waiting] == [(1.0, 100)]
    assert [(one.first_token_at_s, one.token_count, one.context_tokens) for one in state.running] == [(2.0, 7, 150)]
    assert (state.step, state.step_began_at_s, state.seen_at_s) == (STEP, 3.0, 4.0)
    assert (state.kv_used_tokens, state.kv_capacity_tokens) == (450, 10_000)


def test_a_request_on_its_way_to_the_scheduler_waits_already(tmp_path: Path) -> None:
    writer, reader = ProbeWriter(tmp_path / "page"), ProbeReader(tmp_path / "page")
    shown(writer, waiting=[], known=0)
    assert read(reader).waiting == ()

    writer.arrived(5 * S, 321)

    assert [(one.arrived_at_s, one.prefill_tokens) for one in read(reader).waiting] == [(5.0, 321)]


def test_what_serving_does_counts_as_a_change_and_an_arrival_or_a_sign_of_life_does_not(tmp_path: Path) -> None:
    writer, reader = ProbeWriter(tmp_path / "page"), ProbeReader(tmp_path / "page")
    assert reader.change_count() == 0  # not found yet
    shown(writer)
    reader.read(time.monotonic())
    before = reader.change_count()

    writer.alive(time.monotonic_ns())
    writer.arrived(time.monotonic_ns(), 5)
    assert reader.change_count() == before

    shown(writer)
    assert reader.change_count() > before


def test_of_a_crowd_beyond_the_table_the_tokens_still_count(tmp_path: Path) -> None:
    writer = ProbeWriter(tmp_path / "page")
    shown(writer, waiting=[(S, 10)] * (REQUEST_COUNT_MAX + 44))

    waiting = read(ProbeReader(tmp_path / "page")).waiting

    assert sum(one.prefill_tokens for one in waiting) == 10 * (REQUEST_COUNT_MAX + 44)


def test_rings_give_every_row_once_and_lose_only_the_oldest(tmp_path: Path) -> None:
    writer, reader = ProbeWriter(tmp_path / "page"), ProbeReader(tmp_path / "page")
    shown(writer)
    read(reader)

    for number in range(3):
        writer.stepped(number * S, S // 100, STEP)
        writer.ended(0, 1 * S, 2 * S, number + 2)
    assert [step.began_at_s for step in reader.new_steps()] == [0.0, 1.0, 2.0]
    assert [end.token_count for end in reader.new_ends()] == [2, 3, 4]
    assert reader.new_steps() == []

    for number in range(RING + 10):
        writer.stepped(number * S, S // 100, STEP)
    found = [step.began_at_s for step in reader.new_steps()]
    assert found == [float(number) for number in range(RING + 10 - RING // 2, RING + 10)]


def test_the_page_of_an_engine_that_started_again_is_found_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "page"
    shown(ProbeWriter(path))
    reader = ProbeReader(path)
    read(reader)

    second = ProbeWriter(path)
    shown(second, waiting=[], running=[])
    second.alive(60 * S)

    state = read(reader, 60.0 + LOOK_AGAIN_S)
    assert (state.running, state.seen_at_s) == ((), 60.0)


def test_no_page_and_a_foreign_file_read_as_nothing(tmp_path: Path) -> None:
    (tmp_path / "foreign").write_bytes(b"x" * 200_000)

    assert ProbeReader(tmp_path / "none").read(1.0) is None
    assert ProbeReader(tmp_path / "foreign").read(1.0) is None


def test_a_page_that_cannot_be_made_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ROLLFAB_PROBE is .*missing/page.*/dev/shm"):
        ProbeWriter(tmp_path / "missing" / "page")


def test_a_reader_never_sees_half_of_what_belongs_together(tmp_path: Path) -> None:
    writer, reader = ProbeWriter(tmp_path / "page"), ProbeReader(tmp_path / "page")
    shown(writer)
    has_ended = threading.Event()

    def write() -> None:
        for number in range(1, 20_000):
            shown(writer, waiting=[], running=[(number, number, number)] * 3, kv_used=number)
        has_ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = set()
    while not has_ended.is_set():
        state = read(reader)
        if len(state.running) == 3:
            numbers = {one.token_count for one in state.running} | {state.kv_used_tokens}
            assert len(numbers) == 1
            seen |= numbers
    thread.join()
    assert len(seen) > 1
