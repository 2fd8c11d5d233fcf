"""What a worker says of its guard and its pace with every heartbeat."""

from dataclasses import replace

from rollfab.fabric.contract.clock import SystemClock
from rollfab.fabric.contract.fields import WHOLE_MAX
from rollfab.fabric.contract.limits import RECORD_BYTES_MAX
from rollfab.fabric.contract.records import WorkerInfo
from rollfab.fabric.contract.sharing import GuardView
from rollfab.fabric.host.memory import HeldMemory
from rollfab.workers.rollout.engine_sleep import Readiness
from rollfab.workers.rollout.report import PACE_S, Guarded, TokenPace, WorkerReport
from rollfab.workers.rollout.worker import RolloutConfig
from tests.support.queue.played_worker import PlayedEngine


class HandClock(SystemClock):
    def __init__(self) -> None:
        self.at_s = 5.0

    def now_s(self) -> float:
        return self.at_s


def told(guard: Guarded | None, *, is_observing: bool = False, held: HeldMemory | None = None) -> WorkerInfo:
    engine, clock = PlayedEngine(), HandClock()
    config = RolloutConfig(
        worker_id="w", role="serving", model="tiny", slot_count=8, pool="chat", is_observing=is_observing
    )
    readiness = Readiness(engine, clock, changed=lambda: None)
    report = WorkerReport(engine, config, clock, readiness=readiness, guard=guard, held=held)
    return report.info(run_id=None, active_version=0, running_count=0, trouble=None, receiver=None)


def test_a_worker_tells_what_its_guard_sees() -> None:
    view = GuardView(
        state="narrow",
        reason="why",
        headroom_fraction=0.4,
        load_fraction=0.3,
        request_count=7,
        open_fraction=0.9,
        probe="vllm",
    )
    info = told(lambda: view)
    assert (info.guard_state, info.guard_reason, info.probe, info.pool) == ("narrow", "why", "vllm", "chat")
    assert (info.headroom_fraction, info.open_fraction, info.slot_count) == (0.4, 0.9, 8)
    assert (info.load_fraction, info.request_count) == (0.3, 7)
    swamped = told(lambda: replace(view, load_fraction=2.5))
    assert WorkerInfo.decode(swamped.encode()).load_fraction == 2.5, "it is heard of when it has most to do"


def test_a_worker_tells_how_far_off_its_guard_predicts_steps_and_what_it_holds() -> None:
    info = told(lambda: GuardView(state="open", step_error_p50=0.061234, step_error_p95=1e300))
    assert (info.step_error_fraction_p50, info.step_error_fraction_p95) == (0.0612, WHOLE_MAX)
    assert WorkerInfo.decode(info.encode()) == info
    silent = told(lambda: GuardView(state="open"))
    assert (silent.step_error_fraction_p50, silent.step_error_fraction_p95) == (None, None)
    assert told(None).step_error_fraction_p50 is None
    assert info.resident_bytes is None or info.resident_bytes > 1 << 20  # of this process: nobody looks at others
    held = HeldMemory(SystemClock(), lambda pids: 5)
    assert told(None, held=held).resident_bytes is None, "nobody has looked yet"
    held.resident_bytes, held.device_bytes = 1 << 30, 1 << 34
    info = told(None, held=held)
    assert (info.resident_bytes, info.device_bytes) == (1 << 30, 1 << 34)


def test_a_record_with_all_of_these_facts_is_little_larger() -> None:
    bare = WorkerInfo(worker_id="w", role="serving", pid=1, host="h")
    full = replace(
        bare,
        resident_bytes=WHOLE_MAX,
        device_bytes=WHOLE_MAX,
        step_error_fraction_p50=0.1234,
        step_error_fraction_p95=12345.6789,
    )
    assert len(full.encode()) - len(bare.encode()) < 64 < RECORD_BYTES_MAX["WorkerInfo"] // 100


def test_a_guard_that_is_not_up_yet_is_shut_and_none_at_all_is_not() -> None:
    assert told(lambda: None).guard_state == "shut"
    assert told(None).guard_state is None and told(None).headroom_fraction is None


def test_a_worker_that_only_observes_offers_no_slot() -> None:
    assert told(lambda: GuardView(state="open"), is_observing=True).slot_count == 0


def test_the_pace_is_that_of_the_last_seconds() -> None:
    clock = HandClock()
    pace = TokenPace(clock)
    assert pace.look(1000, 1) is None, "since when is not known"
    for second in range(1, 31):
        clock.at_s += 1
        assert pace.look(1000 + 100 * second, 1) == 100.0
    assert pace.look(4000, 1) == 100.0, "no time has passed"
    clock.at_s += PACE_S
    found = pace.look(4000, 1)
    assert found is not None and 36 < found < 38, "1/e of what it was, for turns run and none makes a token"
    clock.at_s += 100
    found = pace.look(0, 1)
    assert found is not None and found < 0.1, "an engine that was started anew"


def test_an_idle_time_does_not_make_a_worker_look_slow() -> None:
    # Given a worker that had nothing to do for a minute
    clock = HandClock()
    pace = TokenPace(clock)
    for _ in range(60):
        clock.at_s += 1
        assert pace.look(0, 0) == 0.0
    # When turns begin in the midst of a second
    clock.at_s += 1
    assert pace.look(50, 1) is None
    # Then its first full second counts whole
    clock.at_s += 1
    assert pace.look(150, 1) == 100.0
    # And so does the first one after another pause
    clock.at_s += 1
    pace.look(150, 0)
    clock.at_s += 60
    pace.look(150, 1)
    clock.at_s += 1
    assert pace.look(250, 1) == 100.0
