"""A plan says how many serving GPUs are worth borrowing at each level of a trace's load, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.plan import choose, levels_of, windows_of
from rollfab.deploy.simulation.run import capacity_of, recorded
from rollfab.deploy.simulation.scenario import read_scenario
from rollfab.errors import ConfigError

SMALL = """
[cluster]
dedicated = 1
serving = 1
[work]
groups = 12
group_size = 2
steps = 1
[simulation]
arms = ["fixed", "ours"]
seeds = [0]
[serving]
"""


def written(tmp_path: Path, serving: str = "") -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(SMALL + serving)
    return path


def trace(tmp_path: Path, *rates: float) -> str:
    """A trace of so many requests a second, ten minutes each."""
    path, at_s, rows = tmp_path / "trace.csv", 0.0, ["t_s,input_tokens,output_tokens"]
    for index, rate in enumerate(rates):
        while at_s < 600 * (index + 1):
            rows.append(f"{at_s:.3f},400,40")
            at_s += 1 / rate
    path.write_text("\n".join(rows))
    return str(path)


def planned(tmp_path: Path, serving: str = "") -> dict[str, Any]:
    shown = CliRunner().invoke(app, ["plan", str(written(tmp_path, serving)), "--json"])
    assert shown.exit_code == 0, shown.output
    found: dict[str, Any] = orjson.loads(shown.output)
    return found


def test_a_plan_borrows_only_what_makes_steps_faster_and_keeps_the_promise() -> None:
    def row(gpus: int, step_s: float, lost: float = 0.0) -> dict[str, Any]:
        return {"gpus_lent": gpus, "step_s": {"mean": step_s}, "lost": lost}

    assert choose([row(0, 100.0), row(4, 90.0), row(8, 89.5)])["gpus_lent"] == 4  # the last four gain too little
    assert choose([row(0, 100.0), row(4, 90.0), row(8, 60.0, lost=0.01)])["gpus_lent"] == 4
    assert choose([row(0, 100.0), row(4, 99.0)])["gpus_lent"] == 0


def test_a_plan_lends_no_more_than_it_says(tmp_path: Path) -> None:
    found = planned(tmp_path)
    rows = found["levels"][0]["rows"]
    assert [row["gpus_lent"] for row in rows] == [0, 1]
    assert rows[0]["harvested_tokens"]["mean"] == 0 < rows[1]["harvested_tokens"]["mean"]
    assert found["tag"].startswith("simulated")


def test_a_plan_says_when_to_lend_what(tmp_path: Path) -> None:
    serving = f"trace = '{trace(tmp_path, 1, 1, 12, 1)}'\ncapacity_per_s = 12.0\nas_recorded = true"
    found = planned(tmp_path, serving)
    assert [level["load"] for level in found["levels"]] == [0.1, 1.05]
    low, full = found["levels"]
    assert low["choice"] == 1 and low["advised"]["step_s"]["mean"] > 0
    assert full["choice"] == 0 and len(full["rows"]) == 1 and full["advised"] is None
    assert [(round(each["from_s"], -2), round(each["to_s"], -2), each["gpus_lent"]) for each in found["when"]] == [
        (0, 1200, 1),
        (1200, 1800, 0),
        (1800, 2400, 1),
    ]
    assert found["when"][0]["step_s"] == low["rows"][1]["step_s"]["mean"] < found["when"][1]["step_s"]

    shown = CliRunner().invoke(app, ["plan", str(written(tmp_path, serving))], env={"COLUMNS": "80"})
    text = shown.output.partition("Lend 0 to 1 of them")[0]
    assert "0:20 to 0:30" in text and "1, advised" in text
    assert max(map(len, text.splitlines())) <= 80


def test_windows_have_the_loads_of_their_time() -> None:
    arrivals = [Arrival(at_s=float(second), prompt_tokens=1, completion_tokens=1) for second in range(1800)]
    twice = [*arrivals, *(each for each in arrivals if each.at_s >= 1200)]
    windows = windows_of(twice, 1800.0, 0.4)
    assert [(each.from_s, each.to_s) for each in windows] == [(0, 600), (600, 1200), (1200, 1800)]
    assert [each.load for each in windows] == pytest.approx([0.3, 0.3, 0.6])
    assert len(windows_of(arrivals, 90_000.0, 0.4)) == 24
    assert [each.load for each in windows_of(arrivals[:100], 100.0, 0.4)] == [0.4]


def test_levels_are_few_and_none_is_lower_than_what_it_stands_for() -> None:
    assert levels_of([0.21, 0.25, 0.0]) == [0.0, 0.25]
    loads = [number / 100 for number in range(3, 88, 7)]
    levels = levels_of(loads)
    assert len(levels) == 4
    assert all(min(level - load for level in levels if level >= load) < 0.25 for load in loads)


def test_a_trace_as_recorded_has_its_own_load(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, f"trace = '{trace(tmp_path, 2)}'\nas_recorded = true"))
    (load,) = recorded(scenario).serving.loads
    assert load * capacity_of(scenario) == pytest.approx(2, rel=0.01)


def test_more_than_the_instances_can_serve_is_refused_with_how_many_could(tmp_path: Path) -> None:
    given = f"trace = '{trace(tmp_path, 12)}'\nas_recorded = true\ncapacity_per_s = 3.0"
    with pytest.raises(ConfigError, match=r"12 requests a second, and 1 instance can serve 3: 5 could serve it"):
        recorded(read_scenario(written(tmp_path, given)))
