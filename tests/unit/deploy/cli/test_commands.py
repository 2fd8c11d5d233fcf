"""What all commands have in common: help, JSON, the run, completion."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from rollfab import __version__
from rollfab.deploy.cli.options import RunFirst
from rollfab.deploy.main import app, main
from rollfab.fabric.contract.errors import ConfigError

ROLES = ("up", "broker", "controller", "agent", "worker", "reward", "gateway")  # they print what they log


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command but the benches, which are in a clone only."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands") and name != "bench":
            yield from commands(command, (*path, name))
        elif name != "bench":
            yield " ".join((*path, name)), command


COMMANDS = dict(commands())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_explains_itself_and_shows_json_and_means_the_run_by_run(name: str) -> None:
    help_ = CliRunner().invoke(app, [*name.split(), "-h"], env={"COLUMNS": "80"})
    assert help_.exit_code == 0 and "Usage:" in help_.output
    assert help_.output == CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "80"}).output
    found = {each.name: each for each in COMMANDS[name].params}
    assert "json" in found or name in ROLES
    assert "run" not in found or found["run"].opts == ["--run"]


def test_the_list_of_commands_says_of_each_what_its_own_help_says() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        shown = group.get_command(None, name)
        assert shown.get_short_help_str(1000) == command.get_short_help_str(1000), name


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("replay azure-conv --url http://127.0.0.1:9 --rate nan", "--rate is nan: give a finite number"),
        ("replay azure-conv --url http://127.0.0.1:9 --speed inf", "--speed is inf: give a finite number"),
        (f"submit {os.devnull} --group-size {10**30}", "--group-size has more than 63 bits: give a smaller number"),
        ("consume --takeover inf", "--takeover is inf: give a finite number"),
    ],
)
def test_a_number_that_is_none_or_endless_is_refused_by_its_option(words: str, told: str) -> None:
    refused = CliRunner().invoke(app, words.split())
    assert isinstance(refused.exception, ConfigError) and str(refused.exception) == told


def test_the_version_is_asked_for_in_two_ways() -> None:
    for words in (["--version"], ["version"]):
        assert CliRunner().invoke(app, words).output == f"{__version__}\n"


@pytest.mark.parametrize(
    ("words", "run", "version"),
    [
        ("r1 7", "r1", 7),
        ("7 --run r1", "r1", 7),
        ("--run r1 7", "r1", 7),
        ("--run=r1 7", "r1", 7),
        ("--url redis://x --json r1 7", "r1", 7),
        ("--json -- r1 7", "r1", 7),
        ("7", None, 7),
        ("", None, None),
    ],
)
def test_a_run_may_be_the_first_word_as_it_was_written_before(words: str, run: str | None, version: int | None) -> None:
    toy, seen = typer.Typer(), []

    @toy.command(cls=RunFirst)
    def look(
        version: int | None = typer.Argument(None),
        run: str | None = typer.Option(None, "--run"),
        url: str | None = typer.Option(None, "--url"),
        json: bool = typer.Option(False, "--json"),
    ) -> None:
        seen.append((run, version))

    done = CliRunner().invoke(toy, words.split())
    assert done.exit_code == 0, done.output
    assert seen == [(run, version)]


def typed_in(shell: str, instruction: str, typed: str) -> dict[str, str]:
    """The variables by which a shell asks for what may follow."""
    place = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_TYPER_COMPLETE_ARGS": typed}
    return {"_ROLLFAB_COMPLETE": f"{instruction}_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args", **place}


def test_a_shell_that_asks_the_command_is_answered() -> None:
    words = [sys.executable, "-c", "import sys; sys.argv[0] = 'rollfab'; from rollfab.deploy.main import main; main()"]
    env = {**os.environ, **typed_in("bash", "complete", "rollfab sta")}
    said = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60).stdout
    assert re.search(r"\bstatus\b", said)


def test_help_is_a_word_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for words, shown in ((["help"], "A rollout fabric"), (["help", "lend"], "rollfab lend [OPTIONS]")):
        monkeypatch.setattr("sys.argv", ["rollfab", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0 and shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    def asked(instruction: str, typed: str) -> str:
        return CliRunner().invoke(app, [], env=typed_in(shell, instruction, typed), prog_name="rollfab").stdout

    assert "rollfab" in asked("source", "")
    assert re.search(r"\bstatus\b", asked("complete", "rollfab sta"))
    assert "--watch" in asked("complete", "rollfab status --w")
    assert re.search(r"\bdiscard\b", asked("complete", "rollfab dead dis"))
    assert re.search(r"\bobserve\b", asked("complete", "rollfab lend o"))


@pytest.mark.parametrize(
    ("before", "line"),
    [
        (0, "11 steps, 88 rollouts, mean reward 0.10 → 0.90; see out/summary.json"),
        (4, "11 steps (4 of them before), 88 rollouts, mean reward 0.10 → 0.90; see out/summary.json"),
        (11, "Nothing to do: the checkpoint in out has 11 steps behind it. --steps counts those, too: --steps 21 goes"),
    ],
)
def test_a_training_says_what_of_it_was_done_before(before: int, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"steps": 11, "rollouts": 88, "reward_first": 0.1, "reward_last": 0.9, "steps_before": before}
    monkeypatch.setattr("rollfab.trainer.loop.run_training", lambda options: facts)

    done = CliRunner().invoke(app, ["train", "--url", "redis://nowhere", "--output", "out"])

    assert done.output.startswith(line), (done.output, done.exception)


@pytest.mark.parametrize("words", ["version --json", "weights --help"])
def test_whoever_reads_the_output_may_have_enough(words: str) -> None:
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run(
        [sys.executable, "-m", "rollfab", *words.split()], stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_an_interrupt_that_a_library_swallows_as_it_loads_ends_the_command(tmp_path: Path) -> None:
    # Given a torch that goes on, and would be there by half
    (tmp_path / "torch.py").write_text(
        "import os\ntry:\n    os.kill(os.getpid(), 2)\n    print('went on')\nexcept KeyboardInterrupt:\n    pass\n"
    )
    words = ["train", "--url", "redis://127.0.0.1:1", "--output", str(tmp_path / "output")]
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # also where a test's is not
    load = f"{heard}; from rollfab.__main__ import main; main()"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", load, *words], env=env, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout + ended.stderr) == (130, b"")
