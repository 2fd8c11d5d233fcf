"""`rollfab bench overhead` does what it says: the same work in both arms, and figures that follow from the rounds."""

from __future__ import annotations

import json

import pytest

from rollfab.fabric.contract.errors import FabricError
from rollfab.fabric.tracing.export import FRACTION
from tests.bench.overhead import main
from tests.bench.overhead.arms import Round, Workload
from tests.bench.overhead.main import Settings, measure, measure_traces, row
from tests.bench.worlds import Metronome

WORK = Workload(
    name="work", model="tiny", trajectory_count=8, turn_count=2, completion_tokens=3, observation_tokens=4
)  # as small as a group allows


def round_of(duration_s: float, **cpu_s: float) -> Round:
    return Round(duration_s=duration_s, token_count=WORK.tokens, cpu_s=cpu_s)


async def test_the_metronome_answers_the_same_length_every_turn() -> None:
    world = Metronome(turn_count=2, completion_tokens=3, observation_tokens=4)
    assert (world.sampling.max_tokens, world.sampling.stop, world.sampling.ends_at_eos) == (3, (), False)
    assert len((await world.reset({}, 1)).text) == 4
    steps = [await world.step("anything"), await world.step("")]
    assert [(len(step.text), step.is_done) for step in steps] == [(4, False), (4, True)]
    # Where its task says otherwise, it does as that
    said = await world.reset({"text": "abcd", "completion_tokens": 5, "temperature": 0.0}, seed=1)
    assert (said.text, world.sampling.max_tokens, world.sampling.temperature) == ("abcd", 5, 0.0)


def test_a_ratio_is_that_of_neighbours_and_the_median_of_these() -> None:
    # Given a machine that grows slower, and one pair of rounds that was disturbed
    alone = [round_of(1.0, engine=0.5), round_of(2.0, engine=0.5), round_of(4.0, engine=0.5)]
    fabric = [round_of(1.25, worker=0.6), round_of(2.5, worker=0.6), round_of(40.0, worker=0.6)]

    # When they are summed up
    found = row(WORK, alone, fabric)

    # Then the disturbance is in the spread, not in the ratio
    assert found["ratio"] == pytest.approx(0.8)
    assert found["ratio_spread"] == pytest.approx((0.1, 0.8))
    assert found["fabric"]["tokens_per_s"] == pytest.approx(48 / 2.5)
    assert found["fabric"]["cpu_ms_per_turn"]["worker"] == pytest.approx(600 / 16)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(90)
def test_a_real_measurement_reports_both_arms() -> None:
    report = json.loads(measure(Settings(workloads=(WORK,), round_count=1)).json())
    assert set(report) == {"name", "params", "results", "baselines", "ratio", "machine"}
    assert report["name"] == "overhead"
    (found,) = report["results"]["rows"]
    alone, fabric = found["engine_alone"]["tokens_per_s"], found["fabric"]["tokens_per_s"]
    assert report["results"]["tokens_per_s"] == fabric > 0
    assert report["baselines"]["engine alone"]["tokens_per_s"] == alone > 0
    assert report["ratio"]["engine_alone"] == pytest.approx(fabric / alone)
    assert set(found["fabric"]["cpu_ms_per_turn"]) == {"controller", "agent", "worker", "broker", "trainer"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.redis
@pytest.mark.timeout(240)  # three fabrics start
def test_a_real_measurement_of_traces_reports_all_arms_and_that_traces_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "300")
    monkeypatch.setattr(main, "SETTLE_S", 1.0)
    report = json.loads(measure_traces(Settings(workloads=(WORK,), round_count=2)).json())
    (found,) = report["results"]["rows"]
    assert found["trace_bytes_per_turn"] > 100
    low, high = report["ratio"]["without_traces_spread"]
    assert 0 < low <= report["ratio"]["without_traces"] <= high
    assert found["without"]["tokens_per_round"] == found["traced"]["tokens_per_round"] == WORK.tokens
    assert found["more_cpu_by_default"] == FRACTION * found["more_cpu"]["traced"]["median"]
    for arm in ("without", "unsampled", "traced"):
        assert set(found[arm]["cpu_ms_per_turn"]) == {"controller", "agent", "worker", "broker", "trainer"}


def test_an_arm_that_sends_no_traces_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fabric:
        """Does its work at once, and sends nothing."""

        def __init__(self, *_: object, **__: object) -> None:
            """Take whatever a fabric takes."""

        def __enter__(self) -> Fabric:
            return self

        def __exit__(self, *_: object) -> None: ...

        def round(self) -> Round:
            return round_of(1.0)

    monkeypatch.setattr(main, "WholeFabric", Fabric)
    with pytest.raises(FabricError, match="no traces came from the arm that sends them"):
        measure_traces(Settings(workloads=(WORK,), round_count=1))
