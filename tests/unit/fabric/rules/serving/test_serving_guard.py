"""The guard as it runs: what it learns from a probe, and what it says it did."""

from __future__ import annotations

from dataclasses import replace

from rollfab.fabric.rules.serving.facts import RunningRequest, ServingState, Slo, StepWork, WaitingRequest
from rollfab.fabric.rules.serving.guard import Allowance, GuardFacts, GuardRule
from rollfab.fabric.rules.serving.step_time import predict
from rollfab.workers.serving.guarding.guard import Guard, GuardConfig, GuardOrders
from rollfab.workers.serving.guarding.ledger import COUNT_MAX, SharingLedger
from rollfab.workers.serving.probes.reader import Arrival, End, Step

CONFIG = GuardConfig(probe="played", slo_ttft_ms=100.0, slo_tpot_ms=10.0)
WORK = StepWork(decode_count=32, context_tokens=3200)
ONE = StepWork(decode_count=1)


class PlayedProbe:
    """A probe that shows what a test says."""

    name = "played"

    def __init__(self) -> None:
        self.state: ServingState | None = ServingState(seen_at_s=0.0)
        self.arrivals: list[Arrival] = []
        self.steps: list[Step] = []
        self.ends: list[End] = []

    def read(self, now_s: float) -> ServingState | None:
        return replace(self.state, seen_at_s=now_s) if self.state is not None else None

    def new_arrivals(self) -> list[Arrival]:
        found, self.arrivals = self.arrivals, []
        return found

    def new_steps(self) -> list[Step]:
        found, self.steps = self.steps, []
        return found

    def new_ends(self) -> list[End]:
        found, self.ends = self.ends, []
        return found


def lent(probe: PlayedProbe, config: GuardConfig = CONFIG, *policies: object) -> Guard:
    guard = Guard(config, probe, policies)  # type: ignore[arg-type]
    guard.orders = GuardOrders(is_lent=True)
    return guard


def warmed(guard: Guard, *, step_s: float = 0.012, count: int = 40) -> float:
    """Let it measure rollout steps on an idle device; returns the time afterwards."""
    now = 10.0
    for _ in range(count):
        guard.look(now, WORK)
        guard.stepped(now, now + step_s, WORK)
        now += step_s + 0.001
    return now


def test_while_it_only_observes_nothing_runs_and_what_could_be_lent_is_counted() -> None:
    guard = Guard(CONFIG, PlayedProbe())
    now = warmed(guard)

    verdicts = [guard.look(now + 0.1 * number, WORK).step_tokens for number in range(20)]

    assert set(verdicts) == {0}
    assert guard.sharing()["could_lend_s"] > 1.5
    assert guard.sharing()["lent_s"] == 0


def test_an_arrival_shuts_the_guard_and_the_time_until_the_step_ended_is_its_reclaim() -> None:
    probe = PlayedProbe()
    guard = lent(probe)
    now = warmed(guard)
    assert guard.look(now, WORK).step_tokens is None

    probe.state = ServingState(seen_at_s=0.0, waiting=(WaitingRequest(arrived_at_s=now - 0.06, prefill_tokens=2000),))
    probe.arrivals = [Arrival(now + 0.004, 2000)]
    verdict = guard.look(now + 0.012, WORK)

    assert verdict.step_tokens == 0
    assert guard.view(now + 0.02).state == "shut"
    assert abs(guard.sharing()["reclaim_ms_p99"] - 8.0) < 0.01


def test_while_a_step_gives_way_the_guard_is_shut_unless_nobody_computes() -> None:
    probe = PlayedProbe()
    guard = lent(probe)
    now = warmed(guard)
    assert guard.look(now, WORK).step_tokens is None
    probe.state = ServingState(seen_at_s=0.0, waiting=(WaitingRequest(arrived_at_s=now, prefill_tokens=2000),))
    probe.arrivals = [Arrival(now + 0.004, 2000)]

    guard.waits(now + 0.1, since_s=now + 0.006)
    guard.waits(now + 3.0, since_s=now + 0.006)

    view = guard.view(now + 3.0)
    assert (view.state, "gives way" in view.reason) == ("shut", True)
    assert abs(view.shut_s - 2.994) < 0.01
    assert abs(guard.sharing()["reclaim_ms_p99"] - 2.0) < 0.01

    # A step that does not end on a device that is free hangs, and must not be excused
    probe.state = ServingState(seen_at_s=0.0)
    guard.look(now + 90.0, WORK)
    guard.waits(now + 90.1, since_s=now + 90.05)
    assert guard.view(now + 90.1).state == "open"


def test_serving_steps_seen_while_one_of_ours_is_under_way_are_learned_when_it_is_known_what_it_slowed_down() -> None:
    probe = PlayedProbe()
    guard, work = lent(probe), StepWork(decode_count=1, context_tokens=100)
    for number in range(60):
        at = 10.0 + 0.1 * number
        guard.look(at, WORK)
        probe.steps = [Step(at, 0.020, work), Step(at + 0.05, 0.005, work)]
        guard.waits(at + 0.04, since_s=at + 0.01)
        guard.stepped(at, at + 0.045, WORK)

    assert abs(predict(guard.models[0], work) - 0.005) < 0.001


def test_orders_that_are_not_repeated_hold_no_longer_than_they_said() -> None:
    guard = lent(PlayedProbe())
    now = warmed(guard)
    guard.orders = GuardOrders(is_lent=True, until_s=now + 0.5)

    assert guard.look(now + 0.4, WORK).step_tokens is None
    assert guard.look(now + 0.6, WORK).step_tokens == 0


def test_a_cap_on_compute_holds_over_a_second() -> None:
    guard = lent(PlayedProbe())
    now = warmed(guard)
    guard.orders = GuardOrders(is_lent=True, compute_fraction_max=0.25)
    began, computed = now, 0.0
    while now < began + 20.0:
        if guard.look(now, WORK).step_tokens != 0:
            guard.stepped(now, now + 0.012, WORK)
            computed, now = computed + 0.012, now + 0.012
        now += 0.001

    assert 0.15 < computed / 20.0 <= 0.30


def test_a_step_measured_far_too_slow_is_tried_again_and_mends_the_model() -> None:
    probe = PlayedProbe()
    guard = lent(probe)
    guard.stepped(9.0, 9.9, WORK)  # while everything was being loaded
    allowed: list[int | None] = []
    now: float = 10.0
    last: int | None = 0
    while now < 60.0 and last is not None:
        last = guard.look(now, WORK).step_tokens
        allowed.append(last)
        if last != 0:
            guard.stepped(now, now + 0.012, WORK)
        now += 0.01

    assert CONFIG.rule.trial_tokens in allowed
    assert last is None


def test_steps_measured_far_too_slow_do_not_keep_it_shut_while_it_is_not_lent() -> None:
    guard = Guard(CONFIG, PlayedProbe())
    guard.stepped(9.0, 9.9, WORK)
    guard.look(9.95, ONE, is_idle=True)
    assert guard.view(9.95).state == "shut"

    # No lease, and no work: it says that a step could be tried, and goes on saying so until it is lent
    for now in (11.0, 12.0, 30.0):
        assert guard.look(now, ONE, is_idle=True).step_tokens == 0
        assert guard.view(now).state == "narrow"

    guard.orders = GuardOrders(is_lent=True)
    assert guard.look(30.1, WORK).step_tokens == CONFIG.rule.trial_tokens
    assert guard.look(30.2, WORK).step_tokens == 0  # one step was tried, and has not ended
    assert guard.view(30.2).state == "shut"


def test_the_view_says_how_near_the_slo_is_and_how_long_it_has_been_shut() -> None:
    probe = PlayedProbe()
    guard = lent(probe)
    now = warmed(guard)
    late = RunningRequest(first_token_at_s=now - 0.05, token_count=4, context_tokens=100)
    probe.state = ServingState(seen_at_s=0.0, running=(late,))
    guard.look(now, WORK)
    guard.look(now + 1.0, WORK)

    view = guard.view(now + 1.0)

    assert (view.state, view.probe, view.headroom_fraction) == ("shut", "played", 0.0)
    assert abs(view.shut_s - 1.0) < 0.01
    assert "pace" in view.reason


def test_another_policy_is_asked_when_ordered() -> None:
    def always(facts: GuardFacts, rule: GuardRule) -> Allowance:
        return Allowance(step_tokens=7, reason="seven")

    guard = lent(PlayedProbe(), CONFIG, always)
    guard.orders = GuardOrders(is_lent=True, policy=1)

    assert guard.look(1.0, WORK).step_tokens == 7


def test_its_settings_travel_as_plain_values() -> None:
    config = GuardConfig(
        probe="/dev/shm/x", slo_ttft_ms=1.0, slo_tpot_ms=2.0, rule=GuardRule(stale_s=9.0), policies=("a:b",)
    )

    assert GuardConfig.of_row(config.row()) == config


def test_requests_are_told_apart_by_whether_rollouts_computed_in_their_time() -> None:
    ledger = SharingLedger(Slo(ttft_ms=50.0, tpot_ms=10.0))
    ledger.computed(1.0, 1.01)
    ledger.computed(1.0105, 1.02)

    ledger.ended(End(0.5, 0.52, 0.9, 20))  # before
    ledger.ended(End(0.9, 1.005, 1.2, 20))  # in the midst, and late
    ledger.ended(End(1.1, 1.12, 1.3, 1))  # after, with one token

    report = ledger.report()
    assert (report["alone"]["request_count"], report["shared"]["request_count"]) == (2, 1)
    assert report["violation_count"] == 1
    assert (report["alone"]["attained_fraction"], report["shared"]["attained_fraction"]) == (0.5, 0.0)


def test_requests_are_counted_since_the_beginning_and_percentiles_are_of_the_newest() -> None:
    ledger = SharingLedger(Slo(ttft_ms=50.0, tpot_ms=10.0))
    for index in range(3 * COUNT_MAX):
        is_late = index < COUNT_MAX  # the first third, which no percentile knows of any more
        ledger.ended(End(float(index), index + (0.1 if is_late else 0.02), index + 0.2, 1))

    alone = ledger.report()["alone"]

    assert alone["request_count"] == 3 * COUNT_MAX
    assert abs(alone["attained_fraction"] - 2 / 3) < 1e-6
    assert abs(alone["ttft_ms_p99"] - 20.0) < 1e-3
