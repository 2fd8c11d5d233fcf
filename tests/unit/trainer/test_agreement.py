"""Is a worker that disagrees with the trainer found, named, and no other? Are the figures what they say they are?"""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollfab.fabric.contract.agreement import Agreement, AlarmRule, Figures, mark_of
from rollfab.fabric.contract.errors import BrokerError, InputError, RunUnknown
from rollfab.fabric.contract.records import Group, Rollout, RunConfig, Span
from rollfab.trainer.agreement import (
    BFLOAT16,
    DIFFERENCES_BYTES_MAX,
    FLOAT32,
    RATIO_MAX,
    WORKER_COUNT_MAX,
    AgreementReporter,
    compare,
    rule_for,
    token_differences,
)
from tests.standin.fabric import StandInFabric
from tests.support.records import new_rollout

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")
ANY = AlarmRule(name="any")


def rollout(*spans: Span, logprobs: list[float], mask: list[int] | None = None) -> Rollout:
    length = len(logprobs)
    return new_rollout(
        range(length),
        spans=spans,
        logprobs=np.array(logprobs, np.float32),
        completion_mask=np.array(mask or [1] * length, np.uint8),
    )


def group(*rollouts: Rollout) -> Group:
    return Group(group_id="g", task_id="t", rollouts=rollouts)


def said_by(worker_id: str, *logprobs: float, version: int = 3) -> Rollout:
    return rollout(Span(0, len(logprobs), worker_id, version), logprobs=list(logprobs))


def test_the_figures_are_those_of_the_definitions() -> None:
    # Given tokens whose difference, trainer − worker, is 0, ln 3, −ln 4 and 0.1
    worker = [-1.0, -2.0, -0.5, -3.0]
    differences = np.array([0.0, math.log(3), -math.log(4), 0.1])
    # When they are compared
    (row,) = compare([group(said_by("w", *worker))], [worker + differences], version=3, rule=ANY).workers
    # Then by hand
    assert row.token_count == 4
    assert row.logprob_difference_mean == pytest.approx(np.abs(differences).mean(), abs=1e-6)
    assert row.logprob_difference_max == pytest.approx(math.log(4), abs=1e-6)
    assert row.importance_sampling_ratio_mean == pytest.approx((1 + 3 + 0.25 + math.exp(0.1)) / 4, abs=1e-6)
    assert row.importance_sampling_ratio_min == pytest.approx(0.25, abs=1e-6)
    assert row.importance_sampling_ratio_max == pytest.approx(3, abs=1e-5)
    assert row.ratio_outside_fraction == 0.5
    assert row.k3_kl == pytest.approx(np.mean(np.exp(differences) - 1 - differences), abs=1e-6)


def test_k3_estimates_the_divergence_of_the_worker_from_the_trainer() -> None:
    # Given two distributions, and many tokens that the worker drew from its own
    worker_V, trainer_V = np.array([0.5, 0.3, 0.2]), np.array([0.4, 0.4, 0.2])
    drawn = np.random.default_rng(0).choice(3, size=200_000, p=worker_V)
    # When compared; then k3 is their KL divergence
    row = said_by("w", *np.log(worker_V)[drawn])
    found = compare([group(row)], [np.log(trainer_V)[drawn]], version=3, rule=ANY).fresh.k3_kl
    assert found == pytest.approx(float(np.sum(worker_V * np.log(worker_V / trainer_V))), rel=0.05)


def test_the_worker_that_disagrees_is_named_and_no_other() -> None:
    # Given three workers in one batch, two of them in one rollout, of which one is 0.01 nats off
    shared = rollout(Span(0, 3, "good-1", 3), Span(4, 7, "bad", 3), logprobs=[-1.0] * 7, mask=[1, 1, 1, 0, 1, 1, 1])
    other = said_by("good-2", -1.0, -1.0)
    trainer = [np.array([-1.0, -1.0, -1.0, 99.0, -1.01, -1.01, -1.01]), np.array([-1.0, -1.0])]
    # When
    agreement = compare([group(shared), group(other)], trainer, version=3, rule=FLOAT32)
    # Then
    (alarm,) = agreement.alarms
    assert (alarm.worker_id, alarm.figure) == ("bad", "logprob_difference_mean")
    assert alarm.value == pytest.approx(0.01, rel=1e-3)
    assert alarm.limit == FLOAT32.difference_mean_limit
    assert "bad" in alarm.text and "version 3" in alarm.text and "restart" in alarm.text
    assert [row.worker_id for row in agreement.workers] == ["bad", "good-1", "good-2"]
    assert [row.token_count for row in agreement.workers] == [3, 3, 2]
    assert agreement.fresh.token_count == 8, "observations are not compared"


def test_where_everybody_disagrees_the_trainer_is_suspected_first() -> None:
    rows = [said_by("w1", -1.0), said_by("w2", -1.0)]
    agreement = compare([group(*rows)], [[-2.0], [-2.0]], version=3, rule=FLOAT32)
    assert len(agreement.alarms) == 2
    assert all("trainer first" in alarm.text for alarm in agreement.alarms)


def test_tokens_of_other_versions_are_counted_apart_and_raise_no_alarm() -> None:
    # Given a batch in which no token is of the trainer's version
    rows = [said_by("w", -1.0, -1.0, version=2), said_by("w", -1.0, version=4)]
    agreement = compare([group(*rows)], [[-3.0, -3.0], [-3.0]], version=3, rule=FLOAT32)
    # Then there is nothing to hold against anybody, and it is said how far training has moved
    assert agreement.alarms == () and agreement.workers == ()
    assert agreement.fresh == Figures()
    assert (agreement.stale.token_count, agreement.stale.logprob_difference_mean) == (3, 2.0)


def test_what_an_engine_makes_behind_an_older_version_s_keys_is_not_held_against_it() -> None:
    # Given a turn in which a worker changed its weights and went on, and one that another worker took over afresh
    kept = rollout(Span(0, 2, "w", 2), Span(2, 4, "w", 3), logprobs=[-1.0] * 4)
    taken = rollout(Span(0, 2, "w", 2), Span(2, 4, "v", 3), logprobs=[-1.0] * 4)
    next_turn = rollout(Span(0, 2, "w", 2), Span(3, 4, "w", 3), logprobs=[-1.0] * 4, mask=[1, 1, 0, 1])
    agreement = compare([group(kept, taken, next_turn)], [np.full(4, -1.0)] * 3, version=3)
    assert {row.worker_id: row.token_count for row in agreement.workers} == {"v": 2, "w": 1}
    assert agreement.stale.token_count == 8


@pytest.mark.parametrize("wrong", [math.nan, -math.inf, math.inf])
def test_a_worker_s_number_that_is_none_is_an_alarm_not_a_crash(wrong: float) -> None:
    rows = [said_by("bad", -1.0, wrong), said_by("old-and-bad", wrong, version=1), said_by("good", -1.0)]
    agreement = compare([group(*rows)], [[-1.0, -1.0], [-1.0], [-1.0]], version=3)
    assert {alarm.worker_id for alarm in agreement.alarms} == {"bad", "old-and-bad"}
    assert {alarm.figure for alarm in agreement.alarms} == {"not_finite_count"}
    assert agreement.fresh.token_count == 2 and agreement.fresh.not_finite_count == 1
    assert Agreement.decode(agreement.encode()) == agreement, "it can be sent"


@pytest.mark.parametrize("wrong", [math.nan, -math.inf])
def test_a_trainer_s_number_that_is_none_is_blamed_on_no_worker(wrong: float) -> None:
    agreement = compare([group(said_by("w", -1.0, -1.0))], [[wrong, -1.0]], version=3)
    (alarm,) = agreement.alarms
    assert alarm.worker_id == "" and "trainer's own" in alarm.text and "1 of 2" in alarm.text
    assert agreement.trainer_not_finite_count == 1
    Agreement.decode(agreement.encode())


def test_absurd_differences_stay_numbers() -> None:
    agreement = compare([group(said_by("w", -1e30, 0.0))], [[0.0, -1e30]], version=3)
    assert Agreement.decode(agreement.encode()).alarms[0].worker_id == "w"
    assert math.isfinite(agreement.fresh.k3_kl) and math.isfinite(agreement.fresh.importance_sampling_ratio_max)


def test_a_batch_without_tokens_agrees() -> None:
    assert compare([], [], version=0).alarms == ()
    empty = rollout(logprobs=[])
    assert compare([group(empty)], [np.zeros(0)], version=0).fresh.token_count == 0


def test_logprobs_that_do_not_fit_are_refused_by_name() -> None:
    rows = [group(said_by("w", -1.0, -1.0))]
    with pytest.raises(InputError, match=r"rollout g\.0 have shape \(3,\), expected \(2,\)"):
        compare(rows, [np.zeros(3)], version=3)
    with pytest.raises(InputError, match="2 arrays of log-probabilities for 1 rollouts"):
        compare(rows, [np.zeros(2), np.zeros(2)], version=3)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"version": "3"}, "version is '3'"),
        ({"version": -1}, "version is -1"),
        ({"version": True}, "version is True"),
        ({"rule": "float32"}, "rule is 'float32', expected an AlarmRule"),
        ({"logprobs": [["x", "y"]]}, "log-probabilities of rollout .* are no numbers"),
        ({"logprobs": [None]}, "log-probabilities of rollout .* have shape"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(words: dict[str, Any], told: str) -> None:
    given = {"logprobs": [[-1.0, -2.0]], "version": 3, "rule": ANY, **words}
    with pytest.raises(InputError, match=told):
        compare([group(said_by("w", -1.0, -2.0))], given.pop("logprobs"), **given)


def test_a_difference_beyond_float32_is_kept_as_the_largest_there_is() -> None:
    (kept,) = token_differences([group(said_by("w", -1.0, -2.0))], [[-1e300, -2.0]], 3)
    assert kept.differences.tolist() == [-float(np.finfo(np.float32).max), 0.0]


def test_the_rule_follows_the_weights() -> None:
    assert rule_for({"float32"}) is FLOAT32
    assert rule_for({"float32", "bfloat16"}) is rule_for({"float8_e4m3fn"}) is BFLOAT16


def test_the_noise_of_bfloat16_is_no_alarm_and_wrong_weights_are_one() -> None:
    dice = np.random.default_rng(0)
    worker = -dice.exponential(1.0, 4000)
    noise = dice.laplace(0, 0.015, 4000)
    noise[7] = 1.5  # a rare token that the two round apart
    fine = compare([group(said_by("w", *worker))], [worker + noise], version=3, rule=BFLOAT16)
    wrong = compare([group(said_by("w", *worker))], [worker + 10 * noise], version=3, rule=BFLOAT16)
    assert fine.alarms == ()
    assert [alarm.worker_id for alarm in wrong.alarms] == ["w"]


def test_a_few_tokens_are_not_judged_by_their_mean() -> None:
    few = [said_by("w", *[-1.0] * (BFLOAT16.token_count_min - 1))]
    many = [said_by("w", *[-1.0] * BFLOAT16.token_count_min)]
    assert compare([group(*few)], [few[0].logprobs - 1], version=3, rule=BFLOAT16).alarms == ()
    assert len(compare([group(*many)], [many[0].logprobs - 1], version=3, rule=BFLOAT16).alarms) == 1


def test_what_is_sent_stays_small_however_many_workers_there_are() -> None:
    rows = [said_by(f"worker-{index}-{'x' * 40}", -1.0) for index in range(1000)]
    agreement = compare([group(*rows)], [[-1.0 - index / 1000] for index in range(1000)], version=3)
    assert (agreement.worker_count, len(agreement.workers), len(agreement.alarms)) == (1000, 64, 64)
    assert agreement.workers[0].worker_id.startswith("worker-999"), "the worst are kept"
    assert len(agreement.encode()) < 100_000


def test_torch_tensors_with_a_gradient_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")
    own = torch.tensor([-1.0, -1.5], requires_grad=True).bfloat16()
    assert compare([group(said_by("w", -1.0, -1.5))], [own], version=3).fresh.logprob_difference_max == 0.0


# ---- what becomes of it


async def reporter() -> tuple[StandInFabric, AgreementReporter]:
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    return fabric, AgreementReporter(fabric.board, fabric.weights, fabric.rollouts(RUN), "r1")


async def kinds(fabric: StandInFabric) -> list[tuple[str, str]]:
    return [(kind, facts["worker_id"]) for _, kind, facts in await fabric.board.events("0-0", 100, 0.0)]


async def test_an_alarm_is_said_once_and_shown_until_the_worker_agrees_again(caplog: pytest.LogCaptureFixture) -> None:
    fabric, report = await reporter()
    good, bad = said_by("good", -1.0), said_by("bad", -1.0)
    # When a worker disagrees twice
    with caplog.at_level(logging.INFO, logger="rollfab.trainer.agreement"):
        for _ in range(2):
            await report.report([group(good, bad)], [[-1.0], [-2.0]], 3, FLOAT32)
    # Then one event and one warning name it
    assert await kinds(fabric) == [("agreement.alarm", "bad")]
    (warning,) = caplog.records
    assert (warning.levelname, warning.worker_id, warning.run_id) == ("WARNING", "bad", "r1")  # type: ignore[attr-defined]
    assert warning.getMessage().startswith("agreement.alarm: worker bad disagrees with the trainer at version 3")
    # When it makes no token of the next batch; then it is still shown, with the version it was compared at
    later = await report.report([group(replace(good, spans=(Span(0, 1, "good", 4),)))], [[-1.0]], 4, FLOAT32)
    assert [(row.worker_id, row.policy_version) for row in later.workers] == [("bad", 3), ("good", 4)]
    kept = (await fabric.board.run_status("r1")).agreement
    assert kept == later and [alarm.worker_id for alarm in later.alarms] == ["bad"]
    # When it agrees again; then that is said, too
    assert (await report.report([group(bad)], [[-1.0]], 3, FLOAT32)).alarms == ()
    assert await kinds(fabric) == [("agreement.alarm", "bad"), ("agreement.settled", "bad")]


def test_of_a_batch_the_rollouts_that_differ_most_are_kept_for_people_up_to_a_bound() -> None:
    length = DIFFERENCES_BYTES_MAX // 4 // 2
    rollouts = [replace(said_by("w", *[-1.0] * length), trajectory_id=f"g.{index}") for index in range(3)]
    small = replace(said_by("w", -1.0, -1.0), trajectory_id="g.3")
    offs = [0.1, -0.3, 0.2, 0.0]
    logprobs = [each.logprobs + off for each, off in zip([*rollouts, small], offs, strict=True)]
    found = token_differences([group(*rollouts, small)], logprobs, 3)
    assert [each.trajectory_id for each in found] == ["g.1", "g.2"]
    assert sum(each.differences.nbytes for each in found) <= DIFFERENCES_BYTES_MAX
    assert found[0].differences[0] == pytest.approx(-0.3, abs=1e-6)


def test_a_token_that_cannot_be_compared_has_no_difference() -> None:
    made = rollout(Span(0, 4, "w", 3), logprobs=[-1.0, math.nan, -1.0, -1.0], mask=[1, 1, 0, 1])
    (found,) = token_differences([group(made)], [[-1.5, -1.0, -9.0, math.inf]], 3)
    assert found.differences[0] == -0.5
    assert np.isnan(found.differences[1:]).all()
    assert (found.policy_version, found.mark) == (3, mark_of(made.completion_ids))
    nothing = rollout(Span(0, 1, "w", 3), logprobs=[-1.0], mask=[0])
    assert token_differences([group(nothing)], [[-1.0]], 3) == []


async def test_no_training_ends_because_differences_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    fabric, report = await reporter()

    async def refuse(found: object) -> int:
        raise BrokerError("this user may not", reason="permission")

    report._rollouts.keep_differences = refuse  # type: ignore[method-assign]
    assert (await report.report([group(said_by("w", -1.0))], [[-1.0]], 3, FLOAT32)).worker_count == 1
    assert (await fabric.board.run_status("r1")).agreement is not None
    assert "agreement.not_kept: this user may not" in caplog.text


async def test_too_few_tokens_to_be_judged_settle_no_alarm() -> None:
    fabric, report = await reporter()
    many = said_by("bad", *[-1.0] * BFLOAT16.token_count_min)
    few = said_by("bad", -1.0)
    await report.report([group(many)], [many.logprobs - 1], 3, BFLOAT16)
    later = await report.report([group(few)], [few.logprobs - 1], 3, BFLOAT16)
    assert [alarm.worker_id for alarm in later.alarms] == ["bad"] and later.worker_count == 1
    assert await kinds(fabric) == [("agreement.alarm", "bad")]
    await report.report([group(many)], [many.logprobs], 3, BFLOAT16)
    assert await kinds(fabric) == [("agreement.alarm", "bad"), ("agreement.settled", "bad")]


async def test_many_alarms_are_bounded_in_what_is_kept() -> None:
    _, report = await reporter()
    for start in (0, 60):
        rows = [said_by(f"w{start + index}", -1.0) for index in range(60)]
        agreement = await report.report([group(*rows)], [[-2.0]] * 60, 3, FLOAT32)
    assert len(agreement.alarms) == len(agreement.workers) == WORKER_COUNT_MAX


async def test_version_and_rule_follow_what_is_published() -> None:
    from rollfab.trainer.publish.publisher import Publisher

    fabric, report = await reporter()
    publisher = Publisher(fabric.weights, "r1")
    await publisher.publish({"w": np.zeros(4, np.uint16)}, 0)
    await publisher.publish({"w": np.ones(4, np.uint16)}, 1)
    agreement = await report.report([group(said_by("w", -1.0, version=1))], [[-1.01]], None, None)
    assert (agreement.policy_version, agreement.rule, agreement.fresh.token_count) == (1, BFLOAT16, 1)


@pytest.mark.usefixtures("nobody_is_waited_for")
async def test_a_run_that_is_gone_is_named() -> None:
    fabric, report = await reporter()
    await fabric.board.delete_run("r1")
    with pytest.raises(RunUnknown, match="'r1'"):
        await report.report([], [], 0, FLOAT32)


def test_outliers_are_what_the_field_calls_outliers() -> None:
    at_bound = compare([group(said_by("w", -1.0, -1.0))], [[-1.0 + math.log(RATIO_MAX)] * 2], version=3, rule=ANY)
    beyond = compare([group(said_by("w", -1.0, -1.0))], [[-1.001 - math.log(RATIO_MAX)] * 2], version=3, rule=ANY)
    assert (at_bound.fresh.ratio_outside_fraction, beyond.fresh.ratio_outside_fraction) == (0.0, 1.0)
