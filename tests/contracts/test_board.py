"""What the control plane promises, on a server, a cluster and the stand-in alike."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping

import pytest

from rollfab.fabric.contract.agreement import Agreement, AlarmRule, WorkerFigures
from rollfab.fabric.contract.errors import InputError, QueueFull, RunMismatch, RunUnknown
from rollfab.fabric.contract.lease_plan import EPOCHS_PER_TERM, LeaseChange, LeasePlan, PlanRow, RunDemand
from rollfab.fabric.contract.records import Lease, WorkerInfo
from rollfab.fabric.contract.sharing import LendSetting, SharingReport
from rollfab.fabric.ports.queue import RunDetails, TrajectoryClaim
from rollfab.fabric.rules.queue.retries import given_up
from rollfab.trainer.checks import make_groups
from tests.contracts.conftest import World
from tests.support.leases import set_lease
from tests.support.records import rollout_of


def info(worker_id: str = "w1", **facts: object) -> WorkerInfo:
    return WorkerInfo(**{"worker_id": worker_id, "role": "dedicated", "pid": 1, "host": "h", **facts})  # type: ignore[arg-type]


def lease(epoch: int, slots: int = 4) -> Lease:
    return Lease(worker_id="w1", run_id="r1", lease_epoch=epoch, slot_count=slots, lease_until_ms=None)


async def test_creating_a_run_again_is_the_same_run(world: World) -> None:
    assert await world.board.create_run(world.run) == world.run
    assert list(await world.board.runs()) == ["r1"]


async def test_a_run_with_other_settings_is_refused_and_says_which(world: World) -> None:
    other = dataclasses.replace(world.run, environment="guess-the-number")
    with pytest.raises(RunMismatch, match="environment is 'frozenlake', not 'guess-the-number'"):
        await world.board.create_run(other)
    assert (await world.board.runs())["r1"].environment == "frozenlake"


async def test_settings_that_may_change_take_effect(world: World) -> None:
    await world.board.create_run(dataclasses.replace(world.run, staleness=5))
    assert (await world.board.runs())["r1"].staleness == 5


async def test_settings_change_only_from_what_they_were_and_a_deleted_run_has_none(world: World) -> None:
    # When somebody else has changed them since, nothing is changed; nor where that would make it another run
    mine, theirs = (dataclasses.replace(world.run, **each) for each in ({"weight": 3.0}, {"staleness": 5}))
    assert await world.board.change_run(world.run, theirs)
    assert not await world.board.change_run(world.run, mine)
    assert (await world.board.runs())["r1"] == theirs
    with pytest.raises(RunMismatch, match="environment is 'frozenlake', not 'other'"):
        await world.board.change_run(theirs, dataclasses.replace(theirs, environment="other"))
    # And what the broker's scripts know of them is as they are now
    assert await world.board.change_run(theirs, dataclasses.replace(theirs, trajectory_count_max=6))
    with pytest.raises(QueueFull, match="limit is"):
        await world.rollouts.push(make_groups([{}] * 20, 1))
    await world.board.delete_run("r1")
    assert not await world.board.change_run(theirs, mine)
    assert await world.board.runs() == {}


async def test_an_unknown_run_is_named(world: World) -> None:
    with pytest.raises(RunUnknown, match="'nope'"):
        await world.board.run_status("nope")
    with pytest.raises(RunUnknown, match="'nope'"):
        await world.board.delete_run("nope")


async def test_a_deleted_run_is_gone(world: World) -> None:
    await world.board.delete_run("r1")
    assert await world.board.runs() == {}
    # Whoever still works on it hears that it was deleted, and not that its data was lost
    for ask in (
        lambda: world.board.run_status("r1"),
        lambda: world.rollouts.receive("trainer", 1, 0.01),
        lambda: world.rollouts.push(make_groups([{}], 1)),
        lambda: world.board.delete_run("r1"),
    ):
        with pytest.raises(RunUnknown, match=r"'r1' was deleted [0-9] s ago"):
            await ask()
    await world.board.create_run(world.run)
    assert await world.rollouts.receive("trainer", 1, 0.01) == []


async def test_the_last_agreement_of_a_run_is_kept_and_goes_with_it(world: World) -> None:
    row = WorkerFigures(worker_id="w1", policy_version=3, token_count=7)
    first = Agreement(policy_version=3, rule=AlarmRule(name="float32"), workers=(row,))
    second = dataclasses.replace(first, policy_version=4)
    assert (await world.board.run_status("r1")).agreement is None
    for agreement in (first, second):
        await world.board.set_agreement("r1", agreement)
        assert (await world.board.run_status("r1")).agreement == agreement
    await world.board.delete_run("r1")
    with pytest.raises(RunUnknown, match="'r1'"):
        await world.board.set_agreement("r1", first)
    await world.board.create_run(world.run)
    assert (await world.board.run_status("r1")).agreement is None


async def test_a_heartbeat_brings_the_lease(world: World) -> None:
    assert await world.board.heartbeat(info()) is None
    await set_lease(world.board, lease(7), None)
    held = await world.board.heartbeat(info(running_count=2))
    assert held is not None
    assert (held.run_id, held.lease_epoch, held.slot_count, held.remaining_ms) == ("r1", 7, 4, None)
    (seen, age_ms) = (await world.board.workers())["w1"]
    assert seen.running_count == 2
    assert 0 <= age_ms < 1000


async def test_a_lease_with_a_time_runs_out_by_the_broker_s_clock(world: World) -> None:
    await set_lease(world.board, lease(7), 100)
    held = await world.board.heartbeat(info())
    assert held is not None
    assert 0 < held.remaining_ms <= 100
    await asyncio.sleep(0.15)
    assert await world.board.heartbeat(info()) is None


async def test_one_controller_leads_and_its_successor_has_a_higher_term(world: World) -> None:
    first = await world.board.lead("c1", 100)
    assert first >= 1
    assert await world.board.lead("c2", 100) == 0
    assert await world.board.lead("c1", 100) == first
    await asyncio.sleep(0.15)
    assert await world.board.lead("c2", 100) > first
    assert await world.board.lead("c1", 100) == 0


async def test_a_controller_that_is_started_again_under_its_name_has_a_higher_term(world: World) -> None:
    first = await world.board.lead("c1", 10_000, is_new=True)
    second = await world.board.lead("c1", 10_000, is_new=True)
    assert second > first
    assert await world.board.lead("c1", 10_000) == second
    assert await world.board.lead("c2", 10_000, is_new=True) == 0


async def test_two_processes_of_one_name_never_lead_in_one_term(world: World) -> None:
    # Given a leader
    first = await world.board.lead("c1", 10_000, process="a", is_new=True)
    assert await world.board.lead("c1", 10_000, process="a") == first
    # When another process of its name starts, then that one leads, in a term of its own, and the first no more
    second = await world.board.lead("c1", 10_000, process="b", is_new=True)
    assert second > first
    assert await world.board.lead("c1", 10_000, process="a") == 0
    assert await world.board.lead("c1", 50, process="b") == second
    # Until the second is silent: they are two, whatever they are called
    await asyncio.sleep(0.1)
    assert await world.board.lead("c1", 10_000, process="a") > second
    assert await world.board.lead("c1", 10_000, process="b") == 0


def change(term: int, number: int, worker_id: str = "w1", *, slots: int = 4, **facts: object) -> LeaseChange:
    epoch = term * EPOCHS_PER_TERM + number
    made = Lease(worker_id=worker_id, run_id="r1", lease_epoch=epoch, slot_count=slots, lease_until_ms=None)
    return LeaseChange(lease=made, **facts)  # type: ignore[arg-type]


def unclocked(leases: Mapping[str, Lease]) -> dict[str, Lease]:
    return {name: dataclasses.replace(lease, remaining_ms=None) for name, lease in leases.items()}


async def test_a_plan_is_carried_out_at_once_and_read_at_once(world: World) -> None:
    # Given two workers
    board = world.board
    for name in ("w1", "w2"):
        await board.heartbeat(info(name))
    # When both are leased, one of them for a while
    standing, timed = change(3, 1), change(3, 2, "w2", slots=2, duration_ms=5_000)
    assert await board.change_leases(3, [standing, timed], {}) == [True, True]
    # Then they find their leases, and the whole board shows them
    assert (await board.heartbeat(info("w1"))).remaining_ms is None
    assert 0 < (await board.heartbeat(info("w2"))).remaining_ms <= 5_000
    survey = await board.survey()
    assert {name: each.slot_count for name, each in survey.leases["r1"].items()} == {"w1": 4, "w2": 2}
    assert survey.assignments == {"w1": "r1", "w2": "r1"}
    assert {name: age_ms < 5_000 for name, (_, age_ms) in survey.workers.items()} == {"w1": True, "w2": True}
    assert survey.runs["r1"] == await board.run_status("r1")
    leases = await board.leases("r1")
    assert 0 < leases["w2"].remaining_ms <= survey.leases["r1"]["w2"].remaining_ms <= 5_000
    assert unclocked(survey.leases["r1"]) == unclocked(leases)
    # And one is extended while the other ends, in one call
    ending = change(3, 4, is_end=True)
    assert await board.change_leases(3, [timed, ending], survey.assignments) == [True, True]
    assert set(await board.leases("r1")) == {"w2"}
    assert await board.heartbeat(info("w1")) is None


async def test_a_worker_may_have_guests(world: World) -> None:
    # Given a worker with leases on two runs of three that it was told to look at, one of which was deleted
    board = world.board
    await board.create_run(dataclasses.replace(world.run, run_id="r2"))
    own, guest = change(3, 1, runs="r1 gone r2"), change(3, 2, slots=3, duration_ms=5_000, runs="r1 gone r2")
    guest = dataclasses.replace(guest, lease=dataclasses.replace(guest.lease, run_id="r2"))
    assert await board.change_leases(3, [guest, own], {}) == [True, True]
    # Then its lease is on the first, and brings the other
    lease = await board.heartbeat(info("w1"))
    assert (lease.run_id, lease.remaining_ms) == ("r1", None)
    assert [(each.run_id, each.lease_epoch, each.slot_count) for each in lease.guests] == [
        ("r2", 3 * EPOCHS_PER_TERM + 2, 3)
    ]
    assert (await board.survey()).assignments == {"w1": "r1 gone r2"}
    # And once the guest has left, by itself
    await board.change_leases(3, [dataclasses.replace(guest, is_end=True), change(3, 1)], {"w1": "r1 gone r2"})
    assert (await board.heartbeat(info("w1"))).guests == ()
    assert (await board.survey()).assignments == {"w1": "r1"}


async def test_what_workers_say_is_read_anew_at_every_survey(world: World) -> None:
    for count in (1, 1, 2):
        await world.board.heartbeat(info("w1", running_count=count))
        assert (await world.board.survey()).workers["w1"][0].running_count == count
    await world.board.forget_worker("w1")
    assert (await world.board.survey()).workers == {}


async def test_once_a_term_is_open_nothing_of_an_older_one_is_written(world: World) -> None:
    # Given a leader that granted a lease, and a successor that has ended it
    board = world.board
    await board.heartbeat(info("w1"))
    old = await board.lead("c1", 50)
    assert await board.change_leases(old, [change(old, 1)], {}) == [True]
    await board.set_plan(LeasePlan(controller_id="c1", term=old, made_at_ms=1))
    await asyncio.sleep(0.1)
    new = await board.lead("c2", 10_000)
    await board.open_term(new)
    assert await board.change_leases(new, [change(new, 1, is_end=True)], {"w1": "r1"}) == [True]
    assert await board.set_plan(LeasePlan(controller_id="c2", term=new, made_at_ms=2))
    # When the old one goes on as if nothing had happened
    done = await board.change_leases(old, [change(old, 9), change(old, 10, "w2")], {"w1": "elsewhere"})
    # Then it grants nothing, points nobody anywhere, ends nothing, forgets nobody and shows nothing
    assert done == [False, False]
    assert await board.leases("r1") == {}
    assert (await board.survey()).assignments == {"w1": "r1"}
    await board.change_leases(new, [change(new, 2)], {"w1": "r1"})
    assert await board.change_leases(old, [change(old, 11, is_end=True)], {}) == [False]
    assert set(await board.leases("r1")) == {"w1"}
    assert not await board.forget_workers(old, ["w1"])
    assert not await board.set_plan(LeasePlan(controller_id="c1", term=old, made_at_ms=3))
    assert (await board.plan()).made_at_ms == 2
    assert await board.forget_workers(new, ["w1"])
    assert await board.workers() == {}


async def test_an_open_term_shuts_the_old_leader_out_before_the_new_one_has_written_anything(world: World) -> None:
    await world.board.open_term(8)
    assert await world.board.change_leases(7, [change(7, 1)], {}) == [False]
    assert await world.board.leases("r1") == {}


async def test_a_plan_for_a_run_that_is_gone_changes_nothing(world: World) -> None:
    gone = dataclasses.replace(change(3, 2).lease, run_id="gone")
    with pytest.raises(RunUnknown, match="'gone'"):
        await world.board.change_leases(3, [change(3, 1), LeaseChange(lease=gone)], {})
    assert await world.board.leases("r1") == {}


async def test_the_newest_plan_is_kept_whole(world: World) -> None:
    assert await world.board.plan() is None
    rows = tuple(
        PlanRow(worker_id=f"w{n}", role="serving", slot_count=n, run_id="r1" if n else None, reason="why")
        for n in range(2)
    )
    demand = (RunDemand(run_id="r1", open_count=5, dedicated_count=0, borrowed_count=1),)
    shown = LeasePlan(controller_id="c1", term=1, made_at_ms=7, rows=rows, runs=demand)
    assert await world.board.set_plan(shown)
    assert await world.board.plan() == shown


async def test_the_serving_team_s_word_is_kept_with_when_it_was_said(world: World) -> None:
    night = LendSetting(mode="on", compute_fraction_max=0.5, hours=["22:00-06:00"], said_by="ann", reason="trial")
    await world.board.set_lend("*", "on")
    await world.board.set_lend("w1", "3")
    await world.board.set_lend("pool:chat", night)
    found = await world.board.lends()
    assert {name: (said.mode, said.slot_count_max) for name, said in found.items()} == {
        "*": ("on", None),
        "w1": ("on", 3),
        "pool:chat": ("on", None),
    }
    assert dataclasses.replace(found["pool:chat"], said_at_ms=0) == night
    assert all(said.said_at_ms > 0 for said in found.values())
    # And one subject's can be taken away again
    await world.board.set_lend("*", "clear")
    assert set(await world.board.lends()) == {"w1", "pool:chat"}


async def test_a_worker_learns_what_concerns_it_and_what_time_it_is(world: World) -> None:
    for subject in ("*", "w1", "w2", "pool:chat", "pool:batch"):
        await world.board.set_lend(subject, "on")
    before_ms = time.time_ns() // 1_000_000
    said, wall_ms = await world.board.lends_of("w1", "chat")
    assert list(said) == ["w1", "pool:chat", "*"]
    assert abs(wall_ms - before_ms) < 5_000
    assert list((await world.board.lends_of("w9", ""))[0]) == ["*"]
    times = (await world.board.wall_ms(), (await world.board.survey()).wall_ms)
    assert all(abs(each - before_ms) < 5_000 for each in times)


@pytest.mark.parametrize(
    ("subject", "rung"), [("*", ["w1", "w2"]), ("pool:chat", ["w1"]), ("w2", ["w2"]), ("d1", []), ("w9", [])]
)
async def test_a_switch_rings_those_whom_it_concerns_and_nobody_else(
    world: World, subject: str, rung: list[str]
) -> None:
    for name, pool, role in (("w1", "chat", "serving"), ("w2", "batch", "serving"), ("d1", "chat", "dedicated")):
        await world.board.heartbeat(info(name, role=role, pool=pool))

    async def is_rung(name: str) -> bool:
        await asyncio.wait_for(world.board.wait_lease(name, 30.0), 10.0 if name in rung else 0.1)
        return True

    await world.board.set_lend(subject, "off")
    found = await asyncio.gather(*map(is_rung, ("w1", "w2", "d1")), return_exceptions=True)
    assert [name for name, each in zip(("w1", "w2", "d1"), found, strict=True) if each is True] == rung


async def test_changes_of_one_subject_at_the_same_time_all_hold(world: World) -> None:
    # Given a team that lends all, and others who bound it at the moment when everything is taken back
    await world.board.set_lend("*", "on")
    changes = [
        {"slot_count_max": 3},
        {"mode": "off", "reason": "incident 7"},
        {"compute_fraction_max": 0.3},
        {"memory_fraction_max": 0.2},
    ]
    said = await asyncio.gather(*(world.board.change_lend("*", each) for each in changes))
    assert (said[1].mode, said[2].compute_fraction_max) == ("off", 0.3)
    found = (await world.board.lends())["*"]
    assert (found.mode, found.slot_count_max) == ("off", 3)
    assert (found.compute_fraction_max, found.memory_fraction_max) == (0.3, 0.2)
    # And what was said of one for the first time is changed too, while a subject that is none is refused
    assert (await world.board.change_lend("w1", {"slot_count_max": 2})).mode == "observe"
    with pytest.raises(InputError):
        await world.board.change_lend("a b", {"mode": "on"})


async def test_every_switch_is_an_event_with_who_and_why(world: World) -> None:
    said = LendSetting(mode="off", slot_count_max=4, said_by="ann", reason="incident 7")
    await world.board.set_lend("pool:chat", said)
    await world.board.set_lend("pool:chat", "clear")
    found = await world.board.events("0-0", 10, 0.05)
    facts = {"worker_id": "pool:chat", "value": "off", "slot_count_max": 4, "said_by": "ann", "reason": "incident 7"}
    assert [each[1:] for each in found] == [
        ("lend.switched", facts),
        ("lend.switched", {"worker_id": "pool:chat", "value": "clear", "said_by": "", "reason": ""}),
    ]


@pytest.mark.parametrize(("subject", "value"), [("*", "maybe"), ("a b", "on"), ("*", "-1")])
async def test_a_switch_that_is_refused_changes_and_says_nothing(world: World, subject: str, value: str) -> None:
    with pytest.raises(InputError):
        await world.board.set_lend(subject, value)
    assert await world.board.lends() == {}
    assert await world.board.events("0-0", 10, 0.02) == []


async def test_a_sharing_report_is_kept_and_goes_with_its_worker(world: World) -> None:
    await world.board.heartbeat(info(role="serving"))
    for count in (1, 2):
        report = SharingReport(worker_id="w1", token_count=count, shared={"ttft_ms_p99": 31.5})
        await world.board.set_sharing(report)
        assert await world.board.sharing() == {"w1": report}
    await world.board.forget_worker("w1")
    assert await world.board.sharing() == {}
    # And a last report of one that has left is not kept
    await world.board.set_sharing(report)
    assert await world.board.sharing() == {}


async def test_events_come_in_order_after_the_last_one_seen(world: World) -> None:
    await world.board.add_event("a", {"n": 1})
    await world.board.add_event("b", {"n": 2})
    first, second = await world.board.events("0-0", 10, 0.05)
    assert [first[1:], second[1:]] == [("a", {"n": 1}), ("b", {"n": 2})]
    assert await world.board.events(second[0], 10, 0.02) == []


async def test_events_are_read_backwards_page_by_page_from_the_newest(world: World) -> None:
    assert await world.board.newest_events("", 2) == []
    for number in range(5):
        await world.board.add_event("a", {"n": number})
    before, pages = "", []
    for _ in range(4):
        page = await world.board.newest_events(before, 2)
        pages.append([facts["n"] for _, _, facts in page])
        before = page[-1][0] if page else before
    assert pages == [[4, 3], [2, 1], [0], []]
    assert (await world.board.newest_events("", 9))[::-1] == await world.board.events("0-0", 9, 0.05)


async def test_who_consumes_and_what_died_are_told_of_a_run(world: World) -> None:
    # Given a run of which nobody has asked anything
    assert await world.board.run_details(world.run) == RunDetails()
    # When two groups are complete, one consumer holds one and another has only asked
    for name in ("g1", "g2"):
        await world.rollouts.push([make_groups([{"seed": 1}], 1, [name])[0]])
    for claim in await claimed(world, 2):
        assert await world.trajectories.settle(claim, rollout_of(claim.job), is_scored=True)
    (held,) = await world.rollouts.receive("old", 1, 0.1)
    # Then it is known who holds how many, and when each asked
    found = {each.name: each for each in (await world.board.run_details(world.run)).consumers}
    assert found["old"].held_count == 1
    assert 0 <= found["old"].heard_s < 5
    assert not found["old"].is_live, "it has said nothing of how long it lives"
    assert (await world.board.run_status("r1")).groups_waiting == 2
    await world.rollouts.acknowledge(held)
    (row,) = (await world.board.run_details(world.run)).consumers
    assert row.held_count == 0
    # And a sign of life counts as being heard of, for as long as it says
    await asyncio.sleep(0.5)
    (before,) = (await world.board.run_details(world.run)).consumers
    await world.rollouts.beat("old", 60.0)
    (row,) = (await world.board.run_details(world.run)).consumers
    assert row.heard_s < before.heard_s
    assert row.is_live and 50 < row.left_s <= 60
    # And a run that is gone has nobody
    await world.board.delete_run("r1")
    assert await world.board.run_details(world.run) == RunDetails()


async def test_a_dead_letter_s_reason_is_told(world: World) -> None:
    await world.rollouts.push([make_groups([{"seed": 1}], 1, ["g1"])[0]])
    (claim,) = await claimed(world, 1)
    letter = given_up("r1", "a1", claim.job, "step raised KeyError")
    assert await world.trajectories.fail(claim.job.trajectory_id, claim.fence, letter, is_final=True) == "dead"
    assert (await world.board.run_details(world.run)).dead_reason == "step raised KeyError"


async def claimed(world: World, count: int) -> list[TrajectoryClaim]:
    """Trajectories, however many calls they take: shards are asked in turn."""
    found: list[TrajectoryClaim] = []
    while len(found) < count:
        found += await world.trajectories.claim("a1", count - len(found))
    return found


async def test_what_the_broker_holds_and_may_hold_is_known(world: World) -> None:
    used, limit = await world.board.memory_bytes()
    assert used >= 0
    assert limit == 0, "brokers of tests have no bound"


async def test_a_survey_tells_heartbeats_that_lie_in_the_future(world: World) -> None:
    await world.board.heartbeat(info())
    survey = await world.board.survey()
    assert survey.now_ms > 0
    assert 0 <= survey.workers["w1"][1] < 1_000
