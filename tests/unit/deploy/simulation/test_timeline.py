"""What `rollfab sim --report` draws: samples that change nothing, and a file that is whole, new and tagged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.deploy.simulation.command import run_all
from rollfab.deploy.simulation.page import write_page
from rollfab.deploy.simulation.report import TAG, results
from rollfab.deploy.simulation.run import Run, simulate
from rollfab.deploy.simulation.scenario import Scenario
from rollfab.deploy.simulation.timeline import SAMPLE_S, Timeline, by_minute
from rollfab.fabric.contract.errors import ConfigError
from tests.support.simulated import SMALL, outcome, run
from tests.support.tried import cases

SLACK = 1e-6  # of an instance's seconds, by rounding and by what a stretch's growth moves between its two engines


@cache
def watched(arm: str) -> tuple[Run, Timeline]:
    """A small run, which is the run that it is without a time line, and its time line."""
    timeline = Timeline()
    found = simulate(SMALL, arm, load=0.25, seed=0, timeline=timeline)
    bare = run(arm)
    assert outcome(replace(found, events=0)) == outcome(replace(bare, events=0))
    assert {round(after.at_s - before.at_s, 6) for before, after in pairwise(timeline.moments)} == {SAMPLE_S}
    return found, timeline


@pytest.mark.parametrize("arm", cases(["ours", "share-all", "rose"], 2))
def test_no_instance_is_ever_used_for_longer_than_time_passed(arm: str) -> None:
    _, timeline = watched(arm)
    for before, after in pairwise(timeline.moments):
        own_s, lent_s, serving_s = (
            getattr(after, name) - getattr(before, name) for name in ("own_s", "lent_s", "serving_s")
        )
        assert 0 <= own_s <= SAMPLE_S * (1 + SLACK)
        assert lent_s + serving_s <= SAMPLE_S * 1.01
        assert min(lent_s, serving_s) >= -0.01 * SAMPLE_S
    assert max(each.running for each in timeline.moments) > 0
    assert any(any(each.leased) for each in timeline.moments)


def test_each_simulated_minute_says_how_far_it_is() -> None:
    told: list[str] = []
    found = simulate(SMALL, "ours", load=0.25, seed=0, tell=told.append)
    assert outcome(replace(found, events=0)) == outcome(replace(run("ours"), events=0))
    assert told == [f"ours, load 0.25, seed 0: step 1 of 1, {n} simulated minutes" for n in range(len(told))]
    assert len(told) == 1 + int(found.span_s / 60)


def test_minutes_have_the_p99_of_the_requests_that_came_in_them() -> None:
    _, timeline = watched("fixed")
    rows = by_minute(timeline.requests, 1e6)
    assert [at_s for at_s, _, _ in rows] == [60.0 * n for n in range(len(rows))]
    assert all(0 < tpot_ms < ttft_ms < 500 for _, ttft_ms, tpot_ms in rows)


def test_the_file_has_every_table_and_a_figure_of_each_arm(tmp_path: Path) -> None:
    scenario = replace(
        SMALL, name="<b>small</b>", simulation=replace(SMALL.simulation, arms=("fixed", "ours"), seeds=(0,))
    )
    shown = [watched(arm) for arm in scenario.simulation.arms]
    path = tmp_path / "report.html"
    write_page(results(scenario, [each for each, _ in shown]), shown, path)
    text = path.read_text("utf-8")
    assert TAG in text and text.count("<svg") == text.count("</svg>") == 2 and text.endswith("</html>\n")
    assert "&lt;b&gt;small" in text and "<b>small" not in text
    assert "src=" not in text and "http-equiv" not in text  # nothing is loaded from elsewhere
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("report.txt", "ends in .txt: name it .html"),
        ("report", "ends in no suffix: name it .html"),
        ("nowhere/report.html", "is not there: make it first"),
        ("there.html", "is there already: name another file, or move it away"),
    ],
)
def test_a_report_that_cannot_be_written_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    monkeypatch.setattr("rollfab.deploy.simulation.command.run_all", _not_called)
    (tmp_path / "there.html").write_text("mine")
    with pytest.raises(ConfigError, match=told):
        CliRunner().invoke(app, ["sim", "s0", "--report", str(tmp_path / name)], catch_exceptions=False)
    assert (tmp_path / "there.html").read_text() == "mine"


def test_a_disk_that_is_full_costs_the_report_and_not_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, is_new: bool) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("rollfab.deploy.simulation.page.write_private", full)
    path = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["sim", "s0", "--arms", "fixed", "--seeds", "1", "--report", str(path)])
    assert "s0 simulated" in done.stdout and isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"--report {path} cannot be written: No space left on device"


def test_a_file_that_came_meanwhile_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"

    def simulated(scenario: Scenario, timelines: dict[int, Timeline]) -> list[Run]:
        path.write_text("mine")
        return run_all(scenario, timelines)

    monkeypatch.setattr("rollfab.deploy.simulation.command.run_all", simulated)
    done = CliRunner().invoke(app, ["sim", "s0", "--arms", "fixed", "--seeds", "1", "--report", str(path)])
    assert "s0 simulated" in done.stdout and "cannot be written: File exists" in str(done.exception)
    assert path.read_text() == "mine" and [each.name for each in tmp_path.iterdir()] == ["report.html"]


def _not_called(*_: object) -> Callable[[], None]:
    raise AssertionError("simulated")
