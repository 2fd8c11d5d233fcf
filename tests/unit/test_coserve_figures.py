"""Figures of co-serving: who is beyond an objective, what serving pays, and how much of the oracle's harvest is had."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from rollfab.bench.coserve_capacity import search
from rollfab.bench.coserve_figures import Round, arm_figures, interval, latencies_ms, promised, relative
from rollfab.bench.coserve_switch import Switch
from rollfab.bench.coserve_table import fault, print_table
from rollfab.bench.harness import Report
from rollfab.bench.replay.records import Arrival, Outcome
from rollfab.fabric.rules.serving import Slo

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


def test_a_repetition_is_judged_against_its_own_neighbours():
    # Given an hour in which the machine became twice as slow
    alone = [a_round("alone", 1, ttft_ms=40.0), a_round("alone", 2, ttft_ms=80.0)]
    ours = [a_round("ours", 1, ttft_ms=44.0, borrowed=80.0), a_round("ours", 2, ttft_ms=88.0, borrowed=40.0)]
    oracle = [a_round("oracle", 1, ttft_ms=44.0, borrowed=100.0), a_round("oracle", 2, ttft_ms=88.0, borrowed=50.0)]
    # When
    found = arm_figures(ours, [*alone, *ours, *oracle], SLO, SLO)
    # Then
    assert found["ttft_tax_p99"] == pytest.approx(0.1)
    assert found["tpot_tax_p99"] == pytest.approx(0.0)
    assert found["harvest_of_oracle"] == pytest.approx(0.8)
    assert found["speedup_over_dedicated"] == pytest.approx(1.6)
    assert found["within_by_repetition"] == [True, True]
    assert found["requests"] == 400 and found["requests_beyond"] == 0


def test_one_repetition_beyond_is_a_violation_whatever_the_others_are():
    rounds = [a_round("ours", 1, ttft_ms=20.0), a_round("ours", 2, ttft_ms=101.0), a_round("ours", 3, ttft_ms=20.0)]
    found = arm_figures(rounds, rounds, SLO, Slo(ttft_ms=15.0, tpot_ms=10.0))
    assert found["violations"] == 1
    assert found["requests_beyond"] == 200
    assert found["requests_beyond_3x_p50"] == 600


def test_without_another_arm_nothing_is_claimed_of_it():
    rounds = [a_round("ours", 1, ttft_ms=20.0)]
    found = arm_figures(rounds, rounds, SLO, SLO)
    assert found["ttft_tax_p99"] is found["harvest_of_oracle"] is found["speedup_over_dedicated"] is None
    assert found["reclaim_ms_p99"] is None


def test_a_request_that_failed_is_beyond_every_objective():
    arrival = Arrival(0.0, 8, 4)
    good = Outcome(arrival=arrival, sent_at_s=0.0, ttft_s=0.02, tpot_s=0.004, ended_at_s=0.1, token_count=4)
    bad = Outcome(arrival=arrival, sent_at_s=0.0, ttft_s=0.02, tpot_s=0.004, ended_at_s=0.1, error="cut")
    assert latencies_ms([good, bad]) == {"ttft_ms": (20.0, math.inf), "tpot_ms": (4.0, math.inf)}


def test_what_is_promised_follows_from_serving_alone():
    rounds = [a_round("alone", 1, ttft_ms=40.0), a_round("alone", 2, ttft_ms=60.0)]
    assert promised(rounds) == Slo(ttft_ms=75.0, tpot_ms=6.25)
    assert relative(rounds) == Slo(ttft_ms=180.0, tpot_ms=15.0)


def test_the_interval_of_p99_holds_it_and_counts_a_burst_for_less_than_as_many_requests():
    # Given requests of which one in fifty is late, alone or in bursts of ten
    alone = [100.0 if index % 50 == 0 else index % 10 for index in range(2_000)]
    bursts = [100.0 if index % 500 < 10 else index % 10 for index in range(2_000)]
    low, high = interval(alone)
    assert low <= 100.0 <= high
    # Then of the bursts one is less sure
    assert interval(bursts)[0] < low


def test_where_requests_failed_the_interval_ends_in_infinity():
    assert interval([*range(1, 500), *[math.inf] * 20])[1] == math.inf
    assert all(math.isfinite(edge) for edge in interval([float(index) for index in range(500)]))


def test_what_is_had_of_the_oracle_says_of_how_many_repetitions():
    # Given an oracle that borrowed nothing in one of two
    ours = [a_round("ours", 1, ttft_ms=20.0, borrowed=80.0), a_round("ours", 2, ttft_ms=20.0, borrowed=40.0)]
    oracle = [a_round("oracle", 1, ttft_ms=20.0, borrowed=100.0), a_round("oracle", 2, ttft_ms=20.0)]
    found = arm_figures(ours, [*ours, *oracle], SLO, SLO)
    assert (found["harvest_of_oracle"], found["harvest_repetitions"]) == (pytest.approx(0.8), 1)


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
    assert (fault(report) is None) is has_ended
    print_table(report)
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("limit", [4.0, 10.0, 31.0, 190.0])
def test_the_capacity_that_is_found_held_and_is_close(limit: float):
    found = search(lambda rate: rate <= limit, 10.0)
    if limit < 10.0 / 1.5:
        assert found is None
    else:
        assert found is not None and 0.93 * limit <= found <= limit
