"""How all tests are run in parts: what fits is run, what does not is told, and a failure is a failure."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.again import VARIABLE
from tests.parts import MARGIN, PARTS, Part, main, run
from tests.support.tried import cases

ROOT = Path(__file__).parents[2]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


class Machine:
    """Takes so many seconds for a share of 1. breaks: names of parts that fail. again: those with a test that passes
    only alone.
    """

    def __init__(self, unit_s: float, breaks: tuple[str, ...] = (), again: tuple[str, ...] = ()) -> None:
        self.unit_s, self.breaks, self.again = unit_s, breaks, again
        self.time_s, self.made = 0.0, list[str]()

    def make(self, part: Part) -> tuple[bool, tuple[str, ...]]:
        self.time_s += self.unit_s * part.share
        self.made.append(part.name)
        return part.name not in self.breaks, ("tests/test_a.py::test_b",) if part.name in self.again else ()

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
    def make(part: Part) -> tuple[bool, tuple[str, ...]]:
        if part.name == "b":
            raise KeyboardInterrupt
        return True, ()

    found = run([Part(name, (name,), 1.0) for name in "abc"], None, make, lambda: 0.0)
    assert [(each.name, each.is_good, each.told) for each in found][1:] == [("b", False, "INTERRUPTED")]


@pytest.mark.parametrize("text", ["0", "-5", "1e-9", "nan", "inf", "abc", ""])
def test_a_limit_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--minutes", text])
    assert ended.value.code == 2


def test_what_was_left_out_says_so_with_its_command() -> None:
    parts = [Part("first", ("test",), 1.0), Part("second", ("test-slow",), 10.0)]
    machine = Machine(60.0, again=("first",))
    found = run(parts, 120.0, machine.make, lambda: machine.time_s)
    assert found[0].again == ("tests/test_a.py::test_b",)
    assert [each.told for each in found] == [
        "passed in 1.0 min, 1 ONLY ALONE:",
        f"LEFT OUT: it takes {10 * MARGIN:.0f} min, and 1 are left; make test-slow",
    ]


def test_every_test_is_in_one_part_and_every_part_is_a_target() -> None:
    targets = dict(re.findall(r"^([a-z-]+):.*\n((?:\t.*\n)*)", MAKEFILE, re.MULTILINE))
    recipes = "".join(targets[word] for part in PARTS for word in part.words)
    assert re.findall(r'(tests|MARKED,\w+\)) -m ("[^"]+"|\w+)', recipes) == [
        ("tests", '"not slow and not alone"'),
        ("MARKED,slow)", '"slow and not long and not alone"'),
        ("MARKED,alone)", "alone"),
        ("MARKED,long)", '"long and not alone"'),
    ]
    # And a mark is written in the file whose tests have it, where the recipes look for it
    places = [
        path for path in (ROOT / "tests").rglob("*.py") if re.search(r"mark\.(slow|long|alone)\b", path.read_text())
    ]
    assert [str(path) for path in places if not path.name.startswith("test_")] == []


BESIDE = 'beside = "PYTEST_XDIST_WORKER" in os.environ or "PYTEST_PLUGINS" in os.environ\n'
NEEDS_THE_MACHINE = f"""
import os, pytest
{BESIDE}
@pytest.mark.parametrize("place", ["a", "b c"])
def test_needs_the_machine_for_itself(place):
    assert not beside

def test_passes():
    pass
"""
FAULTS = {  # what else is there → its file
    "is broken": "def test_is_broken():\n    assert False\n",
    "cannot be read": "import no_such_module\n\n\ndef test_is_lost():\n    pass\n",
    "is skipped alone": f"import os, pytest\n{BESIDE}\ndef test_skips():\n    assert not beside\n    pytest.skip()\n",
}


@pytest.mark.parametrize("fault", cases(["is broken", "", "cannot be read", "is skipped alone"], 1))
def test_what_fails_beside_others_is_played_again_alone_and_named_and_a_fault_stays_one(
    fault: str, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    (tmp_path / "test_two.py").write_text(NEEDS_THE_MACHINE)
    if fault:
        (tmp_path / "test_fault.py").write_text(FAULTS[fault])
    place = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    place |= {"PYTEST_PLUGINS": "tests.again", VARIABLE: str(again)}
    options = ["-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-c", str(ROOT / "pyproject.toml")]
    words = [sys.executable, "-m", "pytest", *options, "--numprocesses", "1", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=place, capture_output=True, text=True, check=False)
    name = "test_two.py::test_needs_the_machine_for_itself"
    assert done.returncode == (1 if fault else 0), done.stdout
    assert ("failed; once more" in done.stdout) == (fault != "cannot be read")
    assert not again.exists() if fault else again.read_text().splitlines() == [f"{name}[a]", f"{name}[b c]"]
