"""docs/security.md says what is so: its tests, users, commands and files are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from rollfab.commands.cli import app
from rollfab.fabric.bus.acl import RIGHTS, user_name

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text("utf-8")
TESTS = {path.name for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+\.py)`", TEXT))))
def test_a_test_that_is_named_exists(name: str) -> None:
    assert name in TESTS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`((?:fabric|tests)/[\w/]+\.py)`", TEXT))))
def test_a_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / name).exists()


def test_every_user_is_in_the_table_and_no_other() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| `rollfab-")]
    assert {name for row in rows for name in re.findall(r"`(rollfab-[\w-]+)`", row)} == set(map(user_name, RIGHTS))


def test_the_commands_are_there() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {"acl", "api", "agent"} <= set(commands)
    options = {name for each in (*commands["acl"].params, *commands["api"].params) for name in each.opts}
    shown = set(re.findall(r" (--[a-z-]+) ", TEXT)) - {"--control"}
    assert shown <= options, shown - options
