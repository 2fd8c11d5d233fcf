"""How all tests are run in parts: what fits is run, what does not is told, and a failure is a failure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.parts import MARGIN, PARTS, Part, main, run

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text("utf-8")


class Machine:
    """Takes so many seconds for a share of 1. breaks: names of parts that fail."""

    def __init__(self, unit_s: float, breaks: tuple[str, ...] = ()) -> None:
        self.unit_s, self.breaks = unit_s, breaks
        self.time_s, self.made = 0.0, list[str]()

    def make(self, part: Part) -> bool:
        self.time_s += self.unit_s * part.share
        self.made.append(part.name)
        return part.name not in self.breaks

    def run(self, limit_s: float | None) -> list[tuple[str, bool | None]]:
        parts = [Part(name, (name,), share) for name, share in (("a", 1.0), ("b", 3.0), ("c", 0.5), ("d", 0.1))]
        return [(each.name, each.is_good) for each in run(parts, limit_s, self.make, lambda: self.time_s)]


def test_without_a_limit_all_parts_run_and_one_that_fails_keeps_none_from_running() -> None:
    machine = Machine(1000.0, breaks=("b",))
    assert machine.run(None) == [("a", True), ("b", False), ("c", True), ("d", True)]
    assert machine.made == ["a", "b", "c", "d"]


def test_a_part_that_would_not_end_in_time_is_left_out_and_smaller_ones_run() -> None:
    machine = Machine(100.0)
    assert machine.run(200.0) == [("a", True), ("b", None), ("c", True), ("d", True)]
    assert machine.time_s <= 200.0
    assert Machine(100.0).run(500.0 * MARGIN) == [("a", True), ("b", True), ("c", True), ("d", True)]


def test_with_a_limit_nothing_is_begun_behind_a_first_part_that_failed_and_its_time_tells_nothing() -> None:
    assert Machine(100.0, breaks=("a",)).run(500.0) == [("a", False), ("b", None), ("c", None), ("d", None)]
    assert Machine(100.0, breaks=("b",)).run(500.0) == [("a", True), ("b", False), ("c", True), ("d", True)]


def test_an_interrupt_ends_it_with_what_was_done_until_then() -> None:
    def make(part: Part) -> bool:
        if part.name == "b":
            raise KeyboardInterrupt
        return True

    found = run([Part(name, (name,), 1.0) for name in "abc"], None, make, lambda: 0.0)
    assert [(each.name, each.is_good, each.told) for each in found][1:] == [("b", False, "INTERRUPTED")]


@pytest.mark.parametrize("text", ["0", "-5", "1e-9", "nan", "inf", "abc", ""])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--minutes", text])
    assert ended.value.code == 2


def test_what_was_left_out_says_so_with_its_command() -> None:
    parts = [Part("first", ("test",), 1.0), Part("second", ("test-slow",), 10.0)]
    machine = Machine(60.0)
    found = run(parts, 120.0, machine.make, lambda: machine.time_s)
    assert [each.told for each in found] == [
        "passed in 1.0 min",
        f"LEFT OUT: it takes {10 * MARGIN:.0f} min, and 1 are left; make test-slow",
    ]


def test_every_test_is_in_one_part_and_every_part_is_a_target() -> None:
    targets = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE))
    recipes = "".join(targets[word] for part in PARTS for word in part.words)
    assert re.findall(r'tests -m ("[^"]+"|\w+)', recipes) == [
        '"not slow and not alone"',
        '"slow and not long and not alone"',
        "alone",
        '"long and not alone"',
    ]
