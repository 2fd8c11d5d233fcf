"""Causes of dead letters, and what is said of those that are retried or discarded."""

from __future__ import annotations

import pytest

from rollfab.fabric.contract.records import DeadLetter
from rollfab.fabric.rules.queue.dead import Refusal, cause_of, causes_of, of_cause, outcome_of


def letter(name: str, reason: str) -> DeadLetter:
    return DeadLetter(trajectory_id=name, run_id="r", worker_id="w", reason=reason, traceback="", attempt=0, job={})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("step hung for 30.5 s", "step hung for 7 s"),
        (
            "5 workers died with turn 0123456789abcdef0123.1.7 alone",
            "5 workers died with turn fedcba98765432100000.0.2 alone",
        ),
        ("OSError: port 1 is taken\nmore of it", "OSError: port 2 is taken\nother words"),
    ],
)
def test_reasons_that_differ_in_what_is_particular_are_of_one_cause(one: str, other: str) -> None:
    assert cause_of(one) == cause_of(other) and "#" in cause_of(one)


def test_a_cause_is_one_short_line_that_moves_no_cursor() -> None:
    assert cause_of("") == "(no reason was given)"
    assert cause_of("\x1b[2Jx" + "y" * 999).isprintable() and len(cause_of("y" * 999)) <= 200


def test_letters_are_counted_by_cause_and_chosen_by_its_words_or_the_reasons() -> None:
    letters = [letter("b.0", "port 1"), letter("a.1", "port 2"), letter("a.0", "port 3"), letter("a.2", "It hung")]
    found = [(row.cause, row.trajectory_count, row.group_count, row.example) for row in causes_of(letters)]
    assert found == [("port #", 3, 2, "a.0"), ("It hung", 1, 1, "a.2")]
    for text, count in ((None, 4), ("PORT", 3), ("port #", 3), ("port 2", 1), ("it h", 1), ("nothing", 0)):
        assert len(of_cause(letters, text)) == count


def test_an_outcome_counts_what_is_done_and_the_others_by_reason() -> None:
    found = outcome_of(
        {"a.0": "done", "a.1": "done", "b.0": "done", "c.0": "received", "c.1": "received", "d.0": "quorum"}
    )
    assert (found.trajectory_count, found.group_count) == (3, 2)
    assert [(each.code, each.trajectory_count, each.group_count) for each in found.refused] == [
        ("received", 2, 1),
        ("quorum", 1, 1),
    ]
    assert all(isinstance(each, Refusal) and each.reason for each in found.refused)
