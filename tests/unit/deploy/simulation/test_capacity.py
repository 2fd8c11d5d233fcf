"""What loads are parts of: the most that an instance serves of a trace within its objectives, found or given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollfab.deploy.replay.records import Arrival
from rollfab.deploy.replay.scale import at_rate
from rollfab.deploy.simulation.machine.capacity import NEAR, Instance
from rollfab.deploy.simulation.report import notes_of, results, show_results
from rollfab.deploy.simulation.run import capacity_of, load_of
from rollfab.deploy.simulation.scenario import ServingPart
from rollfab.errors import ConfigError
from rollfab.fabric.rules.serving.facts import Slo
from tests.support.simulated import SERVING_COST, SMALL, run

SPAN_S = 300.0
EVEN = [Arrival(at_s=number / 4, prompt_tokens=1000, completion_tokens=50) for number in range(1200)]
INSTANCE = Instance(cost=SERVING_COST, kv_tokens=200_000, slo=Slo(ttft_ms=500, tpot_ms=150))


def at(rate: float) -> list[Arrival]:
    return at_rate(EVEN, rate, span_s=SPAN_S, seed=0)


def a_trace(tmp_path: Path, prompt_tokens: int) -> str:
    path = tmp_path / "trace.csv"
    rows = [f"{second},{prompt_tokens},20" for second in range(120)]
    path.write_text("\n".join(["t_s,input_tokens,output_tokens", *rows]))
    return str(path)


def test_the_objectives_are_kept_at_the_rate_that_is_found_and_not_far_above_it() -> None:
    found = INSTANCE.capacity_per_s(at)
    assert INSTANCE.keeps(INSTANCE.answer(at(found)))
    assert not INSTANCE.keeps(INSTANCE.answer(at(found * NEAR * 1.01)))


def test_a_load_of_longer_prompts_has_a_lower_rate() -> None:
    found = INSTANCE.capacity_per_s(at)
    longer = INSTANCE.capacity_per_s(lambda rate: [replace(each, prompt_tokens=4000) for each in at(rate)])
    assert longer < found / 3


def test_an_answer_that_comes_too_late_is_not_waited_for() -> None:
    found = INSTANCE.answer(at(500.0))
    assert found and not INSTANCE.keeps(found)
    assert found.request_count < len(at(500.0)) / 2


def test_loads_are_parts_of_what_is_found_of_their_own_trace(tmp_path: Path) -> None:
    short, long = (
        replace(SMALL, serving=ServingPart(trace=a_trace(tmp_path / name, tokens)))
        for name, tokens in (("short", 500), ("long", 3000))
        if (tmp_path / name).mkdir() is None
    )
    assert capacity_of(long) < capacity_of(short) / 3
    for scenario in (short, long):
        arrivals, span_s = load_of(scenario, 0.5, seed=1)
        assert len(arrivals) / span_s == pytest.approx(0.5 * capacity_of(scenario), rel=0.01)
        served = run("fixed", scenario, load=0.5).served
        assert served and served.attained > 0.99


def test_a_capacity_that_is_given_is_taken(tmp_path: Path) -> None:
    given = replace(SMALL, serving=ServingPart(trace=str(tmp_path / "not-there"), capacity_per_s=3.0))
    assert capacity_of(given) == 3.0


def test_nothing_is_found_where_nothing_serves(tmp_path: Path) -> None:
    nothing = ServingPart(trace=str(tmp_path / "not-there"))
    assert capacity_of(replace(SMALL, cluster=replace(SMALL.cluster, serving=0), serving=nothing)) == 0


def test_objectives_that_one_request_alone_misses_are_refused_with_those_that_it_has(tmp_path: Path) -> None:
    serving = ServingPart(trace=a_trace(tmp_path, 30_000))
    with pytest.raises(ConfigError, match=r"have their first token in \d\d\d ms.*ttft_ms = 500 .*cannot be kept"):
        capacity_of(replace(SMALL, serving=serving))
    assert capacity_of(replace(SMALL, serving=replace(serving, ttft_ms=4000.0))) > 0


def test_a_short_trace_of_requests_that_are_late_alone_is_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "short.csv"
    path.write_text("t_s,input_tokens,output_tokens\n" + "".join(f"{second},30000,5\n" for second in range(9)))
    with pytest.raises(ConfigError, match=r"first token in 8\d\d ms and each later one in 8 ms: .* cannot be kept"):
        capacity_of(replace(SMALL, serving=ServingPart(trace=str(path))))


def test_what_was_found_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (marked := tmp_path / "[bold]").mkdir()
    scenario = replace(SMALL, serving=ServingPart(trace=a_trace(marked, 500), loads=(0.25,)))
    scenario = replace(scenario, simulation=replace(scenario.simulation, arms=("fixed",), seeds=(0,)))
    found = results(scenario, [run("fixed", scenario)])
    assert found["capacity_per_s"] == capacity_of(scenario)
    assert any(note.startswith("Load 1: ") and "found: the most" in note for note in notes_of(found))
    show_results(found)
    assert "[bold]/trace.csv" in "".join(capsys.readouterr().out.split("\n"))

    given = replace(scenario, serving=replace(scenario.serving, capacity_per_s=18.0))
    assert not any(note.startswith("Load 1: ") for note in notes_of(results(given, [run("fixed", given)])))
