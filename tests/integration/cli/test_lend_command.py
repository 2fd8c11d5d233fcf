"""`rollfab lend`: bounds that stay, reasons that are kept, and what a team can read of it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from typer.testing import CliRunner

from rollfab.deploy.main import app
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.contract.sharing import SharingReport
from rollfab.fabric.opened import RedisFabric
from rollfab.fabric.rules.lending.hours import minute_of_week
from rollfab.fabric.rules.lending.terms import terms
from rollfab.fabric.rules.serving.facts import Slo
from rollfab.workers.serving.guarding.ledger import SharingLedger
from rollfab.workers.serving.probes.reader import End
from tests.support.leases import set_lease

pytestmark = pytest.mark.redis


class Desk:
    """A person at the command line, and the broker that the commands speak to."""

    def __init__(self, url: str, fabric: RedisFabric) -> None:
        self.url = url
        self.fabric = fabric
        self.infos: dict[str, WorkerInfo] = {}
        self._beating = asyncio.Lock()  # what a worker says next is not overtaken by what it read before

    async def run(self, *words: str) -> str:
        """What a command prints. Raises what it raises."""
        invoke = partial(CliRunner().invoke, env={"COLUMNS": "80"})
        done = await asyncio.to_thread(invoke, app, ["lend", *words, "--url", self.url])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output

    async def json(self, *words: str) -> Any:
        return json.loads(await self.run(*words, "--json"))

    async def beat(self, worker_id: str, **facts: Any) -> None:
        info = {"role": "serving", "pid": 1, "host": "h", "slot_count": 8, **facts}
        async with self._beating:
            self.infos[worker_id] = WorkerInfo(worker_id=worker_id, **info)
            await self.fabric.board.heartbeat(self.infos[worker_id])

    async def fall_silent(self, worker_id: str) -> None:
        """What it said last is what it says before it falls silent."""
        async with self._beating:
            await self.fabric.board.heartbeat(self.infos.pop(worker_id))

    async def live(self) -> None:
        """Its workers say that they live, until it is cancelled; those that may not lend run nothing."""
        while True:
            async with self._beating:
                for name, info in list(self.infos.items()):
                    said, _ = await self.fabric.board.lends_of(name, info.pool)
                    may_lend = terms(said, name, info.pool, 0).may_lend
                    await self.fabric.board.heartbeat(info if may_lend else dataclasses.replace(info, running_count=0))
            await asyncio.sleep(0.05)


@pytest.fixture
async def desk(url: str) -> AsyncIterator[Desk]:
    client = await open_broker(url, client_name="tests")
    await client.flushall()
    await client.aclose()
    async with await RedisFabric.open(url, client_name="tests") as fabric:
        desk = Desk(url, fabric)
        living = asyncio.create_task(desk.live())
        yield desk
        living.cancel()


async def test_bounds_outlive_a_switch_and_the_strictest_word_holds(desk: Desk) -> None:
    # Given a pool that may be lent at night, and one worker of it with a bound of its own
    await desk.beat("w1", pool="chat")
    await desk.beat("w2", pool="batch")
    await desk.run("limit", "--pool", "chat", "--hours", "00:00-24:00", "--compute", "0.3", "--memory", "0.2")
    assert (await desk.json("status"))["lends"]["pool:chat"]["mode"] == "observe"  # a bound alone lends nothing
    await desk.run("on", "--pool", "chat", "--reason", "trial")
    await desk.run("limit", "--worker", "w1", "--slots", "2")
    await desk.run("on", "--worker", "w1")
    # When everything is taken back
    seen = await desk.json("off", "--reason", "incident 7")
    rows = {row["worker_id"]: row["terms"] for row in seen["serving_workers"]}
    assert {name: row["mode"] for name, row in rows.items()} == {"w1": "off", "w2": "off"}
    assert "incident 7" in rows["w1"]["reason"]
    # And lent again, then the bounds are as they were
    rows = {row["worker_id"]: row["terms"] for row in (await desk.json("on", "--all"))["serving_workers"]}
    assert rows["w1"].items() >= {
        "mode": "on", "slot_count_max": 2, "compute_fraction_max": 0.3, "memory_fraction_max": 0.2
    }.items()  # fmt: skip
    assert rows["w2"].items() >= {"mode": "on", "slot_count_max": None}.items()
    # Until they are taken away
    await desk.run("limit", "--pool", "chat", "--compute", "none", "--hours", "none")
    await desk.run("clear", "--worker", "w1")
    lends = (await desk.json("status"))["lends"]
    assert set(lends) == {"*", "pool:chat"}
    assert lends["pool:chat"]["compute_fraction_max"] is None and lends["pool:chat"]["hours"] == []
    assert lends["pool:chat"]["memory_fraction_max"] == 0.2


async def test_a_name_that_nobody_has_is_refused_and_changes_nothing(desk: Desk) -> None:
    await desk.beat("w1", pool="chat")
    await desk.beat("d1", role="dedicated")
    await desk.run("on", "--pool", "chat")
    for words, text in (
        (
            ("off", "--pool", "caht"),
            "no pool 'caht' is known to the broker, and nothing was switched: did you mean chat",
        ),
        (("on", "--pool", "other"), "there are chat"),
        (("limit", "--worker", "w2", "--slots", "1"), "there are w1"),
        (("off", "--worker", "d1"), "'d1' is a dedicated worker"),
    ):
        with pytest.raises(ConfigError) as caught:  # exit code 2
            await desk.run(*words)
        assert text in str(caught.value)
    assert set((await desk.json("status"))["lends"]) == {"pool:chat"}
    # Unless it is meant; and of a name of which something is said, more can be said
    await desk.run("on", "--pool", "caht", "--future")
    await desk.run("off", "--pool", "caht")
    assert (await desk.json("status"))["lends"]["pool:caht"]["mode"] == "off"


async def test_a_pool_that_comes_later_observes_though_all_was_lent(desk: Desk) -> None:
    await desk.beat("w1", pool="chat")
    await desk.run("on", "--all")
    await desk.beat("w2", pool="batch")
    seen = await desk.json("status")
    modes = {row["worker_id"]: row["terms"]["mode"] for row in seen["serving_workers"]}
    assert modes == {"w1": "on", "w2": "observe"}
    assert seen["lends"]["*"]["names"] == ["pool:chat"]
    assert "of pool chat" in " ".join((await desk.run("status")).split())


async def test_the_answer_says_what_was_taken_back_and_who_has_not_answered(desk: Desk) -> None:
    # Given two workers that run lent turns, and one that is not lent
    await desk.beat("w1", pool="chat", running_count=5)
    await desk.beat("w2", pool="chat", running_count=2)
    await desk.beat("w3", pool="batch")
    await desk.run("on", "--pool", "chat")
    await desk.beat("w1", pool="chat", running_count=5)
    await desk.beat("w2", pool="chat", running_count=2)
    # When they are taken back, then the answer has what they gave back, once they said so
    switched = (await desk.json("off", "--reason", "incident"))["switched"]
    assert (switched["taken_ids"], switched["turn_count"], switched["waiting"]) == (["w1", "w2"], 7, {})
    assert "@" in switched["setting"]["said_by"] and switched["setting"]["said_at_ms"] > 0
    again = " ".join((await desk.run("off")).split())
    assert "nothing had to be taken back" in again and "said by" in again
    # And whoever lends a pool alone is told what still holds it back
    shown = " ".join((await desk.run("on", "--pool", "chat")).split())
    assert "now: 0 workers of 2 may lend" in shown
    assert (
        "all serving workers: off, and the strictest word holds: " in shown and "lend clear --all` takes that" in shown
    )
    # And one that does not answer is named
    await desk.run("clear", "--all")
    await desk.run("on", "--pool", "chat")
    await desk.beat("w2", pool="chat", running_count=2)
    await desk.beat("w1", pool="chat", running_count=3)
    await desk.fall_silent("w1")
    shown = " ".join((await desk.run("off", "--pool", "chat")).split())
    assert "taken back: 2 workers, 5 running turns" in shown
    assert "not yet: w1 told last" in shown and "that 3 turns ran" in shown


async def test_whatever_else_is_said_of_a_worker_is_named_with_what_takes_it_back(desk: Desk) -> None:
    # Given a worker of which all that can be said is off
    await desk.beat("w1", pool="chat")
    for words in ((), ("--pool", "chat")):
        await desk.run("off", *words)
    # When it is lent by its name, then both others are named, and what takes them back does
    shown = " ".join((await desk.run("on", "--worker", "w1")).split())
    found = {"all serving workers": ("clear", "--all"), "pool chat": ("on", "--pool", "chat")}
    for subject, steps in found.items():
        assert f"{subject}: off, and the strictest word holds" in shown and f"lend {' '.join(steps)}`" in shown
    for steps in found.values():
        assert (await desk.json("status"))["serving_workers"][0]["terms"]["mode"] == "off"
        await desk.run(*steps)
    assert (await desk.json("status"))["serving_workers"][0]["terms"]["mode"] == "on"


async def test_bounds_that_leave_nothing_are_named_with_what_takes_them_back(desk: Desk) -> None:
    # Given a pool with bounds of nothing and without an hour now, of which one is older than the switch
    await desk.beat("w1", pool="chat")
    await desk.run("limit", "--pool", "chat", "--slots", "0")
    minute = minute_of_week(await desk.fabric.board.wall_ms())
    hour = f"{(minute // 60 + 12) % 24:02d}:00"  # far from now
    await desk.run("limit", "--worker", "w1", "--memory", "0", "--hours", f"{hour}-{hour[:2]}:30")
    # When it is lent, then each is named with what takes it back, and that does
    await desk.run("on", "--worker", "w1")
    shown = " ".join((await desk.run("on", "--pool", "chat")).split())
    steps = {
        "pool chat: at most 0 slots": "limit --pool chat --slots none",
        "w1: at most 0 memory": "limit --worker w1 --memory none",
        f"w1: lent only {hour}-{hour[:2]}:30 UTC": "limit --worker w1 --hours none",
    }
    for what, step in steps.items():
        assert f"{what}: " in shown and f"lend {step}` takes that back" in shown, shown
    for step in steps.values():
        assert (await desk.json("status"))["serving_workers"][0]["terms"]["mode"] != "on"
        await desk.run(*step.split())
    assert (await desk.json("status"))["serving_workers"][0]["terms"]["mode"] == "on"


async def test_the_log_tells_who_switched_what_and_why_and_what_was_lent(desk: Desk) -> None:
    board = desk.fabric.board
    await desk.beat("w1")
    await desk.beat("d1", role="dedicated")
    await desk.run("on", "--all", "--reason", "trial")
    for name in ("w1", "d1"):
        facts = {"worker_id": name, "run_id": "r1", "slot_count": 4, "lease_epoch": 1, "reason": "20 open"}
        await board.add_event("lease.granted", facts)
    await board.add_event("trainer.step", {"step": 1})
    await desk.run("off", "--worker", "w1")
    events = (await desk.json("log"))["events"]
    assert [(each["kind"], each["facts"]["worker_id"], each["facts"]["reason"]) for each in events] == [
        ("lend.switched", "*", "trial"),
        ("lease.granted", "w1", "20 open"),
        ("lend.switched", "w1", ""),
    ]
    assert "@" in events[0]["facts"]["said_by"]
    assert [each["kind"] for each in (await desk.json("log", "--count", "1"))["events"]] == ["lend.switched"]
    assert "trial" in await desk.run("log")
    # And bounds are told as the status tells them, whatever an event holds in their place
    await desk.run(
        "limit", "--worker", "w1", "--slots", "1", "--compute", "0.3", "--memory", "0.25", "--hours", "22:00-06:00"
    )
    for cap, hours in (("many", None), (None, 7)):
        facts = {"worker_id": "w1", "value": "on", "slot_count_max": cap, "compute_fraction_max": cap, "hours": hours}
        await board.add_event("lend.switched", facts)
    told = " ".join((await desk.run("log")).split())
    assert "w1: off, at most 1 slot, at most 30% of compute, at most 25% of KV cache, 22:00-06:00 UTC by" in told
    assert told.count("w1: on") == 2


async def test_the_log_goes_through_a_bounded_number_of_the_newest_events(desk: Desk) -> None:
    # Given a switch, more events of other kinds than one page has, and another switch
    await desk.run("on", "--all", "--reason", "first")
    await desk.fabric.board.add_events([("trainer.step", {"step": step}) for step in range(1_200)])
    await desk.run("off", "--reason", "second")
    # When one looks at all, at a part, and for one alone
    seen = {
        words: await desk.json("log", *words)
        for words in ((), ("--limit", "1201"), ("--limit", "1202"), ("--count", "1"))
    }
    # Then what was read is what was asked for, and a log that stopped early says so
    found = {words: ([each["facts"]["reason"] for each in log["events"]], log["is_cut"]) for words, log in seen.items()}
    assert found == {
        (): (["first", "second"], False),
        ("--limit", "1201"): (["second"], True),
        ("--limit", "1202"): (["first", "second"], True),
        ("--count", "1"): (["second"], False),
    }
    assert "--limit" in await desk.run("log", "--limit", "1")
    assert "--limit" not in await desk.run("log")


async def test_the_status_shows_terms_lease_and_guard_of_serving_workers_alone(desk: Desk) -> None:
    await desk.fabric.board.create_run(RunConfig(run_id="r1", model="m", environment="e"))
    await desk.beat("d1", role="dedicated")
    guard = {"guard_state": "narrow", "guard_reason": "a burst", "open_fraction": 0.5, "headroom_fraction": 0.25}
    await desk.beat("w1", probe="vllm", **guard)
    lease = Lease(worker_id="w1", run_id="r1", lease_epoch=1, slot_count=4, lease_until_ms=None)
    await set_lease(desk.fabric.board, lease, 60_000)
    (row,) = (await desk.json("status"))["serving_workers"]
    assert row.items() >= {**guard, "worker_id": "w1", "probe": "vllm"}.items()
    assert (row["terms"]["mode"], row["lease"]["slot_count"]) == ("observe", 4)
    shown = " ".join((await desk.run("status")).split())
    assert "only observe" in shown and "w1" in shown and "d1" not in shown


async def test_the_report_compares_requests_with_rollouts_and_without(desk: Desk) -> None:
    assert "no serving worker has reported yet" in await desk.run("report")
    await desk.beat("w1")
    await desk.beat("w2")
    alone = {"request_count": 100, "ttft_ms_p50": 20.0, "ttft_ms_p99": 40.0, "tpot_ms_p50": 8.0, "tpot_ms_p99": 10.0}
    shared = {"request_count": 300, "ttft_ms_p50": 21.0, "ttft_ms_p99": 44.0, "tpot_ms_p50": 8.0, "tpot_ms_p99": 9.0}
    report = SharingReport(
        worker_id="w1",
        alone={**alone, "attained_fraction": 1.0},
        shared={**shared, "attained_fraction": 0.99},
        violation_count=3,
        token_count=5000,
        computing_s=50.0,
    )
    await desk.fabric.board.set_sharing(report)
    await desk.fabric.board.set_sharing(SharingReport(worker_id="w2", could_lend_s=7.0, shared={"request_count": 100}))
    seen = await desk.json("report")
    row = seen["workers"][0]
    assert (round(row["ttft_tax_p99"], 9), round(row["tpot_tax_p99"], 9), row["tpot_tax_p50"]) == (0.1, -0.1, 0.0)
    assert seen["workers"][1]["ttft_tax_p99"] is None
    totals = seen["totals"]
    assert (totals["shared_request_count"], totals["violation_count"], totals["token_count"]) == (400, 3, 5000)
    assert totals["shared_attained_fraction"] == pytest.approx(0.7425)
    assert totals["ttft_tax_p99_worst"] == pytest.approx(0.1)
    assert "at worst TTFT P99 +10.0%, TPOT P99 -10.0%" in " ".join((await desk.run("report")).split())


async def test_the_report_says_of_how_many_requests_and_how_long_and_where_a_p99_means_little(desk: Desk) -> None:
    # Given one worker with 42 requests alone, and 400 with rollouts in an hour
    ledger = SharingLedger(Slo(ttft_ms=500.0, tpot_ms=50.0))
    for index in range(42):
        ledger.ended(End(index, index + 0.02, index + 0.12, 11))
    ledger.passed(3600.0, is_open=True, is_lent=False)
    ledger.computed(1000.0, 5000.0)
    for index in range(400):
        arrived_s = 1000.0 + 9 * index
        ledger.ended(End(arrived_s, arrived_s + 0.03 + index / 1e5, arrived_s + 0.2, 11))
    await desk.beat("w1")
    await desk.fabric.board.set_sharing(SharingReport(worker_id="w1", **ledger.report()))

    # When the team asks, then each P99 stands with its sample, and where the true one is
    (row,) = (await desk.json("report"))["workers"]
    assert row["few"] == ["alone.ttft_ms_p99", "alone.tpot_ms_p99"]
    assert (row["alone"]["ttft_count"], row["alone"]["span_s"], row["shared"]["ttft_count"]) == (42, 41.12, 400)
    low, p99, high = (row["shared"][f"ttft_ms_p99{end}"] for end in ("_low", "", "_high"))
    assert (row["alone"]["ttft_ms_p99_high"], low < p99 < high) == (0.0, True)

    shown = await desk.run("report")
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    assert "w1, measured for 60 min" in words and "42 in 41 s" in words and "400 in 60 min" in words
    assert "20.0 (of 42: too few)" in words and f"{p99:.1f} ({low:.1f} to {high:.1f})" in words
    assert "a P99 of so few requests says little" in words


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["maybe"], "expected on, observe, off"),
        (["on", "--worker", "a", "--pool", "b"], "give one of them"),
        (["off", "--all", "--pool", "b"], "give one of them"),
        (["obsreve"], "did you mean observe"),
        (["on"], "--pool NAME, --worker NAME, or --all"),
        (["4"], "--pool NAME, --worker NAME, or --all"),
        (["clear"], "--pool NAME, --worker NAME, or --all"),
        (["on", "--pool", "a b"], "nothing that can be lent"),
        (["on", "--slots", "many"], "--slots is 'many'"),
        (["limit", "--compute", "1.5"], "--compute is 1.5: expected a number from 0 to 1: 0.3 is 30 %"),
        (["limit", "--memory", "nan"], "--memory is nan: expected a number from 0 to 1"),
        (["limit", "--slots", "9" * 30], f"--slots is {'9' * 30}: expected a number from 0 to 1,000,000"),
        (["9999999", "--all"], "lend is 9999999: expected a number from 0 to 1,000,000"),
        (["limit"], "say what"),
        (["on", "--hours", "nightly"], "'nightly' is no day"),
        (["status", "--slots", "3"], "takes no caps"),
        (["off", "--reason", "x" * 501], "at most 500"),
    ],
)
async def test_wrong_usage_is_said_before_anything_is_asked(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:  # which main() ends with exit code 2
        await Desk("redis://127.0.0.1:1", None).run(*words)  # type: ignore[arg-type]
    assert fault in str(caught.value)
