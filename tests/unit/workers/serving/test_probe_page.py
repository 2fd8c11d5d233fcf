"""The probe's page: what a serving engine shows is what the guard reads."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.rules.serving.facts import ServingState, StepWork
from rollfab.workers.serving.probes.probe_page import (
    ALIVE_NS,
    AT_LAYOUT,
    AT_MAGIC,
    REQUEST_COUNT_MAX,
    RING,
    SEQ,
    SIZE_BYTES,
    ProbeWriter,
    writer_of,
)
from rollfab.workers.serving.probes.reader import LOOK_AGAIN_S, ProbeReader

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
    read(reader)
    has_ended = threading.Event()

    seen: set[int] = set()

    def write() -> None:
        number = 0
        while number < 20_000 or len(seen) < 2:
            number += 1
            shown(writer, waiting=[], running=[(number, number, number)] * 3, kv_used=number)
        has_ended.set()

    thread = threading.Thread(target=write)
    thread.start()
    while not has_ended.is_set():
        state = read(reader)
        if len(state.running) == 3:
            numbers = {one.token_count for one in state.running} | {state.kv_used_tokens}
            assert len(numbers) == 1
            seen |= numbers
    thread.join()


def test_what_was_read_while_it_changed_is_not_shown_later_either(tmp_path: Path) -> None:
    # Given a state that was read, and a newer one
    writer, reader = ProbeWriter(tmp_path / "page"), ProbeReader(tmp_path / "page")
    shown(writer, running=[(1, 1, 1)], kv_used=1)
    assert read(reader).kv_used_tokens == 1
    shown(writer, running=[(2, 2, 2)], kv_used=2)

    # When the writer goes on as that one is read, and then stands in the middle of the next
    page = reader._page
    assert page is not None
    rows = page.rows

    def rows_of_later(*place: Any) -> list[list[int]]:
        shown(writer, running=[(3, 3, 3)], kv_used=3)
        writer._set(SEQ, page.word(SEQ) + 1)
        return rows(*place)

    page.rows = rows_of_later  # type: ignore[method-assign]
    state = read(reader)

    # Then the last whole one is shown
    assert (state.kv_used_tokens, [each.token_count for each in state.running]) == (1, [1])


# ---- what is wrong with a page, and what to do


def trouble(path: Path, now_s: float = 4.0, **options: int) -> str:
    return ProbeReader(path, **options).trouble(now_s)  # type: ignore[arg-type]


def test_a_page_that_is_well_says_what_writes_it_and_nothing_else(tmp_path: Path) -> None:
    writer = ProbeWriter(tmp_path / "page", "vllm 9.9\x1b[2J")
    shown(writer)
    reader = ProbeReader(tmp_path / "page")

    assert reader.trouble(4.0) == ""
    assert (reader.engine(), reader.writer_pid()) == ("vllm 9.9 [2J", os.getpid())  # nothing a terminal would obey


def test_what_is_no_page_of_the_serving_engine_is_refused_by_name_with_the_next_step(
    tmp_path: Path,
) -> None:
    path = tmp_path / "page"
    assert f"ROLLFAB_PROBE={path} vllm serve" in trouble(path)

    (tmp_path / "page-dp0").touch()
    assert "data-parallel engine" in trouble(path) and "--probe " + str(tmp_path / "page-dp0") in trouble(path)

    shown(ProbeWriter(tmp_path / "good"))
    path.symlink_to(tmp_path / "good")
    assert "is a symbolic link" in trouble(path)
    path.unlink()

    os.mkfifo(path)  # opening one for reading waits for a writer
    assert "is no page of a probe" in trouble(path)
    path.unlink()

    path.mkdir()
    assert "is no page of a probe" in trouble(path)
    path.rmdir()

    for content in (b"x" * SIZE_BYTES, b"x"):
        path.write_bytes(content)
        assert "is no page of a probe" in trouble(path)

    page = bytearray((tmp_path / "good").read_bytes())
    path.write_bytes(page[:1000])
    assert "was cut short" in trouble(path)
    path.write_bytes(b"")
    assert "was cut short" in trouble(path)
    page[8 * AT_LAYOUT] += 1
    path.write_bytes(page)
    assert "was written by another version of rollfab: install the same" in trouble(path)

    good = tmp_path / "good"
    good.chmod(0o666)
    assert f"chmod go-w {good}" in trouble(good)
    good.chmod(0o644)
    assert trouble(good) == ""
    assert "has ended or stands still" in trouble(good, 90.0)


def test_a_page_of_another_user_is_believed_only_where_that_user_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fstat = tmp_path / "page", os.fstat
    shown(ProbeWriter(path))

    def of_another(handle: int) -> os.stat_result:
        fields = list(fstat(handle))
        fields[stat.ST_UID] = 4242
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", of_another)
    assert "belongs to user 4242, who may have forged it" in trouble(path) and "--probe-user 4242" in trouble(path)
    assert ProbeReader(path).read(4.0) is None
    assert trouble(path, owner_uid=4242) == ""


def test_a_page_that_is_cut_short_or_removed_ends_nobody_and_is_made_whole(tmp_path: Path) -> None:
    path = tmp_path / "page"
    writer, reader = ProbeWriter(path), ProbeReader(path)
    shown(writer)
    read(reader)
    now_s = 4.0
    for damage in (lambda: os.truncate(path, 0), lambda: os.truncate(path, 300), path.unlink):
        damage()
        reader.new_steps(), reader.arrived_count(), reader.change_count()
        writer.arrived(1 * S, 100)  # what goes on meanwhile
        writer.stepped(1 * S, S, STEP)
        now_s += 1.0
        writer.keep()
        writer.alive(round(now_s * S))

        reader.trouble(now_s)  # finds it
        assert reader.trouble(now_s + LOOK_AGAIN_S + 0.01) == ""
        assert read(reader, now_s).kv_capacity_tokens == 10_000
    assert path.stat().st_size == SIZE_BYTES


def test_a_page_that_another_engine_took_ends_this_one_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "page"
    first = ProbeWriter(path)
    first.keep()
    second = ProbeWriter(path)  # of the same process: as if the first had been frozen for long
    second.alive(time.monotonic_ns())
    with pytest.raises(ConfigError, match=f"process {os.getpid()} writes its page there; give every engine its own"):
        first.keep()
    second.keep()


def test_two_engines_with_one_path_are_refused(tmp_path: Path) -> None:
    made = """
import sys, time
from pathlib import Path
from typing import Any
from rollfab.workers.serving.probes.probe_page import ProbeWriter
writer = ProbeWriter(Path(sys.argv[1]))
writer.alive(time.monotonic_ns() + 500_000_000_000)
print(flush=True)
time.sleep(60)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "src")}
    words = [sys.executable, "-c", made, str(tmp_path / "page")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=environment) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            shown_alive(tmp_path / "page")
            with pytest.raises(ConfigError, match=f"process {other.pid} writes its page there"):
                ProbeWriter(tmp_path / "page")
        finally:
            other.kill()


def test_a_page_that_lives_and_is_ours_alone_names_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "page"
    ProbeWriter(path)
    assert writer_of(path) is None, "it has given no sign of life"
    shown_alive(path)
    assert writer_of(path) == os.getpid()
    with path.open("r+b") as file:
        file.seek(8 * AT_MAGIC)
        file.write(bytes(8))
    assert writer_of(path) is None


def shown_alive(path: Path) -> None:
    """As if its writer had just given a sign of life, however slow this machine is."""
    with path.open("r+b") as file:
        file.seek(8 * ALIVE_NS)
        file.write((time.monotonic_ns() - 1).to_bytes(8, "little"))


def test_files_that_a_writer_left_when_it_was_killed_do_not_stay(tmp_path: Path) -> None:
    old, new = tmp_path / ".page-aaaaaaaa", tmp_path / ".page-bbbbbbbb"
    for left in (old, new):
        left.write_bytes(b"")
    os.utime(old, (1.0, 1.0))

    ProbeWriter(tmp_path / "page")
    assert sorted(each.name for each in tmp_path.iterdir()) == [".page-bbbbbbbb", "page"]  # that may be another's

    (tmp_path / "directory").mkdir()
    with pytest.raises(ConfigError):
        ProbeWriter(tmp_path / "directory")
    assert not list(tmp_path.glob(".directory-*"))


def test_why_a_probe_has_ended_is_read_from_its_page(tmp_path: Path) -> None:
    writer = ProbeWriter(tmp_path / "page", "vllm 9.9")
    shown(writer)
    reader = ProbeReader(tmp_path / "page")
    read(reader)

    writer.end("vllm 9.9 has no Scheduler.schedule")

    told = reader.trouble(4.0)
    assert "has ended: vllm 9.9 has no Scheduler.schedule" in told and "--probe http://HOST:PORT" in told
