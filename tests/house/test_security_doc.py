"""docs/security.md says what is so: its tests, users, commands and files are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from rollfab.deploy.main import app
from rollfab.fabric.queue.acl import RIGHTS, user_name

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "security.md").read_text("utf-8")
TEST_FILES = list((ROOT / "tests").rglob("test_*.py"))
TESTS = {path.name for path in TEST_FILES}
SECTION = TEXT.split("## Who may be bad\n")[1].split("\n## ")[0]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+\.py)`", TEXT))))
def test_a_test_that_is_named_exists(name: str) -> None:
    assert name in TESTS


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", TEXT))))
def test_a_test_function_that_is_named_exists(name: str) -> None:
    assert any(f"def {name}(" in path.read_text("utf-8") for path in TEST_FILES)


def test_everyone_who_may_be_bad_has_a_part() -> None:
    assert re.findall(r"^### (.+)", SECTION, re.MULTILINE) == [
        *("Another user of the host", "An environment", "An agent that plays, and whoever holds a session's key"),
        *("An agent", "A reward function", "A worker", "A trainer"),
        *("A serving engine", "The network"),
    ]
    for part in SECTION.split("\n### ")[1:]:
        assert "\nReaches at most: " in part and "\n- held: " in part and "\nNot defended" in part, part


def test_what_is_held_names_its_test() -> None:
    held = re.findall(r"^- held: .+(?:\n  .+)*", SECTION, re.MULTILINE)
    assert held
    assert [each for each in held if not re.search(r"`test_\w+(?:\.py)?`", each)] == []


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
