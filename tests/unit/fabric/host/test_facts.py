"""A warning that comes again and again fills no disk."""

from __future__ import annotations

import logging
import subprocess
import sys

from rollfab.fabric.host.facts import EVENT_COUNT_MAX, LINE_COUNT_MAX, REPEAT_S, WINDOW_S, Flood


def record(event: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("rollfab.somewhere", level, __file__, 1, event, None, None)


def test_of_a_warning_that_repeats_some_lines_pass_each_minute_and_the_next_says_how_many_did_not() -> None:
    now_s = 0.0
    flood = Flood(lambda: now_s)

    # Given one that comes a thousand times a minute
    passed = [flood.filter(record("row.unreadable")) for _ in range(1000)]
    assert passed == [True] * LINE_COUNT_MAX + [False] * (1000 - LINE_COUNT_MAX)

    # Then another one passes, and what is no warning does
    assert flood.filter(record("lease.lost"))
    assert all(flood.filter(record("turn.done", logging.INFO)) for _ in range(1000))

    # And a minute later it is written again, with what was left out
    now_s += WINDOW_S
    late = record("row.unreadable")
    assert flood.filter(late)
    assert late.left_out == 1000 - LINE_COUNT_MAX  # type: ignore[attr-defined]
    next_one = record("row.unreadable")
    assert flood.filter(next_one)
    assert not hasattr(next_one, "left_out")


def test_the_same_error_with_the_same_facts_is_written_once_in_half_a_minute() -> None:
    now_s = 0.0
    flood = Flood(lambda: now_s)

    def refusal(error: str, **facts: str) -> logging.LogRecord:
        made = record("worker.heartbeat_failed")
        vars(made).update(error=error, **facts)
        return made

    # Given a refusal that comes four times a second, for half a minute
    assert [flood.filter(refusal("refused")) for _ in range(120)] == [True] + [False] * 119
    # Then another one, and that of another run, are written
    assert flood.filter(refusal("away")) and flood.filter(refusal("refused", run_id="r1"))
    # And then it is written again, with what was left out
    now_s += REPEAT_S
    late = refusal("refused")
    assert flood.filter(late) and late.left_out == 119  # type: ignore[attr-defined]


def test_texts_without_end_are_not_all_kept() -> None:
    flood = Flood(lambda: 0.0)
    assert all(flood.filter(record(f"text {number}")) for number in range(3 * EVENT_COUNT_MAX))
    assert len(flood._windows) <= EVENT_COUNT_MAX
    for number in range(3 * EVENT_COUNT_MAX):
        made = record("row.unreadable")
        made.error = f"text {number}"
        flood.filter(made)
    assert len(flood._lines) <= EVENT_COUNT_MAX


def test_a_program_that_sets_up_no_logging_sees_warnings_with_their_facts_until_it_does() -> None:
    code = """
import logging, sys
from rollfab.fabric.host.facts import show_facts
log = logging.getLogger("rollfab.trainer.anything")
show_facts(), show_facts()
log.info("weights.published")
log.warning("weights.not_looked_after", extra={"run_id": "r1", "error": "the broker is away"})
log.warning("run %r waits. Start a worker", "r1", extra={"run_id": "r1"})
logging.basicConfig(format="mine: %(message)s")
log.warning("weights.not_ours", extra={"run_id": "r1"})
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said.splitlines() == [
        "weights.not_looked_after run_id='r1' error='the broker is away'",
        "run 'r1' waits. Start a worker",
        "mine: weights.not_ours",
    ]
