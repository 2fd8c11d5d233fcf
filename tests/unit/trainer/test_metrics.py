"""A training step in numbers: what follows from groups, what the run did meanwhile, and nothing that is not known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollfab.fabric.contract.agreement import Agreement, AlarmRule, Figures
from rollfab.fabric.contract.errors import BrokerError
from rollfab.fabric.contract.records import Failure, Group, Rollout, RunConfig, Span, WorkerInfo
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.rules.queue.timings import Timings
from rollfab.trainer.metrics import StepMeter, group_metrics, lent_metrics, staleness_metrics
from tests.standin.fabric import StandInFabric
from tests.support.processes.relay_nodes import StepClock
from tests.support.records import new_rollout

RUN = RunConfig(run_id="r1", model="tiny", environment="frozenlake")


def rollout(reward: float | None, *, mask: tuple[int, ...] = (1, 1), **fields: object) -> Rollout:
    spans = (Span(0, len(mask), "w1", 3),)
    mask_T = np.array(mask, np.uint8)
    return new_rollout(range(len(mask)), **{"reward": reward, "completion_mask": mask_T, "spans": spans, **fields})


def group(*rollouts: Rollout, **fields: object) -> Group:
    return Group(group_id="g", task_id="t", rollouts=rollouts, **fields)  # type: ignore[arg-type]


def test_groups_say_what_they_hold() -> None:
    first = group(rollout(1.0), rollout(0.0, mask=(1, 0, 1, 1), finish_reason="turns", turn_count=3))
    second = group(rollout(2.0), failures=(Failure("g.1", "it raised"),), cancelled=("g.2",), redelivered=True)
    found = group_metrics([first, second])
    assert found == {
        "group_count": 2,
        "rollout_count": 3,
        "failure_count": 1,
        "cancelled_count": 1,
        "redelivered_count": 1,
        "reward_mean": 1.0,
        "reward_min": 0.0,
        "reward_max": 2.0,
        "reward_deviation": pytest.approx(0.8165, 1e-3),
        "completion_tokens_mean": pytest.approx(7 / 3),
        "completion_tokens_max": 3.0,
        "turn_count_mean": pytest.approx(5 / 3),
        "cut_off_fraction": pytest.approx(1 / 3),
    }


@pytest.mark.parametrize("groups", [[], [group()], [group(rollout(None, mask=(), spans=()))]])
def test_what_is_not_known_is_left_out(groups: list[Group]) -> None:
    found = group_metrics(groups) | staleness_metrics(groups, 3) | lent_metrics(groups, {})
    assert not [name for name in found if name.startswith(("reward", "staleness", "lent"))]
    assert all(type(value) is float and math.isfinite(value) for value in found.values())


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3, 1e6 / 7])
def test_equal_rewards_do_not_deviate(reward: float) -> None:
    assert group_metrics([group(*[rollout(reward)] * 10)])["reward_deviation"] == 0


def test_staleness_counts_from_the_oldest_token() -> None:
    mixed = rollout(1.0, spans=(Span(0, 1, "w1", 4), Span(1, 2, "w2", 2)))
    groups = [group(mixed, rollout(1.0))]
    assert staleness_metrics(groups, 5) == {"staleness_steps_mean": 2.5, "staleness_steps_max": 3.0}
    assert staleness_metrics(groups, 1) == {"staleness_steps_mean": 0.0, "staleness_steps_max": 0.0}
    assert staleness_metrics(groups, -1) == {}


def test_lent_tokens_are_counted_among_those_of_workers_that_are_known() -> None:
    spans = (Span(0, 3, "d", 1), Span(3, 4, "s", 1), Span(4, 9, "gone", 1))
    groups = [group(rollout(1.0, mask=(1,) * 9, spans=spans))]
    assert lent_metrics(groups, {"d": "dedicated", "s": "serving", "a": "agent"}) == {"lent_tokens_fraction": 0.25}
    assert lent_metrics(groups, {}) == {}


async def fabric_with_run() -> StandInFabric:
    fabric = StandInFabric()
    await fabric.board.create_run(RUN)
    return fabric


@pytest.mark.usefixtures("nobody_is_waited_for")
async def test_the_run_says_what_it_did_since_the_last_step() -> None:
    fabric, clock, timings = await fabric_with_run(), StepClock(), Timings("p")
    info = WorkerInfo(worker_id="w1", role="serving", pid=1, host="h")
    await fabric.board.heartbeat(info)
    meter, counters = StepMeter(fabric.board, "r1", clock), ShardKeys("r1", 0).counters
    await fabric._client.hset(counters, "tokens", 1000)
    timings.of("r1").note("turn_queue", 100.0)
    await fabric.board.add_timings(info, timings)
    first = await meter.read([group(rollout(1.0))])
    assert "tokens_per_s" not in first and first["lent_tokens_fraction"] == 1.0

    clock.time_s += 10.0
    await fabric._client.hset(counters, "tokens", 1500)
    for seconds in (1.0, 3.0):
        timings.of("r1").note("turn_queue", seconds)
    await fabric.board.add_timings(info, timings)
    agreement = Agreement(policy_version=3, rule=AlarmRule(name="x"), fresh=Figures(token_count=4, k3_kl=0.25))
    await fabric.board.set_agreement("r1", agreement)
    second = await meter.read([group(rollout(1.0))])
    assert (second["tokens_per_s"], second["turn_queue_s_mean"], second["k3_kl"]) == (50.0, 2.0, 0.25)
    assert "turn_s_mean" not in second

    await fabric.board.delete_run("r1")
    await fabric.board.create_run(RUN)
    clock.time_s += 10.0
    anew = await meter.read([group(rollout(1.0))])
    assert not {"tokens_per_s", "turn_queue_s_mean"} & anew.keys()
    assert all(type(value) is float and math.isfinite(value) for value in (*first.values(), *second.values()))


async def test_a_broker_that_is_away_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fabric = await fabric_with_run()

    async def away(*_: object) -> None:
        raise BrokerError("away")

    monkeypatch.setattr(type(fabric.board), "run_status", away)
    found = await StepMeter(fabric.board, "r1").read([group(rollout(1.0))])
    assert found == group_metrics([group(rollout(1.0))])


def test_rewards_beyond_all_measure_leave_no_number_that_is_none() -> None:
    huge = [group(rollout(1.7e308), rollout(1.7e308), rollout(-1.7e308))]
    assert all(math.isfinite(value) for value in group_metrics(huge).values())


@pytest.mark.filterwarnings("ignore")
async def test_tensorboard_takes_them_as_they_are(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    fabric = await fabric_with_run()
    found = await StepMeter(fabric.board, "r1").read([group(rollout(0.5), replace(rollout(1.5), turn_count=2))])
    with SummaryWriter(str(tmp_path)) as writer:
        for name, value in found.items():
            writer.add_scalar(f"rollfab/{name}", value, 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Scalars("rollfab/reward_mean")
    assert (event.step, event.value) == (7, 1.0)
    assert len(events.Tags()["scalars"]) == len(found)
