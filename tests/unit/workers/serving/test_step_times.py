"""How long a step had the device, on clocks that are played."""

from __future__ import annotations

import pytest

from rollfab.fabric.rules.serving.facts import StepWork
from rollfab.workers.serving.guarding.step_times import StepTimes

WORK, NEXT = StepWork(prefill_tokens=256), StepWork(decode_count=8)


class Clocks:
    """Fake clocks: the time, and the processor time of the thread that calls."""

    now_s = thread_s = 0.0

    def pass_by(self, passed_s: float, own_s: float) -> None:
        self.now_s += passed_s
        self.thread_s += own_s


def steps_on(clocks: Clocks, *, is_on_cpu: bool, computes_here: bool = False) -> StepTimes:
    return StepTimes(
        is_on_cpu=is_on_cpu,
        computes_here=computes_here,
        now_s=lambda: clocks.now_s,
        thread_s=lambda: clocks.thread_s,
    )


@pytest.mark.parametrize(
    ("is_on_cpu", "passed_s", "own_s", "computes_here", "expected"),
    [
        (True, 0.500, 0.012, True, 0.012),  # it gave way for long, and that is not how long steps take
        (True, 0.500, 0.012, False, None),  # it waited for other threads
        (True, 0.014, 0.012, False, 0.012),
        (False, 0.020, 0.008, False, None),  # its thread launched kernels for 8 ms, and slept until they were through
        (False, 0.020, 0.019, False, None),  # it looked again and again until they were through
        (False, 0.020, 0.008, True, None),  # whatever is said of its thread
    ],
)
def test_a_step_counts_with_the_time_that_it_had_of_the_device(
    is_on_cpu: bool, passed_s: float, own_s: float, computes_here: bool, expected: float | None
) -> None:
    clocks = Clocks()
    steps = steps_on(clocks, is_on_cpu=is_on_cpu, computes_here=computes_here)
    steps.begins(WORK)
    clocks.pass_by(passed_s, own_s)

    step = steps.ended()

    assert step is not None and step.work == WORK
    assert step.ended_s - step.began_s == pytest.approx(passed_s)
    assert step.device_s == (None if expected is None else pytest.approx(expected))


def test_of_two_steps_at_once_the_second_begins_when_the_first_has_ended() -> None:
    # Given
    clocks = Clocks()
    steps = steps_on(clocks, is_on_cpu=True)
    steps.begins(WORK)
    clocks.pass_by(0.004, 0.004)
    steps.begins(NEXT)
    clocks.pass_by(0.010, 0.010)

    # When
    first = steps.ended()
    clocks.pass_by(0.003, 0.003)
    second = steps.ended()

    # Then
    assert first is not None and second is not None
    assert (first.work, second.work) == (WORK, NEXT)
    assert first.device_s is None  # which of the two the thread's time was for is not known
    assert (second.began_s, second.ended_s) == (first.ended_s, pytest.approx(0.017))
    assert not steps.is_computing and steps.ended() is None


def test_what_was_no_step_in_the_end_is_forgotten() -> None:
    steps = steps_on(Clocks(), is_on_cpu=False)
    steps.begins(WORK)
    assert steps.is_computing
    steps.forget()
    assert not steps.is_computing and steps.ended() is None
