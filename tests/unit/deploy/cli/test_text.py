"""Text from elsewhere: can it do anything to the terminal that shows it?"""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rollfab import deploy
from rollfab.deploy.cli.printing import Cell, Console, new_table, show, show_json
from rollfab.deploy.cli.status_view import draw
from rollfab.fabric.contract.errors import EnvironmentFailed
from rollfab.fabric.contract.records import TrajectoryJob
from rollfab.fabric.contract.text import cleaned, counted, did_you_mean, one_line, printable
from rollfab.fabric.host.facts import FactsFormatter
from rollfab.workers.environments.failures import dead_letter

EVIL = "\x1b]0;owned\x07\x1b[2J\x00\x9b31m\u202eabc\u2066\r\x08 tail\ud800"
JOB = TrajectoryJob(trajectory_id="g.0", group_id="g", task_id="t", index=0, task={}, seed=0)


def is_harmless(text: str) -> bool:
    return all(each in "\n\t" or (each.isprintable() or each == " ") or ord(each) >= 0xA0 for each in text) and not set(
        text
    ) & set("\u202e\u2066\u200e\u200f\u061c\u2028\u2029\ufeff")


@given(st.text())
def test_what_is_printable_is_harmless_and_said_once(text: str) -> None:
    clean = printable(text)
    assert is_harmless(clean) and printable(clean) == clean
    assert "\n" not in one_line(text) and is_harmless(one_line(text))
    clean.encode()  # no lone surrogate


def test_controls_are_shown_and_plain_text_stays() -> None:
    assert printable("a\x1b[31mb\x00\u202e") == "a\\x1b[31mb\\x00\\u202e"
    plain = "Straße, 東京, 🙂\n\ttab and line"
    assert printable(plain) == plain
    assert cleaned({"a": ["\x07", 1, None]}) == {"a": ["\\x07", 1, None]}


def test_a_dead_letter_holds_no_raw_control_character() -> None:
    for error in (RuntimeError(EVIL), EnvironmentFailed(EVIL, reason="x", traceback=EVIL)):
        letter = dead_letter(error, JOB, run_id="r", worker_id="w", attempt=0)
        assert is_harmless(letter.reason) and is_harmless(letter.traceback)
        assert "\\x1b" in letter.reason and "\\x00" in letter.traceback


def test_a_log_line_is_one_line_without_control_characters() -> None:
    record = logging.makeLogRecord({"msg": f"event\n{EVIL}", "levelno": 30, "levelname": "WARNING", "who": EVIL})
    try:
        raise RuntimeError(EVIL)
    except RuntimeError:
        record.exc_info = sys.exc_info()
    said = FactsFormatter("%(message)s").format(record)
    assert is_harmless(said)
    assert said.splitlines()[0].startswith("event\\n")


def test_the_status_shows_what_a_worker_says_of_itself_without_obeying_it() -> None:
    worker = {
        "worker_id": "w1", "role": "dedicated", "state": "failed", "error": f"[/bold] {EVIL}", "running_count": 0,
        "slot_count": 1, "run_id": None, "active_version": -1, "engine": EVIL, "prefix_hit_fraction": None,
        "wake_ms": None, "sleep_note": None, "weights_note": None, "heartbeat_age_ms": 1,
    }  # fmt: skip
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(draw({"runs": [], "workers": [worker], "leases": {}, "lends": {}, "bad_rows": []}))
    shown = console.export_text()
    assert "[/bold]" in shown and is_harmless(shown)


def test_the_nearest_names_are_said_or_else_those_there_are() -> None:
    assert did_you_mean("caht", ["chat", "batch"]) == "did you mean chat?"
    assert did_you_mean("CHAT", ["chat", "batch"]) == "did you mean chat?"
    assert did_you_mean("run", ["Run", "RUN", "r2"]) == "did you mean RUN or Run?"
    assert did_you_mean("x", ["chat", "batch"]) == "there are batch, chat"
    assert did_you_mean("x", [f"name-{index}" for index in range(20)]).endswith("and 12 more")
    assert did_you_mean("x", []) == "there are none"
    assert did_you_mean("caht", ["chat"], "Or wait") == "did you mean chat? Or wait"
    assert did_you_mean("x", ["chat"], "Or wait") == "there are chat. Or wait"


def test_a_count_and_its_noun_agree_and_so_does_what_they_do() -> None:
    assert [counted(count, "group", "waits", "wait") for count in (0, 1, 2)] == [
        "0 groups wait",
        "1 group waits",
        "2 groups wait",
    ]
    assert [counted(count, "trajectory") for count in (1, 1200)] == ["1 trajectory", "1,200 trajectories"]


def test_commands_print_by_the_one_way_that_makes_text_printable() -> None:
    """Any other `print` or Console of theirs would let a name from the broker move the cursor.

    Scripts for those who work on rollfab (locks, the acceptance run) are none of them, and read no broker of others.
    """
    folder = Path(deploy.__file__).parent
    for path in sorted(
        path for path in folder.rglob("*.py") if path.relative_to(folder).parts[0] not in ("lock", "gpu")
    ):
        if path.name == "printing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            is_rich = isinstance(node, ast.ImportFrom) and node.module == "rich.console"
            taken = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) and is_rich else []
            assert not is_print, f"{path.name}:{node.lineno} prints by itself"
            assert "Console" not in taken, f"{path.name} has a Console of its own"


def test_what_is_printed_moves_no_cursor_and_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    text = "a\x1b[2Jb\x9b\u202ec"
    show(text)
    Console(width=100).print(Text(text, style="red"))
    table = Table("name")
    table.add_row(text)
    Console(width=100, force_terminal=True).print(table)
    show_json({"name": text})
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "\x9b" not in shown and "\u202e" not in shown
    assert shown.count("a\\x1b[2Jb\\x9b\\u202ec") == 2  # a cell is cut to the width of what it would have been
    assert "│ a\\x1b[" in shown
    assert json.loads(shown.splitlines()[-1]) == {"name": text}


def test_brackets_in_a_text_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    name = "[bold]a[/bold] [/x]"
    table = new_table(name, "c", title=f"title {name}")
    table.add_row(Cell(name), f"cell {name}")
    for each in (name, table, f"note {name}"):
        Console().print(each)
    assert capsys.readouterr().out.count(name) == 6


def test_no_blanks_end_a_line_of_a_pipe() -> None:
    table = Table("name", "what", box=None)
    table.add_row("a", "b c")
    table.add_row("", "")
    out = io.StringIO()
    Console(file=out).print(Group(Padding(table, (0, 0, 0, 2)), "  kept   apart  "))
    assert out.getvalue().splitlines() == ["   name  what", "   a     b c", "", "  kept   apart"]


def test_who_reads_has_enough_after_a_line_and_the_command_ends_well() -> None:
    code = "from rollfab.deploy.cli.printing import Console\nfor _ in range(100_000): Console().print('x' * 9)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x" * 9 + b"\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
