"""Play each test that failed once more, with nothing beside it: a pytest plugin that `tests/parts.py` loads.

Several processes on few cores make a test wait that a quiet machine answers at once. A fault fails alone too, and then
the part fails. A test that passes only alone is named, in pytest's summary and in the last lines of all parts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

VARIABLE = "ROLLFAB_TESTS_AGAIN"  # names the file that takes the tests which passed only alone, one a line
COUNT_MAX = 20  # more are no fault of a busy machine

# Programs that a test starts may run pytest themselves.
_FILE = os.environ.pop(VARIABLE, "")
os.environ.pop("PYTEST_PLUGINS", None)


class Again:
    """Takes the names of what failed, and plays it again when all tests are done."""

    def __init__(self, told: Path) -> None:
        self._told = told
        self._failed = dict[str, None]()  # in order
        self._is_whole = True  # all files could be read: else tests are missing, not failed

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._is_whole &= not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Let the tests pass if what failed passes alone; anything but failed tests stays what it is."""
        has_failed = session.exitstatus == pytest.ExitCode.TESTS_FAILED and self._is_whole
        if not has_failed or not 1 <= len(self._failed) <= COUNT_MAX:
            return
        print(f"\n\n=== {len(self._failed)} failed; once more, with nothing beside", flush=True)
        if passes_alone(list(self._failed), session.config.rootpath):
            self._told.write_text("".join(f"{name}\n" for name in self._failed), "utf-8")
            session.exitstatus = pytest.ExitCode.OK


def passes_alone(names: list[str], root: Path) -> bool:
    """Play tests one by one; return whether each of them was played, and passed: one that is skipped did not."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "tests.xml")
        words = [sys.executable, "-m", "pytest", "--exitfirst", f"--junitxml={file}", *names]
        if subprocess.run(words, cwd=root, check=False).returncode != 0:
            return False
        suites = list(ElementTree.parse(file).iter("testsuite"))
        counts = {key: sum(int(each.get(key, 0)) for each in suites) for key in ("tests", "skipped")}
        return counts == {"tests": len(names), "skipped": 0}


def pytest_configure(config: pytest.Config) -> None:
    """Look after the process that hears of all tests, not after those that run them for it."""
    if _FILE and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Again(Path(_FILE)), "rollfab-again")
