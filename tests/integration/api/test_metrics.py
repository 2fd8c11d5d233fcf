"""What a scrape gets: valid text of both kinds, as small with a thousand workers as with one."""

from __future__ import annotations

import asyncio
import dataclasses
import math

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_plain

from rollfab.api.metrics.answer import OPENMETRICS as OPENMETRICS_TEXT
from rollfab.api.metrics.answer import PLAIN, render
from rollfab.api.schemas.answers import Status
from rollfab.fabric.contract.lease_plan import LeaseChange
from rollfab.fabric.contract.records import Lease, RunConfig, WorkerInfo
from rollfab.fabric.rules.queue.timings import BUCKET_COUNT, TIMINGS, Histogram, Timings
from tests.support.processes.api_server import RUN, ApiWorld, running_api

OPENMETRICS = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
ROLES = ("agent", "dedicated", "reward", "serving")


async def scrape(api: ApiWorld) -> dict[str, Metric]:
    answer = await api.http.get("metrics", headers=OPENMETRICS)
    assert answer.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return {family.name: family for family in read_openmetrics(answer.text)}


async def measure(api: ApiWorld, worker_id: str, role: str, seconds: float, *, run_id: str = "r1") -> None:
    timings = Timings(worker_id)
    for name in TIMINGS:
        timings.of(run_id).note(name, seconds, "g1.0")
    info = WorkerInfo(worker_id=worker_id, role=role, pid=1, host="box")
    await api.fabric.board.add_timings(info, timings)


async def test_slots_that_runs_share_count_once_and_each_run_has_its_version(api: ApiWorld) -> None:
    # Given a worker that serves two runs at once, as their weights are the same
    board = api.fabric.board
    await board.create_run(dataclasses.replace(RUN, run_id="z2"))
    info = WorkerInfo(
        worker_id="w1", role="dedicated", pid=1, host="box", run_id="r1", active_version=3, guest_versions={"z2": 7}
    )
    await board.heartbeat(info)
    leases = [
        Lease(worker_id="w1", run_id=name, lease_epoch=n, slot_count=4, lease_until_ms=None)
        for n, name in enumerate(("r1", "z2"), 1)
    ]
    await board.change_leases(0, [LeaseChange(lease=lease, runs="r1 z2") for lease in leases], {})
    # Then its slots are those of the run whose weights it follows
    families = await scrape(api)
    slots = {tuple(each.labels.values()): each.value for each in families["rollfab_lease_slots"].samples if each.value}
    assert slots == {("r1", "standing"): 4, ("z2", "guest"): 4}
    versions = {each.labels["run"]: each.value for each in families["rollfab_worker_weights_version"].samples}
    assert versions == {"r1": 3, "z2": 7}
    (worker,) = (await api.http.get("v1/workers")).json()["workers"]
    assert (worker["lease"]["run_id"], worker["guest_versions"]) == ("r1", {"z2": 7})


async def test_who_accepts_openmetrics_gets_units_and_exemplars(api: ApiWorld) -> None:
    await api.push_group("g1", 2)
    for worker_id, role, seconds in (("w1", "dedicated", 0.003), ("w2", "dedicated", 7.5), ("w3", "serving", 0.2)):
        await measure(api, worker_id, role, seconds)
    families = await scrape(api)

    ttft = families["rollfab_ttft_seconds"]
    assert (ttft.type, ttft.unit) == ("histogram", "seconds")
    own = [sample for sample in ttft.samples if sample.labels["role"] == "dedicated"]
    buckets = {sample.labels["le"]: sample for sample in own if sample.name.endswith("_bucket")}
    assert [buckets[le].value for le in ("0.002", "0.004", "4.096", "8.192", "+Inf")] == [0, 1, 1, 2, 2]
    exemplar = buckets["0.004"].exemplar
    assert exemplar is not None and (exemplar.labels, exemplar.value) == ({"trace_id": "g1.0"}, 0.003)
    (total,) = (sample.value for sample in own if sample.name.endswith("_sum"))
    assert math.isclose(total, 7.503)
    for family in families.values():
        assert family.name.endswith(f"_{family.unit}") or not family.unit
    assert families["rollfab_generated_tokens"].unit == "tokens"


async def test_others_get_the_plain_text_with_the_same_numbers(api: ApiWorld) -> None:
    await measure(api, "w1", "dedicated", 0.003)
    for accept in ("", "*/*", "text/plain;version=0.0.4", "application/json", "\u00e9,;;,=version=x", "a" * 5000):
        answer = await api.http.get("metrics", headers={"accept": accept.encode("latin-1")})  # type: ignore[dict-item]
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    plain = {family.name: family for family in read_plain(answer.text)}
    assert "# UNIT" not in answer.text and "trace_id" not in answer.text
    seen = {(s.name, *sorted(s.labels.items())): s.value for s in plain["rollfab_ttft_seconds"].samples}
    fine = {(s.name, *sorted(s.labels.items())): s.value for s in (await scrape(api))["rollfab_ttft_seconds"].samples}
    assert seen == fine


async def test_a_thousand_workers_are_no_larger_than_four(api: ApiWorld) -> None:
    for role in ROLES:
        await measure(api, f"first-{role}", role, 0.1)
    few = (await api.http.get("metrics", headers=OPENMETRICS)).content
    for start in range(0, 1000, 50):
        numbers = range(start, start + 50)
        await asyncio.gather(*(measure(api, f"w{n}", ROLES[n % 4], 0.09 + 0.00001 * n) for n in numbers))
    many = (await api.http.get("metrics", headers=OPENMETRICS)).content

    assert len(many) < 1.05 * len(few) < 200_000
    families = {family.name: family for family in read_openmetrics(many.decode())}
    for name in TIMINGS:
        counts = [s.value for s in families[f"rollfab_{name}_seconds"].samples if s.name.endswith("_count")]
        assert counts == [251.0] * 4


async def test_names_that_need_quoting_are_quoted(api: ApiWorld) -> None:
    name, histogram = 'a "run"\nwith \\ and }', Histogram(counts=[1] * BUCKET_COUNT, sum_s=1.0)
    histogram.latest = {0: (1_700_000_000_000, 0.0005, "g" * 90)}
    status = Status.model_validate(await api.json("v1/status"))
    for kind, read in ((PLAIN, read_plain), (OPENMETRICS_TEXT, read_openmetrics)):
        text = render(status, {name: {("ttft", "dedicated"): histogram}}, kind).decode()
        samples = [sample for family in read(text) for sample in family.samples if "le" in sample.labels]
        assert {sample.labels["run"] for sample in samples} == {name}


async def test_a_deleted_run_is_in_no_scrape_any_more(api: ApiWorld) -> None:
    other = RunConfig(run_id="r2", model="tiny", environment="frozenlake")
    await api.fabric.board.create_run(other)
    for run_id in ("r1", "r2"):
        await measure(api, "w1", "dedicated", 0.1, run_id=run_id)
    await api.fabric.board.delete_run("r2")
    await measure(api, "w1", "dedicated", 0.1, run_id="r2")  # it had not heard of it
    samples = [sample for family in (await scrape(api)).values() for sample in family.samples]
    assert {sample.labels["run"] for sample in samples if "run" in sample.labels} == {RUN.run_id}


async def test_many_scrapes_at_once_read_the_broker_once(url: str) -> None:
    async with running_api(url, cache_s=5.0) as api:
        await measure(api, "w1", "dedicated", 0.1)
        await api.json("v1/status")
        before = await commands(api)
        answers = await asyncio.gather(*(api.http.get("metrics", headers=OPENMETRICS) for _ in range(30)))
        assert len({answer.content for answer in answers}) == 1
        assert await commands(api) - before <= 3


async def commands(api: ApiWorld) -> int:
    """How often the table of timings was read."""
    client = api.fabric._client
    found = await client.info("commandstats")
    return int(found.get("cmdstat_hgetall", {}).get("calls", 0))
