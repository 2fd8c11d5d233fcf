"""The acceptance run's script: a bad step stops no other, and a run goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollfab.deploy.gpu import child
from rollfab.deploy.gpu.plan import STEPS, Step
from rollfab.deploy.gpu.run import ROOT, chosen, main, read_records
from tests.support.processes.process_groups import state_of, wait_until_gone

MODULE = "tests.support.processes.planted_step"
HANG_S = 12.0
pytestmark = pytest.mark.timeout(180)


def planted(directory: Path, **names: str) -> list[Step]:
    """Steps that do as they are called, each with all the time of the test."""
    return [
        Step(
            name=name,
            shows=how,
            limit_s=HANG_S if how in ("hang", "deaf") else 120,
            module=MODULE,
            words=[how, str(directory)],
        )
        for name, how in names.items()
    ]


def run(steps: Sequence[Step], directory: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]]]:
    results = directory / "results.jsonl"
    code = main(["--device", "cpu", "--results", str(results), *words], steps)
    return code, {record["step"]: record for record in read_records(results)}


def begun(directory: Path) -> list[str]:
    return (directory / "begun").read_text().split()


def test_a_step_that_fails_or_hangs_stops_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = planted(tmp_path, one="fail", two="hang", three="skip", four="mute", five="pass")
    code, records = run(steps, tmp_path)

    assert code == 1
    assert {name: record["state"] for name, record in records.items()} == {
        "one": "failed",
        "two": "timed out",
        "three": "skipped",
        "four": "failed",
        "five": "passed",
    }
    assert records["one"]["reason"] == "exit code 1: ValueError: planted"
    assert records["two"]["reason"] == "no end within 12 s" and records["two"]["figures"] == {"before": 1}
    assert records["three"]["reason"] == "nothing to show"
    assert "told no figures" in records["four"]["reason"]
    assert records["five"]["figures"] == {"first": 1, "second": 2.5} and records["five"]["seconds"] > 0
    shown = capsys.readouterr().out
    assert "1 timed out" in shown and "first 1, second 2.5" in shown

    # Nothing of the step that hung is left, though it was in a session of its own
    assert state_of(int((tmp_path / "below").read_text())) in "ZX"


@pytest.mark.slow
def test_a_step_that_does_not_end_when_asked_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "END_S", 1.0)
    _, records = run(planted(tmp_path, one="deaf", two="pass"), tmp_path)
    assert (tmp_path / "below").exists()
    assert [record["state"] for record in records.values()] == ["timed out", "passed"]


RUN = """
import sys
from pathlib import Path
from rollfab.deploy.gpu.run import main
from tests.integration.gpu.test_run import planted
directory = Path(sys.argv[1])
main(["--device", "cpu", "--results", str(directory / "results.jsonl")], planted(directory, one="stay"))
"""


@pytest.mark.parametrize(("number", "ended"), [(signal.SIGTERM, ("own", "below")), (signal.SIGKILL, ("own",))])
def test_a_run_that_is_ended_leaves_no_step_behind(number: int, ended: tuple[str, ...], tmp_path: Path) -> None:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    going = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path)], env={**os.environ, "PYTHONPATH": path})
    while not (tmp_path / "below").exists() or not (tmp_path / "below").read_text():  # the test's timeout is the limit
        time.sleep(0.05)
    pids = {name: int((tmp_path / name).read_text()) for name in ("own", "below")}
    going.send_signal(number)
    assert going.wait() != 0
    try:
        wait_until_gone(*(pids[name] for name in ended))
    finally:
        for pid in pids.values():
            if state_of(pid) not in "ZX":
                os.kill(pid, signal.SIGKILL)


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    # Given a run with time for some steps, cut off while it wrote
    steps = planted(tmp_path, one="fail", two="pass", three="skip")
    code, records = run([*steps, *planted(tmp_path, four="pass")], tmp_path, "--only", "[ot]*", "--budget-s", "130")
    assert code == 1 and begun(tmp_path) == ["fail", "pass", "skip"]
    short, records = run(planted(tmp_path, late="pass"), tmp_path, "--resume", "--budget-s", "60")
    assert short == 0 and records["late"]["state"] == "skipped" and "go on with --resume" in records["late"]["reason"]
    with (tmp_path / "results.jsonl").open("a") as lines:
        lines.write('{"step": "four", "sta')

    # When it is told to go on, then it runs what was skipped or not begun, and nothing twice
    lines_before = (tmp_path / "begun").read_text()
    code, records = run([*steps, *planted(tmp_path, late="pass", four="pass")], tmp_path, "--resume")
    assert code == 1, "a step that failed before is still told"
    assert (tmp_path / "begun").read_text().removeprefix(lines_before).split() == ["skip", "pass", "pass"]
    assert records["late"]["state"] == records["four"]["state"] == "passed"


def test_steps_are_chosen_by_name_or_pattern() -> None:
    assert [step.name for step in chosen("commit,mps-*")] == ["commit", "mps-coserve", "mps-half", "mps-kill"]
    assert chosen("") == list(STEPS)
    with pytest.raises(SystemExit, match="no step is called comit"):
        chosen("probe,comit")


def test_the_plan_is_of_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert bool(step.module) != bool(step.tests), step.name
        files = [ROOT / each for each in step.tests] or [ROOT / "deploy" / "gpu" / "steps" / f"{step.module}.py"]
        assert all(file.is_file() for file in files), step.name
        assert step.limit_s <= 540, f"{step.name}: one command may take ten minutes"
    assert main(["--list"]) == 0
    shown = capsys.readouterr().out
    assert all(step.name in shown for step in STEPS)


def test_tests_that_fail_are_named(tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text("def test_good():\n    pass\n\n\ndef test_bad():\n    assert 1 == 2\n")
    step = Step(name="tests", shows="", limit_s=120, tests=[str(file)])
    code, records = run([step], tmp_path)
    assert code == 1 and records["tests"]["reason"] == "1 of 2 tests failed: test_bad"

    file.write_text("import pytest\n\n\n@pytest.mark.skip\ndef test_none():\n    pass\n")
    code, records = run([step], tmp_path)
    assert code == 0 and records["tests"]["state"] == "skipped"

    file.write_text("import nothing_of_this_name\n")
    code, records = run([step], tmp_path)
    assert code == 1 and records["tests"]["state"] == "failed"


def test_a_step_that_needs_what_is_not_here_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "vllm" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise ImportError("libcudart.so.13 is not here")\n')
    monkeypatch.setenv("PATH", str(tmp_path))
    steps = [
        Step(name="engine", shows="", limit_s=1, module="engine", needs=["vllm"]),
        Step(name="sleep", shows="", limit_s=1, module="sleep", needs=["gpu"]),
        Step(name="mps", shows="", limit_s=1, module="kill", needs=["mps"]),
    ]
    code, records = run(steps, tmp_path, "--site", str(tmp_path / "site"))
    assert code == 0 and {record["state"] for record in records.values()} == {"skipped"}
    assert records["engine"]["reason"].endswith("ImportError: libcudart.so.13 is not here")
    assert records["sleep"]["reason"] == "it needs a GPU" and "MPS" in records["mps"]["reason"]


def test_records_are_one_json_object_a_line(tmp_path: Path) -> None:
    run(planted(tmp_path, one="pass"), tmp_path)
    [line] = (tmp_path / "results.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert {"step", "state", "reason", "seconds", "figures", "device", "sizes", "shows"} <= set(record)
