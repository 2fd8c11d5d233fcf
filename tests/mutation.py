"""`python -m tests.mutation --lines 100 --seed 1`: break random lines, one at a time, and see which breaks tests find.

- Comparisons, `and` and `or`, numbers, statements, returns and raises are broken, in the folders of ROOMS.
- The unit and contract tests that run a broken line look for it, then a few simulated runs.
- Which tests run which lines is measured once for each test file, and kept outside the tree.
- The same seed breaks the same lines of the same tree. A break that changes nothing counts as survived.

Everything happens in copies of the tree; a test that fails in one that is whole takes no part.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("fabric/queue", "fabric/rules", "fabric/versions", "workers/rollout")
TESTS = ("tests/unit", "tests/contracts")
CACHE = Path.home() / ".cache" / "rollfab" / "mutation"
TESTS_S_MAX = 60.0  # of the tests that look for one break, the quickest first
PYTEST = ("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-o", "timeout=120", "--hypothesis-seed=0")
SIMULATION = ("-m", "tests.sim", "--seed", "1", "--seeds", "4")
SWAPS = "Eq NotEq|Lt GtE|Gt LtE|Is IsNot|In NotIn|And Or".split("|")
SWAPPED = {getattr(ast, a): getattr(ast, b) for pair in SWAPS for a, b in (pair.split(), pair.split()[::-1])}
LUA_TOKEN = re.compile(r"'[^']*'|--.*|(?P<word>==|~=|<=|>=|<|>|\band\b|\bor\b|(?<![\w.])\d+\b)")
LUA_SWAPPED = {"==": "~=", "~=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">", "and": "or", "or": "and"}


@dataclass(frozen=True)
class Mutant:
    """A broken line. lines: a test that runs one of them may find it."""

    path: str
    lines: range
    source: str
    change: str


# ---- what is broken


def python_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Make every break of one file."""
    tree, raw = ast.parse(source), source.encode()
    starts = [0, *accumulate(map(len, raw.splitlines(keepends=True)))]
    skipped = {id(part) for node in ast.walk(tree) for root in _unbroken(node) for part in ast.walk(root)}
    for node in ast.walk(tree):
        if id(node) in skipped or (text := _broken(node)) is None:
            continue
        assert isinstance(node, (ast.expr, ast.stmt)) and node.end_lineno and node.end_col_offset
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        changed = (raw[:begin] + text.encode() + raw[end:]).decode()
        was = " ".join(raw[begin:end].decode().split())
        yield Mutant(path, range(node.lineno, node.end_lineno + 1), changed, f"{was} → {text}")


def _unbroken(node: ast.AST) -> Iterator[ast.AST]:
    """Find what of a node is not run, or stands where Python does not say: annotations, f-strings."""
    if isinstance(node, ast.JoinedStr):
        yield node
    for name in ("annotation", "returns"):
        if isinstance(found := getattr(node, name, None), ast.AST):
            yield found


def _broken(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(left=left, ops=[op, *ops], comparators=rest):
            return f"({ast.unparse(ast.Compare(left, [SWAPPED[type(op)](), *ops], rest))})"
        case ast.BoolOp(op=op, values=values):
            return f"({ast.unparse(ast.BoolOp(SWAPPED[type(op)](), values))})"
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return repr(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return "return None"
        case ast.Raise() | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return "pass"
        case ast.Expr(value=ast.Call() | ast.Await()) if not ast.unparse(node).startswith("log."):
            return "pass"
    return None


def lua_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Make every break of one script."""
    lines = source.splitlines(keepends=True)
    for index, line in enumerate(lines):
        for each in LUA_TOKEN.finditer(line):
            if word := each["word"]:
                text = LUA_SWAPPED.get(word) or str(int(word) + 1)
                changed = line[: each.start()] + text + line[each.end() :]
                yield _line_mutant(path, lines, index, changed, f"{word} → {text}: {line.strip()}")
        if re.match(r"\s*[\w.]+\(.*\)$", line):
            yield _line_mutant(path, lines, index, "\n", f"{line.strip()} → nothing")


def _line_mutant(path: str, lines: list[str], index: int, changed: str, change: str) -> Mutant:
    source = "".join([*lines[:index], changed, *lines[index + 1 :]])
    return Mutant(path, range(index + 1, index + 2), source, change)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Draw one break of each of `count` lines."""
    places: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted(each for room in ROOMS for each in (ROOT / room).rglob("*.*")):
        make = {".py": python_mutants, ".lua": lua_mutants}.get(path.suffix)
        for mutant in make(str(path.relative_to(ROOT)), path.read_text()) if make else ():
            places.setdefault((mutant.path, mutant.lines[0]), []).append(mutant)
    random = Random(seed)
    return [random.choice(places[place]) for place in random.sample(sorted(places), count)]


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
            threading.settrace(None)  # type: ignore[arg-type]
            if (test := self.found.get(item.nodeid)) is not None:
                for path, line in sorted(self._now):
                    test["lines"].setdefault(path.removeprefix(f"{ROOT}/src/rollfab/"), []).append(line)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.found[report.nodeid] = {"seconds": report.duration, "lines": {}}


def tests_that_run() -> dict[str, dict[str, Any]]:
    """Read what each test runs; measure the test files that are not measured."""
    rooms = sha256(b"".join(each.read_bytes() for room in ROOMS for each in sorted((ROOT / room).rglob("*.py"))))
    cached = {}
    for path in sorted(each for folder in TESTS for each in (ROOT / folder).rglob("test_*.py")):
        digest = sha256(rooms.digest() + path.read_bytes()).hexdigest()
        cached[str(path.relative_to(ROOT))] = CACHE / f"{path.stem}-{digest[:16]}.json"
    if missing := [path for path, kept in cached.items() if not kept.exists()]:
        CACHE.mkdir(parents=True, exist_ok=True)
        with copied() as tree:
            command = [sys.executable, "-m", "tests.mutation", "--measure", *missing]
            subprocess.run(command, cwd=tree, env=environment(tree), check=True)
            found = json.loads((tree / "measured.json").read_text())
        for path in missing:
            own = {name: test for name, test in found.items() if name.startswith(f"{path}::")}
            cached[path].write_text(json.dumps(own))
    return {name: test for kept in cached.values() for name, test in json.loads(kept.read_text()).items()}


def looking_for(mutant: Mutant, tests: dict[str, dict[str, Any]]) -> list[str]:
    """Choose the tests that may find a break, the quickest first."""
    path = Path(mutant.path)
    if path.suffix == ".lua":
        users = {path.stem, *(each.stem for each in (ROOT / ROOMS[0]).rglob("*.lua") if uses(each, path.stem))}
        found = {name for name, test in tests.items() if not users.isdisjoint(test["lines"])}
    else:
        ran = {name: test["lines"][mutant.path] for name, test in tests.items() if mutant.path in test["lines"]}
        found = {name for name, lines in ran.items() if any(line in mutant.lines for line in lines)} or set(ran)
    order = sorted(found, key=lambda name: (tests[name]["seconds"], name))
    spent = accumulate(tests[name]["seconds"] for name in order)
    return [name for name, seconds in zip(order, spent, strict=True) if seconds < TESTS_S_MAX]


def uses(script: Path, name: str) -> bool:
    """Whether a script begins with the text of another."""
    return any(line.startswith("-- use ") and name in line.split() for line in script.read_text().splitlines())


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


def environment(tree: Path) -> dict[str, str]:
    """Have Python run the code of a copy."""
    return {**os.environ, "PYTHONPATH": f"{tree}/src"}


def finder_of(mutant: Mutant, tree: Path, tests: list[str]) -> str:
    """Break a copy, look, and mend it. Returns what found the break, or nothing."""
    target = tree / mutant.path
    target.write_text(mutant.source)
    (tree / "tests.txt").write_text("\n".join(tests))
    try:
        for words in ([(*PYTEST, "-x", "@tests.txt")] if tests else []) + [SIMULATION]:
            command = [sys.executable, *words]
            done = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True, timeout=900)
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
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        recorder = Recorder()
        pytest.main([*PYTEST[2:], *given.measure], plugins=[recorder])
        Path("measured.json").write_text(json.dumps(recorder.found))
        return 0
    tests, count = tests_that_run(), 0
    with copied() as first, ThreadPoolExecutor(given.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for job in range(given.jobs):
            trees.put(
                Path(
                    shutil.copytree(
                        first, first / f"copy-{job}", symlinks=True, ignore=shutil.ignore_patterns("copy-*")
                    )
                )
            )

        def look(mutant: Mutant) -> tuple[Mutant, int, str]:
            tree, looking = trees.get(), looking_for(mutant, tests)
            try:
                return mutant, len(looking), finder_of(mutant, tree, looking)
            finally:
                trees.put(tree)

        for mutant, test_count, finder in pool.map(look, drawn(given.lines, given.seed)):
            count += bool(finder)
            what = f"found by {finder}" if finder else f"SURVIVED {test_count} tests"
            print(f"{mutant.path}:{mutant.lines[0]}: {mutant.change}\n    {what}", flush=True)
    print(f"{count} of {given.lines} found: {count / given.lines:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
