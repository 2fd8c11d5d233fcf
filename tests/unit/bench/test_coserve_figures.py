"""Figures of co-serving: who is beyond an objective, what serving pays, and how much of the oracle's harvest is had."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollfab.deploy.replay.figures import Report
from rollfab.deploy.replay.records import Arrival, Outcome
from rollfab.fabric.rules.serving.facts import Slo
from tests.bench.coserve.arms import AGAIN_MAX, Load, interleaved, least_disturbed
from tests.bench.coserve.bursts import Burst, Look, figures, spans, step_ms, taken
from tests.bench.coserve.capacity import search
from tests.bench.coserve.figures import Round, arm_figures, interval, latencies_ms, merged, promised, relative
from tests.bench.coserve.switch import Switch
from tests.bench.coserve.table import faults, print_table
from tests.bench.stolen import stolen_s

SLO = Slo(ttft_ms=100.0, tpot_ms=10.0)


def a_round(arm: str, repetition: int, *, ttft_ms: float, dedicated: float = 100.0, borrowed: float = 0.0) -> Round:
    return Round(
        arm=arm,
        repetition=repetition,
        ttft_ms=tuple([ttft_ms] * 200),
        tpot_ms=tuple([5.0] * 200),
        duration_s=10.0,
        late_ms_max=0.0,
        dedicated_per_s=dedicated,
        borrowed_per_s=borrowed,
    )


def rounds_of(arm: str, *rows: tuple[float, float]) -> list[Round]:
    """Repetitions of an arm by their time to first token and what they borrowed."""
    return [a_round(arm, 1 + index, ttft_ms=row[0], borrowed=row[1]) for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("ours", "others", "expected"),
    [
        pytest.param(
            [(44.0, 80.0), (88.0, 40.0)],
            {"alone": [(40.0, 0.0), (80.0, 0.0)], "oracle": [(44.0, 100.0), (88.0, 50.0)]},
            {
                "ttft_tax_p99": 0.1,
                "tpot_tax_p99": 0.0,
                "harvest_of_oracle": 0.8,
                "speedup_over_dedicated": 1.6,
                "within_by_repetition": [True, True],
                "requests": 400,
                "requests_beyond": 0,
            },
            id="each is judged against its own neighbours, though the machine became twice as slow",
        ),
        pytest.param(
            [(20.0, 30.0), (101.0, 30.0), (20.0, 30.0)],
            {},
            {"violations": 1, "requests_beyond": 200, "requests_beyond_3x_p50": 600},
            id="one beyond is a violation whatever the others are",
        ),
        pytest.param(
            [(20.0, 0.0)],
            {},
            dict.fromkeys(("ttft_tax_p99", "harvest_of_oracle", "speedup_over_dedicated", "reclaim_ms_p99")),
            id="without another arm nothing is claimed of it",
        ),
        pytest.param(
            [(20.0, 80.0), (20.0, 40.0)],
            {"oracle": [(20.0, 100.0), (20.0, 0.0)]},
            {"harvest_of_oracle": 0.8, "harvest_repetitions": 1},
            id="an oracle that borrowed nothing is left out",
        ),
    ],
)
def test_what_is_said_of_an_arm(
    ours: list[tuple[float, float]], others: dict[str, list[tuple[float, float]]], expected: dict[str, Any]
):
    own = rounds_of("ours", *ours)
    every = [*own, *(each for arm, rows in others.items() for each in rounds_of(arm, *rows))]
    found = arm_figures(own, every, SLO, Slo(ttft_ms=15.0, tpot_ms=10.0))
    for name, value in expected.items():
        assert found[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    within = [borrowed for ttft_ms, borrowed in ours if ttft_ms <= SLO.ttft_ms]
    edges = sorted(found["tokens_per_s"]["borrowed_within_slo"]["spread"])
    assert edges == [min(within) if len(within) == len(ours) else 0.0, max(within)]


def test_slices_of_an_arm_count_as_one_repetition():
    short = replace(
        a_round("ours", 1, ttft_ms=20.0, dedicated=100.0, borrowed=10.0),
        duration_s=5.0,
        reclaim_ms=(3.0,),
        guard={"lent_s": 4.0, "state": "open"},
        stolen_fraction=0.004,
        again_count=1,
    )
    long = replace(
        a_round("ours", 1, ttft_ms=40.0, dedicated=200.0, borrowed=40.0),
        duration_s=15.0,
        reclaim_ms=(5.0,),
        guard={"lent_s": 9.0, "state": "shut"},
        again_count=2,
    )
    found = merged([short, long])
    assert found.ttft_ms == (20.0,) * 200 + (40.0,) * 200 and len(found.tpot_ms) == 400
    assert (found.duration_s, found.dedicated_per_s, found.borrowed_per_s) == (20.0, 175.0, 32.5)
    assert found.reclaim_ms == (3.0, 5.0) and found.guard == {"lent_s": 13.0, "state": "shut"}
    assert found.stolen_fraction == pytest.approx(0.001)
    assert arm_figures([found], [found], SLO, SLO)["slices_again"] == 3


def test_slices_have_all_requests_of_their_repetition():
    load = Load(rate_per_s=8.0, request_count=242, slice_count=4)
    assert [load.count_of(part) for part in range(4)] == [60, 60, 61, 61]


class FakeRounds:
    """Slices without a machine. alone_ms: of serving alone, pass by pass over a repetition."""

    def __init__(self, slice_count: int, alone_ms: list[float]) -> None:
        self.load = Load(rate_per_s=8.0, request_count=200, slice_count=slice_count)
        self.order: list[tuple[str, int, int]] = []
        self._alone_ms = alone_ms

    def slice(self, arm: str, repetition: int, part: int) -> Round:
        repetition_pass = sum(each == (arm, repetition, part) for each in self.order)
        self.order.append((arm, repetition, part))
        return a_round(arm, repetition, ttft_ms=self._alone_ms[repetition_pass] if arm == "alone" else 20.0)


def test_a_burst_lasts_from_its_first_request_that_is_sent_to_the_first_token_of_any():
    def answered(at_s: float, ttft_s: float | None, late_s: float = 0.0) -> Outcome:
        return Outcome(
            arrival=Arrival(at_s=at_s, prompt_tokens=1, completion_tokens=1),
            sent_at_s=at_s + late_s,
            ttft_s=ttft_s,
            ended_at_s=at_s + 1.0,
        )

    late = [answered(3.0, 0.2, 0.02), answered(3.0, 0.3, 0.01)]
    outcomes = [*late, answered(0.0, 0.5), answered(0.0, 0.25), answered(0.0, None), answered(6.0, None)]
    assert spans(100.0, outcomes) == [(100.0, 100.25), (103.01, 103.2)]


# Looks 10 ms apart: computing until 1.13 s, then still, and computing again from 1.18 s on; a request at 1.16 s.
SPENT_MS = [*range(0, 140, 10), *[130] * 5, 140, 150]
LOOKS = [
    Look(at_s=1.0 + index / 100, spent_s=spent_ms / 1000, steps=7 + spent_ms // 20, arrived=3 + (index >= 16))
    for index, spent_ms in enumerate(SPENT_MS)
]


@pytest.mark.parametrize(
    ("from_s", "until_s", "was_open", "taken_ms", "noticed_ms", "taken_after_ms"),
    [
        (1.115, 1.175, True, 15.0, 45.0, 0.0),
        (1.115, 1.155, True, 15.0, 40.0, 0.0),  # the token before the look that would have shown its request
        (1.115, 1.195, True, 30.0, 45.0, 15.0),
        (1.181, 1.195, False, 14.0, 14.0, 0.0),
    ],
)
def test_what_rollouts_take_of_a_burst_is_their_processor_time_until_its_first_token(
    from_s: float, until_s: float, was_open: bool, taken_ms: float, noticed_ms: float, taken_after_ms: float
):
    found = taken(LOOKS, from_s, until_s)
    assert found.was_open is was_open
    assert (found.taken_ms, found.noticed_ms) == (pytest.approx(taken_ms), pytest.approx(noticed_ms))
    assert found.taken_after_ms == pytest.approx(taken_after_ms, abs=1e-6)


def test_a_rollout_steps_time_is_what_it_had_of_the_processor():
    assert step_ms(LOOKS) == pytest.approx(20.0)
    assert step_ms(LOOKS[:2]) is None


def test_only_bursts_that_came_while_rollouts_computed_count():
    def a_burst(taken_ms: float, *, was_open: bool) -> Burst:
        return Burst(was_open=was_open, taken_ms=taken_ms, noticed_ms=2.0, taken_after_ms=1.0)

    counted = [a_burst(taken_ms, was_open=True) for taken_ms in (10.0, 30.0, 20.0)]
    found = figures([a_burst(0.0, was_open=False), *counted])
    assert (found["sent_count"], found["burst_count"]) == (4, 3)
    assert (found["taken_ms_p50"], found["taken_ms_p99"]) == (20.0, 30.0)
    assert figures([a_burst(0.0, was_open=False)])["taken_ms_p99"] is None


def test_arms_alternate_slice_by_slice_and_none_is_always_first():
    rounds = FakeRounds(slice_count=2, alone_ms=[20.0])
    found, spoiled = interleaved(rounds, ("alone", "ours"), 2, slo=SLO)
    assert [arm for arm, _, _ in rounds.order] == ["alone", "ours", "ours", "alone", "ours", "alone", "alone", "ours"]
    assert [(each.arm, each.repetition, len(each.ttft_ms)) for each in found] == [
        ("alone", 1, 400),
        ("ours", 1, 400),
        ("alone", 2, 400),
        ("ours", 2, 400),
    ]
    assert spoiled == []


@pytest.mark.parametrize(
    ("alone_ms", "slo", "kept", "put_aside"),
    [
        pytest.param([150.0, 150.0, 150.0, 20.0], SLO, [150.0, 20.0], [150.0, 20.0] * 2, id="alone: twice, no more"),
        pytest.param([10.0], Slo(ttft_ms=15.0, tpot_ms=10.0), [10.0, 20.0], [], id="ours: never"),
    ],
)
def test_a_repetition_is_measured_again_when_serving_alone_misses_its_objectives(
    alone_ms: list[float], slo: Slo, kept: list[float], put_aside: list[float]
):
    found, spoiled = interleaved(FakeRounds(1, alone_ms), ("alone", "ours"), 1, slo=slo, spoiled_max=2)
    assert [each.ttft_ms[0] for each in found] == kept
    assert [each.ttft_ms[0] for each in spoiled] == put_aside


@pytest.mark.parametrize(
    ("stolen", "kept", "again_count"),
    [([0.004], 0.004, 0), ([0.02, 0.001], 0.001, 1), ([0.02, 0.01, 0.03, 0.04], 0.01, AGAIN_MAX)],
)
def test_a_slice_that_the_hypervisor_disturbed_is_measured_again_whatever_came_of_it(
    stolen: list[float], kept: float, again_count: int
):
    rounds = iter(replace(a_round("ours", 1, ttft_ms=20.0 + each), stolen_fraction=each) for each in [*stolen, 0.0])
    found = least_disturbed(lambda: next(rounds))
    assert (found.stolen_fraction, found.again_count, len(list(rounds))) == (kept, again_count, 1)


def test_stolen_time_is_that_of_all_processors(tmp_path: Path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  9 8 7 6 5 4 3 250 1 0\ncpu0 9 8 7 6 5 4 3 100 1 0\n")

    assert stolen_s(stat) == 2.5
    assert stolen_s(tmp_path / "none") == 0.0


def test_a_request_that_failed_is_beyond_every_objective():
    arrival = Arrival(0.0, 8, 4)
    good = Outcome(arrival=arrival, sent_at_s=0.0, ttft_s=0.02, tpot_s=0.004, ended_at_s=0.1, token_count=4)
    bad = Outcome(arrival=arrival, sent_at_s=0.0, ttft_s=0.02, tpot_s=0.004, ended_at_s=0.1, error="cut")
    assert latencies_ms([good, bad]) == {"ttft_ms": (20.0, math.inf), "tpot_ms": (4.0, math.inf)}


def test_a_promise_is_one_that_serving_alone_keeps_in_the_busiest_repetition():
    calm, busy = a_round("alone", 1, ttft_ms=40.0), a_round("alone", 2, ttft_ms=60.0)
    assert promised([calm, calm, calm, busy]) == promised([busy, calm]) == Slo(ttft_ms=75.0, tpot_ms=6.25)
    assert relative([calm, busy]) == Slo(ttft_ms=180.0, tpot_ms=15.0)
    # However often a repetition was measured, its requests are judged together
    rarely = replace(busy, repetition=1, ttft_ms=(60.0,) * 1 + (40.0,) * 199)
    assert promised([rarely, calm]) == Slo(ttft_ms=50.0, tpot_ms=6.25)


def test_the_interval_of_p99_holds_it_and_counts_a_burst_for_less_than_as_many_requests():
    alone = [100.0 if index % 50 == 0 else index % 10 for index in range(2_000)]
    bursts = [100.0 if index % 500 < 10 else index % 10 for index in range(2_000)]
    low, high = interval(alone)
    assert low <= 100.0 <= high
    assert interval(bursts)[0] < low
    assert interval([*range(1, 500), *[math.inf] * 20])[1] == math.inf  # requests failed
    assert all(math.isfinite(edge) for edge in interval([float(index) for index in range(500)]))


def test_reclaims_count_from_the_announcement_of_a_round(tmp_path: Path):
    switch = Switch.create(tmp_path / "switch")
    arrivals = [Arrival(0.0, 8, 4)]
    switch.set_arm(1)
    switch.announce(arrivals, 1.0)
    switch.note_reclaim(0.5)  # while it was warming up
    switch.announce(arrivals, 2.0)
    switch.note_reclaim(0.25)
    assert switch.reclaims_ms() == (250.0,)


@pytest.mark.parametrize(("has_ended", "said"), [(True, "stopped after 1.5 s"), (False, "DID NOT STOP")])
def test_rollouts_that_went_on_without_a_broker_are_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_ended: bool, said: str
):
    monkeypatch.setenv("COLUMNS", "200")
    frozen = {"frozen_s": 6.0, "is_within": True, "lease_ended_after_s": 1.5, "has_ended": has_ended}
    results = {"frozen_broker": frozen, "regenerated_fraction": 0.0, "tokens_made": 1, "curve": []}
    params = {"slo": {"ttft_ms": 1, "tpot_ms": 1}, "burstiness": [], "is_quick": False, "settings": {"rate_per_s": 1}}
    report = Report(name="coserve", params=params, results=results, baselines={}, ratio={})
    assert (faults(report) == []) is has_ended
    print_table(report)
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("limit", [4.0, 10.0, 31.0, 190.0])
def test_the_capacity_that_is_found_held_and_is_close(limit: float):
    found = search(lambda rate: rate <= limit, 10.0)
    if limit < 10.0 / 1.5:
        assert found is None
    else:
        assert found is not None and 0.93 * limit <= found <= limit
