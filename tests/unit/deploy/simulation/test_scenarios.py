"""Scenarios are read strictly, what is shown says that it is simulated, and intervals hold what they should."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.simulation.machine.bound import spare
from rollfab.deploy.simulation.machine.cost import model_of
from rollfab.deploy.simulation.machine.workload import draw_step
from rollfab.deploy.simulation.report import figure, speed_of
from rollfab.deploy.simulation.scenario import SAMPLES, read_scenario
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.rules.serving.facts import StepWork
from tests.support.simulated import run


def written(path: Path, text: str) -> Path:
    path = path / "mine.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_what_is_shipped_can_be_read(name: str) -> None:
    assert read_scenario(name).name == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[cluster]\ngpu_count = 3", "no setting gpu_count"),
        ("[clster]\n", "clster is no part"),
        ("[cluster]\ndedicated = 0", "dedicated is 0: expected 1 to"),
        ("[cluster]\ndedicated = 'two'", "expected a whole number"),
        ("[serving]\nloads = [2.0]", "loads [2.0]"),
        ("[serving]\nloads = []", "expected a list"),
        ("[serving]\nloads = [0.1, 0.2, 0.1]", "loads names 0.1 twice"),
        ("[simulation]\nseeds = [0, 0]", "seeds names 0 twice"),
        ("[simulation]\narms = ['ours', 'ours']", "arms names 'ours' twice"),
        ("[work]\nkind = 'chess'", "kind 'chess'"),
        ("[simulation]\narms = ['roses']", "arms has no 'roses'"),
        ("[cluster]\ngpus_per_instance = 4\ndedicated = 6", "no whole number"),
        ("[failures]\nhours_betwen = 1", "[failures] has no setting hours_betwen: did you mean hours_between"),
        ("[failure]\nhours_between = 1", "failure is no part of a scenario: did you mean failures?"),
        ("[failures]\nback_s = 30\nagents = 2", "[failures] has no hours_between"),
        ("[failures]\nbroker_hours_between = 0.001", "expected 0.01 to 1e+06, or 0: the broker never dies"),
        ("[failures]\nagent_hours_between = 1\nagents = 0", "agents is 0: expected 1 to 1000"),
        ("[failures]\nhours_between = -1", "hours_between is -1: expected 0.01 to"),
        ("[failures]\nhours_between = 0.001", "hours_between is 0.001: expected 0.01 to 1e+06, or 0: no worker dies"),
        ("[failures]\nhours_between = nan", "expected a number"),
        ("[failures]\nhours_between = 1e30", "hours_between is 1e+30: expected 0.01 to"),
        ("[failures]\nhours_between = true", "expected a number"),
        ("[failures]\nhours_between = 1\nback_s = -5", "back_s is -5: expected 0 to"),
        ("[failures]\nhours_between = 1\nback_s = inf", "expected a number"),
        ("failures = 3", "write [failures]"),
        ("[runs]\nweight = [1, 2]", "[runs] has no setting weight: did you mean weights?"),
        ("[run]\nweights = [1, 2]", "run is no part of a scenario: did you mean runs?"),
        ("[runs]\nweights = [1, 0]", "weights 1, 0: expected 0.01 to 100"),
        ("[runs]\nweights = [1, -2]", "weights 1, -2: expected 0.01 to 100"),
        ("[runs]\nweights = [1, 1e9]", "weights 1, 1e+09: expected 0.01 to 100"),
        ("[runs]\nweights = [1, nan]", "expected a number"),
        ("[runs]\nweights = 2", "expected a list"),
        ("[runs]\nweights = []", "expected a list"),
        (f"[runs]\nweights = {[1] * 17}", "16 runs at most"),
        ("[runs]\nweights = [1, 1]\n[simulation]\narms = ['fixed', 'rose']", "rose: no rule for several [runs]"),
        ("[cluster", "is no TOML"),
        (f"[trainer]\ntrain_s = {10**400}", "is no TOML: a whole number in it has more than 1000 bits"),
        (f"[simulation]\narms = {'[' * 3000}{']' * 3000}", "is no TOML: it is nested too deep"),
        ("[work]\nkind = 2026-01-01", "kind is 2026-01-01: expected a text"),
        ("[work]\ngroups = true", "groups is true: expected a whole number"),
        ("[serving]\nloads = [2.5]", "loads [2.5], seeds [0, 1, 2, 3, 4]: expected"),
        ("[serving]\nas_recorded = 1", "as_recorded is 1: expected true or false"),
        ("[serving]\nas_recorded = true\nloads = [0.5]", "[serving] has loads, and as_recorded"),
        ("[serving]\ncapacity_per_s = -1", "expected 0.01 to 1000, or 0: it is found by simulating"),
        ("name = 3", "name is 3: expected a text"),
    ],
)
def test_a_scenario_that_cannot_be_meant_is_refused_by_name(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_scenario(written(tmp_path, text))
    assert told in str(refused.value)


def test_a_name_is_one_line_of_every_table(tmp_path: Path) -> None:
    assert read_scenario(written(tmp_path, 'name = "two\\nlines\\u001b[31m"')).name == r"two\nlines\x1b[31m"


TINY = """
[cluster]
dedicated = 1
serving = 1
[work]
groups = 2
group_size = 2
steps = 1
[simulation]
arms = ["fixed", "ours"]
seeds = [0, 1]
"""


def test_a_table_of_step_times_of_ones_own(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text(
        "model,gpu,gpus,kv_bytes,weight_gb,fixed_ms,weights_ms,token_us,context_us_per_1000,attention_ns\n"
        "mine,cpu,1,1000,1,20,0,0,0,0\n"
    )
    found = model_of("mine", "cpu", 1, path=str(mine))
    assert found.cost.seconds(StepWork(decode_count=1), 0.0) == pytest.approx(0.02155)  # and what a CPU adds
    with pytest.raises(ConfigError, match="no step times for 'mine h100 1'"):
        model_of("mine", "h100", 1, path=str(mine))
    with pytest.raises(ConfigError, match="README"):
        model_of("mine", "cpu", 1, path=str(tmp_path / "none.csv"))
    for number, (old, new, told) in enumerate(
        (
            ("1000,1,20", "1000,1,nan", "line 2, mine: fixed_ms is nan"),
            ("1000,1,20", "1000,1,x", "line 2, mine: fixed_ms is x, expected a number of at least 0"),
            ("mine,cpu,1,", "mine,cpu,1.5,", "gpus is 1.5, expected a whole number"),
            (",0,0\n", "\n", "context_us_per_1000 is missing"),
            ("20,", f'"{"x" * 200_000}', "a line is longer than any row"),
            ("weight_gb", "weigth_gb", "no column weight_gb"),
        )
    ):
        damaged = tmp_path / f"damaged{number}.csv"
        damaged.write_text(mine.read_text().replace(old, new))
        with pytest.raises(ConfigError, match=told):
            model_of("mine", "cpu", 1, path=str(damaged))


@pytest.mark.parametrize(("count", "measured_ms"), [(1, 3.63), (4, 5.74), (8, 7.22), (16, 8.64), (32, 12.10)])
def test_a_step_of_a_model_with_experts_reads_those_that_its_tokens_choose(count: int, measured_ms: float) -> None:
    model = model_of("Qwen3-30B-A3B", "h100", 2)  # of the table that it was fitted to: 1,024 tokens of context each
    cost = replace(model.cost, cpu_step_ms=0.0, cpu_sequence_ms=0.0)
    found_ms = 1000 * cost.seconds(StepWork(decode_count=count, context_tokens=1024 * count), 0.0)
    assert found_ms == pytest.approx(measured_ms, rel=0.3)  # at worst; 8 % on average
    whole = replace(cost, expert_part=1.0)
    assert 1000 * whole.seconds(StepWork(decode_count=1, context_tokens=1024), 0.0) > 3 * 3.63, "as if all were read"
    assert model_of("Qwen3-30B-A3B", "h100", 2, error=2.0).cost.expert_part == cost.expert_part


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_whatever_is_shown_says_that_it_is_simulated(tmp_path: Path, words: list[str]) -> None:
    shown = CliRunner().invoke(app, ["sim", str(written(tmp_path, TINY)), *words], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert "simulated" in shown.output and "held against real runs on CPUs, not on GPUs" in shown.output
    if words:
        found: dict[str, Any] = orjson.loads(shown.output)
        assert found["tag"].startswith("simulated")
        assert found["by_load"][0]["arms"]["fixed"]["over_fixed"]["mean"] == 1.0
        assert found["by_load"][0]["arms"]["ours"]["simulated_s_per_cpu_s"] > 0
    else:
        table = shown.output.partition("All figures")[0]
        assert max(map(len, table.splitlines())) <= 80
        assert "…" not in table
        assert "simulated seconds in one of a core" in " ".join(shown.output.split())


def test_how_often_workers_died_is_told_where_they_may(tmp_path: Path) -> None:
    told = "Deaths in a run: "
    mortal = written(tmp_path, TINY + "[failures]\nhours_between = 0.02\nback_s = 1")
    shown = CliRunner().invoke(app, ["sim", str(mortal), "--seeds", "1"], env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.output
    assert told in " ".join(shown.output.split())
    shown = CliRunner().invoke(app, ["sim", str(written(tmp_path, TINY)), "--seeds", "1"], env={"COLUMNS": "80"})
    assert told not in " ".join(shown.output.split())


def test_the_simulators_speed_is_over_all_seeds_of_an_arm() -> None:
    one = run("fixed")
    assert speed_of([replace(one, span_s=100.0, cpu_s=1.0), replace(one, span_s=500.0, cpu_s=2.0)]) == 200.0


def test_an_arm_without_a_rule_for_several_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--arms: rose: no rule for several \[runs\]; arms that have one: fixed"):
        CliRunner().invoke(app, ["sim", "s12", "--arms", "fixed,rose"], catch_exceptions=False)


def test_each_run_of_several_is_told_of(tmp_path: Path) -> None:
    both = written(tmp_path, TINY + "[runs]\nweights = [2, 1]")
    shown = CliRunner().invoke(app, ["sim", str(both), "--seeds", "1", "--json"])
    assert shown.exit_code == 0, shown.output
    rows = orjson.loads(shown.output)["by_load"][0]["arms"]["ours"]["runs"]
    assert [row["weight"] for row in rows] == [2.0, 1.0]
    shown = CliRunner().invoke(app, ["sim", str(both), "--seeds", "1"], env={"COLUMNS": "80"})
    table = shown.output.partition("All figures")[0]
    assert "each run, simulated" in table
    assert max(map(len, table.splitlines())) <= 80


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match="--arms has no 'our'"):
        CliRunner().invoke(app, ["sim", "s0", "--arms", "our"], catch_exceptions=False)


def test_an_interval_holds_the_mean_of_most_samples_and_a_single_value_has_none() -> None:
    dice, held = Random(1), 0
    for _ in range(60):
        found = figure([dice.gauss(10.0, 1.0) for _ in range(20)])
        held += found["low"] <= 10.0 <= found["high"]
    assert held >= 50  # of 60, 57 in the mean; percentile intervals of 20 are a little narrow
    assert figure([3.0]) == {"mean": 3.0, "low": 3.0, "high": 3.0}


def test_the_oracle_leaves_what_prompts_and_paced_decodes_do_not_need() -> None:
    cost = model_of("Qwen2.5-7B", "h100", 1).cost
    assert spare([], 3.0, cost, 0.15) == [1.0, 1.0, 1.0]
    busy = spare([Arrival(at_s=0.5, prompt_tokens=2000, completion_tokens=20)], 5.0, cost, 0.15)
    assert busy[0] == pytest.approx(
        1 - 1e-6 * cost.token_us * 2000, abs=0.03
    )  # the prompt, and half a second of decodes
    assert busy[4] == 1.0  # 19 tokens at 0.15 s are over
    assert all(0 <= each <= 1 for each in busy)


def test_the_same_seed_and_step_draw_the_same_work_and_dapo_draws_more() -> None:
    one, same, other = (draw_step("alfworld", seed=s, step=0, groups=2, group_size=4) for s in (0, 0, 1))
    assert one == same != other
    dapo = draw_step("reasoning", seed=3, step=0, groups=4, group_size=2, oversample=5.7)
    assert len(dapo.groups) > dapo.needed == len(dapo.kept) == 4
