"""Why a run does or does not move: every cause, which comes first, and nobody is blamed where work moves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollfab.fabric.contract.errors import RunUnknown
from rollfab.fabric.contract.lease_plan import LeasePlan, RunDemand
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.contract.sharing import LendSetting
from rollfab.fabric.inspect.diagnosing import diagnose_run, diagnose_survey, read_fabric
from rollfab.fabric.inspect.diagnosis import CODES, GONE_S, SILENT_MS, STALL_S, Cause, Scene, diagnose, is_well
from rollfab.fabric.ports.queue import BadRow, Consumer, RunDetails, RunStatus
from rollfab.fabric.rules.lending.terms import terms
from tests.standin.fabric import StandInFabric

CONFIG = RunConfig(run_id="r1", model="tiny", environment="frozenlake", staleness=1)
REMOTE = replace(CONFIG, environment="gateway")
ANSWERING = replace(CONFIG, environment="inference")


def info(worker_id: str, role: str, **facts: Any) -> WorkerInfo:
    return WorkerInfo(**{"worker_id": worker_id, "role": role, "pid": 1, "host": "h", **facts})


CONTROLLER = info("c1", "controller")
AGENT = info("a1", "agent", slot_count=64, environments=["frozenlake", "other"])
GATEWAY = info("g1", "agent", slot_count=64, environments=["gateway"])
WORKER = info("w1", "dedicated", model="tiny", slot_count=8, run_id="r1", active_version=0)
SERVING = info("s1", "serving", model="tiny", slot_count=8, pool="chat")
REWARD = info("j1", "reward")


def lease(worker_id: str = "w1", run_id: str = "r1", slots: int = 8) -> Lease:
    return Lease(worker_id=worker_id, run_id=run_id, lease_epoch=1, slot_count=slots, lease_until_ms=None)


def status(
    queued: int = 4,
    running: int = 0,
    scoring: int = 0,
    *,
    ready: int = 0,
    claimed: int = 0,
    waiting: int = 0,
    config: RunConfig = CONFIG,
    head: int = 0,
    depth: int | None = None,
    memory_bytes: int = 0,
    **counters: int,
) -> RunStatus:
    return RunStatus(
        config=config,
        head_version=head,
        depth=queued + running + scoring + waiting if depth is None else depth,
        memory_bytes=memory_bytes,
        trajectories={"queued": queued, "running": running, "scoring": scoring},
        turns={"ready": ready, "claimed": claimed},
        groups_waiting=waiting,
        dead_count=0,
        counters={"groups_submitted": 1, **counters},
    )


def scene(
    run: RunStatus | None = None,
    *infos: WorkerInfo,
    leases: tuple[Lease, ...] = (),
    others: tuple[RunStatus, ...] = (),
    lends: dict[str, LendSetting] | None = None,
    details: RunDetails | None = None,
    quiet_s: float | None = None,
    stale_count: int = 0,
    **facts: Any,
) -> Scene:
    run = run or status()
    held: dict[str, dict[str, Lease]] = {}
    for each in leases:
        held.setdefault(each.run_id, {})[each.worker_id] = each
    serving = [each for each in infos if each.role == "serving"]
    return Scene(
        workers={each.worker_id: (each, 100) for each in infos},
        runs={each.config.run_id: each for each in (run, *others)},
        leases=held,
        terms={each.worker_id: terms(lends or {}, each.worker_id, each.pool, 0) for each in serving},
        quiet_s={} if quiet_s is None else {"r1": quiet_s},
        stale_counts={"r1": stale_count},
        details={} if details is None else {"r1": details},
        **facts,
    )


ALL = (CONTROLLER, AGENT, WORKER)
HELD = (lease(),)
OTHER = status(0, 9, config=replace(CONFIG, run_id="r2"))
REWARDED = replace(CONFIG, reward="judge")
OFF = {"*": LendSetting(mode="off", said_by="ann", reason="launch day")}
ON = {"pool:chat": LendSetting(mode="on")}
UNGUIDED = replace(WORKER, cannot=["guided_json"], engine="transformers 5")
GUIDED = replace(CONFIG, sampling={"guided_json": "{}"})
FULL = replace(CONFIG, memory_bytes_max=1 << 20)
GONE = RunDetails(consumers=(Consumer(name="old", held_count=2, heard_s=GONE_S + 9),))
HERE = RunDetails(consumers=(Consumer(name="trainer", held_count=0, heard_s=2.0),))
DAMAGED = replace(WORKER, error="chunk 3 of version 7 has another digest")

BAD = (BadRow("r1.0:open", "", "it is a list, and should be a hash"), BadRow("r2.0:counters", "tokens", "no count"))

CASES: dict[str, tuple[Scene, str]] = {
    "moves": (scene(status(2, 4, claimed=3, ready=1), *ALL, leases=HELD), "4 trajectories are with an agent, 2 wait"),
    "nothing_submitted": (scene(status(0, groups_submitted=0), *ALL), "nothing was submitted to run 'r1' yet"),
    "all_consumed": (scene(status(0, groups_submitted=8, groups_consumed=8), *ALL), "all 8 groups"),
    "all_cancelled": (scene(status(0, groups_submitted=3, groups_cancelled=3), *ALL), "were cancelled"),
    "for_trainer": (scene(status(0, waiting=3), *ALL, leases=HELD, details=HERE), "3 complete groups of run 'r1' wait"),
    "takes_turns": (scene(None, *ALL, leases=(lease(run_id="r2"),), others=(OTHER,)), "w1: it serves run 'r2'"),
    "consumer_gone": (scene(status(0, waiting=2), *ALL, details=GONE), "held by consumer old"),
    "clock": (
        replace(scene(None, *ALL, leases=HELD), workers={"c1": (CONTROLLER, 1), "w1": (WORKER, -3_600_000)}),
        "w1 lies up to 3600 s in the future",
    ),
    "attempts_fail": (
        scene(status(trajectories_failed=5), *ALL, leases=HELD, details=RunDetails(dead_reason="step raised KeyError")),
        "all 5 trajectories of run 'r1' that have ended failed, and none was completed: step raised KeyError",
    ),
    "too_stale": (
        scene(status(1, 3, claimed=3, head=9), *ALL, leases=HELD, stale_count=8),
        "8 trajectories of run 'r1' ended with tokens older than its staleness allows and run again, and none was "
        "completed meanwhile: the head is version 9, staleness allows 1",
    ),
    "broker_full": (scene(None, *ALL, leases=HELD, memory_bytes=(2 << 30, 2 << 30)), "may hold 2.00 GiB"),
    "no_weights": (scene(status(head=-1), *ALL), "no weights of run 'r1' are published yet"),
    "nothing_started": (scene(), "neither a controller nor an agent nor a worker is connected"),
    "no_controller": (scene(None, AGENT, WORKER), "no controller is connected"),
    "no_worker": (scene(None, CONTROLLER, AGENT), "no worker is connected that could generate for run 'r1' (tiny)"),
    "other_model": (
        scene(None, CONTROLLER, AGENT, replace(WORKER, model="/models/big")),
        "no worker holds the model 'tiny' of run 'r1': they hold /models/big",
    ),
    "cannot_sample": (
        scene(
            status(config=GUIDED),
            CONTROLLER,
            AGENT,
            replace(WORKER, cannot=["guided_json"], engine="transformers 5"),
            leases=HELD,
        ),
        "run 'r1' samples with guided_json, which no worker of its model can do: they have transformers 5",
    ),
    "worker_failed": (
        scene(None, CONTROLLER, AGENT, replace(WORKER, state="failed", error="out of memory", run_id=None)),
        "w1: out of memory",
    ),
    "worker_loading": (
        scene(None, CONTROLLER, AGENT, replace(WORKER, state="loading", slot_count=0, waits_for="its engine")),
        "w1: its engine",
    ),
    "lend_off": (scene(None, CONTROLLER, AGENT, SERVING, lends=OFF), "off, said by ann: launch day"),
    "guard_shut": (
        scene(None, CONTROLLER, AGENT, replace(SERVING, guard_state="shut", guard_reason="a burst"), lends=ON),
        "s1: its guard is shut: a burst",
    ),
    "no_lease": (
        scene(None, CONTROLLER, AGENT, SERVING, lends=ON, reasons={"s1": "rests: it was taken back"}),
        "s1: rests: it was taken back",
    ),
    "staleness": (
        scene(status(0, 4, ready=4, head=7), CONTROLLER, AGENT, DAMAGED, leases=HELD),
        "the head is version 7, staleness allows 1, and w1 holds version 0: chunk 3 of version 7 has another digest",
    ),
    "catching_up": (scene(status(0, 4, ready=4, head=7), *ALL, leases=HELD), "w1 holds version 0"),
    "no_agent": (scene(None, CONTROLLER, WORKER, leases=HELD), "no agent is connected"),
    "other_environment": (
        scene(None, CONTROLLER, WORKER, replace(AGENT, environments=["a", "b"]), leases=HELD),
        "no agent offers environment 'frozenlake' of run 'r1': offered are a, b",
    ),
    "agent_failed": (
        scene(None, CONTROLLER, WORKER, replace(AGENT, error="run 'r1' is not served: no tokenizer"), leases=HELD),
        "a1: run 'r1' is not served: no tokenizer",
    ),
    "agents_full": (
        scene(None, CONTROLLER, WORKER, replace(AGENT, running_count=64), leases=HELD, others=(OTHER,)),
        "all 64 places for environments are taken, run 'r1' has none of them: r2 runs there",
    ),
    "for_session": (
        scene(status(config=REMOTE), CONTROLLER, WORKER, GATEWAY, leases=HELD),
        "4 trajectories of run 'r1' wait for somebody to open a session at a gateway",
    ),
    "for_request": (
        scene(status(0, config=ANSWERING, groups_cancelled=9), *ALL),
        "no request is under way that run 'r1' would answer",
    ),
    "no_reward_worker": (
        scene(status(0, 0, 5, config=REWARDED), *ALL, leases=HELD),
        "5 rollouts of run 'r1' wait for reward function 'judge', and no reward worker is connected",
    ),
    "other_reward": (
        scene(status(0, 0, 5, config=REWARDED), *ALL, replace(REWARD, rewards=["length"]), leases=HELD),
        "no reward worker offers it: offered are length",
    ),
    "run_full": (
        scene(status(4, waiting=3, config=FULL, memory_bytes=2 << 20), *ALL, leases=HELD, details=HERE),
        "it may hold 1.0 MiB, and 3 complete groups are not consumed",
    ),
    "bad_rows": (
        scene(None, *ALL, leases=HELD, bad_rows=BAD),
        "a row that run 'r1' may need cannot be read and is passed over: all of r1.0:open (it is a list",
    ),
    "stalled": (
        scene(status(0, 4, claimed=4), *ALL, leases=HELD, quiet_s=STALL_S + 1),
        "for 61 s nothing has come of it; its turns are leased to w1",
    ),
}


def codes(causes: list[Cause]) -> list[str]:
    return [cause.code for cause in causes]


def test_the_documentation_lists_every_cause_as_it_is() -> None:
    text = (Path(__file__).parents[4] / "docs" / "why.md").read_text()
    assert re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", text, re.MULTILINE) == [
        (code, kind, when) for code, (kind, when) in CODES.items()
    ]


def test_there_is_a_case_for_every_cause() -> None:
    assert list(CASES) == list(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_cause_is_found_and_says_what_is_wrong_in_one_sentence(code: str) -> None:
    seen, words = CASES[code]
    found = next((cause for cause in diagnose(seen, "r1") if cause.code == code), None)
    assert found is not None, codes(diagnose(seen, "r1"))
    assert words in found.text
    assert found.kind == CODES[code][0]
    assert not found.text.endswith(".") and "\n" not in found.text
    assert found.step or found.kind == "moves", "nobody is told what to do"
    assert all(cause.step or cause.kind == "moves" for cause in diagnose(seen, "r1")), "nor after that is mended"


@pytest.mark.parametrize("code", [code for code in CODES if code != "run_full"])
def test_it_comes_first_where_nothing_else_is_wrong(code: str) -> None:
    assert codes(diagnose(CASES[code][0], "r1"))[0] == code


def test_a_dedicated_worker_that_is_gone_is_named_beside_the_serving_ones_that_are_not_lent() -> None:
    gone = diagnose(CASES["lend_off"][0], "r1")[0]
    assert gone.text.startswith("no dedicated worker of its model is connected, and no serving worker is lent")
    assert "`rollfab worker --model tiny`" in gone.step
    failed = replace(WORKER, state="failed", error="out of memory", run_id=None)
    both = diagnose(scene(None, CONTROLLER, AGENT, failed, SERVING, lends=OFF), "r1")
    assert [each.text[:30] for each in both[:2]] == ["no worker can generate for run", "no serving worker is lent for "]


def test_who_waits_for_a_worker_that_starts_is_not_told_first_that_nobody_lends() -> None:
    starting = replace(WORKER, state="loading", slot_count=0, waits_for="its engine to start", run_id=None)
    causes = diagnose(scene(None, CONTROLLER, AGENT, starting, SERVING, lends=OFF), "r1")
    assert codes(causes)[:2] == ["worker_loading", "lend_off"]
    assert "w1: its engine to start" in causes[0].text


def test_who_waits_for_its_turn_is_not_told_that_others_lend_nothing() -> None:
    # Given a dedicated worker that serves another run, with a guest, and a serving one that is not lent
    served = (lease(run_id="r0"), lease(run_id="r2"))
    seen = scene(
        None, CONTROLLER, AGENT, replace(WORKER, run_id="r2"), SERVING, leases=served, others=(OTHER,), lends=OFF
    )
    (cause,) = diagnose(seen, "r1")
    # Then the run waits for its turn, behind the one whose weights that worker follows, and nobody must act
    assert (cause.code, cause.kind) == ("takes_turns", "waits") and "it serves run 'r2'" in cause.text
    # And where a third has failed, that is told behind it
    failed = replace(WORKER, worker_id="w2", state="failed", error="out of memory", run_id=None)
    causes = diagnose(replace(seen, workers={**seen.workers, "w2": (failed, 100)}), "r1")
    assert [(each.code, each.kind) for each in causes] == [("takes_turns", "waits"), ("worker_failed", "passing")]


def test_what_is_most_fundamental_comes_first() -> None:
    # Given a run for which everything is missing, one thing after the other is mended
    run, found = status(head=-1), []
    infos: list[WorkerInfo] = []
    found.append(codes(diagnose(scene(run, *infos), "r1")))
    run = status()
    for each in (CONTROLLER, WORKER, AGENT):
        found.append(codes(diagnose(scene(run, *infos), "r1")))
        infos.append(each)
    found.append(codes(diagnose(scene(run, *infos, leases=HELD), "r1")))
    # Then each answer begins with what is to be mended next
    assert found == [
        ["no_weights", "nothing_started", "no_controller", "no_worker", "no_agent"],
        ["nothing_started", "no_controller", "no_worker", "no_agent"],
        ["no_worker", "no_agent"],
        ["no_agent", "no_lease"],
        ["moves"],
    ]


def test_a_run_with_nothing_to_do_is_not_blamed_but_what_will_be_missing_is_said() -> None:
    idle = status(0, groups_submitted=0)
    assert is_well(diagnose(scene(idle, *ALL, leases=HELD), "r1"))
    assert is_well(diagnose(scene(idle, CONTROLLER, AGENT, SERVING, lends=ON), "r1")), "nothing is lent for no demand"
    found = diagnose(scene(idle, CONTROLLER), "r1")
    assert codes(found) == ["nothing_submitted", "no_worker", "no_agent"] and not is_well(found)


@pytest.mark.parametrize("run", [status(0, 4, ready=4), status(2, 2)])
def test_everybody_who_fell_silent_is_named(run: RunStatus) -> None:
    # Given an agent with trajectories in hand, and a worker, that have said nothing for 9 s
    silent = scene(run, CONTROLLER, gone={each.worker_id: (each, 9_000) for each in (AGENT, WORKER)})
    texts = {cause.code: cause.text for cause in diagnose(silent, "r1") if cause.kind == "passing"}
    # Then both are named
    assert texts["no_worker"].endswith("; w1 was heard of 9 s ago")
    assert texts["no_agent"].endswith("; a1 was heard of 9 s ago")


def test_a_group_that_waits_for_a_trainer_at_its_step_is_nobodys_fault_and_for_one_that_is_gone_it_is() -> None:
    def seen(idle_s: float) -> list[Cause]:
        details = RunDetails(consumers=(Consumer(name="trainer", held_count=0, heard_s=idle_s),))
        return diagnose(scene(status(0, waiting=1), *ALL, leases=HELD, details=details), "r1")

    assert is_well(seen(GONE_S - 1))
    assert not is_well(seen(GONE_S + 1))
    alive = (Consumer(name="trainer", held_count=0, heard_s=9_999.0, left_s=50.0),)
    assert is_well(diagnose(scene(status(0, waiting=1), *ALL, leases=HELD, details=RunDetails(consumers=alive)), "r1"))
    never = diagnose(scene(status(0, waiting=1), *ALL, leases=HELD, details=RunDetails()), "r1")
    assert "nobody has ever asked for one" in never[0].text


def test_a_worker_of_the_same_files_under_another_path_holds_the_model_and_a_namesake_does_not() -> None:
    config = replace(CONFIG, model="/a/m", model_digest="d1")
    same = replace(WORKER, model="/b/m", model_digest="d1")
    namesake = replace(WORKER, model="/a/m", model_digest="d2")
    run = status(2, 4, claimed=2, ready=2, config=config)
    assert codes(diagnose(scene(run, CONTROLLER, AGENT, same, leases=HELD), "r1")) == ["moves"]
    found = diagnose(scene(run, CONTROLLER, AGENT, namesake), "r1")
    assert found[0].code == "other_model" and "w1 holds another model under the name '/a/m'" in found[0].text


def test_a_run_that_hangs_in_its_environment_does_not_wait_for_workers_that_serve_another() -> None:
    # Given a run all of whose trajectories are in their environment, and whose workers have a lease for another one
    elsewhere = {"leases": (lease(run_id="r2"),), "others": (OTHER,)}
    hangs = scene(status(0, 2), *ALL, quiet_s=61.0, **elsewhere)  # type: ignore[arg-type]
    (cause,) = diagnose(hangs, "r1")
    assert (cause.code, cause.kind) == ("stalled", "passing")
    assert (
        cause.text
        == "2 trajectories of run 'r1' are in the environment 'frozenlake', and for 61 s nothing has come of it"
    )
    # But where some wait for an agent or a turn, they wait for those workers too
    for waits in (status(1, 2), status(0, 2, ready=1)):
        assert "takes_turns" in codes(diagnose(replace(hangs, runs={"r1": waits, "r2": OTHER}), "r1"))


def test_a_run_that_no_agent_has_a_place_for_is_not_told_to_wait_for_workers() -> None:
    # Given a run of which nothing has begun, agents without a place, and a worker that serves the run that has them
    busy = replace(AGENT, running_count=AGENT.slot_count)
    kept_out = scene(status(4, 0), CONTROLLER, busy, WORKER, leases=(lease(run_id="r2"),), others=(OTHER,))
    (cause,) = diagnose(kept_out, "r1")
    assert cause.code == "agents_full" and "`rollfab agent --environment frozenlake=module:attr`" in cause.step
    # But one that waits for a turn besides waits for a worker, and a worker that has failed is said in any case
    begun = replace(kept_out, runs={"r1": status(4, 1, ready=1), "r2": OTHER})
    assert codes(diagnose(begun, "r1"))[0] == "takes_turns"
    failed = scene(status(4, 0), CONTROLLER, busy, replace(WORKER, state="failed"), others=(OTHER,))
    assert codes(diagnose(failed, "r1")) == ["worker_failed", "agents_full"]
    # And one that hangs in its environments has stalled, also where more of it waits for their places
    hangs = scene(status(4, 2), CONTROLLER, busy, WORKER, leases=(lease(run_id="r2"),), others=(OTHER,), quiet_s=61.0)
    assert codes(diagnose(hangs, "r1")) == ["stalled"]


@pytest.mark.parametrize(("attempts", "code"), [(3, "moves"), (4, "attempts_fail")])
def test_a_run_whose_attempts_fail_is_told_so_before_any_has_failed_for_good(attempts: int, code: str) -> None:
    run = status(1, 3, claimed=1, attempts_failed=attempts)
    (cause,) = diagnose(scene(run, *ALL, leases=HELD), "r1")
    assert cause.code == code and cause.kind in ("moves", "passing")
    well = status(1, 3, claimed=1, attempts_failed=attempts, trajectories_completed=1)
    assert codes(diagnose(scene(well, *ALL, leases=HELD), "r1")) == ["moves"]


def test_a_run_that_is_through_is_told_what_of_it_failed_for_good() -> None:
    over = replace(status(0, groups_submitted=8, groups_consumed=8), dead_count=3)
    assert "(3 dead letters): `rollfab dead ls --run r1`" in diagnose(scene(over, *ALL), "r1")[0].step


@pytest.mark.parametrize(
    ("queued", "stale", "found"), [(1, 8, ["too_stale"]), (1, 7, ["moves"]), (0, 8, ["too_stale"])]
)
def test_a_run_that_publishes_faster_than_its_trajectories_end_is_told_so_while_it_moves(
    queued: int, stale: int, found: list[str]
) -> None:
    run = status(queued, 4 - queued, claimed=3)
    assert codes(diagnose(scene(run, *ALL, leases=HELD, stale_count=stale), "r1")) == found
    ended = status(0, groups_submitted=8, groups_consumed=8)
    assert codes(diagnose(scene(ended, *ALL, leases=HELD, stale_count=stale), "r1")) == ["all_consumed"]
    # But once its only worker is gone for good, that is what it is told, and nothing of how it was before
    turns = status(0, 4, ready=4)
    assert codes(diagnose(scene(turns, CONTROLLER, AGENT, stale_count=stale), "r1")) == ["no_worker"]


@pytest.mark.parametrize(
    ("roles", "code", "named"),
    [
        (("c1", "a1", "w1"), "nothing_started", "c1, a1, w1 were heard of 7 s ago"),
        (("w1",), "no_worker", "w1 was heard of 7 s ago"),
        (("a1",), "no_agent", "a1 was heard of 7 s ago"),
    ],
)
def test_who_was_heard_of_a_moment_ago_may_only_be_slow(roles: tuple[str, ...], code: str, named: str) -> None:
    """A busy machine, or broker, delays heartbeats; nobody is told to start again what runs."""
    seen = scene(status(4), *ALL, leases=HELD if code == "no_agent" else ())
    for age_ms, kind, said in ((7_000, "passing", named), (31_000, "stuck", "")):
        aged = {name: (info, age_ms if name in roles else 100) for name, (info, _) in seen.workers.items()}
        cause = diagnose(replace(seen, workers=aged), "r1")[0]
        assert (cause.code, cause.kind) == (code, kind)
        assert said in cause.text and cause.step.startswith("Wait a moment") == (kind == "passing")


@pytest.mark.parametrize(
    ("run", "slow", "others", "code"),
    [
        (status(4), AGENT, (WORKER, replace(AGENT, worker_id="a2", environments=["b"])), "other_environment"),
        (status(4), WORKER, (AGENT, replace(WORKER, worker_id="w2", model="small")), "other_model"),
        (
            status(0, 0, 5, config=REWARDED),
            replace(REWARD, rewards=["judge"]),
            (AGENT, WORKER, replace(REWARD, worker_id="j2", rewards=["length"])),
            "other_reward",
        ),
    ],
)
def test_who_alone_could_do_it_and_was_heard_of_a_moment_ago_may_only_be_slow(
    run: RunStatus, slow: WorkerInfo, others: tuple[WorkerInfo, ...], code: str
) -> None:
    seen = scene(run, CONTROLLER, slow, *others, leases=HELD)
    for age_ms, kind in ((7_000, "passing"), (31_000, "stuck")):
        (cause,) = (
            each
            for each in diagnose(replace(seen, workers={**seen.workers, slow.worker_id: (slow, age_ms)}), "r1")
            if each.code == code
        )
        assert cause.kind == kind
        assert cause.text.endswith(f"; {slow.worker_id} was heard of 7 s ago") == (kind == "passing")


@pytest.mark.parametrize(("age_ms", "kind"), [(7_000, "passing"), (31_000, "stuck")])
async def test_whom_the_controller_has_forgotten_of_late_may_only_be_slow(age_ms: int, kind: str) -> None:
    # Given an agent that the controller took off the board 1 s ago
    board = StandInFabric().board
    await board.create_run(CONFIG)
    await board.heartbeat(CONTROLLER)
    await board.add_event("worker.gone", {"worker_id": "a1", "role": "agent", "silent_ms": age_ms - 1_000})
    survey = await board.survey()
    survey = replace(survey, runs={"r1": status(4)}, workers={"c1": (CONTROLLER, 0), "w1": (WORKER, 0)})

    # When a reading a second later finds no agent
    later = replace(survey, wall_ms=survey.wall_ms + 1_000, leases={"r1": {"w1": lease()}})
    found = (await diagnose_survey(board, later, {}, None, (0, 0)))["r1"][0]

    # Then it says when it was there
    assert (found.code, found.kind) == ("no_agent", kind)
    assert ("a1 was heard of 7 s ago" in found.text) == (kind == "passing")


async def test_a_run_that_is_not_there_is_told_by_what_became_of_it() -> None:
    board = StandInFabric().board
    for name in ("r1", "r2"):
        await board.create_run(replace(CONFIG, run_id=name))
    assert set((await read_fabric(board)).causes) == {"r1", "r2"}
    assert set((await read_fabric(board, "r1")).causes) == {"r1"}
    with pytest.raises(RunUnknown, match="did you mean r1"):
        await diagnose_run(board, "r1x")
    await board.delete_run("r1")
    with pytest.raises(RunUnknown, match=r"was deleted \d s ago"):
        await diagnose_run(board, "r1")


@pytest.mark.parametrize(
    ("run", "is_looked_at"),
    [
        (status(1), False),
        (replace(status(1), dead_count=1), True),
        (replace(status(1, trajectories_completed=1), dead_count=1), False),
        (status(1, waiting=1), True),
        (status(1, 1, waiting=1), False),
    ],
)
async def test_consumers_and_reasons_are_read_only_of_a_run_whose_numbers_do_not_say_enough(
    run: RunStatus, is_looked_at: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    board, asked = StandInFabric().board, []
    await board.create_run(CONFIG)

    async def details(config: RunConfig) -> RunDetails:
        asked.append(config.run_id)
        return HERE

    monkeypatch.setattr(board, "run_details", details)
    await diagnose_survey(board, replace(await board.survey(), runs={"r1": run}), {}, None, (0, 0))
    assert asked == ["r1"] * is_looked_at


@pytest.mark.parametrize(
    ("role", "age_ms", "is_led"),
    [("controller", SILENT_MS, True), ("controller", SILENT_MS + 1, False), ("agent", 0, False)],
)
async def test_a_plan_counts_while_its_controller_lives(role: str, age_ms: int, is_led: bool) -> None:
    board = StandInFabric().board
    await board.create_run(CONFIG)
    who = {"c": (info("c", role), age_ms), "w1": (WORKER, 0), "a1": (AGENT, 0)}
    survey = replace(await board.survey(), workers=who, leases={"r1": {"w1": lease()}}, now_ms=60_000)
    survey = replace(survey, runs={"r1": status(1, 3, claimed=3)})
    demand = RunDemand(run_id="r1", open_count=4, dedicated_count=8, borrowed_count=0, moved_at_ms=50_000)
    plan = LeasePlan(controller_id="c", term=1, made_at_ms=0, runs=(demand,))
    (moves,) = (await diagnose_survey(board, survey, {}, plan, (0, 0)))["r1"]
    assert moves.code == "moves" and moves.text.endswith("the last sign of progress 10 s ago") == is_led


@pytest.mark.parametrize(("used", "limit", "is_full"), [(8, 8, True), (7, 8, False), (8, 0, False)])
def test_a_broker_is_full_at_its_limit(used: int, limit: int, is_full: bool) -> None:
    seen = scene(status(4), *ALL, memory_bytes=(used << 20, limit << 20))
    assert ("broker_full" in codes(diagnose(seen, "r1"))) == is_full


@pytest.mark.parametrize(("ages_ms", "said"), [((-5_000, 0), ""), ((-9_000, -7_000), "a1, w1 lies up to 9 s")])
def test_a_heartbeat_that_lies_further_ahead_than_a_tick_is_told(ages_ms: tuple[int, int], said: str) -> None:
    seen = scene(status(4), *ALL, leases=HELD)
    ahead = {"a1": (AGENT, ages_ms[0]), "w1": (WORKER, ages_ms[1])}
    first = diagnose(replace(seen, workers={**seen.workers, **ahead}), "r1")[0]
    assert (first.code == "clock") == bool(said) and said in first.text


@pytest.mark.parametrize(
    ("workers", "is_moving"),
    [
        ([WORKER], True),
        ([replace(WORKER, guard_state="shut")], False),
        ([replace(WORKER, state="failed")], False),
        ([replace(WORKER, guard_state="shut"), replace(WORKER, worker_id="w2")], True),
    ],
)
def test_turns_move_where_a_worker_that_has_them_may_and_can_compute(
    workers: list[WorkerInfo], is_moving: bool
) -> None:
    leases = tuple(lease(each.worker_id) for each in workers)
    found = diagnose(scene(status(0, 3, claimed=3), CONTROLLER, AGENT, *workers, leases=leases), "r1")
    assert ("moves" in codes(found)) == is_moving


def test_a_sampling_that_no_engine_can_do_is_told_with_the_engines() -> None:
    several = scene(
        status(config=GUIDED), CONTROLLER, AGENT, UNGUIDED, replace(UNGUIDED, worker_id="w2", engine="sglang 1")
    )
    (cause,) = [each for each in diagnose(several, "r1") if each.code == "cannot_sample"]
    assert "samples with guided_json" in cause.text and cause.text.endswith("they have transformers 5, sglang 1")
    assert cause.step.startswith("Leave guided_json out of its sampling")
    able = scene(status(config=GUIDED), CONTROLLER, AGENT, UNGUIDED, replace(WORKER, worker_id="w2"))
    assert "cannot_sample" not in codes(diagnose(able, "r1"))


async def test_a_serving_worker_is_judged_by_its_teams_terms() -> None:
    board = StandInFabric().board
    await board.create_run(CONFIG)
    who = {each.worker_id: (each, 0) for each in (CONTROLLER, AGENT, SERVING)}
    survey = replace(await board.survey(), runs={"r1": status(4)}, workers=who)
    found = (await diagnose_survey(board, survey, OFF, None, (0, 0)))["r1"]
    assert found[0].code == "lend_off" and "launch day" in found[0].text


def test_a_worker_that_fell_silent_is_gone_and_one_whose_lease_has_ended_has_none() -> None:
    seen = scene(None, *ALL, leases=HELD)
    silent = replace(seen, workers={**seen.workers, "w1": (WORKER, 6_000)})
    assert codes(diagnose(silent, "r1"))[0] == "no_worker"
    for age_ms, code in ((6_000, "worker_loading"), (31_000, "no_worker")):  # imports hold heartbeats up for a while
        loading = {**seen.workers, "w1": (replace(WORKER, state="loading", slot_count=0), age_ms)}
        assert codes(diagnose(replace(seen, workers=loading), "r1"))[0] == code
    ended = replace(seen, leases={"r1": {"w1": replace(lease(), lease_until_ms=5, remaining_ms=0)}})
    assert codes(diagnose(ended, "r1"))[0] == "no_lease"


def test_one_task_that_fails_beside_many_that_run_is_not_every_attempt() -> None:
    run = status(0, 200, claimed=60, trajectories_failed=8)
    assert codes(diagnose(scene(run, *ALL, leases=HELD), "r1")) == ["moves"]


def test_a_run_of_sessions_moves_while_one_is_open_and_without_a_gateway_is_told_to_start_one() -> None:
    opened = scene(status(3, 1, config=REMOTE), CONTROLLER, WORKER, GATEWAY, leases=HELD)
    assert codes(diagnose(opened, "r1")) == ["moves"]
    for agents in ((), (AGENT,)):
        (found,) = diagnose(scene(status(config=REMOTE), CONTROLLER, WORKER, *agents, leases=HELD), "r1")
        assert found.kind == "stuck" and "`rollfab gateway" in found.step


def test_foreign_texts_are_cut_and_without_control_characters() -> None:
    worker = replace(WORKER, state="failed", error="\x1b[31m\x00\n" + "x" * 5_000)
    (found,) = [each for each in diagnose(scene(None, CONTROLLER, AGENT, worker), "r1") if each.code == "worker_failed"]
    assert len(found.text) < 500 and found.text.isprintable()


# ---------------------------------------------------------------- whatever is read

names = st.sampled_from(["w1", "w2", "tiny", "frozenlake", "other", "", "\x1b[2J"])
counts = st.integers(0, 9)
workers = st.builds(
    info,
    names,
    st.sampled_from(["controller", "agent", "dedicated", "serving", "reward", "unreadable"]),
    model=st.none() | names,
    slot_count=counts,
    running_count=counts,
    run_id=st.sampled_from([None, "r1", "r2"]),
    active_version=st.integers(-1, 9),
    environments=st.lists(names, max_size=2),
    state=st.sampled_from(["ready", "loading", "asleep", "draining", "failed"]),
    error=st.none() | st.text(max_size=9),
    guard_state=st.sampled_from([None, "open", "narrow", "shut", "silent"]),
    guard_reason=st.none() | st.text(max_size=9),
    rewards=st.lists(names, max_size=2),
)
runs = st.builds(
    status,
    counts,
    counts,
    counts,
    ready=counts,
    claimed=counts,
    waiting=counts,
    head=st.integers(-1, 9),
    depth=st.none() | counts,
    memory_bytes=st.sampled_from([0, 5 << 30]),
    config=st.sampled_from([CONFIG, REWARDED, FULL]),
    groups_submitted=counts,
    groups_consumed=counts,
    trajectories_failed=counts,
    trajectories_completed=counts,
)
details = st.builds(
    RunDetails,
    consumers=st.lists(st.builds(Consumer, name=names, held_count=counts, heard_s=st.floats(0, 1e6))).map(tuple),
    dead_reason=st.none() | st.text(max_size=9),
)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    infos = draw(st.lists(workers, max_size=5))
    seen = scene(
        draw(runs),
        *infos,
        leases=tuple(draw(st.lists(st.builds(lease, names, st.sampled_from(["r1", "r2"]), counts), max_size=4))),
        others=(OTHER,),
        lends=draw(st.sampled_from([{}, ON, OFF])),
        details=draw(st.none() | details),
        quiet_s=draw(st.none() | st.floats(-10, 1e6)),
        memory_bytes=draw(st.sampled_from([(0, 0), (5, 9), (9, 9)])),
    )
    ages = draw(st.lists(st.integers(-10_000, 10_000), min_size=len(infos), max_size=len(infos)))
    aged = {each.worker_id: (each, age) for each, age in zip(infos, ages, strict=True)}
    return replace(seen, workers=aged)


@given(scenes())
def test_there_is_always_an_answer_and_each_cause_is_said_once(seen: Scene) -> None:
    found = diagnose(seen, "r1")
    assert found
    assert len(set(codes(found))) == len(found)
    assert set(codes(found)) <= CODES.keys()
    assert ("moves" in codes(found)) == (found[0].code == "moves"), "work that moves is said alone"
    for cause in found:
        assert cause.text and cause.text.isprintable() and len(cause.text) < 2_000
        assert not re.search(r"\b1 ((complete )?(group|trajectorie|rollout|turn|place)s|are|wait|run)\b", cause.text)


@given(st.integers(0, 99), st.integers(1, 99), st.integers(0, 99), st.integers(0, 9), st.lists(workers, max_size=4))
def test_a_healthy_fabric_is_never_blamed(
    queued: int, running: int, done: int, waiting: int, strangers: list[WorkerInfo]
) -> None:
    # Given a run whose turns generate, beside any other workers, and with any history of ends
    run = status(queued, running, claimed=running, waiting=waiting, trajectories_completed=done, groups_consumed=done)
    others = [each for each in strangers if each.worker_id not in ("c1", "a1", "w1")]
    # Then it moves, and nothing else is said
    assert codes(diagnose(scene(run, *ALL, *others, leases=HELD), "r1")) == ["moves"]


def test_what_a_silent_consumer_holds_stands_in_nobodys_way_who_asks() -> None:
    ghost = Consumer(name="ghost", held_count=2, heard_s=GONE_S + 9)
    asker = Consumer(name="trainer", held_count=0, heard_s=0.5)

    first = diagnose(scene(status(0, waiting=2), *ALL, details=RunDetails(consumers=(ghost, asker))), "r1")[0]

    assert (first.code, first.kind) == ("consumer_gone", "passing")
    assert "held by consumer ghost" in first.text and "takeover" in first.text


def test_turns_that_outlive_their_agent_contradict_no_count() -> None:
    # Given turns that generate for trajectories whose agent died: these are queued for another one
    orphaned = status(289, 0, claimed=16)

    (moves,) = diagnose(scene(orphaned, *ALL, leases=HELD), "r1")

    assert moves.text == (
        "run 'r1' moves: 0 trajectories are with an agent, 289 wait for one, 0 wait for a reward; "
        "16 turns generate, 0 are ready"
    )


def test_groups_held_by_one_who_lives_are_not_lost() -> None:
    busy = Consumer(name="rank-0", held_count=2, heard_s=12.0, left_s=48.0)
    asker = Consumer(name="trainer", held_count=0, heard_s=0.5, left_s=60.0)
    done = status(0, waiting=2, groups_submitted=60, groups_consumed=58)

    first = diagnose(scene(done, *ALL, details=RunDetails(consumers=(busy, asker))), "r1")[0]
    assert first.kind == "waits" and first.step.startswith("Wait until it acknowledges"), "nobody else is given them"
    assert "2 complete groups of run 'r1' are held by consumer rank-0, last heard of 12 s ago" in first.text
    assert first.step.endswith("If that process is gone, they go to whoever waits for groups in 48 s")


def test_a_run_whose_every_trajectory_failed_is_not_told_to_push_more_of_the_same() -> None:
    done = status(0, groups_submitted=2, groups_consumed=2, trajectories_failed=8)

    first = diagnose(scene(done, *ALL, leases=HELD), "r1")[0]

    assert first.code == "attempts_fail" and "rollfab dead ls --run r1" in first.step


def test_without_a_controller_nobody_is_said_to_take_turns() -> None:
    codes = [
        cause.code
        for cause in diagnose(scene(None, AGENT, WORKER, leases=(lease(run_id="r2"),), others=(OTHER,)), "r1")
    ]

    assert codes[0] == "no_controller" and "takes_turns" not in codes


def test_who_waits_for_a_turn_is_told_for_how_long_a_worker_serves_each_run() -> None:
    for switch_ms, said in ((None, "for 10 s at least"), (30_000, "for 182 s at least")):
        slow = replace(WORKER, switch_ms=switch_ms)
        turns = scene(None, CONTROLLER, AGENT, slow, leases=(lease(run_id="r2"),), others=(OTHER,))
        assert said in diagnose(turns, "r1")[0].step


@pytest.mark.parametrize("said", [{"state": "failed", "error": "its weights are float64"}, {"state": "loading"}])
def test_what_a_worker_waits_for_at_another_run_is_said_of_that_run(said: dict[str, str]) -> None:
    elsewhere = replace(WORKER, run_id="r2", active_version=-1, **said)  # type: ignore[arg-type]
    found = diagnose(scene(None, CONTROLLER, AGENT, elsewhere, leases=(lease(run_id="r2"),), others=(OTHER,)), "r1")
    assert [(cause.code, "r2" in cause.text, "float64" in cause.text) for cause in found] == [
        ("takes_turns", True, False)
    ]


def test_roles_that_were_here_are_to_be_started_at_this_broker() -> None:
    silent = {"w1": (WORKER, 60_000)}
    (cause, *_) = diagnose(replace(scene(None), workers=silent), "r1")
    assert cause.code == "nothing_started" and "ROLLFAB_URL set to its URL" in cause.step
    assert "that it prints" in diagnose(scene(None), "r1")[0].step
