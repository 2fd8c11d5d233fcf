"""The live page as a person sees it: real Chromium, real api, real broker."""

from __future__ import annotations

import numpy as np
import pytest
from redis import Redis

from rollfab.api.access.keys import new_key
from rollfab.fabric.contract.lease_plan import LeasePlan, PlanRow
from rollfab.fabric.contract.records import Group, Rollout, Span
from rollfab.fabric.contract.sharing import LendSetting, SharingReport
from rollfab.fabric.queue import keys
from rollfab.trainer.agreement import FLOAT32
from rollfab.trainer.aio import AsyncRun
from rollfab.trainer.publish.publisher import Publisher
from tests.e2e.chromium import Browser
from tests.support.processes.api_server import RUN, ApiWorld, running_api
from tests.support.records import new_rollout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]  # a browser's first start on a cold disk

CARD = "[data-run=r1]"
WORKER = "[data-worker=serving-1]"


async def test_the_page_shows_what_happens_while_it_is_open(api: ApiWorld, browser: Browser) -> None:
    # Given an open page
    page = await browser.open(api.url)
    await page.wait_text("#state", "live")
    await page.wait_text(f"{CARD} [data-f=queued]", "0")
    await page.wait_text(f"{CARD} [data-f=waits]", "nothing submitted")
    # When a group is pushed, run and finished, and a trainer reports a step
    await api.push_group("g1", 8)
    await page.wait_text(f"{CARD} [data-f=queued]", "8")
    await page.wait_text(f"{CARD} [data-f=reward]", "–")
    for index, claim in enumerate(await api.claim(8)):
        await api.settle(claim, 1.0 if index < 6 else 0.0)
    await api.fabric.board.add_event("trainer.step", {"run_id": "r1", "step": 4, "loss": 0.5})
    # Then the page says so, without being asked
    await page.wait_text(f"{CARD} [data-f=completed]", "8")
    await page.wait_text("#tiles [data-f=groups]", "1")
    await page.wait_text(f"{CARD} [data-f=reward]", "0.75")
    await page.wait_text(f"{CARD} [data-f=step]", "step 4")
    # And everything it needed came from here
    assert page.complaints() == []
    assert all(address.startswith((api.url, "data:")) for address in page.requested())


async def test_why_a_run_stands_is_on_its_card_with_the_next_step(api: ApiWorld, browser: Browser) -> None:
    # Given a run with work and without weights, and a page
    await api.push_group("g1", 8)
    page = await browser.open(api.url)
    await page.wait_text(f"{CARD} [data-f=waits]", "no weights")
    await page.wait_text(f"{CARD} [data-f=cause]", "no weights of run 'r1' are published yet")
    await page.wait_text(f"{CARD} [data-f=next]", "run.publish(model.named_parameters(), version=0)")
    await page.wait_text(f"{CARD} [data-f=also]", "no agent is connected that could play environment 'frozenlake'")
    await page.wait_value(f"document.querySelector('{CARD} [data-f=why]').dataset.kind", "bad")
    # When weights come, and a worker that failed with a text of its own
    await Publisher(api.fabric.weights, "r1").publish({"w": np.zeros(4, np.float32)}.items(), 0)
    await api.beat("agent-1", "agent", environments=["frozenlake"], slot_count=8)
    await api.beat("w1", "dedicated", model="tiny", slot_count=8, state="failed", error="<b>out of memory</b>")
    # Then the page says so, as text
    await page.wait_text(f"{CARD} [data-f=cause]", "w1: <b>out of memory</b>")
    # And a worker that is well says what it waits for
    await api.beat("w1", "dedicated", model="tiny", slot_count=8, waits_for="a lease")
    await page.click("#nav a[href$=workers]")
    await page.wait_text("[data-worker=w1] [data-f=waits_for]", "waits for a lease")
    assert page.complaints() == []


async def test_rows_that_cannot_be_read_are_on_the_page_as_text_with_what_removes_them(
    api: ApiWorld, browser: Browser, broker_url: str
) -> None:
    # Given a page of a fabric of which every row can be read
    page = await browser.open(api.url)
    await page.wait_text("#state", "live")
    assert await page.text("#bad-rows") is None
    # When somebody writes a run that is none, under a name that is HTML
    with Redis.from_url(broker_url) as redis:
        redis.hset(keys.RUNS, "<b>bad</b>\x1b", b"<i>rubbish</i>")
        # Then it is on the page, as text
        row = "[data-table=runs]"
        await page.wait_text(f"{row} [data-f=row]", "<b>bad</b>\\x1b")
        await page.wait_text(f"{row} [data-f=step]", "rollfab rows rm -- runs '<b>bad</b>\\x1b'")
        await page.wait_value("document.querySelector('#bad-rows [data-f] b, #bad-rows [data-f] i') === null", True)
        # And it is gone when it is removed
        (bad,) = (await api.fabric.board.survey()).bad_rows
        assert await api.fabric.board.remove_row(bad)
        assert redis.hkeys(keys.RUNS) == [b"r1"]
    await page.wait_gone("#bad-rows")
    assert page.complaints() == []


async def test_the_switch_on_the_page_lends_after_a_second_look_takes_back_at_once_and_can_be_undone(
    api: ApiWorld, browser: Browser
) -> None:
    await api.beat("serving-1", "serving", slot_count=8, running_count=3)
    page = await browser.open(f"{api.url}serving")
    await page.wait_text(f"{WORKER} [data-f=limit]", "observe")

    async def said() -> dict[str, str]:
        return {name: setting.mode for name, setting in (await api.fabric.board.lends()).items()}

    # When lending is looked at and left, nothing is said; when it is confirmed, with two clicks, it is said once
    await page.click(f"{WORKER} [data-f=lend]")
    await page.wait_text("#ask", "1 serving worker, 8 slots; 3 turns run there now")
    await page.click("#ask button[type=button]")
    assert await said() == {}
    await page.click(f"{WORKER} [data-f=lend]")
    await page.evaluate("document.querySelector('#ask-go').click(), document.querySelector('#ask-go').click()")
    await page.wait_text(f"{WORKER} [data-f=limit]", "on")
    await page.wait_text("#toast", "serving-1 lends, said by api")
    assert await said() == {"serving-1": "on"}
    await page.wait_text("#switched", "lend.switched")
    # The way out is one click, on every view, and so is the way back
    await page.click("#nav a[href$=events]")
    await page.click("#lend-all-off")
    await page.wait_text("#toast", "Every serving worker was taken back")
    assert await said() == {"serving-1": "on", "*": "off"}
    await page.click("#undo")
    await page.wait_text("#toast", "Every serving worker is as before")
    assert await said() == {"serving-1": "on"}
    await page.click("#nav a[href$=serving]")
    await page.click(f"{WORKER} [data-f=lend_observe]")
    await page.wait_text(f"{WORKER} [data-f=limit]", "observe")
    await page.click(f"{WORKER} [data-f=lend_off]")
    await page.wait_text(f"{WORKER} [data-f=limit]", "off")
    await page.click("#lend-all-on")
    await page.click("#ask-go")
    await page.wait_text("#toast", "Every serving worker lends")
    await page.wait_text(f"{WORKER} [data-f=limit]", "off")
    assert await said() == {"serving-1": "off", "*": "on"}
    assert page.complaints() == []


async def test_the_switch_is_used_by_the_keyboard_alone(api: ApiWorld, browser: Browser) -> None:
    await api.beat("serving-1", "serving", slot_count=8)
    page = await browser.open(f"{api.url}serving")
    await page.wait_text(f"{WORKER} [data-f=limit]", "observe")

    async def said() -> dict[str, str]:
        return {name: setting.mode for name, setting in (await api.fabric.board.lends()).items()}

    # When the second look is left by Escape, nothing is said
    await page.tab_to(f"{WORKER} [data-f=lend]")
    await page.press("Enter")
    await page.wait_text("#ask", "1 serving worker")
    await page.wait_value("document.querySelector('#ask').contains(document.activeElement)", True)
    await page.press("Escape")
    await page.wait_value("document.querySelector('#ask').open", False)
    assert await said() == {}
    # and it is confirmed, taken back and undone by Tab and Enter
    await page.tab_to(f"{WORKER} [data-f=lend]")
    await page.press("Enter")
    await page.wait_text("#ask", "1 serving worker")
    if not await page.evaluate("document.activeElement.matches('#ask-go')"):
        await page.tab_to("#ask-go")
    await page.press("Enter")
    await page.wait_text("#toast", "serving-1 lends")
    assert await said() == {"serving-1": "on"}
    await page.tab_to("#lend-all-off")
    await page.press("Enter")
    await page.wait_text("#toast", "Every serving worker was taken back")
    await page.tab_to("#undo")
    await page.press("Enter")
    await page.wait_text("#toast", "Every serving worker is as before")
    assert await said() == {"serving-1": "on"}
    assert page.complaints() == []


async def test_what_a_guard_does_and_what_sharing_costs_and_gives_is_on_the_page(
    api: ApiWorld, browser: Browser
) -> None:
    # Given a page of a worker without a guard
    await api.beat("serving-1", "serving", slot_count=8)
    page = await browser.open(f"{api.url}serving")
    await page.wait_text(f"{WORKER} [data-f=limit]", "observe")
    assert await page.text("#sharing") is None
    # When it has one, that has something to say
    guard = {"guard_state": "narrow", "guard_reason": "a burst <b>", "open_fraction": 0.5, "headroom_fraction": 0.25}
    await api.beat("serving-1", "serving", slot_count=8, probe="vllm", **guard)
    await api.fabric.board.set_lend("serving-1", LendSetting(mode="on", slot_count_max=3, compute_fraction_max=0.3))
    alone = {"request_count": 10, "ttft_ms_p99": 40.0, "attained_fraction": 1.0}
    shared = {"request_count": 30, "ttft_ms_p99": 42.0, "attained_fraction": 0.9}
    shared |= {"ttft_ms_p99_low": 41.0, "ttft_ms_p99_high": 49.0}
    slo = {"ttft_slo_ms": 41.5, "violation_count": 3}
    report = SharingReport(worker_id="serving-1", alone=alone, shared=shared, token_count=777, **slo)
    await api.fabric.board.set_sharing(report)
    term = await api.fabric.board.lead("c1", 1000)
    row = PlanRow(worker_id="serving-1", role="serving", slot_count=0, run_id=None, reason="dedicated are enough")
    assert await api.fabric.board.set_plan(LeasePlan(controller_id="c1", term=term, made_at_ms=5, rows=(row,)))
    # Then the page says it, and why the controller does what it does
    await page.wait_text(f"{WORKER} [data-f=headroom]", "25 %")
    await page.wait_text(f"{WORKER} [data-f=guard]", "narrow: a burst <b>")
    await page.wait_text(f"{WORKER} [data-f=open]", "open 50 % · by vllm")
    await page.wait_text(f"{WORKER} [data-f=plan]", "dedicated are enough")
    await page.wait_text(f"{WORKER} [data-f=limit]", "max 3")
    await page.wait_text(f"{WORKER} [data-f=why]", "30 % of compute")
    await page.wait_text("#sharing-totals", "90 % within objectives · 3 beyond · TTFT P99 +5.0 %")
    await page.wait_text("[data-sharing=serving-1] [data-f=ttft]", "42.0 ms (+5.0 %)")
    await page.wait_text("[data-sharing=serving-1] td:nth-child(4)", "41 ms to 49 ms")
    await page.wait_text("[data-sharing=serving-1] td:nth-child(4)", "beyond the objective of 42 ms")
    await page.wait_text("[data-sharing=serving-1] [data-f=harvested]", "777")
    # And the overview says the share and the margin
    await page.click("#nav a")
    await page.wait_text("#tiles [data-f=margin]", "25 %")
    await page.wait_text("#view", "90 % within objectives")
    assert page.complaints() == []


async def test_a_worker_s_engine_and_its_sleep_are_on_the_page(api: ApiWorld, browser: Browser) -> None:
    facts = {"resident_bytes": 3 << 29, "device_bytes": 5 << 30, "slot_count": 4}
    facts |= {"guard_state": "open", "step_error_fraction_p50": 0.06, "step_error_fraction_p95": 0.2}
    facts |= {"wake_ms": 1500, "prefix_hit_fraction": 0.25}
    await api.beat("serving-1", "serving", state="asleep", engine="vllm 0.32.0", **facts)
    page = await browser.open(f"{api.url}workers")
    await page.wait_text(f"{WORKER} [data-f=engine]", "vllm 0.32.0")
    await page.wait_text(f"{WORKER} [data-f=state]", "asleep")
    await page.wait_text(f"{WORKER} [data-f=rest]", "woke in 1.5 s")
    await page.wait_text(f"{WORKER} [data-f=hits]", "25 % cached")
    await page.wait_text(f"{WORKER} [data-f=memory]", "1.6 GB + 5.4 GB device")
    await page.wait_text(f"{WORKER} [data-f=step_error]", "steps off by 6.0 %, P95 20 %")
    await api.beat("serving-1", "serving", engine="transformers 5", sleep_note="a CPU")
    await page.wait_text(f"{WORKER} [data-f=rest]", "cannot sleep")
    assert page.complaints() == []


async def test_a_worker_that_disagrees_with_the_trainer_is_marked_by_name(api: ApiWorld, browser: Browser) -> None:
    # Given two workers that sampled the same policy version, and a page without a word of it
    for name in ("dedicated-1", "serving-1"):
        await api.beat(name, "dedicated", slot_count=8)
    page = await browser.open(f"{api.url}runs/r1")
    await page.wait_text(f"{CARD} [data-f=name]", "r1")
    assert await page.text(f"{CARD} [data-f=agreement]") is None
    # When the trainer compares their log-probabilities with its own, and one is off
    groups = [Group(group_id="g1", task_id="t1", rollouts=tuple(map(said_by, ("dedicated-1", "serving-1"))))]
    run = AsyncRun(api.fabric, RUN)
    await run.compare(groups, [np.array([-1.0, -2.0]), np.array([-1.5, -2.0])], version=4, rule=FLOAT32)
    # Then the page unfolds, names it, and marks it and no other, wherever it stands
    await page.wait_text(f"{CARD} [data-f=agree_state]", "1 over the limit")
    await page.wait_text(f"{CARD} [data-f=agree_mean]", "0.13")
    await page.wait_text(f"{CARD} [data-f=agree_max]", "0.50")
    await page.wait_text(f"{CARD} [data-f=alarm]", "worker serving-1 disagrees with the trainer at version 4")
    marked = "[...document.querySelectorAll('tr.over')].map((row) => row.dataset.agreement)"
    await page.wait_value(marked, ["serving-1"])
    await page.click("#nav a")
    await page.wait_text(f"{CARD} [data-f=alarm]", "worker serving-1 disagrees")
    await page.wait_text("#events", "agreement.alarm")
    await page.click("#nav a[href$=workers]")
    await page.wait_text(f"{WORKER} [data-f=disagrees]", "log-probabilities disagree")
    await page.wait_value("document.querySelectorAll('#workers [data-f=disagrees]').length", 1)
    # When they agree again; then the marks go
    await run.compare(groups, [np.array([-1.0, -2.0])] * 2, version=4, rule=FLOAT32)
    await page.wait_gone(f"{WORKER} [data-f=disagrees]")
    await page.evaluate("history.go(-2)")
    await page.wait_text(f"{CARD} [data-f=agree_state]", "agree")
    assert page.complaints() == []


async def test_what_weights_are_held_and_who_is_behind_is_on_the_page(api: ApiWorld, browser: Browser) -> None:
    # Given two versions, and a worker that holds the older one
    publisher, tensor = Publisher(api.fabric.weights, "r1"), np.arange(20000, dtype=np.uint16)
    await publisher.publish({"w": tensor}, 0)
    tensor[:100] += 1
    await publisher.publish({"w": tensor}, 1)
    await api.beat(
        "serving-1",
        "serving",
        run_id="r1",
        active_version=0,
        stage_ms=250,
        pause_ms=1.5,
        weights_note="no cache to keep",
    )
    page = await browser.open(f"{api.url}runs/r1")
    # Then the run says head, sizes, lag and who holds what, and the worker its own
    for version, column, shown in ((1, 1, "head"), (1, 2, "delta"), (1, 5, "0.5 %"), (0, 7, "1"), (0, 8, "serving-1")):
        await page.wait_text(f"[data-version='{version}'] td:nth-child({column})", shown)
    await page.click("#nav a[href$=workers]")
    await page.wait_text(f"{WORKER} [data-f=behind]", "1 behind")
    await page.wait_text(f"{WORKER} [data-f=pause]", "250 ms + 1.5 ms pause")
    await page.wait_text(f"{WORKER} [data-f=weights_note]", "no cache to keep")
    await page.click("#nav a")
    await page.wait_text("#tiles [data-f=lag]", "1")
    assert page.complaints() == []


def said_by(worker_id: str) -> Rollout:
    """Two tokens of a worker at policy version 4."""
    return new_rollout(
        spans=(Span(0, 2, worker_id, 4),), trajectory_id=f"g1.{worker_id}", logprobs=np.array([-1.0, -2.0], np.float32)
    )


async def test_dead_letters_open_with_their_traceback(api: ApiWorld, browser: Browser) -> None:
    await api.push_group("g1", 1)
    (claim,) = await api.claim(1)
    await api.bury(claim, "environment raised <b>ValueError</b>")
    page = await browser.open(api.url)
    await page.wait_text(f"{CARD} [data-f=dead_count]", "1")
    await page.click(f"{CARD} [data-f=dead_count] a")
    await page.click(".cause summary")
    await page.wait_text("[data-letter] [data-f=reason]", "environment raised <b>ValueError</b>")
    await page.click("[data-letter] summary")
    await page.wait_text("[data-letter] pre", "Traceback: line 1")


async def test_a_page_with_nothing_to_show_says_what_to_do(broker_url: str, browser: Browser) -> None:
    async with running_api(broker_url) as api:
        await api.fabric.board.delete_run("r1")
        page = await browser.open(api.url)
        await page.wait_text("#banner", "no controller")
        await page.wait_text("#no-runs", "No run yet")
        await page.wait_text("#no-workers", "rollfab up")


async def test_a_locked_api_asks_for_a_key_and_a_read_key_cannot_lend(broker_url: str, browser: Browser) -> None:
    async with running_api(broker_url, read_keys=("a-key-that-may-read-only",)) as api:
        await api.beat("serving-1", "serving", slot_count=8)
        page = await browser.open(f"{api.url}serving")
        await page.wait_text("#key-dialog", "Key needed")
        assert await page.text(WORKER) is None
        await page.type("#key-input", "a-key-that-may-read-only")
        await page.click("#key-dialog button.main")
        await page.click(f"{WORKER} [data-f=lend]")
        await page.click("#ask-go")
        await page.wait_text("#toast", "use a control key")
        assert await api.fabric.board.lends() == {}


async def test_a_key_in_the_address_opens_the_page_and_leaves_the_address_bar(
    broker_url: str, browser: Browser
) -> None:
    first, second = new_key(), new_key()
    async with running_api(broker_url, control_keys=(first, second)) as api:
        await api.beat("serving-1", "serving", slot_count=8)
        page = await browser.open(f"{api.url}serving#key={first}")
        # Then it reads and acts, and the key is in the tab's storage alone
        await page.click(f"{WORKER} [data-f=lend]")
        await page.click("#ask-go")
        await page.wait_text(f"{WORKER} [data-f=limit]", "on")
        await page.wait_value("location.href", f"{api.url}serving")
        await page.wait_value("sessionStorage.getItem('rollfab.key')", first)
        assert await page.evaluate("history.length") <= 2  # about:blank, and this
        await page.wait_value("localStorage.length + document.cookie.length", 0)
        assert first not in await page.evaluate("document.documentElement.outerHTML")
        assert not any("key" in address for address in page.requested())
        # When the tab is led to an address with another key, it takes that one
        await page.evaluate(f"location.hash = '#key={second}'")
        taken = f"sessionStorage.getItem('rollfab.key') === '{second}'"
        await page.evaluate(f"new Promise((done) => setInterval(() => {taken} && done(true), 20))")
        await page.wait_value("location.href", f"{api.url}serving")
        assert page.complaints() == []


@pytest.mark.parametrize("key", ["rfk_" + "a" * 43, "…", "rfk_a b"], ids=["unknown", "cut", "two words"])
async def test_an_address_with_a_key_that_is_none_says_so(broker_url: str, browser: Browser, key: str) -> None:
    async with running_api(broker_url, control_keys=(new_key(),)) as api:
        page = await browser.open(f"{api.url}#key={key}")
        await page.wait_text("#banner", "this key is not known here")
        await page.wait_text("#banner", ": give one with the button Key, above.")
        await page.wait_text("#key-button", "Key")
        await page.wait_value("location.href", api.url)


async def test_a_key_that_was_changed_while_the_page_is_open_is_asked_for_by_the_button(
    broker_url: str, browser: Browser
) -> None:
    first, second = new_key(), new_key()
    async with running_api(broker_url, control_keys=(first,)) as api:
        page = await browser.open(f"{api.url}#key={first}")
        await page.wait_text("#state", "not ready")
    async with running_api(broker_url, control_keys=(second,), port=int(api.url.rstrip("/").rpartition(":")[2])):
        await page.wait_text(
            "#banner", "this key is not known here: give one with the button Key, above. What you see is"
        )
        await page.click("#key-button")
        await page.type("#key-input", second)
        await page.click("#key-dialog button.main")
        await page.wait_text("#state", "not ready")


async def test_the_documentation_is_drawn(api: ApiWorld, browser: Browser) -> None:
    page = await browser.open(f"{api.url}docs")
    await page.wait_text("#operations", "/v1/workers/{worker_id}/lend")
    assert page.complaints() == []
