"""The api over real HTTP on a real broker: what it says, what it refuses, and to whom."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import numpy as np
import pytest

from rollfab.api.access.config import ApiConfig
from rollfab.api.access.keys import hash_key
from rollfab.api.app import make_app
from rollfab.api.reading.weights import WeightReader
from rollfab.deploy.weights.command import list_versions
from rollfab.fabric.broker.connection import open_broker
from rollfab.fabric.broker.embedded import EmbeddedBroker
from rollfab.fabric.contract.errors import ConfigError
from rollfab.fabric.contract.lease_plan import LeasePlan, PlanRow
from rollfab.fabric.contract.records import Lease
from rollfab.fabric.contract.sharing import SharingReport
from rollfab.fabric.format.manifest import Holder
from rollfab.fabric.queue.keys import ShardKeys
from rollfab.fabric.queue.scripts import Scripts
from rollfab.trainer.publish.publisher import Publisher
from tests.support.leases import set_lease
from tests.support.processes.api_server import ApiWorld, running_api
from tests.support.until import until

READ_KEY = "a-key-that-may-read-only"
CONTROL_KEY = "a-key-that-may-do-everything"


@pytest.fixture
async def locked(url: str) -> AsyncIterator[ApiWorld]:
    async with running_api(url, read_keys=(READ_KEY,), control_keys=(CONTROL_KEY,)) as world:
        yield world


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- probes


async def test_the_process_is_healthy_whatever_else_is_missing(api: ApiWorld) -> None:
    assert (await api.json("healthz"))["status"] == "ok"


async def test_readiness_names_the_missing_controller_and_returns_with_it(api: ApiWorld) -> None:
    said = await api.json("readyz", 503)
    assert not said["is_ready"]
    assert "no controller" in said["missing"][0]

    await api.beat("controller-1", "controller")

    assert await api.json("readyz") == {"is_ready": True, "missing": []}


async def failing(api: ApiWorld) -> bool:
    """Whether the api says that it has no broker."""
    return (await api.http.get("v1/status")).status_code == 503


async def test_a_broker_that_is_gone_is_said_so_everywhere() -> None:
    with EmbeddedBroker.start() as broker:
        async with running_api(broker.url, broker_timeout_s=1.0) as api:
            await api.json("v1/status")
            broker.stop()
            await until(lambda: failing(api))  # for a second, what was read last still counts
            for path in ("v1/status", "v1/runs", "v1/workers"):
                said = await api.json(path, 503)
                assert said["error"] == "BrokerError"
                assert "broker" in said["message"]
            assert "broker" in (await api.json("readyz", 503))["missing"][0]
            assert "rollfab_broker_up 0.0" in (await api.http.get("metrics")).text
            await api.json("healthz")


# ---------------------------------------------------------------- what it says


async def test_the_status_follows_a_group_through_the_fabric(api: ApiWorld) -> None:
    await api.push_group("g1", 4)
    (run,) = (await api.json("v1/status"))["runs"]
    assert (run["depth"], run["trajectories"]["queued"]) == (4, 4)

    claims = await api.claim(3)
    (run,) = (await api.json("v1/runs"))["runs"]
    assert run["trajectories"] == {"queued": 1, "running": 3, "scoring": 0}

    for claim in [*claims, *await api.claim(1)]:
        await api.settle(claim)
    status = await api.json("v1/status")
    assert status["totals"]["groups_waiting"] == 1
    assert status["runs"][0]["counters"]["trajectories_completed"] == 4


async def test_workers_show_their_lease_their_switch_and_their_age(api: ApiWorld) -> None:
    await api.beat("serving-1", "serving", slot_count=8, running_count=3, run_id="r1", headroom_fraction=0.5)
    await api.beat("dedicated-1", "dedicated", slot_count=16, state="failed", error="out of memory")
    lease = Lease(worker_id="serving-1", run_id="r1", lease_epoch=5, slot_count=6, lease_until_ms=None)
    await set_lease(api.fabric.board, lease, 30_000)

    dedicated, serving = (await api.json("v1/workers"))["workers"]

    assert serving["lend"] == "observe"  # nothing was said: it lends nothing
    assert "rollfab lend on" in serving["lend_terms"]["reason"]
    assert serving["is_fresh"]
    assert serving["lease"]["slot_count"] == 6
    assert 0 < serving["lease"]["remaining_ms"] <= 30_000
    assert dedicated["lend"] is None
    assert dedicated["error"] == "out of memory"
    assert [each["worker_id"] for each in (await api.json("v1/leases"))["leases"]] == ["serving-1"]


async def test_workers_show_their_engine_and_its_sleep(api: ApiWorld) -> None:
    await api.beat("serving-1", "serving", state="asleep", engine="vllm 0.32.0", wake_ms=1500, sleep_ms=300)
    held = {"resident_bytes": 2 << 30, "device_bytes": 5 << 30}
    await api.beat(
        "dedicated-1", "dedicated", engine="transformers 5", prefix_hit_fraction=0.25, sleep_note="a CPU", **held
    )

    names = ("state", "engine", "prefix_hit_fraction", "wake_ms", "sleep_ms", "sleep_note", *held)
    rows = [[each[name] for name in names] for each in (await api.json("v1/workers"))["workers"]]
    assert rows == [
        ["ready", "transformers 5", 0.25, None, None, "a CPU", 2 << 30, 5 << 30],
        ["asleep", "vllm 0.32.0", None, 1500, 300, None, None, None],
    ]
    text = (await api.http.get("metrics")).text
    for line in (
        'rollfab_workers{role="serving",state="asleep"} 1.0',
        'rollfab_wake_seconds_max{role="serving"} 1.5',
        'rollfab_sleep_seconds_max{role="serving"} 0.3',
        'rollfab_prefix_hit_ratio_min{role="dedicated"} 0.25',
        'rollfab_resident_bytes_max{role="dedicated"} 2.147483648e+09',
        'rollfab_device_bytes_max{role="dedicated"} 5.36870912e+09',
    ):
        assert line in text.splitlines()
    assert 'rollfab_wake_seconds_max{role="dedicated"}' not in text


async def test_a_lease_that_has_ended_is_not_shown(api: ApiWorld) -> None:
    lease = Lease(worker_id="serving-1", run_id="r1", lease_epoch=5, slot_count=6, lease_until_ms=None)
    await set_lease(api.fabric.board, lease, 50)
    await asyncio.sleep(0.1)
    assert (await api.json("v1/leases"))["leases"] == []


async def test_a_lease_is_shown_though_the_clock_of_its_run_is_behind(api: ApiWorld, url: str) -> None:
    # Given a run whose clock is behind the machine's, as it is after a pause of the broker
    client = await open_broker(url, client_name="tests")
    keys = ShardKeys("r1", 0)
    now_ms, wall_ms, _ = await Scripts(client).call("clock", [keys.clock], [])
    await client.set(keys.clock, f"{wall_ms} {now_ms - 60_000}")
    await client.aclose()
    # When a worker is lent for a while
    await api.beat("serving-1", "serving", slot_count=8)
    lease = Lease(worker_id="serving-1", run_id="r1", lease_epoch=5, slot_count=6, lease_until_ms=None)
    await set_lease(api.fabric.board, lease, 30_000)
    # Then its lease is shown, with what is left of it
    (shown,) = (await api.json("v1/leases"))["leases"]
    assert 0 < shown["remaining_ms"] <= 30_000
    assert (await api.json("v1/workers"))["workers"][0]["lease"]["lease_epoch"] == 5


async def test_an_unknown_run_is_a_clear_404(api: ApiWorld) -> None:
    for path in ("v1/runs/nope", "v1/runs/nope/dead-letters"):
        said = await api.json(path, 404)
        assert said["error"] == "RunUnknown"
        assert "'nope'" in said["message"]
    assert (await api.json("v1/nothing", 404))["error"] == "NotFound"


async def test_dead_letters_come_with_reason_and_traceback(api: ApiWorld) -> None:
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    await api.bury(claim, "environment raised ValueError")

    said = await api.json("v1/runs/r1/dead-letters")

    assert said["dead_count"] == 1
    assert said["dead_letters"][0]["reason"] == "environment raised ValueError"
    assert said["dead_letters"][0]["traceback"] == "Traceback: line 1"
    assert (await api.json("v1/runs/r1/dead-letters?count=0", 422))["error"] == "InputError"


async def publish_twelve(api: ApiWorld) -> None:
    """Versions 0 to 11 of 40 kB, a hundred elements changed by each."""
    publisher, rng = Publisher(api.fabric.weights, "r1"), np.random.default_rng(0)
    tensor = rng.integers(0, 0x7000, 20000, dtype=np.uint16)
    for version in range(12):
        await publisher.publish({"w": tensor}, version)
        tensor[version * 100 : version * 100 + 100] += 1


async def test_versions_come_with_the_figures_of_the_command_line_and_who_holds_them(api: ApiWorld) -> None:
    await publish_twelve(api)
    await api.fabric.weights.hold("r1", Holder("worker-1", 11), 30)
    await api.fabric.weights.hold("r1", Holder("worker-2", 9), 30)

    (weights,) = (await api.json("v1/weights"))["weights"]

    rows = await list_versions(api.fabric.weights, "r1")
    assert rows == weights["versions"]
    by_version = {each["version"]: each for each in weights["versions"]}
    assert (by_version[11]["holder_count"], by_version[10]["holder_count"], weights["holder_count"]) == (1, 0, 2)
    assert [each["version"] for each in weights["versions"] if each["is_head"]] == [weights["head_version"]] == [11]
    assert (await api.json("v1/status"))["runs"][0]["head_version"] == 11
    assert weights["held_bytes"] == sum(each["payload_bytes"] for each in weights["versions"])
    assert by_version[11]["changed_count"] == 100 and by_version[11]["density"] == 100 / 20000
    assert (by_version[0]["density"], by_version[0]["bytes_per_changed"]) == (None, None)


async def test_bytes_of_older_versions_are_learnt_little_by_little_and_published_ones_counted(
    api: ApiWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given twelve versions and a reader that has not looked yet
    monkeypatch.setattr("rollfab.api.reading.weights.LEARN_COUNT", 5)
    await publish_twelve(api)
    reader, manifests = WeightReader(api.fabric.weights), await api.fabric.weights.held("r1")
    # When it looks; then it knows the newest, and after some looks the size of all
    first = await reader.read("r1", 2)
    assert ([each.version for each in first.versions], first.held_bytes) == ([10, 11], None)
    for _ in range(3):
        view = await reader.read("r1", 2)
    (whole,) = (await api.json("v1/weights"))["weights"]
    assert (view.held_bytes, view.held_count) == (whole["held_bytes"], len(manifests))
    # And what was there before counts as nothing published, what comes as its bytes, once
    assert view.published_bytes == 0
    publisher = Publisher(api.fabric.weights, "r1")
    report = await publisher.publish({"w": np.zeros(20000, np.uint16)}, 12)
    for _ in range(2):
        view = await reader.read("r1", 2)
    assert view.published_bytes == report.payload_bytes + report.keyframe_bytes + report.jump_bytes > 0


async def test_rollouts_become_a_reward_curve_without_any_report(api: ApiWorld) -> None:
    await api.push_group("g1", 4)
    rewards = [0.0, 0.5, 1.0, 1e308]
    for claim, reward in zip(await api.claim(4), rewards, strict=True):
        await api.settle(claim, reward)
    await told(lambda run: run["reward_curve"] and run["reward_curve"][0]["rollout_count"] == 4, api, "v1/runs/r1")

    (shown,) = (await api.json("v1/status"))["runs"]
    (point,) = (await api.json("v1/runs/r1"))["reward_curve"]

    assert shown["reward_curve"] == [point]
    assert shown["training"] is None
    assert (point["policy_version"], point["reward_min"]) == (None, 0.0)
    assert point["reward_max"] is None  # not a number that may travel; the answer is whole all the same


async def test_what_a_trainer_reported_last_is_shown(api: ApiWorld) -> None:
    for step in range(600):
        facts = {"run_id": "r1", "step": step, "reward_mean": step / 1000, "policy_version": step}
        await api.fabric.board.add_event("trainer.step", facts)
    await told(lambda run: run["training"] and run["training"]["step"] == 599, api, "v1/runs/r1")

    whole = await api.json("v1/runs/r1")

    assert whole["training"]["reward_mean"] == 0.599
    assert whole["reward_curve"] == []  # rollouts make it


async def test_rates_are_what_was_done_per_second(api: ApiWorld) -> None:
    await asyncio.sleep(0.1)  # the first sample is taken
    await api.push_group("g1", 20)
    for claim in await api.claim(20):
        await api.settle(claim)
    rates = (await told(lambda status: status["rates"]["rollouts_per_s"] > 0, api, "v1/status"))["rates"]
    assert 2 < rates["rollouts_per_s"] < 250


async def test_many_readers_cost_the_broker_one_reading(url: str) -> None:
    async with running_api(url, cache_s=5.0) as api:
        answers = await asyncio.gather(*(api.http.get("v1/status") for _ in range(40)))
        assert len({answer.json()["time_ms"] for answer in answers}) == 1


async def told(holds: Callable[[Any], Any], api: ApiWorld, path: str) -> Any:
    """The first answer for which `holds`."""
    answers: list[Any] = []

    async def is_told() -> Any:
        answers.append(await api.json(path))
        return holds(answers[-1])

    await until(is_told, lambda: f"{path} still says {answers[-1]}", every_s=0.05)
    return answers[-1]


# ---------------------------------------------------------------- metrics


async def test_metrics_are_prometheus_text_with_few_labels(api: ApiWorld) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    await api.push_group("g1", 4)
    await api.beat("dedicated-1", "dedicated", slot_count=16, running_count=5, run_id="r1", active_version=2)
    answer = await api.http.get("metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}

    assert answer.headers["content-type"].startswith("text/plain")
    assert all(name.startswith("rollfab_") for name in families)
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels == {"run", "role", "state", "worker"}
    values = {(s.name, *s.labels.values()): s.value for family in families.values() for s in family.samples}
    assert values["rollfab_trajectories", "r1", "queued"] == 4
    assert values["rollfab_trajectories_submitted_total", "r1"] == 4
    assert values["rollfab_slots_running", "dedicated"] == 5
    assert values["rollfab_active_version_min", "r1"] == 2


async def test_metrics_of_weights_are_by_run_and_by_live_worker(api: ApiWorld) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    # Given a worker two versions behind, one that failed, one without weights, and an agent
    await publish_twelve(api)
    of_weights = {"stage_ms": 250, "pause_ms": 1.5, "payload_bytes": 1234}
    await api.beat("dedicated-1", "dedicated", run_id="r1", active_version=9, **of_weights)
    await api.beat("dedicated-2", "dedicated", run_id="r1", active_version=11, state="failed", error="no way to 12")
    await api.beat("serving-1", "serving", run_id="r1")
    await api.beat("agent-1", "agent", run_id="r1")
    await api.json("v1/status")
    # When they are scraped
    answer = await api.http.get("metrics")
    families = list(text_string_to_metric_families(answer.text))
    values = {(s.name.removeprefix("rollfab_"), *s.labels.values()): s.value for f in families for s in f.samples}
    # Then each says what it reported, and nothing that it did not
    worker = "worker_weights_"
    assert values[f"{worker}version", "r1", "dedicated-1"] == 9
    assert values[f"{worker}versions_behind", "r1", "dedicated-1"] == 2
    assert values[f"{worker}stage_seconds", "r1", "dedicated-1"] == 0.25
    assert values[f"{worker}pause_seconds", "r1", "dedicated-1"] == 0.0015
    assert values[f"{worker}payload_bytes", "r1", "dedicated-1"] == 1234
    assert (values["worker_failed", "r1", "dedicated-1"], values["worker_failed", "r1", "dedicated-2"]) == (0, 1)
    assert values[f"{worker}version", "r1", "serving-1"] == -1
    assert (f"{worker}pause_seconds", "r1", "serving-1") not in values
    assert not any("agent-1" in name for name in values)
    # And the run says what its newest versions are
    (weights,) = (await api.json("v1/weights"))["weights"]
    head = weights["versions"][-1]
    assert values["weights_payload_bytes", "delta", "r1"] == values["head_payload_bytes", "r1"] == head["payload_bytes"]
    assert ("weights_payload_bytes", "keyframe", "r1") in values
    assert values["weights_density_ratio", "r1"] == 100 / 20000
    assert values["weights_bytes_per_changed", "r1"] == head["payload_bytes"] / 100
    assert values["weights_of_entropy_floor_ratio", "r1"] == head["of_entropy_floor"] > 0
    assert values["weights_held_bytes", "r1"] == weights["held_bytes"]
    assert ("weights_published_bytes_total", "r1") in values
    assert values["weights_manifests", "r1"] == weights["held_count"]


# ---------------------------------------------------------------- events


async def read_events(response: httpx.Response, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            found.append(json.loads(line[6:]))
        if len(found) == count:
            break
    return found


async def test_events_arrive_as_they_happen_and_go_on_after_the_last_one_seen(api: ApiWorld) -> None:
    board = api.fabric.board
    async with api.http.stream("GET", "v1/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()
        assert (await anext(lines)).startswith("retry:")
        await board.add_event("first", {"n": 1})
        async for line in lines:
            if line.startswith("data: "):
                break
        seen = json.loads(line[6:])
        assert (seen["kind"], seen["facts"]) == ("first", {"n": 1})
    # When the reader is away while two more happen, and comes back
    await board.add_event("second", {})
    await board.add_event("third", {})
    async with api.http.stream("GET", "v1/events", headers={"last-event-id": seen["event_id"]}) as response:
        # Then it sees them, in order, and nothing twice
        assert [event["kind"] for event in await read_events(response, 2)] == ["second", "third"]


async def test_a_late_reader_gets_what_the_api_itself_no_longer_holds(api: ApiWorld) -> None:
    for number in range(1200):
        await api.fabric.board.add_event("tick", {"n": number})
    async with api.http.stream("GET", "v1/events?after=0") as response:
        assert [event["facts"]["n"] for event in await read_events(response, 1200)] == list(range(1200))


async def test_a_silent_stream_is_kept_alive_by_comments(url: str) -> None:
    async with running_api(url, keep_alive_s=0.1) as api, api.http.stream("GET", "v1/events") as response:
        async with asyncio.timeout(3):
            async for line in response.aiter_lines():
                if line == ": still here":
                    break


async def test_a_stream_too_many_and_an_id_that_is_none_are_refused(url: str) -> None:
    async with running_api(url, event_reader_count_max=1) as api:
        async with api.http.stream("GET", "v1/events") as response:
            await anext(response.aiter_lines())
            assert (await api.json("v1/events", 503))["error"] == "TooManyReaders"
        assert (await api.json("v1/events", 422, headers={"last-event-id": "abc"}))["error"] == "InputError"


# ---------------------------------------------------------------- the switch


async def test_the_switch_reaches_the_board_at_once(api: ApiWorld) -> None:
    await api.beat("serving-1", "serving", slot_count=8)
    for value, kept, shown in (("on", "on", "on"), (3, "3", "3"), ("off", "off", "off"), (0, "0", "off")):
        answer = await api.http.post("v1/workers/serving-1/lend", json={"value": value})
        expected = {"worker_id": "serving-1", "value": kept, "worker_ids": ["serving-1"]}
        assert answer.json().items() >= expected.items()
        (said,) = (await api.fabric.board.lends()).values()
        assert (said.mode, said.slot_count_max) == {"on": ("on", None), 3: ("on", 3), "off": ("off", 3), 0: ("on", 0)}[
            value
        ]
        assert (await api.json("v1/workers"))["workers"][0]["lend"] == shown


async def test_taking_all_back_overrules_a_worker_with_a_switch_of_its_own(api: ApiWorld) -> None:
    for name in ("serving-1", "serving-2"):
        await api.beat(name, "serving", slot_count=8)
    await api.http.post("v1/workers/serving-1/lend", json={"value": "on"})

    answer = await api.http.post("v1/workers/*/lend", json={"value": "off"})

    assert answer.json()["worker_ids"] == ["serving-1", "serving-2"]
    assert [worker["lend"] for worker in (await api.json("v1/workers"))["workers"]] == ["off", "off"]
    # And who had a word of its own still has it when all are lent again
    await api.http.post("v1/workers/serving-2/lend", json={"mode": "observe"})
    await api.http.post("v1/workers/*/lend", json={"mode": "on"})
    assert [worker["lend"] for worker in (await api.json("v1/workers"))["workers"]] == ["on", "observe"]


async def test_a_pool_has_bounds_hours_and_a_reason_and_keeps_them_when_it_is_switched(api: ApiWorld) -> None:
    await api.beat("serving-1", "serving", slot_count=8, pool="chat")
    await api.beat("serving-2", "serving", slot_count=8, pool="batch")
    bounds = {"slot_count_max": 4, "compute_fraction_max": 0.25, "hours": ["00:00-24:00"]}
    answer = await api.http.post("v1/pools/chat/lend", json={"mode": "on", **bounds, "reason": "trial"})
    assert (answer.status_code, answer.json()["worker_ids"]) == (200, ["serving-1"])
    await api.http.post("v1/pools/chat/lend", json={"mode": "off", "reason": "incident"})
    await api.http.post("v1/pools/chat/lend", json={"mode": "on"})
    await api.http.post("v1/pools/chat/lend", json={"slot_count_max": None})

    lending = await api.json("v1/lending")
    (said,) = lending["settings"]
    assert said.items() >= {"subject": "pool:chat", "mode": "on", **bounds, "slot_count_max": None}.items()
    assert said["said_by"] == "api" and said["said_at_ms"] > 0
    modes = {worker["worker_id"]: worker["terms"]["mode"] for worker in lending["workers"]}
    assert modes == {"serving-1": "on", "serving-2": "observe"}

    answer = await api.http.post("v1/pools/chat/lend", json={"mode": "clear"})
    assert (answer.json()["setting"], (await api.json("v1/lending"))["settings"]) == (None, [])
    refused = (await api.http.post("v1/pools/chit/lend", json={"mode": "off"})).json()
    assert (refused["error"], "did you mean chat?" in str(refused)) == ("PoolUnknown", True)
    meant = await api.http.post("v1/pools/chit/lend", json={"mode": "off", "future": True})
    assert (meant.status_code, meant.json()["worker_ids"], meant.json()["turn_count"]) == (200, [], 0)
    kinds = [(event["facts"]["value"], event["facts"]["reason"]) for event in (await events_of(api, 5))]
    assert kinds == [("on", "trial"), ("off", "incident"), ("on", ""), ("on", ""), ("clear", ""), ("off", "")]


async def events_of(api: ApiWorld, count: int) -> list[dict[str, Any]]:
    """The switches so far, the oldest first."""
    for _ in range(100):
        found = [event for event in (await api.json("v1/status"))["events"] if event["kind"] == "lend.switched"]
        if len(found) >= count:
            return found[::-1]
        await asyncio.sleep(0.05)
    raise AssertionError(f"{count} switches were never told")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"reason": "x"},
        {"mode": None},
        {"mode": "maybe"},
        {"value": "on", "mode": "off"},
        {"value": 3, "slot_count_max": 4},
        {"mode": "on", "hours": ["nightly"]},
        {"mode": "on", "compute_fraction_max": 1.5},
        {"mode": "on", "memory_fraction_max": -0.1},
        {"mode": "on", "reason": "x" * 501},
        {"mode": "on", "said_by": "somebody else"},
        *({"value": value} for value in ("maybe", True, -1, 1.5, None, "3")),
    ],
)
async def test_what_cannot_be_obeyed_is_refused_and_changes_nothing(api: ApiWorld, body: dict[str, Any]) -> None:
    await api.beat("serving-1", "serving")
    answer = await api.http.post("v1/workers/serving-1/lend", json=body)
    assert (answer.status_code, answer.json()["error"]) == (422, "InputError")
    assert await api.fabric.board.lends() == {}


async def test_a_router_reads_whom_to_spare_while_a_controller_lives(api: ApiWorld) -> None:
    assert await api.json("v1/lending/advice") == {"extra_requests": {}}
    term = await api.fabric.board.lead("c1", 1000)
    plan = LeasePlan(controller_id="c1", term=term, made_at_ms=5, extra_requests={"serving-1": 12})
    assert await api.fabric.board.set_plan(plan)
    assert await api.json("v1/lending/advice") == {"extra_requests": {}}  # it may be long dead
    await api.beat("c1", "controller")
    advised = {"extra_requests": {"serving-1": 12}}
    await until(lambda: heard(api, advised))
    del api.living["c1"]
    await until(lambda: heard(api, {"extra_requests": {}}), every_s=0.2)  # it has been silent for 3 s
    for path in ("v1/lending/advise", "v1/lending/advice/chat"):
        assert (await api.http.get(path)).status_code == 404
    refused = await api.json("v1/lending/advice?pool=chat", status=422)
    assert "pool" in refused["message"]
    assert (await api.http.post("v1/lending/advice", json=advised)).status_code == 405


async def heard(api: ApiWorld, advice: dict[str, Any]) -> bool:
    await api.beat("serving-1", "serving")  # else nothing looks at the broker's clock, and it stands still
    return bool(await api.json("v1/lending/advice") == advice)


async def test_the_report_the_plan_and_the_metrics_say_what_lending_costs_and_gives(api: ApiWorld) -> None:
    assert (await api.json("v1/plan"))["plan"] is None
    assert (await api.json("v1/sharing"))["totals"]["shared_attained_fraction"] is None
    guard = {"guard_state": "shut", "guard_reason": "a burst", "open_fraction": 0.25, "probe": "vllm"}
    errors = {"step_error_fraction_p50": 0.0625, "step_error_fraction_p95": 0.25}
    await api.beat("serving-1", "serving", slot_count=8, **guard, **errors)
    alone = {"request_count": 10, "ttft_ms_p99": 40.0, "tpot_ms_p99": 10.0, "attained_fraction": 1.0}
    shared = {"request_count": 30, "ttft_ms_p99": 42.0, "tpot_ms_p99": 11.0, "attained_fraction": 0.9}
    report = SharingReport(worker_id="serving-1", alone=alone, shared=shared, violation_count=3, token_count=77)
    await api.fabric.board.set_sharing(report)
    term = await api.fabric.board.lead("c1", 1000)
    row = PlanRow(worker_id="serving-1", role="serving", slot_count=0, run_id=None, reason="dedicated are enough")
    assert await api.fabric.board.set_plan(LeasePlan(controller_id="c1", term=term, made_at_ms=5, rows=(row,)))

    sharing = await api.json("v1/sharing")
    assert sharing["workers"][0]["ttft_tax_p99"] == pytest.approx(0.05)
    assert sharing["totals"].items() >= {"violation_count": 3, "token_count": 77, "worker_count": 1}.items()
    assert (await api.json("v1/plan"))["plan"]["rows"][0]["reason"] == "dedicated are enough"
    (worker,) = (await api.json("v1/lending"))["workers"]
    assert worker.items() >= {**guard, "plan_reason": "dedicated are enough"}.items()
    text = (await api.http.get("metrics")).text
    for line in (
        'rollfab_lend_workers{state="observe"} 1.0',
        'rollfab_guard_workers{state="shut"} 1.0',
        'rollfab_guard_open_ratio{kind="min"} 0.25',
        'rollfab_guard_step_error_ratio_max{kind="p50"} 0.0625',
        'rollfab_guard_step_error_ratio_max{kind="p95"} 0.25',
        'rollfab_serving_ttft_seconds_p99_max{kind="rollouts"} 0.042',
        'rollfab_serving_tpot_seconds_p99_max{kind="alone"} 0.01',
        "rollfab_shared_requests_violated 3.0",
        "rollfab_harvested_tokens 77.0",
    ):
        assert line in text, line


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("v1/runs/r1/trajectories?statee=finished", "has no query parameter 'statee'; did you mean state?"),
        ("v1/status?since_ms=0", "has no query parameter 'since_ms'; there are none"),
        ("v1/history?count=3&cout=3", "has no query parameter 'cout'; did you mean count?"),
        ("readyz?rn=r1", "has no query parameter 'rn'; did you mean run?"),
        ("v1/history?COUNT=3", "has no query parameter 'COUNT'; did you mean count?"),
        ("v1/history?count=3&count=4", "takes 'count' once, and it is given 2 times"),
    ],
)
async def test_a_query_parameter_that_a_route_does_not_take_is_refused_by_name(
    api: ApiWorld, path: str, said: str
) -> None:
    assert (await api.json(path, 422))["message"] == f"/{path.partition('?')[0]} {said}"
    assert (await api.http.get("?from=a-link")).status_code == 200  # a page's address may carry what others add


async def test_only_a_known_serving_worker_has_a_switch(api: ApiWorld) -> None:
    await api.beat("dedicated-1", "dedicated")
    for name, status, error in (("nobody", 404, "WorkerUnknown"), ("dedicated-1", 422, "NotLendable")):
        answer = await api.http.post(f"v1/workers/{name}/lend", json={"value": "off"})
        assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert await api.fabric.board.lends() == {}


# ---------------------------------------------------------------- who may come in


async def test_without_a_key_nothing_is_read_but_probes_and_pages(locked: ApiWorld) -> None:
    for path in ("v1/status", "v1/runs", "v1/events", "metrics"):
        answer = await locked.http.get(path)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["error"] == "Unauthorized"
    for path in ("", "docs", "static/app.js", "healthz", "openapi.json"):
        assert (await locked.http.get(path)).status_code == 200, path
    assert (await locked.http.get("v1/status", headers=bearer("a-key-nobody-has-given-out"))).status_code == 401


async def test_reading_and_controlling_are_separate_rights(locked: ApiWorld) -> None:
    await locked.beat("serving-1", "serving")
    for key in (READ_KEY, CONTROL_KEY):
        assert (await locked.http.get("v1/status", headers=bearer(key))).status_code == 200
    path, body = "v1/workers/serving-1/lend", {"value": "on"}
    assert (await locked.http.post(path, json=body)).status_code == 401
    refused = await locked.http.post(path, json=body, headers=bearer(READ_KEY))
    assert (refused.status_code, refused.json()["error"]) == (403, "Forbidden")
    assert await locked.fabric.board.lends() == {}
    said = await locked.http.post(path, json=body, headers=bearer(CONTROL_KEY))
    assert (said.status_code, said.json()["setting"]["said_by"]) == (200, "control key 1")
    for path in ("v1/lending", "v1/sharing", "v1/plan"):
        assert (await locked.http.get(path)).status_code == 401
        assert (await locked.http.get(path, headers=bearer(READ_KEY))).status_code == 200


async def test_a_switch_is_kept_with_the_name_of_the_key_that_it_was_made_with(url: str) -> None:
    names = ((hash_key(CONTROL_KEY), "ann"),)
    async with running_api(url, control_keys=(CONTROL_KEY,), key_names=names) as world:
        await world.http.post("v1/workers/*/lend", json={"mode": "off"}, headers=bearer(CONTROL_KEY))
        assert (await world.fabric.board.lends())["*"].said_by == "ann"


async def test_a_foreign_name_that_leads_here_is_refused(api: ApiWorld) -> None:
    said = await api.json("v1/status", 403, headers={"host": "evil.example"})
    assert said["error"] == "HostRefused"
    for name in ("localhost:9000", "127.0.0.1", "[::1]:8420"):
        await api.json("v1/status", headers={"host": name})


@pytest.mark.parametrize(
    "name", ["X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto", "Forwarded", "Via", "X-Real-IP", "Client-IP"]
)
async def test_what_a_proxy_passed_on_is_refused_without_keys(api: ApiWorld, name: str) -> None:
    said = await api.json("v1/status", 403, headers={name: ""})
    assert (said["error"], name.lower() in said["message"]) == ("ForwardedRefused", True)
    answer = await api.http.post("v1/workers/*/lend", json={"mode": "on"}, headers={name: "1.1 proxy"})
    assert (answer.status_code, answer.json()["error"]) == (403, "ForwardedRefused")
    assert await api.fabric.board.lends() == {}


async def test_with_keys_what_is_said_of_a_run_needs_one(locked: ApiWorld) -> None:
    assert (await locked.http.get("readyz")).status_code in (200, 503)
    assert (await locked.http.get("readyz?run=r1")).status_code == 401


async def test_with_keys_a_proxy_may_pass_on(locked: ApiWorld) -> None:
    await locked.json("v1/status", headers={**bearer(CONTROL_KEY), "x-forwarded-for": "192.0.2.1"})


async def test_a_foreign_page_may_not_control_but_our_own_may(api: ApiWorld) -> None:
    await api.beat("serving-1", "serving")
    own = api.url.rstrip("/")
    foreign = (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": own},
    )
    for headers in foreign:
        answer = await api.http.post("v1/workers/*/lend", json={"value": "on"}, headers=headers)
        assert (answer.status_code, answer.json()["error"]) == (403, "OriginRefused"), headers
    assert await api.fabric.board.lends() == {}
    headers = {"origin": own, "sec-fetch-site": "same-origin"}
    assert (await api.http.post("v1/workers/*/lend", json={"value": "on"}, headers=headers)).status_code == 200


async def test_every_answer_forbids_framing_and_foreign_scripts(api: ApiWorld) -> None:
    for path in ("", "v1/status", "v1/runs/nope", "static/app.js"):
        headers = (await api.http.get(path)).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "10.0.0.7", "gpu-box"])
def test_an_open_address_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match="keys"):
        make_app(None, ApiConfig(host=host))  # type: ignore[arg-type]


def test_a_key_that_can_be_guessed_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        make_app(None, ApiConfig(read_keys=("secret",)))  # type: ignore[arg-type]
    assert "secret'" not in str(caught.value)


# ---------------------------------------------------------------- documentation


async def test_the_documentation_describes_every_route_and_loads_nothing_from_elsewhere(api: ApiWorld) -> None:
    document = await api.json("openapi.json")
    assert {"/v1/status", "/v1/workers/{worker_id}/lend", "/v1/events", "/readyz"} <= set(document["paths"])
    assert {"/v1/pools/{pool}/lend", "/v1/lending", "/v1/sharing", "/v1/plan"} <= set(document["paths"])
    for path in (
        "",
        "docs",
        "static/app.js",
        "static/docs.js",
        "static/style.css",
        "static/client.js",
        "static/draw.js",
    ):
        text = (await api.http.get(path)).text.replace("http://www.w3.org", "")
        assert "http://" not in text, path
        assert "https://" not in text, path


async def test_the_server_stops_although_a_stream_is_open(url: str) -> None:
    async with running_api(url) as api:
        stream = api.http.stream("GET", "v1/events")
        response = await stream.__aenter__()
        await anext(response.aiter_lines())
    await stream.__aexit__(None, None, None)


async def bury_all(api: ApiWorld, group_id: str, *reasons: str) -> None:
    """Push a group whose trajectories die, each for a reason."""
    await api.push_group(group_id, len(reasons))
    for claim, reason in zip(await api.claim(len(reasons)), reasons, strict=True):
        await api.bury(claim, reason)


async def test_dead_letters_are_counted_by_cause_and_retried_or_discarded_by_it(api: ApiWorld) -> None:
    await bury_all(api, "g1", "reset raised OSError: port 4711", "reset raised OSError: port 4712")
    await bury_all(api, "g2", "reset raised OSError: port 9", "step hung for 30 s")

    said = await api.json("v1/runs/r1/dead-letters/causes")
    assert said["dead_count"] == 4
    counts = [(row["cause"], row["trajectory_count"], row["group_count"]) for row in said["causes"]]
    assert counts == [("reset raised OSError: port #", 3, 2), ("step hung for # s", 1, 1)]

    async def post(action: str, status: int = 200, **body: Any) -> Any:
        answer = await api.http.post(f"v1/runs/r1/dead-letters/{action}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    of_cause = {"all": True, "cause": "oserror"}
    dry = await post("retry", **of_cause, dry_run=True)
    assert dry == {"is_dry_run": True, "trajectory_count": 3, "group_count": 2, "refused": []}
    assert (await api.json("v1/runs/r1/dead-letters"))["dead_count"] == 4
    assert await post("retry", **of_cause) == {**dry, "is_dry_run": False}
    assert await post("retry", **of_cause) == {**dry, "is_dry_run": False, "trajectory_count": 0, "group_count": 0}
    assert len(await api.claim(9)) == 3

    (refused,) = (await post("retry", trajectory_ids=["g1.0", "x"]))["refused"]
    assert (refused["code"], refused["trajectory_count"], refused["group_count"]) == ("unknown", 2, 2)
    assert (await post("discard", all=True))["trajectory_count"] == 1
    assert (await api.json("v1/runs/r1/dead-letters"))["dead_count"] == 0

    for wrong in ({}, {"all": True, "trajectory_ids": ["g1.0"]}, {"trajectory_ids": ["a"], "cause": "x"}, {"al": True}):
        assert (await post("retry", 422, **wrong))["error"] == "InputError"
    said = (await post("retry", 422))["message"]
    assert said == "the request cannot be used: body: say which: trajectory_ids, or all"
    gone = await api.http.post("v1/runs/nope/dead-letters/retry", json={"all": True})
    assert (gone.status_code, gone.json()["error"]) == (404, "RunUnknown")
