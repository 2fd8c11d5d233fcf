"""A script that never closes its connection: however it ends, it says nothing of its end and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.redis

BEGIN = """
import os, sys, threading, time
import rollfab
fabric = rollfab.connect(os.environ["BROKER"] or None)
run = fabric.run("r", model="tiny", environment="frozenlake")
run.submit([{"seed": 1}], group_size=2)
print(fabric.url, flush=True)
"""
WAITING = "threading.Thread(target=lambda: list(run.groups(timeout=60)), daemon=True).start(); time.sleep(0.5)"


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("pass", 0, ""),
        ("raise RuntimeError('mine')", 1, "RuntimeError: mine"),
        ("sys.exit(3)", 3, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
        (WAITING, 0, ""),
        ("list(run.groups(timeout=0.2)); del fabric, run", 0, ""),
        ("groups = iter(run.groups(timeout=0.2)); del fabric", 0, ""),
        ("os._exit(0) if os.fork() == 0 else os.wait()", 0, ""),
        ("sys.exit(0) if os.fork() == 0 else os.wait()", 0, ""),
        ("fabric.close()", 0, ""),
    ],
    ids=["end", "error", "exit", "interrupt", "thread", "deleted", "iterator", "fork", "fork-exit", "closed"],
)
def test_a_script_that_ends_without_close_ends_quietly(end: str, code: int, says: str) -> None:
    watch = [] if "fork" in end else ["-W", "always::ResourceWarning"]  # a copy has sockets that are not its to close
    done = subprocess.run(
        [sys.executable, *watch, "-c", f"{BEGIN}{end}"],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "BROKER": ""},
    )
    assert done.returncode == code
    own, *told = done.stderr.splitlines()
    assert own.startswith("connect() was given no URL")
    assert (told[-1] if told else "") == says
    assert not [line for line in told if "Warning" in line or "ignored" in line or "asyncio" in line], done.stderr
    home = Path(done.stdout.removeprefix("unix://").strip()).parent
    assert done.stdout.startswith("unix://") and not home.exists()
