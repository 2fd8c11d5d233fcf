"""`python -m tests.mutation --lines 100 --seed 1`: break random lines, one at a time, and see which breaks tests find.

- What is broken lies in the folders of ROOMS: see tests/support/mutants.py.
- The unit and contract tests that run a broken line look for it, then a few simulated runs.
- Which tests run which lines is measured once for each test file, and kept outside the tree.
- The same seed breaks the same lines of the same tree. A break that changes nothing counts as survived.

Everything happens in copies of the tree; a test that fails in one that is whole takes no part.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any

import pytest

from tests.support.mutants import ROOMS, ROOT, Mutant, drawn, sources

TESTS = ("tests/unit", "tests/contracts", "tests/house")
CACHE = Path.home() / ".cache" / "rollfab" / "mutation"
TESTS_S_MAX = 60.0  # of the tests that look for one break, the quickest first
PYTEST = [*"-m pytest -q -p no:xdist -p no:cacheprovider -o timeout=120 --hypothesis-seed=0 -m".split(), "not slow"]
SIMULATION = "-m tests.sim --seed 1 --seeds 4".split()


# ---- which tests run what


class Recorder:
    """A plugin of pytest: notes the lines of ROOMS and the scripts that each test runs, and how long it takes."""

    def __init__(self) -> None:
        self._rooms = tuple(f"{ROOT}/src/rollfab/{room}/" for room in ROOMS)
        self._now: set[tuple[str, int]] = set()
        self.found: dict[str, dict[str, Any]] = {}

    def _call(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(self._rooms):
            return None
        if code.co_name == "_script":  # of fabric/queue/scripts.py
            self._now.add((frame.f_locals["name"], 0))
        return self._line(frame, event, arg)

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self._now.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._now = set()
        sys.settrace(self._call)
        threading.settrace(self._call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            if (test := self.found.get(item.nodeid)) is not None:
                for path, line in sorted(self._now):
                    test["lines"].setdefault(path.removeprefix(f"{ROOT}/src/rollfab/"), []).append(line)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.found[report.nodeid] = {"seconds": report.duration, "lines": {}}


def tests_that_run() -> dict[str, dict[str, Any]]:
    """Read what each test runs; measure the test files that are not measured."""
    rooms = sha256(b"".join(each.read_bytes() for each in sources("*.py")))
    cached = {}
    for test_file in sorted(each for folder in TESTS for each in (ROOT / folder).rglob("test_*.py")):
        digest = sha256(rooms.digest() + test_file.read_bytes()).hexdigest()
        cached[str(test_file.relative_to(ROOT))] = CACHE / f"{test_file.stem}-{digest[:16]}.json"
    if missing := [path for path, kept in cached.items() if not kept.exists()]:
        CACHE.mkdir(parents=True, exist_ok=True)
        with copied() as tree:
            python_in(tree, ["-m", "tests.mutation", "--measure", *missing], check=True)
            found = json.loads((tree / "measured.json").read_text())
        for path in missing:
            own = {name: test for name, test in found.items() if name.startswith(f"{path}::")}
            cached[path].write_text(json.dumps(own))
    return {name: test for kept in cached.values() for name, test in json.loads(kept.read_text()).items()}


def looking_for(mutant: Mutant, tests: dict[str, dict[str, Any]]) -> list[str]:
    """Choose the tests that may find a break, the quickest first."""
    path = Path(mutant.path)
    if path.suffix == ".lua":
        is_used = re.compile(rf"^-- use .*\b{path.stem}\b", re.MULTILINE)
        users = {path.stem, *(each.stem for each in sources("*.lua") if is_used.search(each.read_text()))}
        found = {name for name, test in tests.items() if not users.isdisjoint(test["lines"])}
    else:
        ran = {name: test["lines"][mutant.path] for name, test in tests.items() if mutant.path in test["lines"]}
        found = {name for name, lines in ran.items() if any(line in mutant.lines for line in lines)} or set(ran)
    order = sorted(found, key=lambda name: (tests[name]["seconds"], name))
    spent = accumulate(tests[name]["seconds"] for name in order)
    return [name for name, seconds in zip(order, spent, strict=True) if seconds < TESTS_S_MAX]


# ---- looking


@contextmanager
def copied() -> Iterator[Path]:
    """Copy the tree as it stands."""
    with tempfile.TemporaryDirectory(prefix="rollfab-mutation-") as folder:
        listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True)
        for name in listed.splitlines():
            if os.path.lexists(ROOT / name):
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, Path(folder) / name, follow_symlinks=False)
        yield Path(folder)


def python_in(tree: Path, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the code of a copy."""
    path = {**os.environ, "PYTHONPATH": f"{tree}/src"}
    return subprocess.run([sys.executable, *words], cwd=tree, env=path, text=True, **options)


def finder_of(mutant: Mutant, tree: Path, tests: list[str]) -> str:
    """Break a copy, look, and mend it. Returns what found the break, or nothing."""
    target = tree / mutant.path
    target.write_text(mutant.source)
    (tree / "tests.txt").write_text("\n".join(tests))
    try:
        for words in ([[*PYTEST, "-x", "@tests.txt"]] if tests else []) + [SIMULATION]:
            done = python_in(tree, words, capture_output=True, timeout=400)
            if done.returncode:
                failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
                return failed[1] if failed else f"{words[1]} ({(done.stdout + done.stderr).strip().splitlines()[-1]})"
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        shutil.copy2(ROOT / mutant.path, target)
    return ""


def main() -> int:
    """Print a line per break, then the share that was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--lines", type=int, default=100, help="how many lines to break")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--jobs", type=int, default=1, help="how many copies at once")
    parser.add_argument("--under", nargs="+", default=ROOMS, help="folders and files to break")
    parser.add_argument("--without", nargs="+", default=[], help="folders and files of tests that take no part")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        recorder = Recorder()
        pytest.main([*PYTEST[2:], *given.measure], plugins=[recorder])
        Path("measured.json").write_text(json.dumps(recorder.found))
        return 0
    tests = {name: test for name, test in tests_that_run().items() if not name.startswith(tuple(given.without))}
    mutants, found_count = drawn(given.lines, given.seed, tuple(given.under)), 0
    with ExitStack() as stack, ThreadPoolExecutor(given.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for _ in range(given.jobs):
            trees.put(stack.enter_context(copied()))

        def look(mutant: Mutant) -> tuple[Mutant, int, str]:
            tree, looking = trees.get(), looking_for(mutant, tests)
            try:
                return mutant, len(looking), finder_of(mutant, tree, looking)
            finally:
                trees.put(tree)

        for mutant, test_count, finder in pool.map(look, mutants):
            found_count += bool(finder)
            said = f"found by {finder}" if finder else f"SURVIVED {test_count} tests"
            print(f"{mutant.path}:{mutant.lines[0]}: {mutant.change}\n    {said}", flush=True)
    print(f"{found_count} of {len(mutants)} found: {found_count / len(mutants):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
