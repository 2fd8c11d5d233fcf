"""Every view of the live page, at its address, on real data: what it shows, its controls, and what comes meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollfab.api.access.keys import new_key
from rollfab.fabric.contract.lease_plan import LeaseSample, RunSample, Sample, ServingSample
from rollfab.fabric.contract.records import Node, Rollout, Span
from rollfab.fabric.contract.sharing import LendSetting, SharingReport
from rollfab.fabric.model.tokenizer import CharTokenizer
from rollfab.trainer.agreement import BFLOAT16, AgreementReporter
from rollfab.trainer.publish.publisher import Publisher
from tests.e2e.chromium import Browser, Page
from tests.e2e.page_checks import look
from tests.support.processes.api_server import RUN, ApiWorld, running_api
from tests.support.records import rollout_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TEXTS = ("go <b>on</b>", "left", " wall ", "right")
SIZES = ((1440, 900), (1024, 768), (390, 844))
VIEWS = {  # address; what is seen there last, with a part of its text
    "overview": ("", "[data-run=r1] [data-f=dead_count]", "1"),
    "run": ("runs/r1", "[data-group=g9] [data-f=complete]", "1 of 8"),
    "trajectory": ("runs/r1/trajectories/g2.0", "[data-piece='1']", "left"),
    "finished": ("runs/r1/trajectories/g1.0?colour=logprob", "[data-f=legend]", "likely: 50 % to 90 %"),
    "compared": ("runs/r1/trajectories/g2.1?colour=difference", "[data-f=legend]", "half as likely"),
    "workers": ("workers", "[data-worker=serving-1]", "serving-1"),
    "leases": ("workers?show=leases", "[data-f=lease-legend]", "guard narrow"),
    "serving": ("serving", "[data-verdict=serving-1]", "hurt"),
    "dead": ("dead", "[data-dead=r1] .cause", "environment raised <b>ValueError</b>"),
    "events": ("events", "#all-events", "trainer.step"),
}


WATCH = """
window.longest = 0;
const note = (list) => list.getEntries().forEach((each) => (window.longest = Math.max(window.longest, each.duration)));
new PerformanceObserver(note).observe({ entryTypes: ['longtask'] });
"""


def played(rollout: Rollout) -> Rollout:
    """Two turns with an answer of the world between; the second was made by two workers, at two versions."""
    prompt, *parts = (CharTokenizer().encode(text) for text in TEXTS)
    mask = np.concatenate([np.full(len(part), number, np.uint8) for part, number in zip(parts, (1, 0, 1), strict=True)])
    return replace(
        rollout,
        prompt_ids=prompt,
        completion_ids=np.concatenate(parts),
        completion_mask=mask,
        logprobs=np.where(mask, np.float32(-0.25), np.float32(0)),
        spans=(Span(0, 4, "w1", 3), Span(10, 12, "w1", 3), Span(12, 15, "w2", 4)),
        turn_count=2,
        turn_ms=[5, 105, 110, 111, 311, 320],
        info={"rewards": [0.0, 1.0], "said": "<img src=x onerror=alert(1)>"},
    )


async def finish(api: ApiWorld, group_id: str, size: int = 1, *, is_compared: bool = False) -> None:
    """A group is submitted, played, perhaps compared with the trainer's model, and consumed."""
    await api.push_group(group_id, size)
    for claim in await api.claim(size):
        rollout = played(rollout_of(claim.job, 1.0))
        assert await api.fabric.trajectories(RUN).settle(claim, rollout, is_scored=True)
    stream = api.fabric.rollouts(RUN)
    (delivery,) = await stream.receive("t", 1, 1.0)
    if is_compared:
        reporter = AgreementReporter(api.fabric.board, api.fabric.weights, stream, RUN.run_id)
        off = np.resize([0.0, 0.05, 0.3, -0.05, -0.3, -2.0, 1.5], sum(map(len, TEXTS[1:]))).astype(np.float32)
        logprobs = [rollout.logprobs + off for rollout in delivery.group.rollouts]
        await reporter.report([delivery.group], logprobs, 3, BFLOAT16)
    assert await stream.acknowledge(delivery)


async def furnish(api: ApiWorld) -> None:
    """Something of everything that the page shows."""
    await Publisher(api.fabric.weights, "r1").publish({"w": np.zeros(400, np.float32)}.items(), 0)
    await api.beat("agent-1", "agent", environments=["frozenlake"], slot_count=8, running_count=2)
    await api.beat(
        "w1", "dedicated", slot_count=8, running_count=3, run_id="r1", active_version=0, engine="vllm 0.32.0"
    )
    guard = {"guard_state": "narrow", "guard_reason": "a burst", "open_fraction": 0.5, "headroom_fraction": 0.25}
    await api.beat("serving-1", "serving", slot_count=8, pool="chat", probe="vllm", **guard)
    await api.beat(
        "w2", "dedicated", state="failed", error="CUDA error: out of memory <b>while</b> allocating 2.00 GiB"
    )
    await api.fabric.board.set_lend(
        "serving-1", LendSetting(mode="on", slot_count_max=3, said_by="ada", reason="night")
    )
    latencies = {"request_count": 500, "ttft_ms_p99": 42.0, "tpot_ms_p99": 9.0, "attained_fraction": 0.99}
    report = SharingReport(worker_id="serving-1", alone=latencies, shared=latencies, ttft_slo_ms=60, token_count=777)
    await api.fabric.board.set_sharing(report)
    for index in range(3):
        await finish(api, f"g{index}", 4, is_compared=index == 2)
    await api.push_group("g9", 8)
    claims = await api.claim(4)
    await api.settle(claims[0], 0.5)
    await api.bury(claims[1], "environment raised <b>ValueError</b>: step 31 of 90")
    await api.fabric.board.add_event("trainer.step", {"run_id": "r1", "step": 4, "loss": 0.5})
    await remember(api)


async def remember(api: ApiWorld) -> None:
    """An hour of samples, as a controller takes them, in which a burst hurt serving users once."""
    board = api.fabric.board
    term, now_ms = await board.lead("controller-1", 60_000), await board.wall_ms()
    held = leases_held(now_ms - 3_600_000)
    for minute in range(60):
        tokens = 6_000 * minute + 90 * minute * (minute % 7)
        run = RunSample(
            run_id="r1",
            token_count=tokens,
            rollout_count=9 * minute,
            groups_waiting=minute % 5,
            dead_count=1,
            head_version=minute // 9,
            cause="moves",
        )
        serving = ServingSample(
            worker_id="serving-1",
            guard_state="open",
            slot_count=3,
            token_count=tokens // 4,
            request_count=40 * minute,
            violation_count=9 * (minute > 40),
            request_count_alone=40 * minute,
            violation_count_alone=0,
            ttft_ms_p99=40 + minute % 9,
            tpot_ms_p99=9 + minute % 3,
            ttft_ms_p99_alone=39,
            tpot_ms_p99_alone=9,
            ttft_slo_ms=60,
            tpot_slo_ms=20,
        )
        sample = Sample(
            time_ms=now_ms - 60_000 * (60 - minute),
            token_count=tokens,
            rollout_count=9 * minute,
            groups_waiting=minute % 5,
            dead_count=1,
            worker_count=4,
            running_count=3 + minute % 6,
            slot_count=16,
            runs=(run,),
            serving=(serving,),
            leases=tuple(row for since, row in held if since == minute),
        )
        assert await board.add_sample(term, sample)


def leases_held(start_ms: int) -> list[tuple[int, LeaseSample]]:
    """What a controller wrote down of two workers' leases, by the minute of the hour."""
    rows = (
        (0, "w1", "r1", 8, ""),
        (21, "w1", "night-run", 4, ""),
        (52, "w1", "r1", 8, ""),
        (2, "serving-1", "", 0, "shut"),
        (9, "serving-1", "r1", 3, "open"),
        (30, "serving-1", "", 0, "shut"),
        (41, "serving-1", "night-run", 1, "narrow"),
        (47, "serving-1", "night-run", 2, "open"),
    )
    return [(minute, LeaseSample(name, start_ms + 60_000 * minute, *rest)) for minute, name, *rest in rows]


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
async def test_every_view_is_whole_at_every_size(api: ApiWorld, browser: Browser, pictures: Path, scheme: str) -> None:
    await furnish(api)
    for width, height in SIZES:
        page = await browser.open(api.url, width=width, height=height, scheme=scheme)
        for name in VIEWS:
            await show(page, api, name)
            await look(page, f"{name}-{width}-{scheme}", pictures, width=width, height=height)
            await api.beat("controller-1", "controller")
    assert page.complaints() == []
    assert all(address.startswith((api.url, "data:")) for address in page.requested())


async def test_a_run_shows_what_holds_it_up_and_its_groups_and_leads_to_a_trajectory_and_back(
    api: ApiWorld, browser: Browser
) -> None:
    await furnish(api)
    page = await browser.open(api.url)
    await page.click("[data-run=r1] h3 a")
    # Then the run's open trajectories and groups are there, also those that come
    await page.wait_text("[data-trajectory='g9.2'] [data-f=place]", "agent-1")
    await page.wait_text("[data-group=g9] [data-f=complete]", "1 of 8")
    await api.push_group("g10", 2)
    (claim,) = await api.claim(1)
    await page.wait_text(f"[data-trajectory='{claim.job.trajectory_id}']", claim.job.trajectory_id, timeout_s=10)
    # And what is finished, by a choice that the address keeps
    await choose(page, "groups", "finished")
    await page.wait_text("[data-group=g1] [data-f=complete]", "4 of 4")
    await page.wait_text("[data-group=g1]", "all rewards equal")
    await page.wait_value("location.search", "?groups=finished")
    # And each sibling leads to its trajectory, and the browser back, and forth
    await page.click("[data-group=g1] a.sibling")
    await page.wait_text("[data-f=state]", "finished")
    await page.wait_value("location.pathname", "/runs/r1/trajectories/g1.0")
    await page.evaluate("history.back()")
    await page.wait_text("[data-group=g1] [data-f=complete]", "4 of 4")
    await page.evaluate("history.forward()")
    await page.wait_text("[data-f=state]", "finished")
    await page.wait_text("h1", "g1.0")
    await page.click("#nav a")
    await page.wait_text("[data-run=r1] [data-f=name]", "r1")
    assert page.complaints() == []


STALENESS = "document.querySelector('[aria-label^=Staleness]')?.getAttribute('aria-label') ?? ''"
FIRST_SEEN = f"""
window.seen = null;
const note = () => {{
  if (!window.seen && document.querySelector("[data-f=head_version]")?.textContent === "9") window.seen = {STALENESS};
}};
new MutationObserver(note).observe(document.body, {{ subtree: true, childList: true, characterData: true }});
"""


async def test_staleness_is_told_of_the_head_that_was_when_it_was_read(api: ApiWorld, browser: Browser) -> None:
    # Given a group that waits for its trainer, one version behind the head
    publisher = Publisher(api.fabric.weights, "r1")
    await publisher.publish({"w": np.zeros(400, np.float32)}.items(), 4)
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    assert await api.fabric.trajectories(RUN).settle(claim, played(rollout_of(claim.job, 1.0)), is_scored=True)
    page = await browser.open(f"{api.url}runs/r1")
    await page.wait_text("[data-f=head_version]", "4")
    await page.evaluate(f"new Promise((done) => setInterval(() => ({STALENESS}) && done(true), 20))")
    told = await page.evaluate(STALENESS)
    # When the head moves on, and the page has not read anew what waits
    await page.evaluate(FIRST_SEEN)
    await publisher.publish({"w": np.ones(400, np.float32)}.items(), 9)
    await page.wait_text("[data-f=head_version]", "9")
    # Then it does not call that stale by a head that nobody compared it with
    assert told.endswith(": 1") and await page.evaluate("window.seen") == told
    assert page.complaints() == []


async def test_a_trajectory_is_told_as_text_tokens_times_and_raw(api: ApiWorld, browser: Browser) -> None:
    await furnish(api)
    page = await browser.open(f"{api.url}runs/r1/trajectories/g1.0")
    # Then its turns are there as text, with who made them
    await page.wait_text("[data-piece='0']", TEXTS[0])
    await page.wait_text("[data-piece='1']", "left")
    await page.wait_text("[data-piece='3']", "w2 · v4")
    await page.wait_text("[data-f=legend]", "the policy made it (mask 1, underlined)")
    await page.wait_value("document.querySelectorAll('.lanes i').length", 5)
    await page.wait_text(".reward-parts", "1")
    # And colours, ids and what is known of one token
    await choose(page, "colour", "worker")
    await page.wait_text("[data-f=legend]", "w2")
    await choose(page, "colour", "logprob")
    await page.wait_text("[data-f=legend]", "likely: 50 % to 90 %")
    await page.click("[data-piece='3'] .t")
    await page.wait_text("[data-f=pointed]", "log-probability -0.2500, probability 77.9 % · worker w1, version 3")
    await page.click("[data-f=ids]")
    ids = [int(each) for each in CharTokenizer().encode("left")]
    await page.wait_text("[data-piece='1'] .token-text", " ".join(map(str, ids)))
    await page.wait_value("location.search", "?colour=logprob&ids=1")
    # And what is other people's is text
    await page.click("[data-f=info] summary")
    await page.wait_text("[data-f=info] pre", "<img src=x onerror=alert(1)>")
    await page.wait_value("document.querySelector('#view img, #view .piece b b') === null", True)
    # And one that nobody has is not there
    await page.call("Page.navigate", url=f"{api.url}runs/r1/trajectories/g77.0")
    await page.wait_text(".notice", "has no trajectory 'g77.0' now")
    # And of one whose run was deleted, a person is told so in words for a page
    await api.fabric.board.delete_run(RUN.run_id)
    await page.call("Page.navigate", url=f"{api.url}runs/r1/trajectories/g1.0")
    await page.wait_text(
        ".notice", "this run was deleted, or never created: Overview, above, lists those that there are"
    )


async def test_tokens_are_coloured_by_how_far_the_trainer_s_log_probabilities_differ(
    api: ApiWorld, browser: Browser, tmp_path: Path
) -> None:
    await finish(api, "g1", 1)
    await finish(api, "g2", 1, is_compared=True)
    # Where no trainer compared it, the colour is not offered, and it is said how it comes to be
    page = await browser.open(f"{api.url}runs/r1/trajectories/g1.0?colour=difference")
    await page.wait_text(
        "[data-f=compared]", "have it call run.compare before its groups are acknowledged", timeout_s=10
    )
    values = "[...document.querySelector('[data-f=colour]').options].map((each) => each.value)"
    assert "difference" not in await page.evaluate(values)
    await page.wait_text("[data-f=legend]", "the policy made it")
    # Where one did, tokens are coloured by it, and each one's is told
    await page.call("Page.navigate", url=f"{api.url}runs/r1/trajectories/g2.0")
    await page.wait_text("[data-f=compared]", "with version 3", timeout_s=10)
    await choose(page, "colour", "difference")
    tones = "[...document.querySelectorAll('[data-piece=\"1\"] .t')].map((each) => each.dataset.tone)"
    await page.wait_value(tones, ["e0", "a1", "a2", "b1"])
    await page.click("[data-piece='1'] .t:last-of-type")
    await page.wait_text("[data-f=pointed]", "trainer − worker −0.0500 nats, ratio 0.951")
    # And so does the page that is kept on a disk
    await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await page.click("[data-f=offline]")
    file = tmp_path / "g2.0.html"
    for _ in range(200):
        if file.exists() and file.stat().st_size:
            break
        await asyncio.sleep(0.05)
    offline = await browser.open(file.as_uri())
    await choose(offline, "colour", "difference")
    await offline.wait_text("[data-f=legend]", "half as likely")
    await offline.wait_value(tones, ["e0", "a1", "a2", "b1"])
    assert page.complaints() == []


async def test_a_trajectory_that_branches_is_a_tree(api: ApiWorld, browser: Browser) -> None:
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    nodes = (Node(-1, 4, [{"role": "user", "content": "go"}]), Node(0, 10), Node(0, 15))
    whole = replace(played(rollout_of(claim.job, 1.0)), nodes=nodes)
    assert await api.fabric.trajectories(RUN).settle(claim, whole, is_scored=True)
    page = await browser.open(f"{api.url}runs/r1/trajectories/g1.0")
    await page.wait_text("[data-piece='3'] header", "branches off piece 2 (turn)")
    depths = "[...document.querySelectorAll('.piece')].map((piece) => piece.style.getPropertyValue('--depth'))"
    await page.wait_value(depths, ["0", "0", "1", "1"])
    await page.click("[data-f=messages] summary")
    await page.wait_text("[data-f=messages] pre", "go")


async def test_a_trajectory_s_offline_page_opens_from_a_disk_and_shows_the_same(
    api: ApiWorld, browser: Browser, tmp_path: Path
) -> None:
    await furnish(api)
    page = await browser.open(f"{api.url}runs/r1/trajectories/g1.0")
    await page.wait_text("[data-piece='3']", "ght")
    await page.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    await page.click("[data-f=offline]")
    await page.click("[data-f=download]")
    files = [tmp_path / "g1.0.html", tmp_path / "g1.0.json"]
    for _ in range(200):
        if all(file.exists() and file.stat().st_size for file in files):
            break
        await asyncio.sleep(0.05)
    assert "https:" not in files[0].read_text()
    assert page.complaints() == []
    # When it is opened from a disk
    offline = await browser.open(files[0].as_uri())
    await offline.wait_text("[data-piece='3']", "ght")
    await choose(offline, "colour", "version")
    await offline.wait_text("[data-f=legend]", "version 4")
    await offline.wait_text("#kept", "as it was on")
    assert offline.complaints() == []
    assert [each for each in offline.requested() if not each.startswith(("file:", "data:"))] == []


async def test_a_trajectory_of_a_hundred_thousand_tokens_does_not_freeze_the_page(
    api: ApiWorld, browser: Browser
) -> None:
    count = 100_000
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    half = count // 2
    whole = replace(
        rollout_of(claim.job, 1.0),
        prompt_ids=CharTokenizer().encode("go"),
        completion_ids=np.resize(CharTokenizer().encode("left right "), count),
        completion_mask=np.ones(count, np.uint8),
        logprobs=np.full(count, -0.5, np.float32),
        spans=(Span(0, half, "w1", 1), Span(half, count, "w2", 2)),
        turn_count=1,
    )
    assert await api.fabric.trajectories(RUN).settle(claim, whole, is_scored=True)
    page = await browser.open(f"{api.url}runs/r1/trajectories/g1.0")
    await page.wait_text("[data-piece='1'] header", "100,000 tokens", timeout_s=20)
    await page.evaluate(WATCH)
    await page.click("[data-piece='1'] button")
    await choose(page, "colour", "logprob")
    await asyncio.sleep(1)
    assert await page.evaluate("document.querySelectorAll('.t').length") < 10_000
    assert await page.evaluate("window.longest") < 1500
    assert page.complaints() == []


async def test_what_serving_users_saw_is_plotted_and_judged(api: ApiWorld, browser: Browser) -> None:
    await furnish(api)
    page = await browser.open(f"{api.url}serving")
    await page.wait_text("[data-verdict=serving-1]", "hurt")
    await page.wait_text("[data-verdict=serving-1]", "9")
    await page.wait_value("document.querySelectorAll('.uplot canvas').length", 4)
    label = "document.querySelector('.uplot-host').getAttribute('aria-label')"
    assert "objective 60 ms" in await page.evaluate(label)
    # When another span is chosen, the address keeps it
    await choose(page, "span", "1h")
    await page.wait_text("[data-verdict=serving-1]", "hurt")
    await page.wait_value("location.search", "?span=1h")
    assert page.complaints() == []


async def test_of_a_thousand_workers_those_in_sight_are_drawn_and_any_is_found(api: ApiWorld, browser: Browser) -> None:
    names = [f"w{index:04d}" for index in range(1000)]
    await asyncio.gather(
        *(
            api.beat(name, "serving" if index % 3 == 0 else "dedicated", slot_count=8)
            for index, name in enumerate(names)
        )
    )
    page = await browser.open(f"{api.url}workers", width=1440, height=900)
    await page.wait_text("#worker-count", "666 dedicated · 334 serving", timeout_s=15)
    shown = "document.querySelectorAll('#workers tr[data-worker]').length"
    assert await page.evaluate(shown) < 100
    # When somebody scrolls, the rows there are drawn
    await page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    await page.wait_text("[data-worker=w0999]", "w0999", timeout_s=10)
    assert await page.evaluate(shown) < 100
    # And one is found by its name, or by its role and state; its switch is in the window
    await page.type("[data-f=search]", "w0333")
    await page.wait_text("[data-f=found]", "1 of 1,00", timeout_s=10)
    await page.wait_text("[data-worker=w0333] [data-f=limit]", "observe")
    ends = await page.evaluate(
        "document.querySelector('[data-worker=w0333] [data-f=lend_off]').getBoundingClientRect().right"
    )
    assert ends < 1440
    await page.wait_value("location.search", "?q=w0333")
    assert page.complaints() == []


async def test_leases_are_told_over_time_by_lane_and_in_words(api: ApiWorld, browser: Browser) -> None:
    await furnish(api)
    page = await browser.open(f"{api.url}workers", width=1440, height=900)
    await choose(page, "show", "leases")
    # Then every worker that takes leases has a lane, which also says in words what is drawn
    await page.wait_text("[data-f=lease-legend]", "night-run", timeout_s=10)
    await page.wait_text("[data-f=looked]", "as written down every minute, last at")
    label = "document.querySelector('[data-lane=serving-1] .lease-lane').getAttribute('aria-label')"
    await page.wait_value(label, "serving-1: 3 leases; at last run night-run, 2 slots, guard open")
    await page.wait_value("document.querySelector('[data-lane=agent-1]') === null", True)
    drawn = "[...document.querySelectorAll('[data-lane=serving-1] .lease-lane i')].map((each) => each.dataset.guard)"
    await page.wait_value(drawn, ["shut", "open", "shut", "narrow", "open"])
    # also with keys alone
    await page.tab_to("[data-lane=serving-1] summary")
    await page.press("Enter")
    await page.wait_text("[data-lane=serving-1] ol", "run night-run, 1 slot, guard narrow")
    # And what was asked for stays in the address, and narrows the lanes
    await page.type("[data-f=search]", "w1")
    await page.wait_gone("[data-lane=serving-1]")
    await choose(page, "span", "6h")
    await page.wait_text("[data-lane=w1] ol", "", timeout_s=10)
    await page.wait_value("location.search", "?show=leases&q=w1&span=6h")
    # And the workers are there again
    await choose(page, "show", "")
    await page.wait_text("[data-worker=w1]", "w1")
    await page.wait_value("document.querySelector('#lease-times') === null", True)
    assert page.complaints() == []


async def test_of_a_thousand_workers_fifty_lanes_are_asked_for_and_drawn_at_a_time(
    api: ApiWorld, browser: Browser
) -> None:
    names = [f"w{index:04d}" for index in range(1000)]
    await asyncio.gather(*(api.beat(name, "dedicated", slot_count=8) for name in names))
    page = await browser.open(f"{api.url}workers?show=leases", width=1440, height=900)
    lanes = "document.querySelectorAll('[data-lane]').length"
    await page.wait_for("document.querySelector('[data-lane=w0049]')", timeout_s=15)
    await page.wait_text("[data-f=looked]", "Nothing is written down of that time", timeout_s=10)
    await page.wait_value(lanes, 50)
    await page.click("[data-f=more-lanes]")
    await page.wait_for("document.querySelector('[data-lane=w0099]')")
    await page.wait_value(lanes, 100)
    for _ in range(200):
        asked = [address.count("worker=") for address in page.requested() if "leases/history" in address]
        if 100 in asked:
            break
        await asyncio.sleep(0.05)
    assert max(asked) == 100
    await page.type("[data-f=search]", "w0777")
    await page.wait_text("[data-lane=w0777]", "w0777")
    await page.wait_value(lanes, 1)
    assert page.complaints() == []


async def test_events_come_as_they_happen_and_are_searched_and_filtered(api: ApiWorld, browser: Browser) -> None:
    for index in range(200):
        await api.fabric.board.add_event("worker.failed", {"worker_id": f"w{index}", "error": "<i>memory</i>"})
    page = await browser.open(f"{api.url}events")
    await page.wait_text("[data-f=found]", "200 of 200")
    assert await page.evaluate("document.querySelectorAll('#all-events tr').length") < 100
    await api.fabric.board.add_event("lease.granted", {"worker_id": "w7", "reason": "need"})
    await page.wait_text("#all-events tr", "lease.granted")
    await page.type("[data-f=search]", "w7")
    await page.wait_text("[data-f=found]", "12 of 201")
    await choose(page, "kind", "lease.granted")
    await page.wait_text("[data-f=found]", "1 of 201")
    await page.wait_value("document.querySelector('#all-events i') === null", True)
    assert page.complaints() == []


async def test_dead_letters_are_grouped_by_cause_retried_and_discarded_after_a_look(
    api: ApiWorld, browser: Browser
) -> None:
    # Given three letters of one cause and one of another
    await api.push_group("g1", 6)
    claims = await api.claim(4)
    for index, claim in enumerate(claims[:3]):
        await api.bury(claim, f"environment raised <b>ValueError</b>: step {index} of 90")
    await api.bury(claims[3], "the reward was NaN")
    page = await browser.open(api.url)
    await page.wait_text("[data-run=r1] [data-f=dead_count]", "4")
    await page.click("[data-run=r1] [data-f=dead_count] a")
    # Then they stand by cause, and open with their traceback
    cause = "[data-dead=r1] .cause"
    await page.wait_text(cause, "environment raised <b>ValueError</b>: step # of #")
    await page.click(f"{cause} summary")
    await page.click("[data-letter] summary")
    await page.wait_text("[data-letter] pre", "Traceback: line 1")
    # When one is retried, and then all of its cause: first it is said what will happen
    await page.click("[data-letter] [data-f=retry]")
    await page.wait_text("#ask", "1 trajectory of 1 group will run again")
    await page.click("#ask-go")
    await page.wait_text("#toast", "1 trajectory run again")
    await page.click(f"{cause} [data-f=retry_cause]")
    await page.wait_text("#ask", "2 trajectories of 1 group will run again")
    await page.click("#ask-go")
    await page.wait_text("[data-f=total]", "1 in 1 run")
    await page.click("[data-f=discard_all]")
    await page.wait_text("#ask", "1 trajectory of 1 group will be forgotten. This cannot be undone.")
    await page.click("#ask-go")
    await page.wait_text("#view", "No trajectory was given up.")
    assert page.complaints() == []


# ---------------------------------------------------------------- what goes wrong


async def test_addresses_that_lead_nowhere_say_so(api: ApiWorld, browser: Browser) -> None:
    page = await browser.open(f"{api.url}runs/%3Cb%3Er%2F1%25'%22")
    await page.wait_text("#view", "There is no run <b>r/1%'\" here.")
    await page.wait_value("document.querySelector('#view b') === null", True)
    for address in ("runs/%E0%A4%A", "runs/r1/nothing"):
        await page.call("Page.navigate", url=f"{api.url}{address}")
        await page.wait_text("#view", "There is nothing at this address.")
    await page.click("#view a")
    await page.wait_text("[data-run=r1] [data-f=name]", "r1")


async def test_a_page_at_a_deep_address_works_behind_a_prefix_and_takes_a_key(
    broker_url: str, browser: Browser
) -> None:
    key = new_key()
    async with running_api(broker_url, control_keys=(key,)) as api, prefixed(api, "/rl/fabric") as root:
        await finish(api, "g1")
        page = await browser.open(f"{root}runs/r1/trajectories/g1.0")
        await page.wait_text("#key-dialog", "Key needed")
        page = await browser.open(f"{root}runs/r1/trajectories/g1.0#key={key}")
        await page.wait_text("[data-piece='1']", "left")
        await page.wait_value("location.href", f"{root}runs/r1/trajectories/g1.0")
        await page.click("#nav a[href$=workers]")
        await page.wait_text("#view", "No worker is connected")
        await page.wait_value("location.pathname", "/rl/fabric/workers")


async def test_colours_are_switched_and_kept(api: ApiWorld, browser: Browser) -> None:
    page = await browser.open(api.url)
    await page.wait_text("#theme", "◐ Auto")
    background = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(background)
    await page.click("#theme")
    await page.click("#theme")
    await page.wait_text("#theme", "Dark")
    assert await page.evaluate(background) != light
    await page.call("Page.reload")
    await page.wait_text("#theme", "Dark")


async def show(page: Page, api: ApiWorld, name: str) -> None:
    """Lead the page to a view of what `furnish` made, and wait until all has come that the view reads."""
    place, selector, expected = VIEWS[name]
    await page.call("Page.navigate", url=f"{api.url}{place}")
    await page.wait_text("#state", "live", timeout_s=10)
    await page.wait_text(selector, expected, timeout_s=10)


async def choose(page: Page, name: str, value: str) -> None:
    """Choose in a list, as a person does, once it has that choice."""
    find = f"document.querySelector('select[data-f={name}]')"
    await page.wait_for(f"[{find}].find((list) => list && [...list.options].some(({{value}}) => value === '{value}'))")
    await page.evaluate(f"{find}.value = '{value}', {find}.dispatchEvent(new Event('change', {{bubbles: true}}))")


@asynccontextmanager
async def prefixed(api: ApiWorld, prefix: str) -> AsyncIterator[str]:
    """A proxy that serves an api below a prefix, which it strips; yields the address there."""
    host, _, port = api.url.removeprefix("http://").rstrip("/").rpartition(":")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            method, path, rest = (await reader.readuntil(b"\r\n")).split(b" ", 2)
            headers = (await reader.readuntil(b"\r\n\r\n")).replace(b"keep-alive", b"close")
            back.write(b" ".join((method, path.removeprefix(prefix.encode()), rest)) + headers)
            while data := await there.read(65536):
                writer.write(data)
        for end in (back, writer):
            end.close()
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}{prefix}/"
